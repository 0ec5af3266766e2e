"""What it costs to move a cut: how decisive each one is."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import pairwise
from typing import assert_never

from gpipebal.argument_kinds import plain_number
from gpipebal.objectives import Quantity
from gpipebal.planner.own_cost import cost_of_run
from gpipebal.problem import Problem, Rules
from gpipebal.schedule import CheckpointMode
from gpipebal.solvers.dense import AnyCost

__all__ = ["sensitivity"]

#: Simulated times that differ only by this fraction are equal.
_ROUNDING = 1e-12

Moves = tuple[tuple[float | None, float | None], ...]
#: Bounds of a split.
Bounds = tuple[int, ...]
#: Tells the peak memory of every partition of a split, in bytes.
Peaks = Callable[[Bounds], Sequence[int]]
#: Tells the makespans of splits.
Makespans = Callable[[Sequence[Sequence[int]]], Sequence[float]]


def sensitivity(
    problem: Problem,
    bounds: Sequence[int],
    modes: Sequence[CheckpointMode],
    order: Sequence[int],
    objective: Quantity,
    cost: AnyCost | None = None,
    *,
    peaks: Peaks | None = None,
    makespans: Makespans | None = None,
) -> Moves:
    """Tell how much the objective grows if a cut is moved by one layer to the left or right.

    Args:
        problem: What was solved.
        bounds: The split.
        modes: Mode of each partition.
        order: Device of each partition.
        objective: What was minimised.
        cost: The cost of runs, if that was minimised.
        peaks: Tells what partitions need, including what waits for busy neighbours in the split's
            own timeline; None: limits are checked without waiting. Needed if peak memory was
            minimised.
        makespans: Simulates splits, if their makespan was minimised under a schedule without a
            formula; None: GPipe's formula.

    Returns:
        For each cut, the growth if it is moved to the left, and to the right; None where that split
        is not allowed.

    Complexity:
        O(K) for each move of K partitions. With `peaks` or `makespans` one call, or one split.

    Example:
        >>> problem = Problem([1, 1, 1, 1], [0] * 4, [0] * 4, 2, checkpoint="never")
        >>> sensitivity(problem, (0, 2, 4), ["never"] * 2, (0, 1), "bottleneck")
        ((1, 1),)
    """
    # Whether a move is allowed and what it costs may both depend on the peaks.
    needs = None if peaks is None else cache(peaks)
    moved = dict(_allowed_moves(problem, bounds, modes, order, needs))
    splits = [tuple(bounds), *moved.values()]
    growths: list[float]
    if objective == "makespan" and makespans is not None:
        now, *values = makespans(splits)
        # A difference as small as the rounding of sums counts as none.
        growths = [0.0 if math.isclose(v, now, rel_tol=_ROUNDING) else v - now for v in values]
    elif objective == "makespan" or objective == "bottleneck":
        costs = problem.costs
        exact = costs.makespan if objective == "makespan" else costs.bottleneck
        least, *units = (exact(split, modes, order) for split in splits)
        growths = [problem.to_time(value - least) for value in units]
    elif objective == "peak_memory":
        assert needs is not None
        peak, *others = (max(needs(split)) for split in splits)
        growths = [other - peak for other in others]
    elif objective == "cost":
        assert cost is not None
        growths = _growths_of_cost(cost, splits)
    else:
        assert_never(objective)
    known = {
        move: growth for move, growth in zip(moved, growths, strict=True) if math.isfinite(growth)
    }
    return tuple(
        (known.get((j, bounds[j] - 1)), known.get((j, bounds[j] + 1)))
        for j in range(1, problem.n_partitions)
    )


def _allowed_moves(
    problem: Problem,
    bounds: Sequence[int],
    modes: Sequence[CheckpointMode],
    order: Sequence[int],
    needs: Peaks | None,
) -> Iterator[tuple[tuple[int, int], Bounds]]:
    """Yield moves that keep rules and limits: a cut and its new place, and the split with it."""
    rules, memory = problem.rules or Rules(), problem.memory
    limits = [problem.limits[k] for k in order]

    def is_allowed(j: int, start: int, end: int) -> bool:
        # A partition that does not fit without what waits does not fit with it.
        return rules.allows(start, end, j) and (
            memory is None or memory.fits(start, end, j, modes[j], limits[j])
        )

    for j, place in enumerate(bounds[1:-1], start=1):
        start, end = bounds[j - 1], bounds[j + 1]
        for cut in (place - 1, place + 1):
            if not start < cut < end or not (
                is_allowed(j - 1, start, cut) and is_allowed(j, cut, end)
            ):
                continue
            split = (*bounds[:j], cut, *bounds[j + 1 :])
            if needs is not None and problem.is_limited:
                pairs = zip(needs(split), limits, strict=True)
                if any(limit is not None and need > limit for need, limit in pairs):
                    continue
            yield (j, cut), split


def _growths_of_cost(cost: AnyCost, splits: Sequence[Bounds]) -> list[float]:
    """Return how much more the costliest run of each further split costs; infinity: not allowed."""

    @cache
    def of(j: int, start: int, end: int) -> float:
        found = cost_of_run(cost, start, end, j)
        return math.inf if found is None else plain_number(found)

    now, *values = (
        max(of(j, start, end) for j, (start, end) in enumerate(pairwise(split))) for split in splits
    )
    return [value - now for value in values]
