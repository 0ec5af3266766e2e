"""The memory of partitions from which everything is taken at once, as in no step that runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

import gpipebal as gb
from gpipebal.memory import partition_memory
from gpipebal.plan import PeakMemory
from gpipebal.schedule import order_of
from gpipebal.timeline import EventTable, Timeline


def peaks_without_waiting(
    profile: gb.Profile, bounds: Sequence[int], *, chunks: int, checkpoint: Any, **given: Any
) -> list[PeakMemory]:
    """Predict the peak of each partition by a timeline in which all others are done before it."""
    n = len(bounds) - 1
    order = order_of(given.get("schedule", "gpipe"), n, chunks, checkpoint)
    given |= {"chunks": chunks, "checkpoint": checkpoint}
    peaks = []
    for j in range(n):
        starts = np.where(order.partitions == j, 1.0 + np.arange(order.n_actions), 0.0)
        table = EventTable(order.partitions, order.kinds, order.micro_batches, starts, starts + 0.5)
        timeline = Timeline(table, n, "simulated")
        peaks.append(partition_memory(profile, bounds, timeline=timeline, **given)[j])
    return peaks
