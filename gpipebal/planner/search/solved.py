"""One solver for one question: the objective's own, a search under a schedule, or any cost."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from gpipebal.errors import InfeasibleError
from gpipebal.planner.own_cost import cost_of_run
from gpipebal.planner.posing import Posed
from gpipebal.planner.schedules.search import search_schedule
from gpipebal.planner.search.all_ways import MOST_ORDERS, device_orders
from gpipebal.problem import Problem
from gpipebal.simulator import weight_shares
from gpipebal.solvers import Split, find, split_any_cost
from gpipebal.solvers.sets.levels import MOST_STATES, Levels, count_states

__all__ = ["solved"]


def solved(posed: Posed, problem: Problem, time_limit: float | None) -> Split | None:
    """Run the solver that the question asks for; None if nothing fits.

    Args:
        posed: The question.
        problem: Its problem, or the one with the most that can wait.
        time_limit: Seconds after which an open-ended search returns.
    """
    question = posed.question
    if question.is_searched:
        return _searched(posed, problem, time_limit)
    if question.cost is None:
        return find(problem, question.objective, question.method, time_limit=time_limit)
    return _any_cost(posed, problem)


def _searched(posed: Posed, problem: Problem, limit: float | None) -> Split | None:
    """Search under the schedule, in each order of the devices that is open, if they are few."""
    question, n = posed.question, problem.n_partitions
    if problem.checkpoint == "auto" and _nothing_recomputed(problem):
        # Then 'never' is the only mode of use, and searches for one mode are faster.
        problem = replace(problem, checkpoint="never")
    orders = device_orders(posed, MOST_ORDERS)
    # If there are many: the order with the least bottleneck, and the one that was given.
    ways = [None, tuple(range(n))] if orders is None else orders
    found: list[Split] = []
    for order in ways:
        one = problem
        if order is not None and problem.devices is not None:
            devices = [problem.devices[k] for k in order]
            one = replace(problem, devices=devices, any_order=False)
        split = search_schedule(
            one,
            question.schedule,
            weight_share=weight_shares(posed.profile),
            time_limit=None if limit is None else limit / len(ways),
        )
        if split is not None:
            found.append(split if order is None else replace(split, order=order))
    if not found:
        return None
    best = min(found, key=lambda split: split.value)
    # The bound for an open order holds for all orders.
    bound = found[0].lower_bound if orders is None else min(one.lower_bound for one in found)
    return best.with_bound(bound)


def _nothing_recomputed(problem: Problem) -> bool:
    """Whether every run of layers that fits in some mode fits in the fastest one."""
    if not problem.is_limited:
        return True
    levels = Levels(problem, stateless=count_states(problem) > MOST_STATES)
    return all(len(options) == 1 for options in levels.kinds)


def _any_cost(posed: Posed, problem: Problem) -> Split | None:
    cost, modes = posed.question.cost, problem.costs.modes(None)
    assert cost is not None

    memory = problem.memory
    if memory is not None:
        # Peaks are made for all ends at once, and asked for one by one.
        memory = replace(memory, rows=cache(memory.rows))

    def allowed(start: int, end: int, j: int) -> float | None:
        if memory is not None and not memory.fits(start, end, j, modes[j], problem.limits[j]):
            return None
        return cost_of_run(cost, start, end, j)

    n_layers, n_partitions = problem.n_layers, problem.n_partitions
    try:
        value, bounds = split_any_cost(allowed, n_layers, n_partitions, rules=problem.rules)
    except InfeasibleError:
        return None
    return Split(bounds, value, value, "dense table", modes, tuple(range(n_partitions)))
