"""Simulator: place durations on a schedule, each action as early as its order allows.

An action starts when its device has finished the action before it and when the actions that it
needs have ended: a forward needs the one in the partition before, a recompute its own forward, a
backward its own forward, its recompute if there is one, and the backward in the partition after. A
backward may come in two parts: the gradient of the input, which others wait for, and that of the
weights, which needs the first. Nothing else costs time, unless durations of transfers, of launches
by the host or of the optimizer are given. No action waits for room, as those of `GPipe` do: a fast
partition may be further ahead here, and the makespan is the same::

    # GPipe, 3 partitions, 4 micro-batches, F takes 1 clock, B takes 2: makespan 18 clocks.
    # partition 0  0123......DDCCBBAA
    # partition 1  .0123...DDCCBBAA..
    # partition 2  ..0123DDCCBBAA....
    # bubble_fraction = 18 idle / 54 = (n - 1) / (m + n - 1) = 1/3

Read in this order: `durations` and `of_profile` (what is placed), `place` (the verb for durations),
`simulate` (the verb for plans), `work` (a schedule as numbers: who needs whom), `engines` (three
ways to the same times: many devices at once, few devices, and a host that all have to pass),
`wavefront` (a fourth, for GPipe on many devices), `sharing` (partitions that slow each other down),
`trials` (many durations on one order), `refusals` (why a schedule can never finish), `held`,
`held_of` and `tracks` (memory over time) and `comparison` (schedules side by side).
"""

from gpipebal.simulator.comparison import ScheduleRow, ScheduleTable, compare_durations
from gpipebal.simulator.durations import Durations
from gpipebal.simulator.held import CellBytes, HeldBytes
from gpipebal.simulator.held_of import held_of
from gpipebal.simulator.of_profile import durations_of, weight_shares
from gpipebal.simulator.place import place
from gpipebal.simulator.simulate import simulate
from gpipebal.simulator.tracks import MemoryTrack, memory_over_time

__all__ = [
    "CellBytes",
    "Durations",
    "HeldBytes",
    "MemoryTrack",
    "ScheduleRow",
    "ScheduleTable",
    "compare_durations",
    "durations_of",
    "held_of",
    "memory_over_time",
    "place",
    "simulate",
    "weight_shares",
]
