"""Exact bisection: the smallest limit that every partition can keep.

For a given limit, filling one partition after the other as far as the limit allows decides
whether a split exists (a probe). Bisecting the limit with probes is fast, but on its own it only
converges towards the answer. So every probe is made to tell more than yes or no. A split that
was found has some largest cost, often below the limit that was tried: that becomes the new upper
end. A probe that failed would take the very same path with every limit up to the cheapest
extension that it had to refuse: that becomes the new lower end. Both ends are now costs of actual
runs of layers, and when they meet, the value is exact and its proof is complete. And the last
partition tells how far off the limit was, by what it lacked or had left: the next probe is where
that would be nothing, and in the middle only if such guesses stay on one side.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import pairwise
from operator import sub
from typing import NamedTuple

from gpipebal.solvers.chain import Limit

__all__ = [
    "Smallest",
    "fill",
    "floor",
    "largest_layer",
    "largest_partition",
    "refusals",
    "smallest_limit",
]

#: With up to this many layers for each partition, looking at each takes no longer than a probe.
_FEW_LAYERS = 8

#: After this many guesses in a row on one side of the answer, the interval is halved; and a guess
#: keeps a distance of one part in `_CLOSEST` of the interval from its ends.
_MOST_ALIKE, _CLOSEST = 2, 8


class Smallest(NamedTuple):
    """The smallest limit, the proven bound below it, and a split that keeps the limit.

    Without a split, `lower_bound` still holds, and it exceeds the `at_most` that was asked for.
    """

    value: int
    lower_bound: int
    bounds: tuple[int, ...] | None


def largest_layer(ends: Sequence[int], starts: Sequence[int]) -> int:
    """Return the largest cost of a single layer, which no limit can undercut.

    Example:
        >>> largest_layer([0, 2, 3, 6], [0, 2, 3, 6])
        3
    """
    return max(map(sub, ends[1:], starts))


def floor(sums: Sequence[int], n_partitions: int) -> int:
    """Bound the bottleneck from below: by the even share and, where that is quick, by layers.

    No partition costs less than its largest layer; and some partition has at least the mean number
    of layers.

    Example:
        >>> floor([0, 2, 3, 10], 2), floor([0, 2, 3, 10], 1)
        (7, 10)
    """
    share = -(-sums[-1] // n_partitions)
    n_layers = len(sums) - 1
    if n_layers > _FEW_LAYERS * n_partitions:
        return share
    several = -(-n_layers // n_partitions)
    return max(share, largest_layer(sums, sums), min(map(sub, sums[several:], sums)))


def largest_partition(ends: Sequence[int], starts: Sequence[int], bounds: Sequence[int]) -> int:
    """Return the largest cost of a partition.

    Example:
        >>> largest_partition([0, 2, 3, 6], [0, 2, 3, 6], [0, 2, 3])
        3
    """
    return max([ends[end] - starts[start] for start, end in pairwise(bounds)])


def smallest_limit(
    ends: Sequence[int],
    starts: Sequence[int],
    n_partitions: int,
    *,
    at_least: int,
    at_most: int | None = None,
    limits: Sequence[Limit] = (),
    filled: Sequence[int] | None = None,
) -> Smallest:
    """Find the smallest limit that some split keeps with all of its partitions.

    Minimises the largest ``ends[end] - starts[start]`` of a partition over all splits into
    exactly `n_partitions` non-empty partitions that keep `limits`.

    Args:
        ends: Never decreasing; one more than layers.
        starts: Never decreasing; one more than layers.
        n_partitions: Number of partitions, at most the number of layers.
        at_least: A known lower bound.
        at_most: Give up as soon as the smallest limit is proven to exceed this.
        limits: Further limits. Some split must keep them.
        filled: Bounds of a split that keeps them, in which partitions are filled as far as they, or
            looser ones, allow with some limit. None: none is known.

    Returns:
        The value (equal to its lower bound) and the split that fills partitions from the left;
        or no split, if every one exceeds `at_most`.

    Complexity:
        O(P K log N) for N layers, K partitions and P probes; P is about 2 to 18.

    Source:
        Pinar and Aykanat, "Fast optimal load balancing algorithms for 1D partitioning", JPDC
        64(8), 2004, exact bisection. Differs: partitions may not be empty; further limits.

    Example:
        >>> sums = [0, 5, 37, 54, 74, 124, 151, 176, 201]
        >>> smallest_limit(sums, sums, 4, at_least=51).value
        70
    """
    n_layers = len(ends) - 1
    # Where each cut was in a probe that failed, and in one that did not: later probes try limits
    # in between, and their cuts are in between. A layer is left for every later partition.
    lows: Sequence[int] = [0] * (n_partitions - 1)
    highs: Sequence[int] = range(n_layers - n_partitions + 1, n_layers)
    highest = ends[n_layers] - starts[0] if at_most is None else at_most
    lower, upper = at_least, None
    best: list[int] = []
    trial, step = at_least, at_least // (16 * n_partitions) + 1
    # The limits of the last probe that failed and of the last that did not, with what was lacking
    # or left in the last partition; and how many probes in a row ended alike.
    failed, kept, n_alike = (trial, 0), (trial, 0), 0
    if filled is not None:
        highs, best = filled[1:-1], list(filled)
        upper = largest_partition(ends, starts, best)
        kept = upper, upper - (ends[n_layers] - starts[best[-2]])
    while lower <= highest and (upper is None or lower < upper):
        cuts = fill([Limit(ends, starts, trial), *limits], lows, highs)
        last = cuts[-1]
        lacking = ends[n_layers] - starts[last] - trial
        if lacking <= 0 and all(limit.allows(last, n_layers) for limit in limits):
            highs = cuts[1:]
            best = [*cuts, n_layers]
            upper = largest_partition(ends, starts, best)
            kept, n_alike = (trial, -lacking), max(n_alike, 0) + 1
        else:
            lows = cuts[1:]
            step *= 4
            failed, n_alike = (trial, max(lacking, 0)), min(n_alike, 0) - 1
            if last in cuts[-2:-1]:
                # No partition can begin here with a limit below the cost of this layer.
                lower = ends[last + 1] - starts[last]
            else:
                lower = min(refusals(ends, starts, cuts, trial, limits))
                step = max(step, lacking // n_partitions)
        if upper is None:
            # Steps as long as what was lacking, longer ones if that was not enough.
            trial = min(max(lower, trial + step), highest)
        elif abs(n_alike) > _MOST_ALIKE:
            trial = (lower + upper) // 2
        else:
            away = (upper - lower) // _CLOSEST
            trial = min(max(_in_proportion(failed, kept), lower + away), upper - max(away, 1))
    if upper is None:
        return Smallest(lower, lower, None)
    return Smallest(upper, lower, tuple(best))


def fill(limits: Sequence[Limit], lows: Iterable[int], highs: Iterable[int]) -> list[int]:
    """Fill one partition after the other as far as limits allow: all but the last.

    Args:
        limits: What every partition keeps; the first of them may forbid single layers.
        lows: For each cut, a place that it is known to reach; 0 if nothing is known.
        highs: For each cut, the last place that it may take.

    Returns:
        The starts of all partitions. Where a single layer is too much, all that follow are equal.

    Complexity:
        O(K log N) for K partitions and N layers, times the number of limits.

    Example:
        >>> fill([Limit([0, 2, 3, 6, 8], [0, 2, 3, 6, 8], 5)], [0, 0], [2, 3])
        [0, 2, 3]
    """
    start = 0
    cuts = [0]
    # These loops take most of the time, and mostly there is one limit.
    if len(limits) == 1:
        ends, starts, most = limits[0]
        for low, high in zip(lows, highs, strict=True):
            low = low if low > start else start + 1
            start = bisect_right(ends, starts[start] + most, low, high + 1) - 1
            cuts.append(start)
        return cuts
    (ends, starts, most), *others = limits
    for low, high in zip(lows, highs, strict=True):
        low = low if low > start else start + 1
        end = bisect_right(ends, starts[start] + most, low, high + 1) - 1
        for tails, heads, limit in others:
            room = heads[start] + limit
            if tails[end] > room:
                end = bisect_right(tails, room, low, end + 1) - 1
        start = end
        cuts.append(start)
    return cuts


def refusals(
    ends: Sequence[int],
    starts: Sequence[int],
    cuts: Sequence[int],
    trial: int,
    limits: Sequence[Limit],
) -> list[int]:
    """Return the limits above `trial` that would change the path of a probe that failed.

    They are the costs of what a partition refused because of `trial` alone: for the last partition
    all layers that are left, for each other one the layer after it.
    """
    n_layers = len(ends) - 1
    refused = [*[end + 1 for end in cuts[1:]], n_layers]
    if limits:
        runs = list(zip(cuts, refused, strict=True))
        for tails, heads, most in limits:
            runs = [(start, end) for start, end in runs if tails[end] - heads[start] <= most]
        costs = [ends[end] - starts[start] for start, end in runs]
    else:
        costs = list(map(sub, [ends[end] for end in refused], [starts[cut] for cut in cuts]))
    return [cost for cost in costs if cost > trial]


def _in_proportion(failed: tuple[int, int], kept: tuple[int, int]) -> int:
    """Guess the limit at which nothing is lacking and nothing left."""
    (low, lacking), (high, left) = failed, kept
    return low + (high - low) * lacking // max(lacking + left, 1)
