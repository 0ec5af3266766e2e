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
# # 5. A language model with a large vocabulary head
#
# "A stack of equal blocks needs no planner: give every device the same number." That is almost true of language
# models. It is only almost true because they end in a layer that compares every state with every word of a vocabulary.
# The larger the vocabulary and the smaller the blocks, the more that last layer costs: in time, and above all in memory,
# because it outputs one number per word for every token.
#
# Nothing runs here, and no GPU is needed: all profiles are estimated from shapes, for an A100.

# %%
# %matplotlib inline
import torch

import gpipebal as gb
from gpipebal.models import gpt
from gpipebal.models.entries import token_cross_entropy
from gpipebal.plots import plot_balance, plot_partitions, plot_timelines

LAYERS, WIDTH, VOCABULARY, CONTEXT, DEVICES = 24, 1024, 64_000, 1024, 8


def estimate(vocabulary, rows=32, chunks=32):
    """Estimate a GPT on an A100, in training with Adam."""
    with torch.device("meta"):
        model = gpt(LAYERS, WIDTH, heads=16, vocabulary=vocabulary, context=CONTEXT)
        tokens = torch.zeros(rows, CONTEXT, dtype=torch.int64)
    return gb.profile_model(
        model,
        tokens,
        chunks=chunks,
        method="estimate",
        rates="A100",
        loss_fn=token_cross_entropy,
        target=tokens,
        optimizer=torch.optim.Adam,
    )


profile = estimate(VOCABULARY)
print(profile)

# %% [markdown]
# A block is two layers here, attention and feed-forward. The table compares them with the head, the last layer:

# %%
frame = profile.to_frame().set_index("name")
frame["ms"] = 1e3 * (frame["forward_time"] + frame["backward_time"])
frame["MiB saved"] = frame["saved_bytes"] / 2**20
frame["MiB out"] = frame["output_bytes"] / 2**20
head, block = profile.names[-1], profile.names[1:3]
print(frame.loc[[profile.names[0], *block, head], ["kind", "ms", "MiB saved", "MiB out"]].round(1))
print(f"the head takes as long as {frame['ms'][head] / frame['ms'][list(block)].sum():.1f} blocks")

# %% [markdown]
# ## Equal blocks, and the optimum
#
# If the chain is cut as equally as the number of layers allows, the last device has the head in addition to its share, and
# all others wait for it with every micro-batch:

# %%
n = profile.n_layers
equal = [n * (j + 1) // DEVICES - n * j // DEVICES for j in range(DEVICES)]
by_rule = gb.evaluate(profile, equal)
plan = gb.solve(profile, DEVICES)
for name, found in (("equal", by_rule), ("solved", plan)):
    bubble = 100 * found.bubble_fraction
    print(f"{name:7} {found.balance}: {found.makespan:.2f} s, bubble {bubble:.0f} %")

# %%
plot_partitions(by_rule).figure

# %%
plot_balance(profile, plan).figure

# %%
plot_timelines({"equal": gb.simulate(by_rule), "solved": gb.simulate(plan)}).figure

# %% [markdown]
# How much the planner helps depends on the vocabulary. The head cannot be cut. When the vocabulary is very large, the head
# alone is the longest partition, and then neither a better cut nor more devices help. (The way out is another kind of
# parallelism, which cuts *inside* that layer.)

# %%
for vocabulary in (32_000, 64_000, 128_000, 256_000):
    large = estimate(vocabulary)
    best, rule = gb.solve(large, DEVICES), gb.evaluate(large, equal)
    print(
        f"{vocabulary:7,} words: {best.balance!s:28} {best.makespan:.2f} s, "
        f"{100 * (rule.makespan / best.makespan - 1):.0f} % longer with equal partitions"
    )

# %% [markdown]
# ## The memory of the head
#
# With `loss(pipe(x)).backward()` the outputs of all micro-batches are gathered on the last device before the loss is
# computed once, over the whole mini-batch. So that device holds the output, its gradient, and what the loss needs, for the
# whole mini-batch. With `pipe.step` the last partition computes the loss of one micro-batch after the other, and the
# numbers of all words exist for one micro-batch only. For the largest of these vocabularies:

# %%
for inside in (False, True):
    found = gb.evaluate(large, best.balance, loss_inside=inside)
    peak = found.partitions[-1].memory.total / 2**30
    print(f"loss {'inside' if inside else 'outside'} the pipeline: last device {peak:5.1f} GiB")

# %% [markdown]
# This decides whether the model fits at all:

# %%
for inside in (False, True):
    try:
        found = gb.solve(large, DEVICES, memory_limit="40 GiB", loss_inside=inside)
        print(f"loss_inside={inside}: {found.balance}, {found.makespan:.2f} s")
    except gb.GpipebalError as error:
        print(f"loss_inside={inside}: {error}")

# %% [markdown]
# Almost the same from a shell (the built-in model trains with plain SGD, not Adam):
#
#     gpipebal profile gpt --set layers=24 --set width=1024 --set heads=16 --set vocabulary=256000 --set context=1024 \
#         --rows 32 --chunks 32 --estimate A100 -o gpt.json
#     gpipebal solve gpt.json -n 8 --memory-limit 40GiB --loss-inside
#
# Next: [6. From one laptop to a thousand devices](06-thousand-devices.ipynb).
