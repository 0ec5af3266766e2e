"""What it costs to move a cut: how decisive each one is."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from itertools import pairwise
from typing import assert_never

from gpipebal.argument_kinds import plain_number
from gpipebal.objectives import Quantity, TimeObjective
from gpipebal.planner.execution import Way
from gpipebal.planner.own_cost import cost_of_run
from gpipebal.problem import Problem, Rules
from gpipebal.solvers.dense import AnyCost

__all__ = ["sensitivity"]

#: With more partitions that recompute every micro-batch it would take too long.
_MOST_PATHS = 1024
#: Simulated times that differ only by this fraction are equal.
_ROUNDING = 1e-12

Moves = tuple[tuple[float | None, float | None], ...]
#: Tells the peak memory of every partition of a split, in bytes.
Peaks = Callable[[tuple[int, ...]], Sequence[int]]
#: Tells the makespans of splits.
Makespans = Callable[[Sequence[Sequence[int]]], Sequence[float]]


def sensitivity(
    problem: Problem,
    way: Way,
    objective: Quantity,
    cost: AnyCost | None = None,
    *,
    peaks: Peaks | None = None,
    makespans: Makespans | None = None,
) -> Moves:
    """Tell how much the objective grows if a cut is moved by one layer to the left or right.

    Args:
        problem: What was solved.
        way: The split, with the modes that count.
        objective: What was minimised.
        cost: The cost of runs, if that was minimised.
        peaks: Tells what partitions need, with what may wait in the split as a whole; None: limits
            are checked with the least that may wait. Needed if peak memory was
            minimised.
        makespans: Simulates splits, if their makespan was minimised under a schedule without a
            formula; None: GPipe's formula.

    Returns:
        For each cut, the growth if it is moved to the left, and to the right; None where that split
        is not allowed. Empty for more than `_MOST_PATHS` partitions that recompute every
        micro-batch.

    Complexity:
        O(K^2) for K partitions. With `peaks` or `makespans` one call, or one split, for each move.

    Example:
        >>> problem = Problem([1, 1, 1, 1], [0] * 4, [0] * 4, 2, checkpoint="never")
        >>> sensitivity(problem, Way((0, 2, 4), ["never"] * 2, (0, 1)), "bottleneck")
        ((1, 1),)
    """
    # Whether a move is allowed and what it costs may both depend on the peaks.
    needs, bounds = None if peaks is None else cache(peaks), way.bounds
    allowed = _allows(problem, way, needs)
    if objective == "makespan" and makespans is not None:
        growths = _simulated(bounds, allowed, makespans)
    else:
        change = _change(problem, way, objective, cost, needs)
        if change is None:
            return ()
        growths = {move: change(*move) for move in _moves(bounds) if allowed(*move)}
    return tuple(
        (_known(growths.get((j, bounds[j] - 1))), _known(growths.get((j, bounds[j] + 1))))
        for j in range(1, problem.n_partitions)
    )


def _known(growth: float | None) -> float | None:
    return None if growth is None or not math.isfinite(growth) else growth


def _moves(bounds: Sequence[int]) -> list[tuple[int, int]]:
    """Return all moves: the partition after a cut, and where the cut is moved to."""
    return [
        (j, cut)
        for j in range(1, len(bounds) - 1)
        for cut in (bounds[j] - 1, bounds[j] + 1)
        if bounds[j - 1] < cut < bounds[j + 1]
    ]


def _moved(bounds: Sequence[int], j: int, cut: int) -> tuple[int, ...]:
    return (*bounds[:j], cut, *bounds[j + 1 :])


def _allows(
    problem: Problem,
    way: Way,
    needs: Peaks | None,
) -> Callable[[int, int], bool]:
    """Return a function that tells whether a moved cut keeps rules and limits."""
    rules, memory, bounds = problem.rules or Rules(), problem.memory, way.bounds
    limits = [problem.limits[k] for k in way.order]

    def is_allowed(j: int, start: int, end: int) -> bool:
        # A partition that does not fit with the least that may wait does not fit.
        return rules.allows(start, end, j) and (
            memory is None or memory.fits(start, end, j, way.modes[j], limits[j])
        )

    def allowed(j: int, cut: int) -> bool:
        if not (is_allowed(j - 1, bounds[j - 1], cut) and is_allowed(j, cut, bounds[j + 1])):
            return False
        if needs is None or not problem.is_limited:
            return True
        needed = zip(needs(_moved(bounds, j, cut)), limits, strict=True)
        return all(limit is None or need <= limit for need, limit in needed)

    return allowed


def _simulated(
    bounds: Sequence[int], allowed: Callable[[int, int], bool], makespans: Makespans
) -> dict[tuple[int, int], float]:
    moves = [move for move in _moves(bounds) if allowed(*move)]
    now, *found = makespans([tuple(bounds), *(_moved(bounds, *move) for move in moves)])
    # A difference as small as the rounding of sums counts as none.
    return {
        move: 0.0 if math.isclose(value, now, rel_tol=_ROUNDING) else value - now
        for move, value in zip(moves, found, strict=True)
    }


def _change(
    problem: Problem,
    way: Way,
    objective: Quantity,
    cost: AnyCost | None,
    needs: Peaks | None,
) -> Callable[[int, int], float] | None:
    """Return a function for how much the objective grows if a cut is moved."""
    if objective == "cost":
        assert cost is not None
        return _of_cost(cost, way.bounds)
    if objective == "peak_memory":
        assert needs is not None
        now = max(needs(tuple(way.bounds)))
        return lambda j, cut: max(needs(_moved(way.bounds, j, cut))) - now
    if objective == "makespan" or objective == "bottleneck":
        return _of_times(problem, way, objective)
    assert_never(objective)


def _of_cost(cost: AnyCost, bounds: Sequence[int]) -> Callable[[int, int], float]:
    """Return the growth of the largest cost of a run."""

    def of(j: int, start: int, end: int) -> float:
        found = cost_of_run(cost, start, end, j)
        return math.inf if found is None else plain_number(found)

    costs = [of(j, start, end) for j, (start, end) in enumerate(pairwise(bounds))]
    now = max(costs)

    def change(j: int, cut: int) -> float:
        left, right = of(j - 1, bounds[j - 1], cut), of(j, cut, bounds[j + 1])
        return max(left, right, *costs[: j - 1], *costs[j + 1 :]) - now

    return change


def _of_times(
    problem: Problem, way: Way, objective: TimeObjective
) -> Callable[[int, int], float] | None:
    """Return the growth of makespan or bottleneck; None: there are too many partitions."""
    if objective == "makespan" and "always" in way.modes and len(way.modes) > _MOST_PATHS:
        return None
    costs, bounds = problem.costs, way.bounds
    value_of = costs.bottleneck_of if objective == "bottleneck" else costs.makespan_of
    parts = costs.parts(*way)
    now = value_of(bounds, parts)

    def change(j: int, cut: int) -> float:
        left = costs.part(bounds[j - 1], cut, way.order[j - 1], way.modes[j - 1])
        right = costs.part(cut, bounds[j + 1], way.order[j], way.modes[j])
        changed = [*parts[: j - 1], left, right, *parts[j + 1 :]]
        return problem.to_time(value_of(_moved(bounds, j, cut), changed) - now)

    return change
