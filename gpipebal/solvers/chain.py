"""Which partitions are allowed: the shared vocabulary of all solvers.

Every limit that these solvers meet is inherited by shorter runs: if the layers ``start`` to
``end - 1`` may form a partition, so may every non-empty part of them (times add up, and are not
negative). All limits together then amount to one list, ``reach``: a partition that starts at
layer ``start`` may end anywhere from ``start + 1`` to ``reach[start]``, and ``reach`` never
decreases. That list is rarely needed: a `Limit` answers for the few places that a solver meets.
Two consequences make the solvers short: the places where a given cut may be in some valid split
form an interval, and taking the longest partition first finds a split whenever there is one.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from operator import gt
from typing import NamedTuple

__all__ = [
    "Limit",
    "Solution",
    "Windows",
    "everywhere",
    "meet",
    "narrowed",
    "reach_limit",
    "reach_within",
]


class Solution(NamedTuple):
    """What a solver returns: a split, its value and the proven bound, as scaled integers."""

    bounds: tuple[int, ...]
    value: int
    lower_bound: int


class Limit(NamedTuple):
    """A limit of what every partition costs: ``ends[end] - starts[start] <= most``.

    Where the cost is a plain sum over layers, `ends` and `starts` are the same prefix sums.
    Neither ever decreases.
    """

    ends: Sequence[int]
    starts: Sequence[int]
    most: int

    def allows(self, start: int, end: int) -> bool:
        """Tell whether a partition may be the layers `start` to ``end - 1``."""
        return self.ends[end] - self.starts[start] <= self.most


class Windows(NamedTuple):
    """The first and the last place of each bound; both increase from 0 to the number of layers."""

    first: Sequence[int]
    last: Sequence[int]

    @property
    def width(self) -> int:
        """Number of places, one less for each window."""
        return sum(self.last) - sum(self.first)


def reach_limit(reach: Sequence[int]) -> Limit:
    """Turn a list of how far partitions may extend into a limit.

    Example:
        >>> limit = reach_limit([2, 3, 3])
        >>> limit.allows(0, 2), limit.allows(0, 3)
        (True, False)
    """
    return Limit(range(len(reach) + 1), reach, 0)


def reach_within(ends: Sequence[int], starts: Sequence[int], limit: int) -> list[int]:
    """Find how far a partition may extend when its cost is limited.

    A partition from `start` to `end` costs ``ends[end] - starts[start]``. Where that is a plain
    sum over layers, `ends` and `starts` are the same prefix sums.

    Args:
        ends: Never decreasing; one more than layers.
        starts: Never decreasing; one more than layers.
        limit: Largest cost allowed, at least that of every single layer.

    Returns:
        One end per layer.

    Complexity:
        O(N log N) for N layers.

    Example:
        >>> reach_within([0, 2, 3, 6], [0, 2, 3, 6], 4)
        [2, 3, 3]
    """
    return [bisect_right(ends, start + limit) - 1 for start in starts[:-1]]


def meet(*reaches: Sequence[int]) -> list[int]:
    """Impose several limits at once.

    Example:
        >>> meet([2, 3, 3], [1, 3, 3])
        [1, 3, 3]
    """
    return list(map(min, *reaches))


def everywhere(n_layers: int, n_partitions: int) -> Windows:
    """Return where each bound may be without any limit.

    Example:
        >>> everywhere(5, 3)
        Windows(first=[0, 1, 2, 5], last=[0, 3, 4, 5])
    """
    lows, highs = range(n_partitions), range(n_layers - n_partitions + 1, n_layers)
    return Windows([*lows, n_layers], [0, *highs, n_layers])


def narrowed(limits: Sequence[Limit], windows: Windows) -> Windows | None:
    """Find where each bound can be in a split that keeps limits.

    Args:
        limits: What every partition keeps.
        windows: Where each bound may be.

    Returns:
        Windows in which every place is taken by some valid split. None if there is no valid split.

    Complexity:
        O(K log N) for N layers and K partitions, times the number of limits.

    Example:
        >>> narrowed([reach_limit([2, 3, 4, 4])], everywhere(4, 3))
        Windows(first=[0, 1, 2, 4], last=[0, 2, 3, 4])
    """
    lows, highs = windows
    last = [0]
    for end in highs[1:]:
        start = last[-1]
        for ends, starts, most in limits:
            room = starts[start] + most
            if ends[end] > room:
                end = bisect_right(ends, room, start + 1, end + 1) - 1
        last.append(end)
    if any(map(gt, lows, last)):
        return None
    first = [lows[-1]]
    for start in lows[-2:0:-1]:
        end = first[-1]
        for ends, starts, most in limits:
            least = ends[end] - most
            if starts[start] < least:
                start = bisect_left(starts, least, start, end)
        first.append(start)
    first.append(0)
    return Windows(first[::-1], last)
