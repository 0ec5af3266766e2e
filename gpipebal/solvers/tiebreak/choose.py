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

from gpipebal.solvers.bisection import floor, smallest_limit
from gpipebal.solvers.chain import Limit, everywhere, narrowed
from gpipebal.solvers.tiebreak.by_rows import fits, squares_by_rows
from gpipebal.solvers.tiebreak.narrow import squares_in_windows
from gpipebal.solvers.tiebreak.near_even import near_even, near_even_windows, unevenness
from gpipebal.solvers.tiebreak.parametric import priced_least_squares

__all__ = ["fewest_squares", "sum_of_squares", "tie_break"]

#: Above this many table entries per layer, pricing partitions is faster than the table: it costs
#: about this many passes over the chain.
_TABLE_PASSES = 8

#: With more than `_WIDE` places for each cut it is worthwhile to ask which of them can be best;
#: with up to `_LAYERS` layers for each partition, where that leaves little out, only with four
#: times as many places.
_WIDE, _LAYERS = 16, 8

#: With up to `_FEW` places for each cut, the table is faster one by one than by rows; and pricing
#: at its fastest is like a table of `_LIKE_PRICING` entries for each layer.
_FEW, _LIKE_PRICING = 4, 3

#: By rows, this many runs take as long as one entry of the table.
_RUNS = 800


def tie_break(
    loads: Sequence[int], candidates: Iterable[Sequence[Limit]], n_partitions: int
) -> tuple[int, ...]:
    """Choose one split by bottleneck, then sum of squares, then leftmost cuts.

    Args:
        loads: Prefix sums of the layers' times.
        candidates: Sets of limits; a split that keeps all of one set is a candidate. At least
            one candidate must exist for each.
        n_partitions: Number of partitions.

    Complexity:
        That of `smallest_limit` and `fewest_squares`, for each of `candidates`.

    Example:
        >>> tie_break([0, 1, 2, 3, 4, 5], [[]], 4)
        (0, 1, 2, 3, 5)
    """
    at_least = floor(loads, n_partitions)
    smallest: int | None = None
    tied: list[Sequence[Limit]] = []
    for limits in candidates:
        found = smallest_limit(
            loads, loads, n_partitions, at_least=at_least, at_most=smallest, limits=limits
        )
        if found.bounds is None:
            continue
        if found.value != smallest:
            tied.clear()
        smallest = found.value
        tied.append(limits)
    assert smallest is not None
    within = Limit(loads, loads, smallest)
    splits = [fewest_squares(loads, [within, *limits], n_partitions) for limits in tied]
    return most_even(loads, splits)


def sum_of_squares(loads: Sequence[int], bounds: Sequence[int]) -> int:
    """Add up the squared weights of all partitions.

    Example:
        >>> sum_of_squares([0, 1, 3, 6], (0, 2, 3))
        18
    """
    return sum((loads[end] - loads[start]) ** 2 for start, end in pairwise(bounds))


def fewest_squares(
    loads: Sequence[int], limits: Sequence[Limit], n_partitions: int
) -> tuple[int, ...]:
    """Find the leftmost split with the least sum of squared partition weights.

    Minimises over all splits into exactly `n_partitions` non-empty partitions that keep `limits`;
    among the minimisers, returns the lexicographically smallest bounds.

    Args:
        loads: Prefix sums of the layers' weights.
        limits: The limits. Some split must keep them.
        n_partitions: Number of partitions.

    Complexity:
        O(w l), where w is the number of places where cuts may stand, added up over all cuts, and l
        how many ends a partition can have, in few operations; see `squares_by_rows`. Or O(w log N),
        and at most O(S N log N) with S about 4 to 12, see `priced_least_squares`.

    Example:
        >>> loads = [0, 3, 4, 5, 8]
        >>> fewest_squares(loads, [Limit(loads, loads, 4)], 3)
        (0, 1, 3, 4)
    """
    n_layers = len(loads) - 1
    widest = narrowed(limits, everywhere(n_layers, n_partitions))
    assert widest is not None
    found, few = [widest], _FEW * (n_partitions + 12)
    if widest.width <= few:
        return squares_in_windows(loads, limits, widest)
    even = unevenness(loads, widest.last)
    by_rows = fits(loads, limits, even)
    if n_layers > _LAYERS * n_partitions:
        worth = widest.width > _WIDE * n_partitions
    else:
        worth = by_rows and widest.width > 4 * _WIDE * n_partitions
    if worth:
        even = near_even(loads, limits, widest)
        found = near_even_windows(loads, limits, widest, even)
        by_rows = fits(loads, limits, even)
    splits = []
    for windows in found:
        split: tuple[int, ...] | None = None
        count = windows.width
        if by_rows and min(count, _LIKE_PRICING * n_layers) > few:
            # No more than take as long as the other methods.
            runs = _RUNS * min(count, _TABLE_PASSES * n_layers)
            split = squares_by_rows(loads, limits, windows, even, runs)
        if split is None and count > _TABLE_PASSES * n_layers:
            return tuple(priced_least_squares(loads, limits, n_partitions))
        if split is None:
            split = squares_in_windows(loads, limits, windows)
        if split:
            splits.append(split)
    return most_even(loads, splits)


def most_even(loads: Sequence[int], splits: Iterable[tuple[int, ...]]) -> tuple[int, ...]:
    """Choose the split with the least sum of squares, and of equal ones the leftmost."""
    return min(splits, key=lambda bounds: (sum_of_squares(loads, bounds), bounds))
