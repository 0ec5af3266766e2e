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
# # 2. Balance it
#
# A **balance** says how many layers each partition gets: `[2, 3, 2]`. This notebook finds the best one, shows how good
# rules of thumb are compared with it, and what changes when memory is short or devices differ.
#
# ## In one line
#
# If all you want is the balance, one call profiles the model and solves. Here is a small ResNet of 51 layers:

# %%
# %matplotlib inline
import torch

import gpipebal as gb
from gpipebal.models.resnet import resnet
from gpipebal.plots import plot_balance, plot_partitions

torch.manual_seed(0)
model = resnet((1, 1, 1, 1), num_classes=1000, width=32)
sample = torch.randn(8, 3, 64, 64)
print("by time  ", gb.balance_by_time(model, sample, 2, chunks=4, timeout=0.5))
print("by memory", gb.balance_by_size(model, sample, 2, chunks=4, param_scale=4.0))

# %% [markdown]
# Two goals: `balance_by_time` minimises the largest *time* of a partition, `balance_by_size` the largest *memory*. The rest
# of this notebook is for those who want to see more, or to ask for more.
#
# ## From a profile to a plan
#
# The library comes with stored profiles (folder `profiles/`). This one is ResNet-101, measured on a CPU: 370 layers.

# %%
profile = gb.Profile.load("../profiles/resnet101-64px-rows4-cpu.json")
plan = gb.solve(profile, 4)
plan

# %% [markdown]
# *Proven optimal* means: of all ways to cut these 370 layers into four runs (more than eight million), none has a
# shorter makespan with these layer times. The plan carries its lower bound. The tests compare every method with trying
# all splits of short chains.
#
# Two words that notebook 3 explains: the *bubble* is the devices' idle time. With *checkpointing*, a partition drops what
# its layers saved, and computes it again (*recompute*) before the backward.
#
# The same as a picture: every layer in the colour of its partition, and the partitions compared with their mean.

# %%
plot_balance(profile, plan).figure

# %%
plot_partitions(plan).figure

# %%
print(plan.explain())

# %% [markdown]
# ## What is minimised
#
# The solver does not look at the slowest partition alone. In GPipe all micro-batches run forward, then all run backward.
# The slowest *forward* sets the pace of the first part of the **makespan** (the time from the first start to the last
# end), and the slowest *backward* that of the second part. The two may be different partitions. `objective` can also be
# `"bottleneck"` (the slowest partition) or `"peak_memory"`.

# %%
for objective in ("makespan", "bottleneck", "peak_memory"):
    found = gb.solve(profile, 4, objective=objective)
    peak = max(part.memory.total for part in found.partitions)
    print(
        f"{objective:12} {found.balance!s:22} makespan {1e3 * found.makespan:6.0f} ms, "
        f"bottleneck {1e3 * found.bottleneck:5.0f} ms, peak {peak / 2**20:4.0f} MiB"
    )

# %% [markdown]
# ## Rules of thumb and the optimum
#
# The rules are: equally many layers; equally many parameters; the rule of torchgpipe, which moves cuts step by step
# until no single move helps; and the *least bottleneck*, the slowest partition as fast as possible, which would be best if
# pipelines never filled and drained. The table compares them with the plan:

# %%
print(gb.compare_rules(profile, gb.solve(profile, 8)))

# %% [markdown]
# The column `gap` comes from the lower bound: it says how far each balance can be from the best possible one at most, as a
# share of its own makespan.
#
# ## Memory limits
#
# A device has only so much memory. Without checkpointing, four partitions of this model need:

# %%
free = gb.solve(profile, 4, checkpoint="never")
print([f"{part.memory.total / 2**20:.0f} MiB" for part in free.partitions])

# %% [markdown]
# With a limit the solver moves cuts. With `checkpoint="auto"` it also chooses, together with the cuts and for each
# partition, whether to keep what was computed or to compute it again:

# %%
for limit in ("250 MiB", "180 MiB", "140 MiB"):
    try:
        found = gb.solve(profile, 4, checkpoint="auto", memory_limit=limit)
    except gb.GpipebalError as error:
        print(f"{limit}: {error}")
    else:
        print(f"{limit}: {found.balance}, {', '.join(found.modes)}, {found.makespan:.2f} s")

# %% [markdown]
# If nothing fits, the error says by how much, and what would fit:

# %%
try:
    gb.solve(profile, 4, memory_limit="100 MiB")
except gb.GpipebalError as error:
    print(error)

# %% [markdown]
# ## Devices that differ, links that are slow
#
# Here are two fast and two slow devices, with a link of 1 GB/s between neighbours. `any_order` says whether they may
# change places:

# %%
slow = gb.Link(bandwidth=1e9)
for any_order in (False, True):
    found = gb.solve(profile, 4, devices=[2.0, 2.0, 1.0, 1.0], any_order=any_order, link=slow)
    print(f"{found.balance} on devices {list(found.devices)}: {1e3 * found.makespan:.0f} ms")

# %% [markdown]
# ## How sure are the times?
#
# Measured times vary. The next best plans are often within that noise. `top_plans` lists them, so that a run can try
# several (`gpipebal run --try 3`).

# %%
for found in gb.top_plans(profile, 4, 4):
    print(found.balance, f"{1e3 * found.makespan:.2f} ms")

# %% [markdown]
# The same from a shell:
#
#     gpipebal solve profile.json --partitions 4 --memory-limit 180MiB --checkpoint auto -o plan.json --plot plan.png
#
# Next: [3. Bubbles, checkpointing and schedules](03-schedules.ipynb).
