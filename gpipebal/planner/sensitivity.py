"""What it costs to move a cut: how decisive each one is."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from itertools import accumulate, pairwise
from typing import NamedTuple, assert_never

import numpy as np

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
        O(K) for K partitions; O(K^2) if some recompute every micro-batch. With `peaks` or
        `makespans` one call, or one split, for each move.

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
    if objective == "makespan" and "always" in way.modes:
        return _of_paths(problem, way)
    if objective == "makespan" or objective == "bottleneck":
        return _of_times(problem, way, objective)
    assert_never(objective)


def _of_cost(cost: AnyCost, bounds: Sequence[int]) -> Callable[[int, int], float]:
    """Return the growth of the largest cost of a run."""

    def of(j: int, start: int, end: int) -> float:
        found = cost_of_run(cost, start, end, j)
        return math.inf if found is None else plain_number(found)

    costs = [of(j, start, end) for j, (start, end) in enumerate(pairwise(bounds))]
    now, beside = max(costs), _without_two(costs)

    def change(j: int, cut: int) -> float:
        return max(of(j - 1, bounds[j - 1], cut), of(j, cut, bounds[j + 1]), beside[j]) - now

    return change


def _without_two(values: Sequence[float]) -> list[float]:
    """Return, for each cut, the largest of all values except those of its two sides.

    Example:
        >>> _without_two([3, 1, 2])
        [0, 2, 3]
    """
    start: float = 0
    before = list(accumulate(values, max, initial=start))
    behind = list(accumulate(reversed(values), max, initial=start))[::-1]
    return [0, *(max(before[j - 1], behind[j + 1]) for j in range(1, len(values)))]


def _of_paths(
    problem: Problem,
    way: Way,
) -> Callable[[int, int], float] | None:
    """Return the growth of the makespan where any partition may be the one that decides."""
    if len(way.modes) > _MOST_PATHS:
        return None
    bounds, times_of, repeats = way.bounds, _times_of(problem, way), problem.chunks - 1
    parts = [times_of(j, start, end) for j, (start, end) in enumerate(pairwise(bounds))]

    def value(rows: Sequence[_PartTimes]) -> int:
        # For each split again: one with a slow link or device may need larger numbers than others.
        small = sum(map(sum, rows)) * max(1, repeats) < 2**62
        table = np.array(rows, dtype=np.int64 if small else object)
        # As in `Costs.makespan`: forwards up to a partition, its recompute, all backwards from it.
        once, last_recompute, forward_phase, backward_phase, _ = table.T
        slowest = np.maximum.accumulate(forward_phase) + np.maximum.accumulate(backward_phase)
        return int((np.cumsum(once) + last_recompute + repeats * slowest).max())

    now = value(parts)

    def change(j: int, cut: int) -> float:
        rows = list(parts)
        rows[j - 1] = times_of(j - 1, bounds[j - 1], cut)
        rows[j] = times_of(j, cut, bounds[j + 1])
        return problem.to_time(value(rows) - now)

    return change


def _of_times(
    problem: Problem,
    way: Way,
    objective: TimeObjective,
) -> Callable[[int, int], float]:
    """Return the growth of makespan or bottleneck, from the two partitions that change."""
    bounds, times_of, repeats = way.bounds, _times_of(problem, way), problem.chunks - 1
    parts = [times_of(j, start, end) for j, (start, end) in enumerate(pairwise(bounds))]
    #: By partition, what limits the pace of each phase and of both together.
    paces = list(zip(*(part.paces for part in parts), strict=True))
    beside = [_without_two(pace) for pace in paces]
    total = sum(part.once for part in parts)

    def value(once: int, forward_phase: float, backward_phase: float, load: float) -> float:
        return (
            load if objective == "bottleneck" else once + repeats * (forward_phase + backward_phase)
        )

    now = value(total, *map(max, paces))

    def change(j: int, cut: int) -> float:
        left, right = times_of(j - 1, bounds[j - 1], cut), times_of(j, cut, bounds[j + 1])
        once = total - parts[j - 1].once - parts[j].once + left.once + right.once
        most = [
            max(here, there, others[j])
            for here, there, others in zip(left.paces, right.paces, beside, strict=True)
        ]
        return problem.to_time(int(value(once, *most) - now))

    return change


class _PartTimes(NamedTuple):
    """The scaled times of one partition, with the link that leads to it where that overlaps.

    Attributes:
        once: What a micro-batch takes on its way there and back.
        last_recompute: The recompute of the last micro-batch.
        forward_phase: What limits the pace of forwards.
        backward_phase: What limits the pace of recomputes and backwards.
        load: What limits the pace of micro-batches.
    """

    once: int
    last_recompute: int
    forward_phase: int
    backward_phase: int
    load: int

    @property
    def paces(self) -> tuple[int, int, int]:
        """What limits a pace, which the largest partition decides."""
        return self.forward_phase, self.backward_phase, self.load


def _times_of(problem: Problem, way: Way) -> Callable[[int, int, int], _PartTimes]:
    """Return a function for the times of partitions of any layers, by device and mode."""
    costs = problem.costs

    def times_of(j: int, start: int, end: int) -> _PartTimes:
        part = costs.part(start, end, way.order[j], way.modes[j])
        there, back = (costs.send[start], costs.give_back[start]) if costs.overlaps else (0, 0)
        return _PartTimes(
            once=part.forward + part.backward + there + back,
            last_recompute=part.last_recompute,
            forward_phase=max(part.forward, there),
            backward_phase=max(part.backward + part.recompute, back),
            load=max(part.load, there + back),
        )

    return times_of
