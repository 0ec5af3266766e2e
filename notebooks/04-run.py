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
# # 4. Run it, and compare with the prediction
#
# A plan is a promise. This notebook trains a small model as a pipeline of two partitions on the CPU, each with its share
# of the cores, records what happens, and compares it with the plan. With GPUs the same code runs with one partition on
# each of them. The output is on `pipe.devices[-1]`, and the target of the loss has to be there too.

# %%
# %matplotlib inline
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import gpipebal as gb
from gpipebal.planner import training_step
from gpipebal.plots import plot_chunks, plot_memory, plot_timeline

torch.manual_seed(0)
WIDTH, ROWS = 512, 2048
blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.GELU()) for _ in range(6)]
model = nn.Sequential(nn.Linear(64, WIDTH), *blocks, nn.Linear(WIDTH, 2000))
sample, target = torch.randn(ROWS, 64), torch.randint(2000, (ROWS,))

# %% [markdown]
# Now profile, plan, and make the pipeline. It is a torch module that uses the model's own layers: its parameters have
# the same names, and training one trains the other.


# %%
def make_optimizer(parameters):
    """Make the optimizer that both the profiler and the training use."""
    return torch.optim.SGD(parameters, lr=0.01)


profile = gb.profile_model(
    model,
    sample,
    chunks=8,
    partitions=2,
    loss_fn=cross_entropy,
    target=target,
    optimizer=make_optimizer,
    timeout=8.0,
)
plan = gb.solve(profile, 2, checkpoint="except_last")
plan

# %%
pipe = gb.GPipe.from_plan(model, plan)
optimizer = make_optimizer(list(pipe.parameters()))
print("partitions on", [str(device) for device in pipe.devices])

# %% [markdown]
# ## Does it compute the same?
#
# Before anything else, compare outputs, gradients and buffers of the pipeline with those of the plain model, on copies:

# %%
print(gb.verify(model, pipe, sample))

# %% [markdown]
# ## A few steps, recorded
#
# The training code looks as usual. `trace` records when each device did what.

# %%
losses = []
with gb.trace(pipe) as recorder:
    for _ in range(5):
        optimizer.zero_grad()
        loss = cross_entropy(pipe(sample), target.to(pipe.devices[-1]))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
print([f"{loss:.3f}" for loss in losses])

# %% [markdown]
# The picture has the prediction above the measurement, on one time axis. The gap in the middle is the loss, which is
# computed once over the whole mini-batch, between forwards and backwards.

# %%
predicted = training_step(profile, plan)
by_time = sorted(recorder.timelines[1:], key=lambda timeline: timeline.makespan)
measured = by_time[len(by_time) // 2]
plot_timeline(predicted, beside=measured).figure

# %% [markdown]
# In numbers: how long each kind of cell (one micro-batch in one partition) took, on average. On a machine that is not idle, the
# measurement varies, and this is one short run. [benchmarks/prediction](../benchmarks/prediction/README.md) has
# 450 plans, each with the median over several groups of steps.

# %%
from gpipebal.side_by_side import set_side_by_side

print(set_side_by_side({"plan": plan, "run": measured}, profile))

# %%
measured

# %% [markdown]
# `measured.save("timeline.json")` writes a trace that [Perfetto](https://ui.perfetto.dev) opens, with a track for every
# partition, and arrows from each micro-batch's forward to its next one.
#
# ## Memory
#
# The picture shows what each partition should hold over time according to the profile, in the step that was measured.
# Where the last partition switches from forwards to backwards, the outputs of all micro-batches are gathered and the loss
# takes what it needs. The gathered output and the loss stay until the step is over, the gradient of the output only while
# backwards run. Below the picture, the plan's own peaks are compared with what a step was measured to hold:

# %%
from gpipebal.pipeline import measure_memory
from gpipebal.simulator import held_of, memory_over_time

plot_memory(memory_over_time(measured, held_of(profile, plan))).figure

# %%
with measure_memory(pipe, optimizer) as meter:
    optimizer.zero_grad()
    output = pipe(sample)
    cross_entropy(output, target.to(output.device)).backward()
    optimizer.step()
for j, (part, found) in enumerate(zip(plan.partitions, meter.peak_bytes, strict=True)):
    print(
        f"partition {j}: predicted {part.memory.total / 2**20:.1f} MiB, "
        f"measured {found / 2**20:.1f} MiB"
    )

# %% [markdown]
# ## The loss inside the pipeline
#
# With `step` the last partition computes the loss of each micro-batch as it comes out. No partition waits for the whole
# mini-batch, and the schedule may be 1F1B, which holds fewer micro-batches at a time.

# %%
with gb.trace(pipe) as recorder:
    for _ in range(3):
        optimizer.zero_grad()
        pipe.step(sample, target=target, loss_fn=cross_entropy, schedule="1f1b")
        optimizer.step()
plot_timeline(recorder.timelines[-1]).figure

# %% [markdown]
# ## How many micro-batches?
#
# The profile was measured at several sizes, so the solver can choose the best number: it takes the one with the smallest
# makespan. The picture names the number with the shortest training step among those that it draws; the step time counts
# more than the makespan does, so the two may differ:

# %%
candidates = [gb.solve(profile, 2, chunks=chunks) for chunks in (2, 4, 8, 16, 32)]
print("best:", gb.solve(profile, 2, chunks="auto").chunks)
plot_chunks(candidates).figure

# %%
pipe.close()

# %% [markdown]
# To profile, plan, run and compare from a shell, with the plain model timed as well:
#
#     gpipebal run my_package.my_module:make_model --partitions 2 --chunks 8
#     cd gpipebal-run && gpipebal compare profile.json plan.json timeline.json
#
# On one CPU the plain model with all cores is often faster. A pipeline pays where a model does not fit one device, or
# where every partition has its own device. Next: [5. A language model with a large
# head](05-language-model.ipynb).
