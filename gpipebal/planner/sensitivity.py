"""What it costs to move a cut: how decisive each one is."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise

from gpipebal.planner.question import AnyCost
from gpipebal.problem import Problem, Rules
from gpipebal.schedule import CheckpointMode

__all__ = ["sensitivity"]

#: Up to so many partitions every moved cut is worked out from scratch.
_FEW = 64

Moves = tuple[tuple[float | None, float | None], ...]


def sensitivity(
    problem: Problem,
    bounds: Sequence[int],
    modes: Sequence[CheckpointMode],
    order: Sequence[int],
    objective: str,
    cost: AnyCost | None = None,
) -> Moves:
    """Tell how much the objective grows if a cut is moved by one layer to the left or right.

    Args:
        problem: What was solved.
        bounds: The split.
        modes: Mode of each partition.
        order: Device of each partition.
        objective: What was minimised.
        cost: The cost of runs, if that was minimised.

    Returns:
        For each cut, the growth to the left and to the right; None where that is no split that
        is allowed. Empty for more than `_FEW` partitions that recompute every micro-batch.

    Complexity:
        O(K) for K partitions; O(K^2) if some recompute every micro-batch.

    Example:
        >>> problem = Problem([1, 1, 1, 1], [0] * 4, [0] * 4, 2, checkpoint="never")
        >>> sensitivity(problem, (0, 2, 4), ["never"] * 2, (0, 1), "bottleneck")
        ((1, 1),)
    """
    allowed = _Allowed(problem, modes, order)
    change = _change(problem, bounds, modes, order, objective, cost)
    if change is None:
        return ()
    moves = []
    for j in range(1, problem.n_partitions):  # j: the partition behind the cut
        pair: list[float | None] = []
        for cut in (bounds[j] - 1, bounds[j] + 1):
            start, end = bounds[j - 1], bounds[j + 1]
            fits = start < cut < end and allowed(j, start, cut, end)
            more = change(j, cut) if fits else math.inf
            pair.append(more if math.isfinite(more) else None)
        moves.append((pair[0], pair[1]))
    return tuple(moves)


class _Allowed:
    """Tells whether a moved cut keeps rules and limits."""

    def __init__(
        self, problem: Problem, modes: Sequence[CheckpointMode], order: Sequence[int]
    ) -> None:
        self._problem, self._modes, self._order = problem, modes, order
        self._rules = problem.rules or Rules()
        self._uncut = self._rules.uncut

    def __call__(self, j: int, start: int, cut: int, end: int) -> bool:
        """Whether partitions j - 1 and j may be cut there."""
        rules = self._rules
        if cut in self._uncut:
            return False
        if any(
            partition in (j - 1, j) and (layer >= cut) != (partition == j)
            for layer, partition in rules.pinned
        ):
            return False
        longest = rules.max_layers
        if longest is not None and max(cut - start, end - cut) > longest:
            return False
        return self._fits(j - 1, start, cut) and self._fits(j, cut, end)

    def _fits(self, j: int, start: int, end: int) -> bool:
        problem = self._problem
        if problem.memory is None or problem.devices is None:
            return True
        limit = problem.devices[self._order[j]].memory_limit
        if limit is None:
            return True
        peaks = problem.memory.rows(start, j, self._modes[j])
        return end - start <= len(peaks) and int(peaks[end - start - 1]) <= limit


def _change(
    problem: Problem,
    bounds: Sequence[int],
    modes: Sequence[CheckpointMode],
    order: Sequence[int],
    objective: str,
    cost: AnyCost | None,
) -> Callable[[int, int], float] | None:
    """Return what tells by how much the objective grows if a cut is put elsewhere."""
    runs = list(pairwise(bounds))
    if objective == "cost":
        assert cost is not None
        return _of_largest(
            [_number(cost(a, b, j)) for j, (a, b) in enumerate(runs)],
            lambda j, a, b: _number(cost(a, b, j)),
            bounds,
        )
    if objective == "peak_memory":

        def peak(j: int, start: int, end: int) -> float:
            assert problem.memory is not None
            return int(problem.memory.rows(start, j, modes[j])[end - start - 1])

        return _of_largest([peak(j, a, b) for j, (a, b) in enumerate(runs)], peak, bounds)
    if objective == "makespan" and "always" in modes:
        return _from_scratch(problem, bounds, modes, order)
    return _of_times(problem, bounds, modes, order, objective)


def _number(value: float | None) -> float:
    return float("inf") if value is None else value


def _of_largest(
    values: Sequence[float], of: Callable[[int, int, int], float], bounds: Sequence[int]
) -> Callable[[int, int], float]:
    """Return the growth of a maximum over partitions."""
    beside = _without_two(values)

    def change(j: int, cut: int) -> float:
        now = max(of(j - 1, bounds[j - 1], cut), of(j, cut, bounds[j + 1]), beside[j])
        return now - max(values)

    return change


def _without_two(values: Sequence[float]) -> list[float]:
    """Return, for each cut, the largest of all values but those on both its sides.

    Example:
        >>> _without_two([3, 1, 2])
        [0, 2, 3]
    """
    start: float = 0
    before = list(accumulate(values, max, initial=start))
    behind = list(accumulate(reversed(values), max, initial=start))[::-1]
    return [0, *(max(before[j - 1], behind[j + 1]) for j in range(1, len(values)))]


def _from_scratch(
    problem: Problem,
    bounds: Sequence[int],
    modes: Sequence[CheckpointMode],
    order: Sequence[int],
) -> Callable[[int, int], float] | None:
    if len(modes) > _FEW:
        return None
    value = problem.costs.makespan(bounds, modes, order)

    def change(j: int, cut: int) -> float:
        moved = (*bounds[:j], cut, *bounds[j + 1 :])
        return problem.to_time(problem.costs.makespan(moved, modes, order) - value)

    return change


def _of_times(
    problem: Problem,
    bounds: Sequence[int],
    modes: Sequence[CheckpointMode],
    order: Sequence[int],
    objective: str,
) -> Callable[[int, int], float]:
    """Return the growth of makespan or bottleneck, from the two partitions that change."""
    costs, repeats = problem.costs, problem.chunks - 1

    def of(j: int, start: int, end: int) -> tuple[int, int, int, int]:
        """Return what a run passes once, its forward, its backward, and all of it."""
        part = costs.part(start, end, order[j], modes[j])
        again, load = part.backward + part.again, part.forward + part.backward
        load += max(part.again, part.early)
        link = costs.send[start], costs.give_back[start]
        if not costs.overlaps:
            link = 0, 0
        return (
            part.forward + part.backward + sum(link),
            max(part.forward, link[0]),
            max(again, link[1]),
            max(load, sum(link)),
        )

    parts = [of(j, a, b) for j, (a, b) in enumerate(pairwise(bounds))]
    once, *columns = ([part[k] for part in parts] for k in range(4))
    beside = [_without_two(column) for column in columns]
    total = sum(once)

    def value(passed: int, first: float, again: float, load: float) -> float:
        return load if objective == "bottleneck" else passed + repeats * (first + again)

    now = value(total, *map(max, columns))

    def change(j: int, cut: int) -> float:
        left, right = of(j - 1, bounds[j - 1], cut), of(j, cut, bounds[j + 1])
        passed = total - once[j - 1] - once[j] + left[0] + right[0]
        most = [max(left[k], right[k], beside[k - 1][j]) for k in (1, 2, 3)]
        return problem.to_time(int(value(passed, *most) - now))

    return change
