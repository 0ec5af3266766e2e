"""Two thresholds: the smallest sum of two maxima over one split.

A split has a largest forward and a largest backward time, and they pull in different directions.
Weighing them against each other in one cost per layer loses: the two maxima may belong to
different partitions. But once the first is limited, the smallest possible second is an ordinary
bottleneck problem, and the fewer splits the first limit allows, the larger the second gets. So
the pairs worth looking at form a staircase, which is walked from its one end to the other:
tighten the first limit to just below what was needed, find the smallest second, find the
smallest first for that. Most steps cannot lead to a sum as small as the best so far, and for them
one probe is enough: it asks whether such a sum is possible, or even one that is larger by what
the last probe lacked; if not, it gives the least value that the second must have. The smaller the
best sum, the fewer steps are left, so after the first of them a few places far apart are looked at.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from gpipebal.solvers.bisection import (
    fill,
    floor,
    largest_partition,
    refusals,
    smallest_limit,
)
from gpipebal.solvers.chain import Limit

__all__ = ["SmallestSum", "smallest_sum"]

#: Where to look after the first step, in quarters of what is left of the staircase.
_FAR_APART = (2, 1, 3)


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
    both: Sequence[int],
    limits: Sequence[Limit] = (),
    at_most: int | None = None,
) -> SmallestSum:
    """Find the smallest sum of the largest first and the largest second cost of a partition.

    Minimises ``max(first) + max(second)`` over all splits into exactly `n_partitions` non-empty
    partitions that keep `limits`, and finds every pair of maxima that attains the minimum.

    Args:
        first: Prefix sums of the layers' first cost.
        second: Prefix sums of the layers' second cost.
        n_partitions: Number of partitions.
        both: Prefix sums of both costs together.
        limits: Further limits. Some split must keep them.
        at_most: Give up at once if a quick lower bound exceeds this.

    Complexity:
        O(S K log N) for N layers, K partitions and S probes.

    Source:
        Limiting one maximum and sweeping over its values: Zheng et al., "Alpa", OSDI 2022,
        section 5.2, for a sum and a maximum. Differs: two maxima; a chain, where greedy probes
        are exact; steps are jumped; all optimal pairs are found.

    Example:
        >>> smallest_sum([0, 3, 4, 5], [0, 1, 4, 9], 2, both=[0, 4, 8, 14])
        SmallestSum(total=9, lower_bound=9, pairs=((4, 5),))
    """
    # No sum of two maxima is below the largest sum of both costs in one partition.
    quick = smallest_limit(
        both, both, n_partitions, at_least=floor(both, n_partitions), limits=limits
    )
    if at_most is not None and quick.lower_bound > at_most:
        return SmallestSum(quick.lower_bound, quick.lower_bound, ())
    assert quick.bounds is not None
    least_first, least_second = floor(first, n_partitions), floor(second, n_partitions)

    def least_of(
        column: Sequence[int], limit: Limit, at_least: int, filled: Sequence[int]
    ) -> tuple[int, Sequence[int]]:
        """Return the smallest of one cost for a limit of the other, and a split that has it."""
        found = smallest_limit(
            column,
            column,
            n_partitions,
            at_least=max(at_least, quick.value - limit.most),
            limits=[limit, *limits],
            filled=filled,
        )
        assert found.bounds is not None
        return found.value, found.bounds

    def total_of(bounds: Sequence[int]) -> int:
        return sum(largest_partition(sums, sums, bounds) for sums in (first, second))

    best = total_of(quick.bounds)
    n_layers = len(first) - 1
    anywhere = [0] * (n_partitions - 1), range(n_layers - n_partitions + 1, n_layers)

    def probe(most_first: int, most_second: int) -> tuple[list[int], list[Limit], bool]:
        """Return cuts that keep all limits as far as they can, the limits, and whether all do."""
        kept = [Limit(second, second, most_second), Limit(first, first, most_first), *limits]
        cuts = fill(kept, *anywhere)
        return cuts, kept, all(limit.allows(cuts[-1], n_layers) for limit in kept)

    pairs: list[tuple[int, int]] = []
    # Splits that are still to be looked at have a first cost of at most `most_first` and a second
    # of at least `least_second`: all that were left out have a larger sum than `best`.
    most_first, leap, too_far = best - least_second, 0, best
    far_apart: Sequence[int] = _FAR_APART
    while most_first >= least_first:
        cuts, (trial, *others), is_kept = probe(most_first, best - most_first + leap)
        if is_kept:
            total = total_of((*cuts, n_layers))
            if total > best:
                leap, too_far = leap // 4, leap
                continue
            within = Limit(first, first, most_first)
            found, bounds = least_of(second, within, least_second, (*cuts, n_layers))
            needed, _ = least_of(first, Limit(second, second, found), least_first, bounds)
            if needed + found < best:
                best = needed + found
                pairs.clear()
            if needed + found == best:
                pairs.append((needed, found))
            most_first, least_second, leap, too_far = needed - 1, found + 1, 0, best
            for quarters in far_apart:
                room = min(most_first, best - least_second) - least_first
                if room <= 0:
                    break
                within = Limit(first, first, least_first + quarters * room // 4)
                cuts, _, is_kept = probe(within.most, best - within.most)
                if is_kept:
                    _, bounds = least_of(second, within, least_second, (*cuts, n_layers))
                    if total_of(bounds) < best:
                        best = total_of(bounds)
                        pairs.clear()
            far_apart = ()
        else:
            refused = refusals(second, second, cuts, trial.most, others)
            if not refused:
                break
            least_second = min(refused)
            # Raising the second limit helps each partition that refused, by as much.
            lacking = second[n_layers] - second[cuts[-1]] - trial.most
            more = max(lacking, 0) // len(refused)
            # Not as far as was too far just now; a little further on it may not be.
            leap = min(leap + more, (leap + too_far) // 2)
            too_far += (too_far + more) // 4
        most_first = min(most_first, best - least_second)
    return SmallestSum(best, best, tuple(pairs))
