"""The k best splits: each is the best of all that differ from those before it.

All splits but the best one fall into groups: those that differ in the first cut; those that share
the first cut and differ in the second; and so on. In each group the best is found by the same
solver, with places of cuts fixed and forbidden; the next split is the best of these, and its
group falls apart in the same way.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from itertools import count

from gpipebal.solvers.sets.levels import Levels
from gpipebal.solvers.sets.reachability import BestPath, Path

__all__ = ["parts_without", "ranked"]

#: A solver: value and split, or None if there is no split.
Solve = Callable[[Levels], "BestPath | None"]


def ranked(levels: Levels, solve: Solve) -> Iterator[tuple[int, Path]]:
    """Yield splits from the best one on, no two with the same bounds.

    Args:
        levels: The problem, with the places that bounds may have.
        solve: Finds the best split within such places.

    Yields:
        Value and split. Values never decrease; of equal values, leftmost cuts come first among
        the candidates that are known at that time.

    Complexity:
        Up to K solves for each split and K partitions.

    Source:
        Lawler, "A procedure for computing the K best solutions to discrete optimization problems
        and its application to the shortest path problem", Management Science 18(7), 1972.

    Example:
        >>> from gpipebal.problem import Problem
        >>> from gpipebal.solvers.sets.reachability import Search
        >>> from gpipebal.solvers.sets.staircase import least_bottleneck
        >>> levels = Levels(Problem([1, 2, 3, 4], [0] * 4, [0] * 4, 2))
        >>> [(value, path.bounds) for value, path in
        ...     ranked(levels, lambda levels: least_bottleneck(Search(levels)))]
        [(6, (0, 3, 4)), (7, (0, 2, 4)), (9, (0, 1, 4))]
    """
    tickets = count()
    heap: list[tuple[int, tuple[int, ...], int, Path, Levels]] = []

    def push(group: Levels) -> None:
        found = solve(group)
        if found is not None:
            path = found.path
            heapq.heappush(heap, (found.value, path.bounds, next(tickets), path, group))

    push(levels)
    while heap:
        value, bounds, _, path, group = heapq.heappop(heap)
        yield value, path
        for places in parts_without(group.places, bounds):
            differs = copy(group)
            differs.places = places
            push(differs)


def parts_without(places: Sequence[int], bounds: Sequence[int]) -> Iterator[list[int]]:
    """Part all splits but one: each other split is in one part, and in no other.

    Args:
        places: The set of places of each bound.
        bounds: The split.

    Yields:
        The sets of places of each part. No split may be in it: only empty sets are left out.

    Example:
        >>> [list(map(bin, part)) for part in parts_without([0b1, 0b110, 0b110, 0b1000], (0, 1, 2))]
        [['0b1', '0b100', '0b110', '0b1000']]
    """
    left = list(places)
    for k in range(1, len(bounds) - 1):  # k: cut
        other = left[k] & ~(1 << bounds[k])
        if other:
            yield [*left[:k], other, *left[k + 1 :]]
        left[k] = 1 << bounds[k]
