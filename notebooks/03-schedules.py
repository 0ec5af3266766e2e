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
# # 3. Bubbles, checkpointing and schedules
#
# A pipeline has to fill up and to run empty. While it does, devices wait. That idle time is called the **bubble**.
# This notebook is about what makes it small, and what that costs in memory. Nothing runs here: a **simulator** places
# known times on a schedule, in milliseconds.
#
# To see the pattern, take a model of 16 equal layers. For one micro-batch each takes 1 ms for its forward and 2 ms for
# its backward, saves 8 MiB for its backward, and passes 1 MiB to the next layer.

# %%
# %matplotlib inline
import gpipebal as gb
from gpipebal.plots import plot_chunks, plot_memory, plot_schedules, plot_timeline, plot_timelines
from gpipebal.simulator import held_of, memory_over_time

MIB = 2**20


def equal_layers(n_layers=16, chunks=4, size=1.0, overhead=0.0):
    """Make a profile of equal layers, for micro-batches `size` times as large as usual: of 16 rows."""
    return gb.Profile.from_costs(
        [1e-3 * (size + overhead)] * n_layers,
        saved_bytes=[int(8 * MIB * size)] * n_layers,
        output_bytes=[int(1 * MIB * size)] * n_layers,
        parameter_bytes=[4 * MIB] * n_layers,
        rows=int(16 * size),
        chunks=chunks,
    )


profile = equal_layers()
plan = gb.solve(profile, 4, checkpoint="never")
timeline = gb.simulate(plan)
plot_timeline(timeline).figure

# %% [markdown]
# There is one row per device, time runs from left to right, and the numbers are micro-batches. All forwards come first,
# then all backwards, beginning with the last micro-batch: that is **GPipe's schedule**. Device 3 cannot start before the
# first micro-batch has come through devices 0 to 2; device 0 waits for gradients from all others.
#
# With $n$ equal partitions and $m$ micro-batches, every device is idle for $n - 1$ of its $m + n - 1$ turns:

# %%
n, m = 4, 4
print(f"simulated {timeline.bubble_fraction:.4f}, formula {(n - 1) / (m + n - 1):.4f}")

# %% [markdown]
# ## More micro-batches
#
# If the mini-batch stays the same, more micro-batches are smaller ones. If a layer's time were exactly proportional to
# the rows, more of them would always be better: the bubble shrinks with $1/m$.
#
# In reality every layer has an overhead that does not shrink. Let it be a tenth of the time of a usual micro-batch:

# %%
candidates = []
for chunks in (1, 2, 4, 8, 16, 32, 64):
    share = 4 / chunks  # rows of a micro-batch, as a multiple of those above
    part = equal_layers(chunks=chunks, size=share, overhead=0.1)
    candidates.append(gb.solve(part, 4, checkpoint="never"))
plot_chunks(candidates).figure

# %% [markdown]
# With few micro-batches the bubble is wide. With many there is more work, because the overhead is paid again and again.
# The best number lies in between. (`solve(profile, 4, chunks="auto")` finds it, if the profile was measured at several
# sizes: notebook 4.)
#
# ## Checkpointing
#
# Until its backward comes, every micro-batch keeps what its layers saved. GPipe holds all of them at the same time. (The
# last partition also has the outputs, which are gathered for the loss: the narrow hatched band.) The dashed line is a
# limit of 120 MiB.

# %%
plot_memory(memory_over_time(timeline, held_of(profile, plan)), limit="120 MiB").figure

# %% [markdown]
# **Checkpointing** keeps only the *input* of each partition, and computes the rest again right before the backward. That
# costs one more forward (hatched) and saves most of what is held for the backwards: half of the peak, parameters included.
# `"except_last"` spares the last micro-batch, whose backward follows its forward at once:

# %%
checkpointed = gb.solve(profile, 4, checkpoint="except_last")
again = gb.simulate(checkpointed)
plot_timeline(again).figure

# %%
plot_memory(memory_over_time(again, held_of(profile, checkpointed)), limit="120 MiB").figure

# %%
for mode in ("never", "except_last", "always"):
    found = gb.solve(profile, 4, checkpoint=mode)
    peak = max(part.memory.total for part in found.partitions)
    print(f"{mode:12} {1e3 * found.makespan:6.1f} ms, highest peak {peak / MIB:6.1f} MiB")

# %% [markdown]
# ## Other schedules
#
# A different order of the same work can save memory or idle time:
#
# * **1F1B** starts a backward as soon as it can. With equal partitions it is exactly as long as GPipe, but
#   the first device never holds more than $n$ micro-batches, however many there are.
# * **Interleaved 1F1B** gives every device two partitions, so that filling and emptying take half as long.
# * **Breadth first** (`looped_bfs`) goes round such devices too, but does all micro-batches of one partition before those of
#   the device's next one: as fast here, with all micro-batches in flight.
# * **Zero-bubble (ZB-H1)** divides a backward in two: the gradient of the input, for which others wait, and the gradient
#   of the weights, which fills the gaps.

# %%
equal = equal_layers(chunks=8)
plan = gb.solve(equal, 4, checkpoint="never")
shown = {name: gb.simulate(plan, name) for name in ("gpipe", "1f1b", "zb_h1")}
plot_timelines(shown).figure

# %% [markdown]
# This table has all of them. `run by` says what can run each one: `GPipe` of this library runs `gpipe` and `1f1b`,
# `torch.distributed.pipelining` runs the others. `gpipe_in_order` is torch's GPipe, whose backwards begin with the first
# micro-batch.

# %%
table = gb.compare_schedules(equal, 4, chunks=8)
print(table)

# %%
plot_schedules(table).figure

# %% [markdown]
# ## Unequal partitions
#
# Nothing above needed a profiler, because all layers were equal. If one layer takes four times as long as the others,
# the partition that holds it sets the pace. No schedule repairs a bad cut, and the more micro-batches there are, the
# more a bad cut costs.

# %%
uneven = gb.Profile.from_costs([1e-3] * 15 + [4e-3], chunks=8)
pair = {
    "equally many layers": gb.simulate(gb.evaluate(uneven, [4, 4, 4, 4], checkpoint="never")),
    "solved": gb.simulate(gb.solve(uneven, 4, checkpoint="never")),
}
plot_timelines(pair).figure

# %% [markdown]
# The same from a shell:
#
#     gpipebal simulate profile.json --partitions 4 --schedule 1f1b --checkpoint never --plot timeline.png
#     gpipebal compare profile.json --partitions 4 --chunks 8
#
# Next: [4. Run it and compare with the prediction](04-run.ipynb).
