"""Exact bisection: the smallest limit that every partition can keep.

For a given limit, filling one partition after the other as far as the limit allows decides
whether a split exists (a probe). Bisecting the limit with probes is fast, but on its own it only
converges towards the answer. So every probe is made to teach more than yes or no. A split that
was found has some largest cost, often below the limit that was tried: that becomes the new upper
end. A probe that failed would take the very same path with every limit up to the cheapest
extension that it had to refuse: that becomes the new lower end. Both ends are now costs of actual
runs of layers, and when they meet, the value is exact and its proof is complete.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise
from operator import sub
from typing import NamedTuple

__all__ = ["Smallest", "largest_layer", "smallest_limit"]


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


def smallest_limit(
    ends: Sequence[int],
    starts: Sequence[int],
    n_partitions: int,
    *,
    at_least: int,
    at_most: int | None = None,
    reach: Sequence[int] | None = None,
) -> Smallest:
    """Find the smallest limit that some split keeps with all of its partitions.

    Minimises the largest ``ends[end] - starts[start]`` of a partition over all splits into
    exactly `n_partitions` non-empty partitions that keep `reach`.

    Args:
        ends: Never decreasing; one more than layers.
        starts: Never decreasing; one more than layers.
        n_partitions: Number of partitions, at most the number of layers.
        at_least: A known lower bound, no less than the largest single layer.
        at_most: Give up as soon as the smallest limit is proven to exceed this.
        reach: Further limits; see `gpipebal.solvers.chain`. Some split must keep them.

    Returns:
        The value (equal to its lower bound) and the split that fills partitions from the left;
        or no split, if every one exceeds `at_most`.

    Complexity:
        O(P K log N) for N layers, K partitions and P probes; P is about 1 to 15.

    Source:
        Pinar and Aykanat, "Fast optimal load balancing algorithms for 1D partitioning", JPDC
        64(8), 2004, exact bisection. Differs: partitions may not be empty; further limits.

    Example:
        >>> sums = [0, 5, 37, 54, 74, 124, 151, 176, 201]
        >>> smallest_limit(sums, sums, 4, at_least=51).value
        70
    """
    n_layers = len(ends) - 1
    # The loop below is hot: one probe is one pass over `rooms`, the last place that each cut may
    # take so that a layer is left for every later partition.
    rooms = range(n_layers - n_partitions + 1, n_layers)
    highest = ends[n_layers] - starts[0] if at_most is None else at_most
    lower, upper = at_least, None
    best: list[int] = []
    trial, step = at_least, max(at_least // (4 * n_partitions), 1)
    while lower <= highest and (upper is None or lower < upper):
        start = 0
        cuts = [0]
        for room in rooms:
            end = bisect_right(ends, starts[start] + trial, start + 1, room + 1) - 1
            if reach is not None and reach[start] < end:
                end = reach[start]
            cuts.append(end)
            start = end
        finished = reach is None or reach[start] == n_layers
        if finished and ends[n_layers] - starts[start] <= trial:
            cuts.append(n_layers)
            best = cuts
            upper = max([ends[end] - starts[start] for start, end in pairwise(cuts)])
        else:
            lower = _next_limit(ends, starts, cuts, trial, reach)
        if upper is None:
            # Steps that grow until a probe succeeds: the answer is mostly near the lower bound.
            trial = min(max(lower, trial + step), highest)
            step *= 4
        else:
            trial = (lower + upper) // 2
    if upper is None:
        return Smallest(lower, lower, None)
    return Smallest(upper, lower, tuple(best))


def _next_limit(
    ends: Sequence[int],
    starts: Sequence[int],
    cuts: Sequence[int],
    trial: int,
    reach: Sequence[int] | None,
) -> int:
    """Return the smallest limit that changes the path of a probe that failed."""
    n_layers = len(ends) - 1
    costs = [
        ends[end + 1] - starts[start]
        for start, end in pairwise(cuts)
        if reach is None or end < reach[start]
    ]
    if reach is None or reach[cuts[-1]] == n_layers:
        costs.append(ends[n_layers] - starts[cuts[-1]])
    return min([cost for cost in costs if cost > trial])
