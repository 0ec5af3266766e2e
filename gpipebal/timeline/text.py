"""Text Gantt: a timeline in a terminal, one line per device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from gpipebal.timeline.events import ALL_KINDS, EVENT_KINDS, LAUNCH_KIND, Event, kind_of
from gpipebal.timeline.table import EventTable

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["draw_rows", "legend"]

#: Kinds that a legend explains also where they do not occur.
_ALWAYS = "FRB"


def draw_rows(
    events: Sequence[Event],
    n_rows: int,
    width: int,
    devices: Sequence[int] | None = None,
    *,
    within: tuple[float, float] | None = None,
    numbered: bool = True,
) -> list[str]:
    r"""Draw one row of characters per device; all have the same length, `width` at most.

    A column shows what runs at its middle. If all times are multiples of a common clock that
    fits, every clock gets equally many columns, so that the drawing is exact.

    Args:
        events: What to draw.
        n_rows: Number of devices.
        width: The most columns.
        devices: Device of each partition; None: partition j is on device j.
        within: Seconds at which the axis begins and ends, which then has all columns; None: where
            the events do, with fewer columns if that gives each clock equally many.
        numbered: Whether every event is of one micro-batch, whose number is shown.

    Example:
        >>> events = (Event(0, "F", 0, 0, 1), Event(1, "F", 0, 1, 2), Event(1, "B", 0, 2, 4))
        >>> print(*draw_rows(events, 2, width=11), sep="\n")
        00......
        ..00AAAA
    """
    table = EventTable.of(events)
    origin, end = within or table.span
    makespan = end - origin
    columns = _count_columns(table, origin, makespan, width) if within is None else width
    rows = [["."] * columns for _ in range(n_rows)]
    if makespan > 0:
        shown = table.pick(table.computes)
        # Column c belongs to the event if its middle, c + 0.5, lies inside.
        firsts, lasts = (
            np.ceil((times - origin) / makespan * columns - 0.5).astype(np.int64)
            for times in (shown.starts, shown.ends)
        )
        # Only a few of millions of events show in a line of text.
        for k in np.flatnonzero(lasts > firsts).tolist():
            event, first, last = shown[k], int(firsts[k]), int(lasts[k])
            row = event.partition if devices is None else devices[event.partition]
            kind = kind_of(event.kind)
            symbol = kind.symbols[event.micro_batch % 10] if numbered else kind.of_several
            rows[row][first:last] = symbol * (last - first)
    return ["".join(row) for row in rows]


def draw_launches(table: EventTable, columns: int) -> str | None:
    """Draw what the host launches, by micro-batch, on the same time axis; None: nothing."""
    launches = table.pick(table.of_kind(LAUNCH_KIND))
    if not len(launches):
        return None
    as_forwards = EventTable(
        np.zeros(len(launches), dtype=np.int32),
        np.full(len(launches), ALL_KINDS.index("F"), dtype=np.uint8),
        launches.micro_batches,
        launches.starts,
        launches.ends,
    )
    return draw_rows(as_forwards, 1, columns, within=table.span)[0]


def legend(table: EventTable, *, numbered: bool = True) -> str:
    """Say what the characters mean: forward, recompute and backward, and what else occurs."""
    found = np.bincount(table.kinds, minlength=len(EVENT_KINDS))
    names: dict[str, list[str]] = {}
    for kind, n_events in zip(EVENT_KINDS, found.tolist(), strict=True):
        if kind.computes and (n_events or kind.letter in _ALWAYS):
            first, last = kind.symbols[0], kind.symbols[-1]
            symbols = kind.of_several if not numbered or first == last else f"{first}-{last}"
            names.setdefault(symbols, []).append(kind.name)
    return ", ".join(f"{symbols} {' or '.join(several)}" for symbols, several in names.items())


def _count_columns(table: EventTable, origin: float, makespan: float, width: int) -> int:
    """Return the largest number of columns up to `width` that draws a common clock evenly."""
    if makespan == 0:
        return width
    # More different times than columns have no common clock, and need not all be looked at.
    enough = 20 * (width + 2)
    if len(_different(table.starts[:enough], origin, makespan)) > width + 1:
        return width
    times = _different(np.concatenate((table.starts, table.ends)), origin, makespan)
    steps = np.diff(times)
    # The clock is no longer than the shortest step in time: fewer clocks need not be tried.
    fewest = round(1 / float(steps[steps > 1e-9].min()))
    for clocks in range(fewest, width + 1):
        if np.all(np.abs(times * clocks - np.round(times * clocks)) < 1e-6):
            return width // clocks * clocks
    return width


def _different(times: NDArray[np.float64], origin: float, makespan: float) -> NDArray[np.float64]:
    """Return the different times as fractions of the makespan, sorted; close ones are one."""
    found = np.unique((times - origin) / makespan)
    return found[np.concatenate(([True], np.diff(found) > 1e-9))] if len(found) else found
