"""Bottleneck and makespan under limits, where the makespan's sum is the same for every split.

The same questions as in `gpipebal.solvers.filling.bottleneck` and
`gpipebal.solvers.filling.thresholds`, put to a `Search`, which assumes nothing about which runs are
allowed: memory limits, a checkpoint mode for each partition, rules about cuts.
"""

from __future__ import annotations

from contextlib import suppress

from gpipebal.solvers.deadline import NO_DEADLINE, Deadline
from gpipebal.solvers.sets.evenness import most_even
from gpipebal.solvers.sets.reachability import BestPath, Path, Search, TimeIsUpError

__all__ = ["least_bottleneck", "least_sum", "settle"]


def least_bottleneck(search: Search, deadline: Deadline = NO_DEADLINE) -> BestPath | None:
    """Make the slowest partition as fast as possible; None if there is no split.

    Ties are broken by the least sum of squared partition times, then by the leftmost cuts. Once the
    `deadline` is up they are not, and what was found is returned with the bound so far.

    Complexity:
        That of `Search.smallest` and `most_even`.
    """
    found = search.smallest("load", deadline=deadline)
    if found.path is None:
        return None
    path = found.path
    search.deadline = deadline
    with suppress(TimeIsUpError):
        path = most_even(search, {"load": found.value}) or path
    search.deadline = NO_DEADLINE
    return BestPath(found.value, found.lower_bound, path)


def least_sum(search: Search, repeated: bool = True) -> tuple[int, Path] | None:
    """Make the largest forward plus the largest backward as small as possible.

    Ties are broken by the smallest bottleneck, then by the least sum of squared partition times,
    then by the leftmost cuts.

    Args:
        search: Where to search.
        repeated: False if the sum does not matter (one chunk): the tie-break decides alone.

    Returns:
        The sum and the split; None if there is no split.

    Complexity:
        As many times `Search.smallest` as the staircase has steps, twice; see `smallest_sum`.

    Source:
        As `gpipebal.solvers.filling.thresholds`. Differs: allowed runs need not be intervals.

    Example:
        >>> from gpipebal.problem import Problem
        >>> from gpipebal.solvers.sets.levels import Levels
        >>> problem = Problem([3, 1, 1], [1, 3, 5], [0, 0, 0], 2, chunks=3)
        >>> least_sum(Search(Levels(problem)))[0]
        9
    """
    if not repeated:
        path = settle(search, [{}])
        return None if path is None else (0, path)
    # No sum of two maxima is below the largest sum of both costs in one partition.
    quick = search.smallest("load")
    if quick.path is None:
        return None
    least_first = search.smallest("forward").value
    best = quick.path.most("forward") + quick.path.most("backward_phase")
    pairs: list[tuple[int, int]] = []
    first_limit: int | None = None
    next_second = 0
    while True:
        limits = {} if first_limit is None else {"forward": first_limit}
        found = search.smallest(
            "backward_phase", limits, at_least=next_second, at_most=best - least_first
        )
        if found.path is None:
            break
        needed = search.smallest(
            "forward",
            {"backward_phase": found.value},
            at_least=max(least_first, quick.value - found.value),
            at_most=best - found.value,
        )
        if needed.path is not None:
            if needed.value + found.value < best:
                best = needed.value + found.value
                pairs.clear()
            pairs.append((needed.value, found.value))
        # What is left has a smaller first, hence a larger second.
        next_second = found.value + 1
        first_limit = min(needed.lower_bound - 1, best - next_second)
        if first_limit < least_first:
            break
        next_second = max(next_second, quick.value - first_limit)
    path = settle(search, [{"forward": one, "backward_phase": two} for one, two in pairs])
    assert path is not None
    return best, path


def settle(search: Search, candidates: list[dict[str, int]]) -> Path | None:
    """Choose one of the splits that keep one of several pairs of limits.

    By the smallest bottleneck, then the least sum of squared partition times, then the leftmost
    cuts.
    """
    least: int | None = None
    tied: list[dict[str, int]] = []
    for limits in candidates:
        found = search.smallest("load", limits, at_most=least)
        if found.path is None:
            continue
        if found.value != least:
            tied.clear()
        least = found.value
        tied.append(limits)
    if least is None:
        return None
    paths = [most_even(search, {**limits, "load": least}) for limits in tied]
    return min((path for path in paths if path is not None), key=lambda path: _rank(path))


def _rank(path: Path) -> tuple[int, tuple[int, ...]]:
    return sum(option.load.of(start, end) ** 2 for option, start, end in path.runs), path.bounds
