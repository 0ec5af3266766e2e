"""The best of all ways to run a short chain, in the order of what bounds their values.

A bound is quickly known, while a value may take the simulation of a mini-batch. So the way with the
least bound is valued first, and takes its turn again by its value, until the first in turn has been
valued and fits: no other is better.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

from gpipebal.plan import Plan
from gpipebal.planner.execution import Way
from gpipebal.planner.plans import fits, plan_of_split, value_of
from gpipebal.planner.posing import Posed
from gpipebal.solvers import Split
from gpipebal.solvers.deadline import Deadline

__all__ = ["best_way"]


class _Waiting(NamedTuple):
    """A way that waits for its turn; they are sorted by these attributes, in this order.

    Attributes:
        value: The value of the way, or a bound that it is not below.
        is_valued: Whether it is the value.
        tie: Which of equally good ways is taken; empty for bounds.
        place: Where it is in the list of all ways.
    """

    value: float
    is_valued: bool
    tie: tuple[float, ...]
    place: int


def best_way(
    posed: Posed,
    ways: Sequence[Way],
    found: Split,
    deadline: Deadline,
    any_plan: Callable[[], Plan | None],
) -> tuple[Plan | None, float]:
    """Return the best of all ways that keeps its limits, with what may wait in it.

    Args:
        posed: The question.
        ways: All ways.
        found: The best split with the least that may wait: no way's value is below its bound.
        deadline: When it is up, the search ends with the plan that is known to fit, or a way
            whose value is known.
        any_plan: Returns a plan that fits, if one is known or soon found.

    Returns:
        The best plan, and a bound that no plan's value is below; None and infinity: there is none.
    """
    firsts = (_first_bound(posed, way, found) for way in ways)
    waiting = [_Waiting(bound, False, (), k) for k, bound in enumerate(firsts)]
    heapq.heapify(waiting)
    is_late = False
    while waiting:
        if deadline.is_up and not is_late:
            is_late = True
            best = any_plan()
            if best is not None:
                valued = min((one for one in waiting if one.is_valued), default=None)
                if valued is not None and valued.value < best.value:
                    plan = _plan_of(posed, ways[valued.place], valued.value, found)
                    best = plan if fits(plan) else best
                bound = min(waiting[0].value, best.value)
                return best.with_bound(bound), bound
        bound, is_valued, _, k = heapq.heappop(waiting)
        way = ways[k]
        if not is_valued:
            value = value_of(posed, way)
            if value is not None:
                heapq.heappush(waiting, _Waiting(value, True, _tie_of(posed, way), k))
            continue
        plan = _plan_of(posed, way, bound, found)
        if fits(plan):
            note = "What may wait for other partitions decides what fits: all plans were looked at."
            return replace(plan, notes=(*plan.notes, note)), plan.lower_bound
    return None, math.inf


def _first_bound(posed: Posed, way: Way, found: Split) -> float:
    """Bound the value of a way without a simulation."""
    question, memory = posed.question, posed.problem.memory
    if question.minimised == "peak_memory" and memory is not None:
        runs = enumerate(zip(pairwise(way.bounds), way.modes, strict=True))
        return float(max(memory.rows(a, j, mode)[b - a - 1] for j, ((a, b), mode) in runs))
    if question.is_searched:
        return found.lower_bound
    value = value_of(posed, way)
    return math.inf if value is None else value


def _tie_of(posed: Posed, way: Way) -> tuple[float, ...]:
    """Rank equally good ways: bottleneck, then squares of the partitions' times."""
    counted = way._replace(modes=posed.counted(way.modes))
    parts = posed.problem.costs.parts(*counted)
    bottleneck = posed.problem.bottleneck(*counted)
    return bottleneck, sum(part.load**2 for part in parts)


def _plan_of(posed: Posed, way: Way, value: float, found: Split) -> Plan:
    """Turn a way into a plan, as if it were the best."""
    return plan_of_split(posed, way.split(value, value, found.method))
