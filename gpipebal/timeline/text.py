"""Text Gantt: a timeline in a terminal, one line per partition."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from gpipebal.timeline.events import COMPUTE_KINDS, Event

__all__ = ["draw_rows"]


def draw_rows(events: Sequence[Event], n_partitions: int, width: int) -> list[str]:
    r"""Draw one row of characters per partition; all have the same length, `width` at most.

    A column shows what runs at its middle. If all times are multiples of a common clock that
    fits, every clock gets equally many columns, so that the drawing is exact.

    Example:
        >>> events = (Event(0, "F", 0, 0, 1), Event(1, "F", 0, 1, 2), Event(1, "B", 0, 2, 4))
        >>> print(*draw_rows(events, 2, width=11), sep="\n")
        00......
        ..00AAAA
    """
    origin = min((event.start for event in events), default=0.0)
    makespan = max((event.end for event in events), default=0.0) - origin
    columns = _count_columns(events, origin, makespan, width)
    rows = [["."] * columns for _ in range(n_partitions)]
    for event in events if makespan > 0 else ():
        if event.kind in COMPUTE_KINDS:
            # Column c belongs to the event if its middle, c + 0.5, lies inside.
            first, last = (
                math.ceil((time - origin) / makespan * columns - 0.5) for time in event[3:]
            )
            rows[event.partition][first:last] = _symbol(event) * (last - first)
    return ["".join(row) for row in rows]


def _symbol(event: Event) -> str:
    digit = event.micro_batch % 10
    return {"F": str(digit), "R": "r", "B": "ABCDEFGHIJ"[digit]}[event.kind]


def _count_columns(events: Sequence[Event], origin: float, makespan: float, width: int) -> int:
    """Return the largest number of columns up to `width` that draws a common clock evenly."""
    if makespan == 0:
        return width
    times = sorted({(time - origin) / makespan for event in events for time in event[3:]})
    steps = [after - before for before, after in itertools.pairwise(times)]
    # The clock is no longer than the shortest step in time: fewer clocks need not be tried.
    fewest = round(1 / min(step for step in steps if step > 1e-9))
    for clocks in range(fewest, width + 1):
        if all(abs(time * clocks - round(time * clocks)) < 1e-6 for time in times):
            return width // clocks * clocks
    return width
