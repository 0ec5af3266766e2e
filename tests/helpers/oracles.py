"""Slow and obvious answers to check fast ones against: brute force, tables, event simulation.

Nothing here shares code with what it checks. Times become Fractions, so that sums of floats are
exact, and the makespan comes from simulating every action, not from a formula.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fractions import Fraction
from functools import cache
from itertools import combinations, pairwise

from gpipebal.problem import Problem

__all__ = [
    "all_bounds",
    "brute_force",
    "dense_bottleneck",
    "dense_least_squares",
    "dense_sum_of_maxima",
    "event_makespan",
    "rank",
]


def all_bounds(n_layers: int, n_partitions: int) -> Iterator[tuple[int, ...]]:
    """Enumerate all splits into non-empty partitions, leftmost cuts first."""
    for cuts in combinations(range(1, n_layers), n_partitions - 1):
        yield (0, *cuts, n_layers)


def brute_force(problem: Problem, objective: str) -> tuple[Fraction, tuple[int, ...]]:
    """Try all splits; return the least value, and the split that the tie-break rule chooses."""
    candidates = all_bounds(len(problem.forward), problem.n_partitions)
    value, *_, bounds = min(rank(problem, objective, bounds) for bounds in candidates)
    return value, bounds


def rank(
    problem: Problem, objective: str, bounds: tuple[int, ...]
) -> tuple[Fraction, Fraction, Fraction, tuple[int, ...]]:
    """Return what splits are ordered by: value, bottleneck, sum of squares, bounds."""
    forward, backward, recompute = (
        [sum(map(Fraction, times[start:end]), Fraction(0)) for start, end in pairwise(bounds)]
        for times in (problem.forward, problem.backward, problem.recompute)
    )
    counts = problem.checkpoint == "always" or (
        problem.checkpoint == "except_last" and problem.chunks > 1
    )
    partitions = zip(forward, backward, recompute, strict=True)
    loads = [f + b + (r if counts else 0) for f, b, r in partitions]
    bottleneck, squares = max(loads), sum((load * load for load in loads), Fraction(0))
    value = bottleneck
    if objective == "makespan":
        value = event_makespan(forward, backward, recompute, problem.chunks, problem.checkpoint)
    return value, bottleneck, squares, bounds


def event_makespan(
    forward: Sequence[Fraction],
    backward: Sequence[Fraction],
    recompute: Sequence[Fraction],
    chunks: int,
    checkpoint: str,
) -> Fraction:
    """Simulate one mini-batch of GPipe, action by action, and return when the last one ends.

    Every partition works through its own list: all forwards, then micro-batch by micro-batch from
    the last to the first its recompute, if it has one, and its backward. An action starts as soon
    as the one before it in the list has ended and its input is there: the output of the partition
    before for a forward, the gradient of the partition behind for a backward. A recompute needs
    no gradient.
    """
    last = len(forward) - 1
    times = {"F": forward, "R": recompute, "B": backward}
    row = [("F", i) for i in range(chunks)]
    for i in reversed(range(chunks)):
        if checkpoint == "always" or (checkpoint == "except_last" and i < chunks - 1):
            row.append(("R", i))
        row.append(("B", i))
    before = {action: row[place - 1] if place else None for place, action in enumerate(row)}

    @cache
    def ends(kind: str, i: int, j: int) -> Fraction:
        previous = before[kind, i]
        needed = [Fraction(0)]
        if previous is not None:
            needed.append(ends(*previous, j))
        if kind == "F" and j > 0:
            needed.append(ends("F", i, j - 1))
        if kind == "B" and j < last:
            needed.append(ends("B", i, j + 1))
        return max(needed) + times[kind][j]

    return max(ends(*row[-1], j) for j in range(last + 1))


def dense_bottleneck(costs: Sequence[int], n_partitions: int) -> int:
    """Fill the whole table of smallest bottlenecks: partitions times layers, all pairs."""
    n_layers = len(costs)
    best: list[float] = [0, *[float("inf")] * n_layers]
    for _ in range(n_partitions):
        best = [
            min(
                (max(best[start], sum(costs[start:end])) for start in range(end)),
                default=float("inf"),
            )
            for end in range(n_layers + 1)
        ]
    return int(best[n_layers])


def dense_least_squares(
    costs: Sequence[int], reach: Sequence[int], n_partitions: int
) -> tuple[int, tuple[int, ...]]:
    """Fill the whole table of least sums of squares, with the leftmost bounds that attain them.

    A partition that starts at `start` ends at ``reach[start]`` at the latest.
    """
    n_layers = len(costs)
    # From the right: least squares of the layers from a place on, and the bounds from there.
    best: dict[int, tuple[int, tuple[int, ...]]] = {n_layers: (0, (n_layers,))}
    for _ in range(n_partitions):
        longer: dict[int, tuple[int, tuple[int, ...]]] = {}
        for start in range(n_layers):
            options = [
                (sum(costs[start:end]) ** 2 + squares, (start, *bounds))
                for end, (squares, bounds) in best.items()
                if start < end <= reach[start]
            ]
            if options:
                longer[start] = min(options)
        best = longer
    return best[0]


def dense_sum_of_maxima(
    first: Sequence[int], second: Sequence[int], n_partitions: int
) -> tuple[int, set[tuple[int, int]]]:
    """Try every limit of the first cost; return the least sum of maxima and its pairs."""
    n_layers = len(first)
    runs = [(start, end) for end in range(1, n_layers + 1) for start in range(end)]
    pairs = set()
    for limit in {sum(first[start:end]) for start, end in runs}:
        best: list[float] = [0, *[float("inf")] * n_layers]
        for _ in range(n_partitions):
            longer = [float("inf")] * (n_layers + 1)
            for start, end in runs:
                if sum(first[start:end]) <= limit:
                    longer[end] = min(longer[end], max(best[start], sum(second[start:end])))
            best = longer
        if best[n_layers] < float("inf"):
            pairs.add((limit, int(best[n_layers])))
    # A limit above what is needed gives a larger sum, so only true pairs attain the least one.
    least = min(one + two for one, two in pairs)
    return least, {pair for pair in pairs if sum(pair) == least}
