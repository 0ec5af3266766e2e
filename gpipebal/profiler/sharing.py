"""What partitions that work side by side do to each other, as the traces of a trial tell it.

Every kind of work presses on what all share (the interpreter, caches, memory) more or less: by
its *pressure* p. Beside work of pressures q it takes 1 + p * sum(q) times as long as alone. So a
forward, which is driven by the interpreter, waits for other forwards, and hardly for a backward,
which is not.

Cells of a pipeline run beside others for a part of their time only: while it fills and drains, and
where a partition waits, the neighbours have the machine for themselves. If a cell took `d` seconds
and the same cell takes `a` alone, then all its work is::

    1 = (1 - f - g - ..) * d / a + f * d / (a * (1 + p * p)) + g * d / (a * (1 + p * q)) + ..

where another one of its own kind ran for a share `f` of them, and one of pressure `q` for `g`.
That gives p. One cell is interrupted by what else happens on the machine, so the median counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import median
from typing import NamedTuple

from gpipebal.timeline import Event

__all__ = ["MOST_PRESSURE", "TracedCell", "overlaps", "pressure"]

#: With this pressure work takes four times as long beside other such work.
MOST_PRESSURE = 3.0**0.5
#: If others worked for less than this share of the time, they tell nothing.
LEAST_OVERLAP = 0.5


class TracedCell(NamedTuple):
    """A cell of a trace.

    Attributes:
        ratio: Its seconds over those that it takes alone.
        beside: By kind, the share of its time for which others worked, added up over them.
    """

    ratio: float
    beside: Mapping[str, float]


def overlaps(
    events: Sequence[Event], kind_of: Callable[[str], str | None]
) -> list[dict[str, float]]:
    """Return for each event, by kind, the share of its time for which other partitions worked.

    Args:
        events: Those of one step.
        kind_of: Names the kind of an event's kind; None: it is no work.

    Example:
        >>> two = [Event(0, "F", 0, 0.0, 2.0), Event(1, "F", 0, 1.0, 2.0)]
        >>> overlaps(two, str.lower)
        [{'f': 0.5}, {'f': 1.0}]
    """
    found = []
    for one in events:
        length = one.end - one.start
        beside: dict[str, float] = {}
        for other in events:
            shared = min(one.end, other.end) - max(one.start, other.start)
            name = kind_of(other.kind)
            if other.partition != one.partition and shared > 0 and name is not None and length > 0:
                beside[name] = beside.get(name, 0.0) + shared / length
        found.append(beside)
    return found


def pressure(cells: Iterable[TracedCell], kind: str, known: Mapping[str, float]) -> float | None:
    """Find the pressure of a kind of work.

    Args:
        cells: Its cells.
        kind: Its name.
        known: Pressures of other kinds; those that are not here press on nothing.

    Returns:
        The median over the cells, from 0 to `MOST_PRESSURE`; None: the others worked too little to
        tell.

    Example:
        >>> cells = [TracedCell(1.5, {"f": 1.0}), TracedCell(1.0, {})]
        >>> round(pressure(cells, "f", {}) ** 2, 6)
        0.5
    """
    found = []
    for cell in cells:
        if sum(cell.beside.values()) < LEAST_OVERLAP:
            continue
        low, high = 0.0, MOST_PRESSURE
        for _ in range(40):
            middle = (low + high) / 2
            if _work(cell, middle, {**known, kind: middle}) > 1.0:
                low = middle
            else:
                high = middle
        found.append((low + high) / 2)
    return median(found) if found else None


def _work(cell: TracedCell, own: float, pressures: Mapping[str, float]) -> float:
    """Return how often a cell could have been done in its time."""
    alone = max(0.0, 1.0 - sum(cell.beside.values()))
    beside = sum(
        share / (1.0 + own * pressures.get(name, 0.0)) for name, share in cell.beside.items()
    )
    return cell.ratio * (alone + beside)
