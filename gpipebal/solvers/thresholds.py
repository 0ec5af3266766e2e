"""Two thresholds: the smallest sum of two maxima over one split.

A split has a largest forward and a largest backward time, and they pull in different directions.
Weighing them against each other in one cost per layer loses: the two maxima may belong to
different partitions. But once the first is limited, the smallest possible second is an ordinary
bottleneck problem, and the fewer splits the first limit allows, the larger the second gets. So
the pairs worth looking at form a staircase, which is walked from its one end to the other:
tighten the first limit to just below what was needed, find the smallest second, find the
smallest first for that. Steps that cannot lead to a sum as small as the best so far are jumped.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from gpipebal.solvers.bisection import largest_layer, smallest_limit
from gpipebal.solvers.chain import meet, reach_within

__all__ = ["SmallestSum", "smallest_sum"]


class SmallestSum(NamedTuple):
    """The smallest sum of two maxima, the proven bound below it, and all pairs that attain it.

    Without a pair, only the bound is known, and it exceeds the `at_most` that was asked for.
    """

    total: int
    lower_bound: int
    pairs: tuple[tuple[int, int], ...]


def smallest_sum(
    first: Sequence[int],
    second: Sequence[int],
    n_partitions: int,
    *,
    reach: Sequence[int] | None = None,
    at_most: int | None = None,
) -> SmallestSum:
    """Find the smallest sum of the largest first and the largest second cost of a partition.

    Minimises ``max(first) + max(second)`` over all splits into exactly `n_partitions` non-empty
    partitions that keep `reach`, and finds every pair of maxima that attains the minimum.

    Args:
        first: Prefix sums of the layers' first cost.
        second: Prefix sums of the layers' second cost.
        n_partitions: Number of partitions.
        reach: Further limits; see `gpipebal.solvers.chain`. Some split must keep them.
        at_most: Give up at once if a quick lower bound exceeds this.

    Complexity:
        O(S (N log N + P K log N)) for N layers, K partitions, P probes of a bisection and S steps
        of the staircase; S was 1 to 20 on measured profiles, and 1 where the costs are
        proportional.

    Source:
        Limiting one maximum and sweeping over its values: Zheng et al., "Alpa", OSDI 2022,
        section 5.2, for a sum and a maximum. Differs: two maxima; a chain, where greedy probes
        are exact; steps are jumped; all optimal pairs are found.

    Example:
        >>> smallest_sum([0, 3, 4, 5], [0, 1, 4, 9], 2)
        SmallestSum(total=9, lower_bound=9, pairs=((4, 5),))
    """
    both = [one + two for one, two in zip(first, second, strict=True)]
    # No sum of two maxima is below the largest sum of both costs in one partition.
    quick = smallest_limit(
        both, both, n_partitions, at_least=_floor(both, n_partitions), reach=reach
    )
    if at_most is not None and quick.lower_bound > at_most:
        return SmallestSum(quick.lower_bound, quick.lower_bound, ())
    least_first = smallest_limit(
        first, first, n_partitions, at_least=_floor(first, n_partitions), reach=reach
    ).value

    best: int | None = None
    pairs: list[tuple[int, int]] = []
    left_out: list[int] = []  # lower bounds of the sums of splits that were not looked at
    allowed = reach
    next_second = _floor(second, n_partitions)
    while True:
        found = smallest_limit(
            second,
            second,
            n_partitions,
            at_least=next_second,
            at_most=None if best is None else best - least_first,
            reach=allowed,
        )
        if found.bounds is None:
            left_out.append(least_first + found.lower_bound)
            break
        within = _limited(second, found.value, reach)
        needed = smallest_limit(
            first, first, n_partitions, at_least=least_first, reach=within
        ).value
        total = needed + found.value
        if best is None or total < best:
            best = total
            pairs.clear()
        if total == best:
            pairs.append((needed, found.value))
        # What is left has a smaller first, hence a larger second; and of that, only what can
        # have a sum of at most `best` is of interest.
        next_second = found.value + 1
        limit = min(needed - 1, best - next_second)
        left_out.append(limit + 1 + next_second)
        if limit < least_first:
            left_out.append(least_first + next_second)
            break
        allowed = _limited(first, limit, reach)
    assert best is not None
    return SmallestSum(best, min(best, *left_out), tuple(pairs))


def _limited(sums: Sequence[int], limit: int, reach: Sequence[int] | None) -> list[int]:
    """Limit one cost of a partition, besides the limits in `reach`."""
    within = reach_within(sums, sums, limit)
    return within if reach is None else meet(reach, within)


def _floor(sums: Sequence[int], n_partitions: int) -> int:
    """Return a lower bound of the bottleneck: the largest layer, and the even share."""
    return max(largest_layer(sums, sums), -(-sums[-1] // n_partitions))
