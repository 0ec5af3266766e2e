"""Bounds that no plan is below, known without a search."""

from __future__ import annotations

from operator import add

from gpipebal.planner.posing import Posed
from gpipebal.planner.schedules.search import bound_of
from gpipebal.problem import Problem
from gpipebal.problem.costs import least_sums
from gpipebal.simulator import weight_shares
from gpipebal.solvers.bisection import largest_layer

__all__ = ["lower_bound_of", "parts_of_bound", "quick_bound_of"]


def lower_bound_of(problem: Problem) -> float:
    """Bound the makespan of every split under GPipe, without a search.

    One micro-batch goes through all layers, and all others at least through the largest layer, or
    an even share, on the fastest device for it.

    Example:
        >>> lower_bound_of(Problem([1, 3], [2, 6], [1, 3], 2, chunks=3))
        36
    """
    once, slowest = parts_of_bound(problem)
    return problem.to_time(once + (problem.chunks - 1) * sum(slowest))


def parts_of_bound(problem: Problem) -> tuple[int, list[int]]:
    """Bound what every split passes once, and its slowest forward and backward phase.

    Example:
        >>> parts_of_bound(Problem([1, 3], [2, 6], [1, 3], 2, chunks=3))
        (12, [3, 9])
    """
    costs, modes = problem.costs, problem.modes
    forward, backward, _ = map(least_sums, zip(*costs.types, strict=True))
    phases = [forward, backward]
    if modes is not None and "never" not in modes and problem.chunks > 1:
        again = least_sums([costs.least_recompute(kind) for kind in range(len(costs.types))])
        phases[1] = list(map(add, backward, again))
    slowest = [
        max(largest_layer(sums, sums), -(-sums[-1] // problem.n_partitions)) for sums in phases
    ]
    return forward[-1] + backward[-1], slowest


def quick_bound_of(posed: Posed) -> float:
    """Bound the value of every plan that answers a question; 0 where no bound is quickly known."""
    question = posed.question
    if question.minimised != "makespan":
        return 0.0
    if question.is_searched:
        shares = weight_shares(posed.profile)
        return bound_of(posed.problem, question.schedule, weight_share=shares)
    return lower_bound_of(posed.problem)
