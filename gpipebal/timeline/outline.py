"""Outline: the same timeline with fewer events, for pictures and files of very many actions."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from gpipebal.argument_kinds import check_kind
from gpipebal.timeline.table import EventTable
from gpipebal.timeline.timeline import Timeline

__all__ = ["outline"]

#: Idle time between two actions that counts as rounding, as a fraction of the makespan.
ROUNDING = 1e-12


def outline(timeline: Timeline) -> Timeline:
    """Join actions of one kind and partition that follow one another without idle time.

    Makespan, bubble, busy times, imbalance and chunks stay the same. An event has the largest
    micro-batch of those it replaces, so which one ran when is lost. Copies, and launches by the
    host, are left out, except one with which the timeline begins or ends; of a timeline that has
    nothing else, nothing is left.

    Args:
        timeline: Simulated or measured.

    Returns:
        A Timeline whose provenance has ``detail: False``, with its events in the order of
        devices, and of starts on each.

    Complexity:
        O(n log n) for n events, in numpy.

    Example:
        >>> from gpipebal.timeline import Event
        >>> events = (Event(0, "F", 0, 0, 1), Event(0, "F", 1, 1, 2), Event(0, "B", 1, 3, 4))
        >>> [str(event) for event in outline(Timeline(events, 1)).events]
        ['0F1', '0B1']
    """
    check_kind("timeline", timeline, Timeline)
    provenance = {**timeline.provenance, "detail": False}
    whole, computes = timeline.table, timeline.table.computes
    table = whole.pick(computes)
    if not len(table):
        return replace(timeline, events=table, provenance=provenance)
    ends = [] if whole.starts.min() == table.starts.min() else [int(whole.starts.argmin())]
    ends += [] if whole.ends.max() == table.ends.max() else [int(whole.ends.argmax())]
    if ends:
        kept = computes.copy()
        kept[ends] = True
        table = whole.pick(kept)
    devices = np.array(timeline.placement)[table.partitions]
    order = np.lexsort((table.ends, table.starts, devices))
    table = table.pick(order)
    idle = table.starts[1:] - table.ends[:-1] > ROUNDING * timeline.makespan
    # Another partition, also on the same device, is another event.
    others = (np.diff(table.partitions) != 0) | (np.diff(table.kinds.astype(int)) != 0)
    first = np.flatnonzero(np.concatenate(([True], idle | others)))
    last = np.append(first[1:], len(table)) - 1
    joined = EventTable(
        table.partitions[first],
        table.kinds[first],
        np.maximum.reduceat(table.micro_batches, first),
        table.starts[first],
        table.ends[last],
    )
    return replace(timeline, events=joined, provenance=provenance)
