# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 1. Profile a model
#
# A model that is too large or too slow for one device can be cut into pieces, one piece per device. Each piece is a
# run of consecutive layers and is called a **partition**. The input of a training step, the **mini-batch**, is cut
# too, into **micro-batches**: while the second device works on the first micro-batch, the first device already works
# on the second. That is pipeline parallelism.
#
# Everything that follows depends on one question: *where to cut?* A partition that takes twice as long as the others
# makes all others wait. To cut well, you have to know what every layer costs. So the first thing to do is to measure.

# %%
# %matplotlib inline
import torch

import gpipebal as gb
from gpipebal.models.resnet import resnet
from gpipebal.plots import plot_profile

torch.manual_seed(0)
model = resnet((3, 4, 6, 3), num_classes=1000, width=32)
images = torch.randn(16, 3, 64, 64)
labels = torch.randint(1000, (16,))
print(f"{len(model)} layers, {sum(p.numel() for p in model.parameters()):,} parameters")

# %% [markdown]
# The model is an `nn.Sequential` whose children are the **layers**: the smallest pieces, which are never cut. (If your
# model has Sequentials inside a Sequential, flatten them, so that there are more places to cut.)
#
# `profile_model` takes the model and a sample mini-batch, and sends single micro-batches through the model: here, 16
# images in 4 micro-batches, so 4 images at a time. It measures copies that share the model's parameters, so that the
# model is the same afterwards. `timeout` limits how long it repeats; more repeats make the times steadier.

# %%
profile = gb.profile_model(
    model,
    images,
    chunks=4,
    loss_fn=torch.nn.functional.cross_entropy,
    target=labels,
    optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    timeout=10.0,
)
profile

# %% [markdown]
# These are the slowest layers. All layers, drawn in the order of the chain:

# %%
plot_profile(profile).figure

# %% [markdown]
# There are two lessons for cutting. Layers differ widely, so *equally many layers* is a poor rule. And how
# long a backward takes compared with its forward differs from layer to layer: from next to nothing (max pooling) to more
# than twice as long (the largest convolutions). So counting only forwards is a poor rule as well.
#
# Memory tells another story. What stays for the whole step (parameters, their gradients, the optimizer's state)
# grows towards the end of this model. What is saved for the backward shrinks, because images get smaller:

# %%
plot_profile(profile, by="memory").figure

# %% [markdown]
# The profile as a table, for your own questions, has times in seconds, sizes in bytes, and one row per layer. Which
# kinds of layers take the time?

# %%
frame = profile.to_frame()
frame["time"] = frame["forward_time"] + frame["backward_time"]
by_kind = frame.groupby("kind")[["time", "parameter_bytes"]].sum()
(by_kind / by_kind.sum()).sort_values("time", ascending=False).round(3)

# %% [markdown]
# ## Smaller and larger micro-batches
#
# Half the rows rarely take half the time: every layer has an overhead that does not shrink. The profiler measures at
# a few sizes by default, and `at_rows` estimates what lies between them and, less surely, beyond them.

# %%
rows = sorted({profile.rows, *(other.rows for other in profile.other_sizes)})
print("measured at", rows, "rows")
for n_rows in (1, 2, 3, 4):
    size = profile.at_rows(n_rows)
    seconds = sum(layer.time for layer in size.layers)
    print(f"{n_rows} rows: {1e3 * seconds:6.1f} ms, {1e3 * seconds / n_rows:6.1f} ms a row")

# %% [markdown]
# ## A model that does not fit, on a device that you do not have
#
# With `method="estimate"` nothing runs. Parameters and values are on the `meta` device, where tensors have shapes but
# no memory. Bytes follow from the shapes, times from the peak rates of the device that you name. Such times are lower
# bounds: they show how layers compare, not how long they take. This is a GPT of 13 billion parameters on an H100:

# %%
from gpipebal.models import gpt

with torch.device("meta"):
    large = gpt(layers=40, width=5120, heads=40, vocabulary=50257, context=2048)
    tokens = torch.zeros(8, 2048, dtype=torch.int64)
estimate = gb.profile_model(large, tokens, chunks=8, method="estimate", rates="H100")
print(estimate)

# %%
plot_profile(estimate).figure

# %% [markdown]
# All blocks are alike; the last layer, which compares every state with every word of the vocabulary, is not. Notebook 5
# is about that layer.
#
# ## Keep it
#
# A saved profile is a small JSON file. It says how it was made, and it can be planned on any machine, without the model
# and without torch. Before you use it with a model again, ask whether that is still the model that was measured:

# %%
import tempfile
from pathlib import Path

path = Path(tempfile.mkdtemp()) / "profile.json"
profile.save(path)
again = gb.Profile.load(path)
print(f"{path.stat().st_size / 1024:.0f} KiB, of {again.provenance['device']}")
print(again.matches(model))

# %% [markdown]
# The same from a shell:
#
#     gpipebal profile my_package.my_module:make_model --chunks 4 --output profile.json
#     gpipebal show profile.json --plot profile.png
#
# Next: [2. Balance it](02-balance.ipynb).
