"""How much partitions that work side by side slow each other down, by the traces of a trial.

Every kind of work puts some load on what all share (the interpreter, caches, memory): its
*pressure* p. Next to work of pressures q it takes 1 + p * sum(q) times as long as alone. So a
forward, which is driven by the interpreter, waits for other forwards, and hardly for a backward,
which is not.

Cells of a pipeline run next to others for only a part of their time: while the pipeline fills and
drains, and where a partition waits, its neighbours have the machine to themselves. If a cell took
`d` seconds and the same cell takes `a` alone, then all its work is::

    1 = (1 - f - g - ..) * d / a + f * d / (a * (1 + p * p)) + g * d / (a * (1 + p * (p + q))) + ..

where for a share `f` of these seconds another cell of its own kind ran, and for a share `g` one of
its own kind and one of pressure `q`. That gives p. Single cells are interrupted by other work on
the machine, so the median counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from statistics import median
from typing import NamedTuple

from gpipebal.timeline import Event

__all__ = ["MOST_PRESSURE", "TracedCell", "overlaps", "pressure"]

#: With this pressure, work takes four times as long next to other such work.
MOST_PRESSURE = 3.0**0.5
#: If others worked for less than this share of the time, they tell nothing.
LEAST_OVERLAP = 0.5


#: Kinds of work, one for each partition that works, in alphabetical order.
Kinds = tuple[str, ...]


class TracedCell(NamedTuple):
    """A cell of a trace.

    Attributes:
        ratio: Its seconds over those that it takes alone.
        beside: By kinds of other work, the share of its time for which exactly these worked.
    """

    ratio: float
    beside: Mapping[Kinds, float]


def overlaps(
    events: Sequence[Event], kind_of: Callable[[str], str | None]
) -> list[dict[Kinds, float]]:
    """Return for each event, by kinds of work, the share of its time for which others worked.

    Args:
        events: The events of one step.
        kind_of: Returns the kind of work of an event's kind; None: it is not work.

    Example:
        >>> two = [Event(0, "F", 0, 0.0, 2.0), Event(1, "F", 0, 1.0, 2.0)]
        >>> overlaps(two, str.lower)
        [{('f',): 0.5}, {('f',): 1.0}]
    """
    working = [(event, name) for event in events if (name := kind_of(event.kind)) is not None]
    found = []
    for one in events:
        others = [
            (max(one.start, other.start), min(one.end, other.end), name)
            for other, name in working
            if other.partition != one.partition and other.start < one.end and one.start < other.end
        ]
        moments = sorted({moment for start, end, _ in others for moment in (start, end)})
        beside: dict[Kinds, float] = {}
        for since, until in pairwise(moments):
            kinds = sorted(name for start, end, name in others if start <= since and until <= end)
            if kinds:
                share = (until - since) / (one.end - one.start)
                beside[tuple(kinds)] = beside.get(tuple(kinds), 0.0) + share
        found.append(beside)
    return found


def pressure(cells: Iterable[TracedCell], kind: str, known: Mapping[str, float]) -> float | None:
    """Find the pressure of a kind of work.

    Args:
        cells: Its cells.
        kind: Its name.
        known: Pressures of other kinds; kinds that are not here have none.

    Returns:
        The median over the cells, from 0 to `MOST_PRESSURE`; None: the others worked too little to
        tell.

    Example:
        >>> cells = [TracedCell(1.5, {("f",): 1.0}), TracedCell(1.0, {})]
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
        share / (1.0 + own * sum(pressures.get(name, 0.0) for name in kinds))
        for kinds, share in cell.beside.items()
    )
    return cell.ratio * (alone + beside)
