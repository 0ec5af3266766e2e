"""Ways to recompute layers of several partitions, the cheapest first, where what waits decides.

What may wait for busy neighbours is known only for a whole choice. It may be less with runs that
need more by themselves, for example because a neighbouring partition recomputes too. So where the
runs that need least do not fit, others are tried together, in the order of their time.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from gpipebal.solvers.deadline import Deadline
from gpipebal.solvers.knapsack.knapsack import Way, cheapest, lowest
from gpipebal.solvers.knapsack.network import Arc, Network

__all__ = ["Choice", "SearchTime", "choices_of", "in_order"]


class SearchTime:
    """Seconds that the searches for each partition may take together.

    Args:
        most: So many; None: as long as it takes.
    """

    def __init__(self, most: float | None) -> None:
        self._most = most
        self._used: dict[int, float] = {}

    @contextmanager
    def search(self, j: int) -> Iterator[float | None]:
        """Give the seconds that are left for partition j, and take off those that a block takes."""
        started, used = time.monotonic(), self._used.get(j, 0.0)
        try:
            yield None if self._most is None else max(0.0, self._most - used)
        finally:
            self._used[j] = used + time.monotonic() - started


class Choice(NamedTuple):
    """One way to recompute layers of a partition.

    Attributes:
        seconds: Seconds that it takes, for one micro-batch.
        way: The way; None: the partition stays as it is.
    """

    seconds: float
    way: Way | None


def choices_of(
    network: Network, limit: int | None, most: int, time_limit: float | None = None
) -> tuple[list[Way], bool]:
    """List ways whose peaks keep a limit.

    Args:
        network: All ways of a partition.
        limit: Bytes, without what waits; None: no limit.
        most: How many ways are listed at most.
        time_limit: Seconds to search for all of them; None: as long as it takes.

    Returns:
        The ways, and whether these are all. All are listed if there are few; otherwise the
        cheapest, and the cheapest for lower and lower limits, down to the lowest.

    Example:
        >>> from gpipebal.solvers.knapsack.network import Ceiling
        >>> steps = {0: [Arc(1, 0, 8, (8,)), Arc(1, 5, 2, (9,))], 1: [Arc(2, 0, 1, (1,))]}
        >>> network = Network(steps, {2: [Ceiling(0, times=1, beside=0)]})
        >>> [way.cost for way in choices_of(network, 20, 9)[0]], choices_of(network, 12, 1)[1]
        ([0, 5], False)
    """
    least = lowest(network)
    if limit is not None and least.peak > limit:
        return [], True
    if _count(network) <= most:
        ways = [
            Way(arcs, sum(arc.cost for arc in arcs), 0, network.peak(arcs))
            for arcs in _all_arcs(network)
        ]
        return [way for way in ways if limit is None or way.peak <= limit], True
    found: list[Way] = []
    deadline = Deadline(time_limit)
    room = network.peak(network.lightest(1, 0)) if limit is None else limit
    while room > least.peak and len(found) < most - 1:
        way = cheapest(network, room, deadline.left)
        if way is None or way.peak <= least.peak:
            break
        found.append(way)
        # In steps so large that the lowest is reached.
        room = way.peak - max(1, (way.peak - least.peak) // (most - len(found)))
    return [*found, least], False


def _count(network: Network) -> int:
    """Count the ways from the start."""
    counts: dict[Hashable, int] = dict.fromkeys(network.ends, 1)
    for node in reversed(network.arcs):
        counts[node] = sum(counts[arc.end] for arc in network.arcs[node])
    return counts[network.start]


def _all_arcs(network: Network) -> Sequence[tuple[Arc, ...]]:
    """Return the steps of all ways, in the order of the network."""
    found: dict[Hashable, list[tuple[Arc, ...]]] = {end: [()] for end in network.ends}
    for node in reversed(network.arcs):
        found[node] = [(arc, *rest) for arc in network.arcs[node] for rest in found[arc.end]]
    return found[network.start]


def in_order(choices: Sequence[Sequence[Choice]]) -> Iterator[tuple[Choice, ...]]:
    """Yield one choice of each list, in the order of their seconds together.

    Complexity:
        O(k log c) for each of the c that are yielded, with k lists.

    Example:
        >>> lists = [[Choice(0, None), Choice(5, None)], [Choice(1, None), Choice(2, None)]]
        >>> [sum(one.seconds for one in both) for both in in_order(lists)]
        [1, 2, 6, 7]
    """
    if not all(choices):
        return
    ranked = [sorted(one, key=lambda choice: choice.seconds) for one in choices]

    def seconds(places: Sequence[int]) -> float:
        return sum(one[k].seconds for one, k in zip(ranked, places, strict=True))

    first = (0,) * len(ranked)
    heap = [(seconds(first), first)]
    while heap:
        _, places = heapq.heappop(heap)
        yield tuple(one[k] for one, k in zip(ranked, places, strict=True))
        # Each tuple of places comes from one other: the one with its last place above 0 lowered.
        last = max((j for j, k in enumerate(places) if k), default=0)
        for j in range(last, len(ranked)):
            if places[j] + 1 < len(ranked[j]):
                further = (*places[:j], places[j] + 1, *places[j + 1 :])
                heapq.heappush(heap, (seconds(further), further))
