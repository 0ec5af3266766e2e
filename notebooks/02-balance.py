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
# the rules of thumb are beside it, and what changes when memory is short or devices differ.
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
# Two goals, two balances. `balance_by_time` makes the largest *time* of a partition small, `balance_by_size` the largest
# *memory*. What follows is for those who want to see more, or to ask for more.
#
# ## From a profile to a plan
#
# The library comes with stored profiles (folder `profiles/`). This one is ResNet-101, measured on a CPU: 370 layers.

# %%
profile = gb.Profile.load("../profiles/resnet101-64px-rows4-cpu.json")
plan = gb.solve(profile, 4)
plan

# %% [markdown]
# *Proven optimal* means: no other way to cut these 370 layers into four runs, and there are more than eight million, has
# a shorter step by these times. The plan carries its lower bound; the tests compare every method with trying all splits of short
# chains.
#
# Two words before notebook 3 explains them: the *bubble* is the devices' idle time; with *checkpointing* a partition drops
# what its layers saved, and computes it again (*recompute*) before the backward.
#
# The same as a picture: every layer in the colour of its partition, and the partitions against their mean.

# %%
plot_balance(profile, plan).figure

# %%
plot_partitions(plan).figure

# %%
print(plan.explain())

# %% [markdown]
# ## What is minimised
#
# Not the slowest partition alone. In GPipe all micro-batches run forward, then all run backward. The **makespan**, from the
# first start to the last end, is paced by the slowest *forward* in its first half and by the slowest *backward* in its
# second, and these may be different partitions. `objective` can also be `"bottleneck"` (the slowest partition) or
# `"peak_memory"`.

# %%
for objective in ("makespan", "bottleneck", "peak_memory"):
    found = gb.solve(profile, 4, objective=objective)
    peak = max(part.memory.total for part in found.partitions)
    print(
        f"{objective:12} {list(found.balance)!s:22} makespan {1e3 * found.makespan:6.0f} ms, "
        f"bottleneck {1e3 * found.bottleneck:5.0f} ms, peak {peak / 2**20:4.0f} MiB"
    )

# %% [markdown]
# ## Rules of thumb beside the optimum
#
# Equally many layers; equally many parameters; and the rule of torchgpipe, which moves cuts step by step until no
# single move helps:

# %%
from gpipebal.planner.rule_comparison import compare_rules

print(compare_rules(profile, gb.solve(profile, 8)))

# %% [markdown]
# The column `gap` is what the bound is for: how far each can be from the best there is, as a share of its own makespan.
#
# ## Memory limits
#
# A device has only so much memory. Without checkpointing, four partitions of this model need:

# %%
free = gb.solve(profile, 4, checkpoint="never")
print([f"{part.memory.total / 2**20:.0f} MiB" for part in free.partitions])

# %% [markdown]
# With a limit the solver moves cuts, and with `checkpoint="auto"` it chooses, partition by partition, whether to keep what
# was computed or to compute it again, together with the cuts:

# %%
for limit in ("300 MiB", "200 MiB", "140 MiB"):
    try:
        found = gb.solve(profile, 4, checkpoint="auto", memory_limit=limit)
    except gb.GpipebalError as error:
        print(f"{limit}: {error}")
    else:
        print(f"{limit}: {list(found.balance)}, {', '.join(found.modes)}, {found.makespan:.2f} s")

# %% [markdown]
# And if nothing fits, the error says by how much, and what would:

# %%
try:
    gb.solve(profile, 4, memory_limit="100 MiB")
except gb.GpipebalError as error:
    print(error)

# %% [markdown]
# ## Devices that differ, links that are slow
#
# Two fast and two slow devices, with a link of 1 GB/s between neighbours. May they change places?

# %%
from gpipebal.problem import Link

slow = Link(bandwidth=1e9)
for any_order in (False, True):
    found = gb.solve(profile, 4, devices=[1.0, 2.0, 2.0, 1.0], any_order=any_order, link=slow)
    print(f"{list(found.balance)} on devices {list(found.devices)}: {found.makespan:.2f} s")

# %% [markdown]
# ## How sure are the times?
#
# Measured times vary. The next best plans are often within that noise: `top_plans` lists them, so that a run can try
# them all (`gpipebal run --try 3`).

# %%
from gpipebal.planner import top_plans

for found in top_plans(profile, 4, 4):
    print(list(found.balance), f"{1e3 * found.makespan:.2f} ms")

# %% [markdown]
# The same from a shell:
#
#     gpipebal solve profile.json --partitions 4 --memory-limit 300MiB --checkpoint auto -o plan.json --plot plan.png
#
# Next: [3. Bubbles, checkpointing and schedules](03-schedules.ipynb).
