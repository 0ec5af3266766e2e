"""Choose among splits that are equally good, always the same one, and a good one.

The largest partition alone decides bottleneck and makespan, so optimal splits are many: the
partitions that are not the slowest may be cut in countless ways. Left to chance, the same profile
would give different plans, and a greedy choice piles the work up at one end. The rule is: among
the optimal splits take those with the smallest bottleneck, among them those with the smallest
sum of squared partition times (the most even ones), and among them the leftmost cuts
(lexicographically smallest bounds).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

from gpipebal.solvers.bisection import largest_layer, smallest_limit
from gpipebal.solvers.chain import cut_windows, meet, reach_within
from gpipebal.solvers.envelope import cheapest_ends, first_starts
from gpipebal.solvers.narrow import narrow_windows, squares_in_windows
from gpipebal.solvers.parametric import priced_least_squares

__all__ = ["fewest_squares", "fewest_squares_within", "sum_of_squares", "tie_break"]

#: Above this many table entries per layer, pricing partitions is faster than the table: it costs
#: about this many passes over the chain.
_TABLE_PASSES = 25


def tie_break(
    loads: Sequence[int], reaches: Iterable[Sequence[int]], n_partitions: int
) -> tuple[int, ...]:
    """Choose one split by bottleneck, then sum of squares, then leftmost cuts.

    Args:
        loads: Prefix sums of the layers' times.
        reaches: Limits; a split that keeps one of them is a candidate. At least one candidate
            must exist for each.
        n_partitions: Number of partitions.

    Complexity:
        That of `smallest_limit` and `fewest_squares`, for each of `reaches`.

    Example:
        >>> tie_break([0, 1, 2, 3, 4, 5], [[5, 5, 5, 5, 5]], 4)
        (0, 1, 2, 3, 5)
    """
    n_layers = len(loads) - 1
    at_least = max(largest_layer(loads, loads), -(-loads[n_layers] // n_partitions))
    smallest: int | None = None
    tied: list[Sequence[int]] = []
    for reach in reaches:
        found = smallest_limit(
            loads, loads, n_partitions, at_least=at_least, at_most=smallest, reach=reach
        )
        if found.bounds is None:
            continue
        if found.value != smallest:
            tied.clear()
        smallest = found.value
        tied.append(reach)
    assert smallest is not None
    within = reach_within(loads, loads, smallest)
    candidates = [fewest_squares(loads, meet(reach, within), n_partitions) for reach in tied]
    return min(candidates, key=lambda bounds: (sum_of_squares(loads, bounds), bounds))


def sum_of_squares(loads: Sequence[int], bounds: Sequence[int]) -> int:
    """Add up the squared weights of all partitions.

    Example:
        >>> sum_of_squares([0, 1, 3, 6], (0, 2, 3))
        18
    """
    return sum((loads[end] - loads[start]) ** 2 for start, end in pairwise(bounds))


def fewest_squares_within(loads: Sequence[int], limit: int, n_partitions: int) -> tuple[int, ...]:
    """Find the leftmost split with the least sum of squares whose partitions keep one limit.

    As `fewest_squares` with the limits ``reach_within(loads, loads, limit)``.

    Args:
        loads: Prefix sums of the layers' weights.
        limit: Largest weight of a partition; some split must keep it.
        n_partitions: Number of partitions.

    Complexity:
        That of `squares_in_windows`; that of `fewest_squares` where windows are wide.

    Example:
        >>> fewest_squares_within([0, 1, 2, 3, 4, 5], 2, 4)
        (0, 1, 2, 3, 5)
    """
    first, last = narrow_windows(loads, limit, n_partitions)
    if sum(last) - sum(first) > _TABLE_PASSES * len(loads):
        return fewest_squares(loads, reach_within(loads, loads, limit), n_partitions)
    return squares_in_windows(loads, limit, first, last)


def fewest_squares(
    loads: Sequence[int], reach: Sequence[int], n_partitions: int
) -> tuple[int, ...]:
    """Find the leftmost split with the least sum of squared partition weights.

    Minimises over all splits into exactly `n_partitions` non-empty partitions that keep `reach`;
    among the minimisers, returns the lexicographically smallest bounds.

    Args:
        loads: Prefix sums of the layers' weights.
        reach: The limits; see `gpipebal.solvers.chain`. Some split must keep them.
        n_partitions: Number of partitions.

    Complexity:
        O(w log N), where w is the number of places where cuts may stand, added up over all cuts;
        at most O(S N log N) with S about 10 to 30, see `priced_least_squares`.

    Example:
        >>> fewest_squares([0, 3, 4, 5, 8], [3, 3, 4, 4], 3)
        (0, 1, 3, 4)
    """
    windows = cut_windows(reach, n_partitions)
    assert windows is not None
    first, last = windows
    entry = first_starts(reach)
    if sum(last) - sum(first) > _TABLE_PASSES * len(reach):
        return tuple(priced_least_squares(loads, reach, entry, n_partitions))
    # A dynamic program from the right, so that the walk from the left meets the leftmost cut
    # first; `after` and `here` hold the costs behind the next cut and behind this one.
    after, here = [0] * (len(reach) + 1), [0] * (len(reach) + 1)
    table = []
    for j in range(n_partitions - 1, -1, -1):  # j: partition
        starts, ends = (first[j], last[j]), (first[j + 1], last[j + 1])
        table.append(cheapest_ends(loads, entry, after, here, starts, ends))
        after, here = here, after
    bounds = [0]
    for j in range(n_partitions):
        bounds.append(table[n_partitions - 1 - j][bounds[j] - first[j]])
    return tuple(bounds)
