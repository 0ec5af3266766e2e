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

__all__ = ["Limit", "Solution", "everywhere", "meet", "reach_limit", "reach_within", "windows"]


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


def everywhere(n_layers: int, n_partitions: int) -> tuple[list[int], list[int]]:
    """Return the first and the last place that each bound may have, without any limit.

    Example:
        >>> everywhere(5, 3)
        ([0, 1, 2, 5], [0, 3, 4, 5])
    """
    lows, highs = range(n_partitions), range(n_layers - n_partitions + 1, n_layers)
    return [*lows, n_layers], [0, *highs, n_layers]


def windows(
    limits: Sequence[Limit], lows: Sequence[int], highs: Sequence[int]
) -> tuple[list[int], list[int]] | None:
    """Find where each bound can be in a split that keeps limits.

    Args:
        limits: What every partition keeps.
        lows: First place that each bound may have; increasing from 0 to the number of layers.
        highs: Last place that each bound may have; increasing likewise.

    Returns:
        First and last place of each bound; every place between is taken by some valid split as
        well. None if there is no valid split.

    Complexity:
        O(K log N) for N layers and K partitions, times the number of limits.

    Example:
        >>> windows([reach_limit([2, 3, 4, 4])], *everywhere(4, 3))
        ([0, 1, 2, 4], [0, 2, 3, 4])
    """
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
    return first[::-1], last
