"""The best plan for a question: solved for each number of micro-batches, and checked for limits."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from gpipebal.errors import BalanceError
from gpipebal.plan import Plan
from gpipebal.planner.execution import Way
from gpipebal.planner.plans import fits, plan_of_split, value_of
from gpipebal.planner.posing import Posed, pose
from gpipebal.planner.search.all_ways import all_ways
from gpipebal.planner.search.best_way import best_way
from gpipebal.planner.search.learned import LearnedMemory
from gpipebal.planner.search.lower_bounds import quick_bound_of
from gpipebal.planner.search.open_modes import quicker, roomier
from gpipebal.planner.search.solved import solved
from gpipebal.problem import Problem
from gpipebal.schedule import CHECKPOINT_MODES
from gpipebal.solvers import Split
from gpipebal.solvers.deadline import Deadline
from gpipebal.solvers.sets.levels import in_order_if_large
from gpipebal.solvers.sets.peak import least_shortage

__all__ = ["MOST_WAYS", "Best", "best_of", "best_of_all"]

#: Up to so many ways to cut and run a chain all of them are tried where what may wait decides.
MOST_WAYS = 500
#: How often a question is asked again with what plans have shown.
_MOST_AGAIN = 16
#: Up to so many layers times partitions questions that leave less open are asked for a better plan.
_FEW_PLACES = 400

_BY_PEAK = "Found by the least peak memory, because what may wait decides what fits."
_NOT_PROVEN = "A split that is better by the least that may wait in it exceeds a limit by its own."


class Best(NamedTuple):
    """What was found for one number of micro-batches.

    Attributes:
        plan: The best plan that fits; None: none was found.
        lower_bound: No plan that fits has a smaller value; infinity: there is none.
    """

    plan: Plan | None
    lower_bound: float


def best_of(posed: Posed) -> Best:
    """Find the best plan at one number of micro-batches.

    Where what may wait for other partitions decides, not all ways may be looked at. Then questions
    that leave less open are asked too, so that more freedom does not have the worse plan; but see
    `_with_less_open` for when they are not. In the plan that is found, faster modes are tried.
    """
    deadline = Deadline(posed.question.time_limit)
    best = _best_as_asked(posed)
    for one in _with_less_open(posed, best):
        try:
            other = _best_as_asked(one).plan
        except BalanceError:
            continue  # the method that was asked for is for what is open
        if other is not None and (best.plan is None or other.value < best.plan.value):
            best = best._replace(plan=_as_asked(posed, other, best.lower_bound))
            if other.value <= best.lower_bound:
                break
    return best if best.plan is None else best._replace(plan=quicker(posed, best.plan, deadline))


def _with_less_open(posed: Posed, best: Best) -> Iterator[Posed]:
    """Yield questions with the given order of the devices, or a given mode, where they may help.

    Not under a time limit, because each of them would get all of it; nor, unless no plan is known,
    for long chains.
    """
    question, (plan, bound) = posed.question, best
    is_few = posed.problem.n_layers * posed.problem.n_partitions <= _FEW_PLACES
    is_proven = math.isinf(bound) if plan is None else plan.value <= bound
    waits = question.objective == "peak_memory" or (posed.problem.is_limited and is_few)
    if question.time_limit is not None or is_proven or not (waits or plan is None):
        return
    narrower = [replace(question, any_order=False)] if question.any_order else []
    if question.checkpoint == "auto":
        wide = (question, *narrower)
        narrower += [replace(one, checkpoint=mode) for one in wide for mode in CHECKPOINT_MODES]
    for one in narrower:
        yield pose(one, posed.chunks)


def _as_asked(posed: Posed, plan: Plan, bound: float) -> Plan:
    """Turn the plan for a question that leaves less open into one for this question."""
    split = Way.of(plan).split(plan.value, bound, plan.method)
    return _noted(posed, plan_of_split(posed, split).with_bound(bound))


def _noted(posed: Posed, plan: Plan) -> Plan:
    """Say why a plan under limits is not proven, unless it is."""
    # The least peak has a gap because of what may wait, whether there is a limit or not.
    is_unsure = plan.gap and posed.problem.is_limited and posed.question.objective != "peak_memory"
    return replace(plan, notes=(*plan.notes, _NOT_PROVEN)) if is_unsure else plan


def _best_as_asked(posed: Posed) -> Best:
    """Find the best plan, or a good one, without a look at questions that leave less open.

    Limits are first checked with the least that may wait for other partitions. Mostly the plan that
    is found keeps them with its own, and is the best. If not, all ways are tried if they are few.
    If they are many, the question is asked again with what plans have shown that runs of layers
    need, until the plan fits; then with the most that can wait. If all of this finds no plan, the
    splits are tried that lack least. The gap tells between which values the best plan is.

    Time that is up ends the search for better plans. As long as none is known that fits, all of
    this is tried all the same, but each search on the way returns the first split that it finds.
    """
    question = posed.question
    deadline = Deadline(question.time_limit)
    found = solved(posed, posed.problem, question.time_limit)
    if found is None:
        return Best(None, math.inf)
    if found.lower_bound < found.value:
        # A solver that is out of time may have a worse bound than this quick one.
        found = found.with_bound(max(found.lower_bound, quick_bound_of(posed)))
    bound = found.lower_bound
    plan = plan_of_split(posed, found)
    is_peak = question.objective == "peak_memory" and question.cost is None
    if fits(plan) and (not is_peak or plan.value <= bound):
        return Best(plan, bound)
    ways = all_ways(posed, MOST_WAYS)
    if ways is not None:
        any_plan = (lambda: plan) if fits(plan) else partial(_with_most_room, posed)
        return Best(*best_way(posed, ways, found, deadline, any_plan))
    best = _best_with_what_is_shown(posed, found, plan, deadline)
    if best is None or (best.value > bound and not deadline.is_up):
        careful = _solved_again(posed, posed.cautious, deadline)
        if careful is not None:
            best = _better(best, plan_of_split(posed, careful.with_bound(bound)))
    best = best or _with_most_room(posed)
    if best is None:
        return Best(None, bound)
    bound = min(bound, best.value)
    return Best(_noted(posed, best.with_bound(bound)), bound)


def _best_with_what_is_shown(
    posed: Posed, found: Split, plan: Plan, deadline: Deadline
) -> Plan | None:
    """Return the best plan that fits of a split, and of those found with what plans have shown."""
    problem, split = posed.problem, found
    assert problem.memory is not None
    learned = LearnedMemory(problem.memory, problem.n_partitions)
    best = _better(None, roomier(posed, plan))
    for _ in range(_MOST_AGAIN):
        if best is not None and (best.value <= split.value or deadline.is_up):
            break  # no later one is better, as far as is known
        learned.learn(split, plan)
        again = _solved_again(posed, replace(problem, memory=learned.memory), deadline)
        if again is None:
            break
        split = again.with_bound(found.lower_bound)
        plan = plan_of_split(posed, split)
        best = _better(best, roomier(posed, plan))
    return best


def _better(best: Plan | None, plan: Plan) -> Plan | None:
    """Return the better of the best plan known and another one, if that fits."""
    return plan if fits(plan) and (best is None or plan.value < best.value) else best


def _solved_again(posed: Posed, problem: Problem, deadline: Deadline) -> Split | None:
    """Solve a variant of a question that has been answered, in the time that is left."""
    try:
        return solved(posed, problem, deadline.left)
    except BalanceError:
        return None  # HiGHS found nothing in time; there is another answer


def _with_most_room(posed: Posed) -> Plan | None:
    """Try the splits that lack least, counted with the most that may wait and with the least."""
    if not posed.problem.is_limited:
        return None
    for problem in (posed.cautious, posed.problem):
        short = least_shortage(in_order_if_large(problem))
        if short is None:
            continue
        path = short[1]
        way = Way(path.bounds, path.modes, path.order)
        value = value_of(posed, way)
        if value is None:
            continue
        plan = roomier(posed, plan_of_split(posed, way.split(value, 0.0, "peak bisection")))
        if fits(plan):
            return replace(plan, notes=(*plan.notes, _BY_PEAK))
    return None


def best_of_all(posed: Sequence[Posed]) -> tuple[Posed, Plan] | None:
    """Find the best plan among numbers of micro-batches; None if none was found.

    The most promising numbers are solved first; those whose bound is above the best plan found are
    left out.
    """
    if len(posed) == 1:
        plan = best_of(posed[0]).plan
        return None if plan is None else (posed[0], plan)
    lower_bounds = [quick_bound_of(one) for one in posed]
    best: tuple[Posed, Plan] | None = None
    proven = math.inf
    for k in sorted(range(len(posed)), key=lower_bounds.__getitem__):
        if best is not None and lower_bounds[k] >= best[1].value:
            break
        plan, lower_bound = best_of(posed[k])
        proven = min(proven, lower_bound)
        if plan is not None and (best is None or plan.value < best[1].value):
            best = posed[k], plan
    if best is None:
        return None
    return best[0], best[1].with_bound(proven)
