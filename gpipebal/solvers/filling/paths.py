"""Makespans in which the path through any partition may decide, with recompute throughout.

A sweep over thresholds has found a good split, and a lower bound that ignores all paths but one.
Here the gap between the two is closed: first for the value, then for each rule of the tie-break
in turn. Every question is first asked about a larger set of splits, described by limits on
partitions, where the tie-break is fast: if the split that it chooses there is optimal, it is the
answer. Only questions that then remain open are given to the Pareto program.
"""

from __future__ import annotations

from collections.abc import Sequence

from gpipebal.problem import Problem
from gpipebal.solvers.chain import Solution, reach_limit
from gpipebal.solvers.filling.pareto import ParetoProgram, TooManyLabels
from gpipebal.solvers.tiebreak.choose import sum_of_squares, tie_break

__all__ = ["solve_all_paths"]

#: How many labels are compared for the sake of evenness, at most: about a second. Counted, not
#: timed, so that the same problem always gives the same split.
_MOST_LABELS = 1_000_000


def solve_all_paths(problem: Problem, lower_bound: int, known: Sequence[int]) -> Solution:
    """Split a chain so that its mini-batch ends as early as possible, whichever path decides.

    Minimises the makespan of checkpoint mode ``'always'`` over all splits into exactly
    `n_partitions` non-empty partitions. Among the minimisers: smallest bottleneck, then least sum
    of squared partition times, then leftmost cuts. On long chains there can be too many minimisers
    to compare by their squares: then `known` is returned, if it is one with that bottleneck;
    otherwise the leftmost cuts decide.

    Args:
        problem: A problem with 2 or more chunks.
        lower_bound: A proven lower bound of its makespan, as a scaled integer.
        known: Bounds of some split, the better the faster.

    Complexity:
        That of `ParetoProgram.least`, up to four times.

    Example:
        >>> problem = Problem([9, 1], [1, 1], [9, 1], 2, chunks=2, checkpoint="always")
        >>> solve_all_paths(problem, 0, known=(0, 1, 2))
        Solution(bounds=(0, 1, 2), value=38, lower_bound=38)
    """
    n_partitions, loads = problem.n_partitions, problem.load_sums

    def load(start: int, end: int) -> int:
        return loads[end] - loads[start]

    value = problem.exact_makespan(known)
    known_load: int | None = problem.exact_bottleneck(known)
    if lower_bound < value:
        faster = ParetoProgram(problem, value - 1)
        # Mostly nothing is faster, and to see that takes far fewer labels.
        if faster.least(faster.reach, True, lambda *_: True):
            value = faster.least(faster.reach, 0, lambda most, path, _start, _end: max(most, path))
            known_load = None

    # From here on the value is proven. What the tie-break chooses from a larger set of splits is
    # its choice from the optimal ones, if it is one of them.
    optimal = ParetoProgram(problem, value)
    bounds = tie_break(loads, [[reach_limit(optimal.reach)]], n_partitions)
    if problem.exact_makespan(bounds) == value:
        return Solution(bounds, value, value)

    bottleneck = problem.exact_bottleneck(bounds)
    if bottleneck != known_load:
        reach = optimal.reach if known_load is None else optimal.within(known_load - 1)
        found = optimal.least(reach, 0, lambda most, _path, start, end: max(most, load(start, end)))
        if found is not None:
            bottleneck = found
        elif known_load is not None:
            bottleneck = known_load
    reach = optimal.within(bottleneck)
    bounds = tie_break(loads, [[reach_limit(reach)]], n_partitions)
    if problem.exact_makespan(bounds) == value:
        return Solution(bounds, value, value)

    # Squares that the known split stays below, if it is a candidate, are of no interest.
    squares = sum_of_squares(loads, known) if known_load == bottleneck else None

    def extend(
        least: tuple[int, tuple[int, ...]], _path: int, start: int, end: int
    ) -> tuple[int, tuple[int, ...]] | None:
        so_far = least[0] + load(start, end) ** 2
        # The rest is least when it is even; `least` has one bound for every partition by now.
        rest, left = loads[-1] - loads[end], n_partitions - len(least[1])
        if squares is not None and rest * rest > left * (squares - so_far):
            return None
        return so_far, (*least[1], end)

    try:
        chosen = optimal.least(reach, (0, (0,)), extend, most_labels=_MOST_LABELS)[1]
    except TooManyLabels:
        if squares is not None:
            return Solution(tuple(known), value, value)
        chosen = optimal.least(reach, (0,), lambda cuts, _path, _start, end: (*cuts, end))
    return Solution(chosen, value, value)
