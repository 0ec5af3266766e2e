"""The makespan when every micro-batch is recomputed.

A partition recomputes its last micro-batch while later partitions still work, so the mini-batch
ends with the slowest of several paths: forwards up to partition k, recompute there, backwards
down to partition 0. The path through the last partition nearly always decides: an earlier one
can do so only if its recompute takes longer than all forwards and backwards after it.

So the first step keeps only the last path. It costs (chunks - 1) times the sum of two maxima, as
without this mode, plus what it passes once: a third threshold, swept like the first two. If the
split that the tie-break chooses among those optima has no slower path, it is optimal for all
paths together, because leaving paths out can only make a makespan shorter. If it has a slower one,
the same sweep, with every path charged for both maxima of the whole chain, finds a split that is
good, and mostly optimal; `gpipebal.solvers.filling.paths` closes the gap that is left between the
two.
"""

from __future__ import annotations

from collections.abc import Sequence

from gpipebal.problem import Problem
from gpipebal.solvers.bisection import largest_layer, smallest_limit
from gpipebal.solvers.chain import Limit, Solution
from gpipebal.solvers.filling.paths import solve_all_paths
from gpipebal.solvers.filling.thresholds import smallest_sum
from gpipebal.solvers.tiebreak.choose import tie_break

__all__ = ["solve_makespan_always"]


def solve_makespan_always(problem: Problem) -> Solution:
    """Split a chain so that its mini-batch ends as early as possible, with recompute throughout.

    Minimises the makespan of checkpoint mode ``'always'`` over all splits into exactly
    `n_partitions` non-empty partitions. Among the minimisers: smallest bottleneck, then least sum
    of squared partition times, then leftmost cuts; on long chains the squares may be left out,
    see `solve_all_paths`.

    Complexity:
        That of `smallest_sum`, for each value of the third threshold that can be optimal, a few
        to some dozens; and that of `solve_all_paths` where another path than the last one decides.

    Example:
        >>> solve_makespan_always(
        ...     Problem([1, 2, 2, 1], [2, 3, 4, 2], [1, 2, 2, 1], 2, chunks=4, checkpoint="always")
        ... )
        Solution(bounds=(0, 2, 4), value=56, lower_bound=56)
    """
    n_layers, n_partitions = problem.n_layers, problem.n_partitions
    if n_partitions == 1:
        value = problem.exact_makespan((0, n_layers))
        return Solution((0, n_layers), value, value)
    if problem.chunks == 1:
        return _solve_one_chunk(problem)
    # A path passes once what lies before its end, less the recomputes before its start, where
    # start and end are those of the partition in which it turns around.
    loads, starts = problem.load_sums, problem.recompute_sums
    last_end_only = [0] * n_layers + [loads[-1]]
    value, candidates = _three_thresholds(problem, last_end_only, starts)
    bounds = tie_break(loads, candidates, n_partitions)
    if problem.exact_makespan(bounds) == value:
        return Solution(bounds, value, value)
    _, candidates = _three_thresholds(problem, loads, starts)
    known = tie_break(loads, candidates, n_partitions)
    return solve_all_paths(problem, lower_bound=value, known=known)


def _solve_one_chunk(problem: Problem) -> Solution:
    # Without repeats, a limit on all paths is a limit on partitions, and bisection is exact.
    loads, starts = problem.load_sums, problem.recompute_sums
    at_least = largest_layer(loads, starts)
    found = smallest_limit(loads, starts, problem.n_partitions, at_least=at_least)
    within = Limit(loads, starts, found.value)
    bounds = tie_break(loads, [[within]], problem.n_partitions)
    return Solution(bounds, found.value, found.lower_bound)


def _three_thresholds(
    problem: Problem, ends: Sequence[int], starts: Sequence[int]
) -> tuple[int, list[list[Limit]]]:
    """Minimise the largest of a third cost, plus (chunks - 1) times the two maxima.

    The third cost of a partition is ``ends[end] - starts[start]``.

    Returns:
        The minimum, and limits: the splits that attain it are those that keep one set of them.
    """
    n_partitions, repeats = problem.n_partitions, problem.chunks - 1
    forward, backward_phase = problem.forward_sums, problem.backward_phase_sums
    least_third = smallest_limit(
        ends, starts, n_partitions, at_least=largest_layer(ends, starts)
    ).value
    best: int | None = None
    candidates: list[list[Limit]] = []
    third = ends[-1] - starts[0]  # allows everything
    while third >= least_third:
        least = smallest_sum(
            forward,
            backward_phase,
            n_partitions,
            both=problem.load_sums,
            limits=[Limit(ends, starts, third)],
            at_most=None if best is None else (best - third) // repeats,
        )
        for one, two in least.pairs:
            limits = [Limit(forward, forward, one), Limit(backward_phase, backward_phase, two)]
            needed = smallest_limit(
                ends, starts, n_partitions, at_least=least_third, at_most=third, limits=limits
            ).value
            total = needed + repeats * least.total
            if best is None or total < best:
                best = total
                candidates.clear()
            if total == best:
                candidates.append([*limits, Limit(ends, starts, needed)])
        # Any other split that is as good has larger maxima, hence a smaller third cost.
        assert best is not None
        next_sum = least.lower_bound + 1 if least.pairs else least.lower_bound
        third = best - repeats * next_sum
    assert best is not None
    return best, candidates
