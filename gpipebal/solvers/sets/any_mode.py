"""The makespan where partitions recompute every micro-batch, or have any mode that fits.

A partition that recomputes every micro-batch takes, for all but the last of them, as long as one
that does not recompute the last. What the last one adds is nearly always hidden: the partition
recomputes it while later partitions still work. Only the last partition has none after it. So there
are two cases: the last partition does not recompute its last micro-batch, or it does and is charged
for that once. In both, the other partitions are charged as if they did not recompute theirs. That
bounds every makespan from below, and the split that attains it is the best one if no recompute of
a partition in the middle lengthens the makespan; its true makespan is worked out, and the gap says
what is left.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from gpipebal.schedule import CheckpointMode
from gpipebal.solvers.sets.levels import Levels
from gpipebal.solvers.sets.reachability import BestPath

__all__ = ["solve_any_mode"]

#: A solver of some levels; None if there is no split.
Solve = Callable[[Levels], BestPath | None]


def solve_any_mode(levels: Levels, solve: Solve) -> BestPath | None:
    """Choose cuts and modes so that the mini-batch ends as early as possible.

    Args:
        levels: Those of a problem with ``checkpoint='auto'``, or with ``'always'`` among its modes.
        solve: Finds the best split as if ``'always'`` took as long as ``'except_last'``.

    Returns:
        Value and bound are equal unless the last recompute of a partition in the middle lengthens
        the makespan; None if there is no split.

    Complexity:
        That of `solve`, up to three times.

    Example:
        >>> from gpipebal.problem import Problem
        >>> from gpipebal.solvers import split
        >>> split(Problem([1, 1], [1, 1], [1, 1], 2, 4, "auto")).modes
        ('never', 'never')
    """
    first, last = tuple(levels.modes[:-1]), levels.modes[-1]
    if last == ("always",):
        return _solved(_levels_with(levels, (*first, last)), solve)
    best = _solved(levels, solve)
    if best is None or best.value == best.lower_bound or "always" not in last:
        return best
    cases = [
        _solved(_levels_with(levels, (*first, case)), solve, best.lower_bound)
        for case in (last[:-1], last[-1:])
    ]
    found = [case for case in cases if case is not None]
    best = min([best, *found], key=lambda case: case.value)
    return best._replace(lower_bound=min([best.value, *(case.lower_bound for case in found)]))


def _levels_with(levels: Levels, modes: Sequence[tuple[CheckpointMode, ...]]) -> Levels:
    early = tuple(modes[-1]) == ("always",)
    return Levels(levels.problem, levels.limits, levels, modes=modes, early=early)


def _solved(levels: Levels, solve: Solve, at_least: int = 0) -> BestPath | None:
    found = solve(levels)
    if found is None:
        return None
    _, lower_bound, path = found
    value = levels.problem.costs.makespan(path.bounds, path.modes, path.order)
    return BestPath(value, min(max(lower_bound, at_least), value), path)
