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
# # 6. From one laptop to a thousand devices, by simulation
#
# What happens to a pipeline when it grows? You do not need a thousand devices to find out: for known costs the solver and
# the simulator are exact, and both are fast. This notebook takes seconds.
#
# The model is a GPT with 1,024 blocks of two layers each. With embedding, last norm and head these are 2,051 layers. They
# are estimated for an H100. Identical layers are examined only once.

# %%
# %matplotlib inline
import time

import torch
from matplotlib.figure import Figure

import gpipebal as gb
from gpipebal.models import gpt
from gpipebal.plots import partition_colours, plot_timeline

BLOCKS, WIDTH = 1024, 4096

with torch.device("meta"):
    model = gpt(BLOCKS, WIDTH, heads=32, vocabulary=32_000, context=2048)
    tokens = torch.zeros(1, 2048, dtype=torch.int64)
start = time.perf_counter()
profile = gb.profile_model(model, tokens, method="estimate", rates="H100")
n_parameters = sum(p.numel() for p in model.parameters())
print(f"{profile.n_layers} layers, {n_parameters / 1e9:.0f} billion parameters")
print(profile)

# %% [markdown]
# ## Planning and simulating
#
# `gb.solve` and `gb.simulate` do all of this for plans of ordinary size. But a plan also predicts the memory of every
# partition, for which it walks through each action (one forward, recompute or backward); with millions of actions that
# takes minutes. Here we use the two parts that matter now by themselves: the solver, which cuts the chain, and `place`,
# which puts durations on a schedule.

# %%
from gpipebal.problem import Link, Problem, links_of
from gpipebal.schedule import order_of
from gpipebal.simulator import durations_of, place
from gpipebal.solvers import split


def best_bounds(n_devices, chunks):
    """Find the best cuts: the first layer of each partition."""
    problem = Problem(
        **profile.layer_times, n_partitions=n_devices, chunks=chunks, checkpoint="never"
    )
    found = split(problem)
    assert found.status == "optimal"
    return found.bounds


def run(n_devices, chunks, *, one_process=False, link=None):
    """Cut the model in the best way, and simulate a step."""
    links = None if link is None else links_of(profile, link)
    times = durations_of(profile, best_bounds(n_devices, chunks), links=links)
    if not one_process:
        # Every device has a process of its own, which launches ahead of the work.
        times = times.without_launches
    return place(order_of("gpipe", n_devices, chunks, "never"), times)


# %% [markdown]
# A thousand devices and four thousand micro-batches make eight million forwards and backwards. They are kept as columns
# of numbers, so each of the following lines takes seconds at most:

# %%
DEVICES = (8, 64, 256, 1024)
for n in DEVICES:
    start = time.perf_counter()
    bounds = best_bounds(n, 4 * n)
    middle = time.perf_counter()
    timeline = run(n, 4 * n)
    end = time.perf_counter()
    print(
        f"{n:5} devices: makespan {timeline.makespan:6.1f} s, bubble "
        f"{100 * timeline.bubble_fraction:4.1f} %, {len(timeline.events):9,} events"
    )
print(f"The last: cut in {1e3 * (middle - start):.0f} ms, simulated in {end - middle:.1f} s.")

# %% [markdown]
# The smallest of them, as a picture:

# %%
plot_timeline(run(8, 32)).figure

# %% [markdown]
# ## How many micro-batches do a thousand devices need?
#
# The picture shows the share of time that devices work, over the number of micro-batches per device. If all partitions took
# equally long, one rule would hold at every size: with one micro-batch per device half of the time is lost, with four a
# fifth. The curves of 8 and 64 devices come close to that.

# %%
PER_DEVICE = (0.5, 1, 2, 4)
figure = Figure(figsize=(7, 3.4), layout="constrained")
ax = figure.add_subplot()
for n, colour in zip(DEVICES, partition_colours(len(DEVICES)), strict=True):
    shares = [100 * (1 - run(n, int(each * n)).bubble_fraction) for each in PER_DEVICE]
    ax.plot(PER_DEVICE, shares, marker="o", color=colour, label=f"{n} devices")
ax.set(xscale="log", xlabel="micro-batches per device", ylabel="time at work [%]", ylim=(0, 100))
ax.set_xticks(PER_DEVICE, [str(each) for each in PER_DEVICE])
ax.minorticks_off()
ax.legend(frameon=False)
figure

# %% [markdown]
# Where the curve of the thousand devices lies lower than the others, filling and emptying the pipeline is not the reason:
# with two layers on each device there is no room to balance anything. `imbalance` is the largest time of a device over the
# mean:

# %%
for n in DEVICES:
    print(f"{n:5} devices: imbalance {run(n, n).imbalance:.3f}")

# %% [markdown]
# ## Links
#
# At every cut a state of 2,048 tokens is passed on. Over a fast link the work hides this copy; a slow link limits the
# speed by itself. (Copies run at the same time as the computation. `gb.solve(..., link=...)` also moves the cuts to where
# little crosses.)

# %%
for name, bandwidth in (("none", None), ("InfiniBand", 50e9), ("Ethernet", 3e9), ("slow", 125e6)):
    link = None if bandwidth is None else Link(bandwidth, latency=10e-6)
    timeline = run(64, 256, link=link)
    speed = "" if bandwidth is None else f"{bandwidth / 1e9:g} GB/s"
    print(f"{name:10} {speed:10}: makespan {timeline.makespan:6.1f} s")

# %% [markdown]
# ## One process for all
#
# A single process that launches the work of all devices, as `GPipe` does, is one more station that all work has to
# pass through. The profile says how long the launch of every layer takes. Where does that become the limit?

# %%
for n in DEVICES[:3]:
    free, one = run(n, 4 * n).makespan, run(n, 4 * n, one_process=True).makespan
    print(f"{n:5} devices: {free:6.1f} s with a process for each, {one:6.1f} s with one for all")

# %% [markdown]
# This is why one process is for one machine, and why a pipeline over many machines has a process for every device.
#
# This is the last notebook. [docs/architecture.md](../docs/architecture.md) is the map of the code.
