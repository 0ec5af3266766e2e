"""The next best plans, whatever is minimised: each is the best of a part of all splits.

All splits but that of a plan fall into parts, one for each cut: those that share all cuts before it
and differ in this one. The best plan of a part is what `best_of` finds where bounds have the places
of that part. The best of these is the next plan, and its part falls apart in the same way.

A part is searched only when its turn comes: by the bound of the part that it comes from, which no
plan in it is below. So where many plans are as good as the best one, few parts are searched.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import count
from typing import NamedTuple

from gpipebal.errors import BalanceError
from gpipebal.plan import Plan
from gpipebal.planner.posing import Posed
from gpipebal.planner.search.best import Best, best_of
from gpipebal.planner.search.lower_bounds import quick_bound_of
from gpipebal.problem import Rules, to_bounds
from gpipebal.problem.rules import Within
from gpipebal.solvers.deadline import Deadline
from gpipebal.solvers.sets.ranked import parts_without

__all__ = ["best_plans"]


class _Part(NamedTuple):
    """A part of all splits; parts are sorted by these attributes, in this order.

    Attributes:
        turn: The value of its best plan, or its bound as long as it has not been searched.
        is_new: Whether it has not been searched.
        ticket: When it was made.
        asked: The question that its plans answer.
        places: The set of places of each bound; None: all.
        bound: No plan in it has a smaller value.
        plan: The best plan in it that was found; None: it has not been searched.
    """

    turn: float
    is_new: bool
    ticket: int
    asked: Posed
    places: Sequence[int] | None
    bound: float
    plan: Plan | None


def best_plans(posed: Sequence[Posed], k: int) -> list[tuple[Posed, Plan]]:
    """Find the k best plans, no two with the same cuts and number of micro-batches.

    Args:
        posed: The question for each number of micro-batches. The first plan has its time limit,
            and all others together as much again.
        k: How many.

    Returns:
        Plans, best first, with the question that each answers; fewer if no more were found. All
        have the same bound, which holds for every plan. The first is no worse than the one that
        `best_of_all` finds, and where each search proves its plan, these are the k best.

    Complexity:
        Up to K searches for each plan but the first, and K partitions.

    Source:
        Lawler, as in `gpipebal.solvers.sets.ranked`, here around the whole planner.
    """
    tickets = count()
    heap: list[_Part] = []
    for one in map(_remembering, posed):
        least = quick_bound_of(one)
        heapq.heappush(heap, _Part(least, True, next(tickets), one, None, least, None))
    deadline: Deadline | None = None
    found: list[_Part] = []
    bound = math.inf  # of all that is not looked at any more
    while heap and len(found) < k:
        part = heapq.heappop(heap)
        if part.plan is not None:
            found.append(part)
            if part.asked.is_open:
                # The same cuts may be better in other modes, or in another order of devices.
                bound = min(bound, part.bound)
            deadline = deadline or Deadline(part.asked.question.time_limit)
            for places in _parts_of(part):
                new = _Part(part.bound, True, next(tickets), part.asked, places, part.bound, None)
                heapq.heappush(heap, new)
        elif deadline is not None and deadline.is_up:
            bound = min(bound, part.bound)
        else:
            plan, least = _searched(part, deadline)
            least = max(part.bound, least)
            if plan is None:
                bound = min(bound, least)
            else:
                turn = part._replace(turn=plan.value, is_new=False, bound=least, plan=plan)
                heapq.heappush(heap, turn)
    bound = min([bound, *(part.bound for part in heap), *(part.turn for part in found)])
    found.sort(key=lambda part: part[:3])
    return [(part.asked, part.plan.with_bound(bound)) for part in found if part.plan is not None]


def _remembering(asked: Posed) -> Posed:
    """Ask for a caller's cost of a run once: the searches have most runs in common."""
    cost = asked.question.cost
    if cost is None:
        return asked
    return replace(asked, question=replace(asked.question, cost=cache(cost)))


def _searched(part: _Part, deadline: Deadline | None) -> Best:
    """Find the best plan of a part that is new, as thoroughly as `solve` if it has all splits."""
    limit, asked = None if deadline is None else deadline.left, part.asked
    if limit is not None:
        asked = replace(asked, question=replace(asked.question, time_limit=limit))
    if part.places is not None:
        rules = Within.of(asked.problem.rules or Rules(), part.places)
        asked = replace(asked, problem=replace(asked.problem, rules=rules))
    try:
        return best_of(asked, thorough=part.places is None)
    except BalanceError:
        if limit is None:
            raise
        return Best(None, part.bound)  # HiGHS found nothing in time


def _parts_of(part: _Part) -> list[list[int]]:
    """Part the splits of a part, but that of its best plan."""
    assert part.plan is not None
    problem, places = part.asked.problem, part.places
    if places is None:
        places = (problem.rules or Rules()).places(problem.n_layers, problem.n_partitions)
    return list(parts_without(places, to_bounds(part.plan.balance)))
