"""Bounds that no plan is below, known without a search."""

from __future__ import annotations

from itertools import pairwise

from gpipebal.planner.posing import Posed
from gpipebal.planner.schedules.search import bound_of
from gpipebal.problem import Problem
from gpipebal.simulator import weight_shares

__all__ = ["lower_bound_of", "quick_bound_of"]


def lower_bound_of(problem: Problem, objective: str) -> float:
    """Bound the makespan of every split under GPipe, without a search; 0 for another objective.

    One micro-batch goes through all layers, and all others at least through the largest layer, or
    an even share, on the fastest device for it.

    Example:
        >>> lower_bound_of(Problem([1, 3], [2, 6], [1, 3], 2, chunks=3), "makespan")
        36
    """
    if objective != "makespan":
        return 0
    costs, modes = problem.costs, problem.modes
    least = []
    for name in ("forward", "backward"):
        sums = [getattr(one, name) for one in costs.types]
        layers = [min(b - a for a, b in pair) for pair in zip(*map(pairwise, sums), strict=True)]
        least.append(layers)
    if modes is not None and "never" not in modes and problem.chunks > 1:
        sums = [costs.least_recompute(kind) for kind in range(len(costs.types))]
        again = [min(b - a for a, b in pair) for pair in zip(*map(pairwise, sums), strict=True)]
        least.append([b + r for b, r in zip(least[1], again, strict=True)])
    n, repeats = problem.n_partitions, problem.chunks - 1
    slowest = [max(max(layers), -(-sum(layers) // n)) for layers in (least[0], least[-1])]
    return problem.to_time(sum(map(sum, least[:2])) + repeats * sum(slowest))


def quick_bound_of(posed: Posed) -> float:
    """Bound the value of every plan that answers a question; 0 where no bound is quickly known."""
    question = posed.question
    if question.cost is not None:
        return 0.0
    if question.is_searched:
        shares = weight_shares(posed.profile)
        return bound_of(posed.problem, question.schedule, weight_share=shares)
    return lower_bound_of(posed.problem, question.objective)
