"""The best plan for a question: solved for each number of micro-batches, and checked for limits."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, islice
from typing import NamedTuple

from gpipebal.errors import BalanceError
from gpipebal.plan import Plan
from gpipebal.planner.execution import Way
from gpipebal.planner.plans import fits, plan_of_split, value_of
from gpipebal.planner.posing import Posed, pose
from gpipebal.planner.search.all_ways import all_ways
from gpipebal.planner.search.best_way import best_way
from gpipebal.planner.search.lower_bounds import quick_bound_of
from gpipebal.planner.search.lower_limits import under_lower_limits
from gpipebal.planner.search.open_modes import quicker, roomier
from gpipebal.planner.search.solved import solved
from gpipebal.problem import Problem
from gpipebal.schedule import CHECKPOINT_MODES
from gpipebal.solvers import Split, iter_best_splits
from gpipebal.solvers.deadline import Deadline
from gpipebal.solvers.sets.levels import MOST_STATES, count_states
from gpipebal.solvers.sets.peak import least_shortage

__all__ = ["MOST_WAYS", "Best", "best_of", "best_of_all"]

#: How many of the best splits are tried where too much waits in the best one ...
_MOST_TRIED = 16
#: ... and where none is known that fits.
_MOST_UNTIL_ONE_FITS = 100
#: Up to so many layers times partitions they are also tried to be sure that none of them is better.
_FEW_PLACES = 400
#: Up to so many ways to cut and run a chain all of them are tried under limits ...
MOST_WAYS = 500
#: ... and for the least peak, for which all peaks of each are worked out.
_MOST_PEAK_WAYS = 100

_BY_PEAK = "Found by the least peak memory, because what may wait decides what fits."


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
    `_with_less_open` for when they are not.
    """
    deadline = Deadline(posed.question.time_limit)
    best = _best_as_asked(posed)
    for one in _with_less_open(posed, best):
        try:
            other = _best_as_asked(one).plan
        except BalanceError:
            continue  # the method that was asked for is for what is open
        if other is not None and (best.plan is None or other.value < best.plan.value):
            best = best._replace(plan=_as_asked(posed, other, other.value, best.lower_bound))
            if other.value <= best.lower_bound:
                break
    if best.plan is None:
        best = _or_least_peak(posed, best)
    return best if best.plan is None else best._replace(plan=quicker(posed, best.plan, deadline))


def _or_least_peak(posed: Posed, best: Best) -> Best:
    """Take the plan with the least peak memory, where limits leave no other that was tried."""
    question = posed.question
    is_known = question.minimised in ("cost", "peak_memory") or not posed.problem.is_limited
    if is_known or math.isinf(best.lower_bound):
        return best
    # The method that was asked for is for another objective, and of too many kinds of devices no
    # orders are searched for this one.
    any_order = question.any_order and count_states(posed.problem) <= MOST_STATES
    by_peak = replace(question, objective="peak_memory", method="auto", any_order=any_order)
    least = _least_peak(pose(by_peak, posed.chunks))
    if least is None:
        return best
    value = value_of(posed, Way.of(least))
    assert value is not None
    plan = _as_asked(posed, least, value, best.lower_bound)
    return best._replace(plan=replace(plan, notes=(*plan.notes, _BY_PEAK)))


def _least_peak(posed: Posed) -> Plan | None:
    """Find the plan with the least peak memory that fits, where no other one has been found."""
    if posed.question.time_limit is None:
        return best_of(posed).plan
    # Only what searches for its own objective: all else has been done for the question, in vain.
    found, deadline = solved(posed, posed.problem, None), Deadline(posed.question.time_limit)
    if found is None:
        return None
    plan = _lower_peak_with_waiting(posed, plan_of_split(posed, found), deadline)
    return plan if fits(plan) else _best_under_lower_limits(posed, found, plan, deadline)


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


def _as_asked(posed: Posed, plan: Plan, value: float, bound: float) -> Plan:
    """Turn the plan for another question about this chain into one for this question."""
    split = Way.of(plan).split(value, bound, plan.method)
    same = plan_of_split(posed, split).with_bound(min(bound, value))
    # The least peak has a gap because of what may wait, whether there is a limit or not.
    is_noted = posed.problem.is_limited and posed.question.objective != "peak_memory"
    return _noted(same) if is_noted else same


def _noted(plan: Plan) -> Plan:
    """Say why a plan under limits is not proven, unless it is."""
    note = "A split that is better by the least that may wait in it exceeds a limit by its own."
    return replace(plan, notes=(*plan.notes, note)) if plan.gap else plan


def _best_as_asked(posed: Posed) -> Best:
    """Find the best plan, or a good one, without a look at questions that leave less open.

    Limits are first checked with the least that may wait for other partitions. If the plan that is
    found exceeds one of them with its own, all ways are tried if they are few. If they are many,
    more is recomputed, where modes are open; the search is done again under lower and lower limits
    for the partitions that exceed theirs, and with the most that can wait; and the next best splits
    are tried, and those that lack least. The gap tells between which values the best plan is.

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
    plan = plan_of_split(posed, found)
    if question.objective == "peak_memory" and question.cost is None:
        plan = _lower_peak_with_waiting(posed, plan, deadline)
        ways = all_ways(posed, _MOST_PEAK_WAYS) if plan.gap else None
        if ways is not None:
            known = plan if fits(plan) else None
            any_plan = partial(_with_most_room, posed) if known is None else lambda: known
            return Best(*best_way(posed, ways, found, deadline, any_plan))
    if fits(plan):
        return Best(plan, plan.lower_bound)
    ways = all_ways(posed, MOST_WAYS)
    if ways is not None:
        return Best(*best_way(posed, ways, found, deadline, partial(_with_most_room, posed)))
    bound = found.lower_bound
    best = _best_under_lower_limits(posed, found, plan, deadline)
    # For the least peak, `_lower_peak_with_waiting` has done so.
    if question.minimised != "peak_memory" and (best is None or best.value > bound):
        careful = _solved_again(posed, posed.cautious, deadline)
        best = _best_fitting(None if careful is None else plan_of_split(posed, careful), best)
    n_places = posed.problem.n_layers * posed.problem.n_partitions
    is_late = deadline.is_up
    if best is None and is_late:
        best = _with_most_room(posed)  # quicker than what is left
    if best is None or (best.value > bound and n_places <= _FEW_PLACES):
        best, bound = _among_next(posed, best, bound, deadline)
    if best is None and not is_late:
        best = _with_most_room(posed)
    if best is None:
        return Best(None, bound)
    bound = min(bound, best.value)
    return Best(_noted(best.with_bound(bound)), bound)


def _best_under_lower_limits(
    posed: Posed, found: Split, plan: Plan, deadline: Deadline
) -> Plan | None:
    """Return the best plan that fits of a split, and of those under lower limits."""
    best: Plan | None = None

    def solve(problem: Problem) -> Split | None:
        is_enough = best is not None and deadline.is_up
        return None if is_enough else _solved_again(posed, problem, deadline)

    for split, one in chain([(found, plan)], under_lower_limits(posed, found, plan, solve)):
        if best is not None and split.value >= best.value:
            break  # no later one is better
        best = _best_fitting(roomier(posed, one), best)
    return best


def _solved_again(posed: Posed, problem: Problem, deadline: Deadline) -> Split | None:
    """Solve a variant of a question that has been answered, in the time that is left."""
    try:
        return solved(posed, problem, deadline.left)
    except BalanceError:
        return None  # HiGHS found nothing in time; there is another answer


def _with_most_room(posed: Posed) -> Plan | None:
    """Try the splits that lack least, counted with the most that may wait and with the least."""
    for problem in (posed.cautious, posed.problem):
        in_order = [replace(problem, any_order=False)] if problem.any_order else []
        for one in [problem, *in_order]:
            if count_states(one) > MOST_STATES:
                continue
            short = least_shortage(one)
            if short is None:
                continue
            path = short[1]
            way = Way(path.bounds, path.modes, path.order)
            value = value_of(posed, way)
            if value is None:
                continue
            split = way.split(value, 0.0, "peak bisection")
            plan = roomier(posed, plan_of_split(posed, split))
            if fits(plan):
                return replace(plan, notes=(*plan.notes, _BY_PEAK))
    return None


def _among_next(
    posed: Posed, best: Plan | None, bound: float, deadline: Deadline
) -> tuple[Plan | None, float]:
    """Try the next best splits while there is time; return the best that fits, and a bound."""
    # Then one split is one plan, and no split that comes later in the ranking is better.
    is_given = not posed.is_open
    n_tried = 0
    most = _MOST_TRIED if best is not None else _MOST_UNTIL_ONE_FITS
    for other in _next_best(posed, most):
        if is_given:
            bound = max(bound, other.lower_bound)
        if best is not None and (deadline.is_up or other.lower_bound >= best.value):
            return best, bound
        n_tried += 1
        plan = roomier(posed, plan_of_split(posed, other))
        if fits(plan):
            best = _best_fitting(plan, best)
            if is_given:
                return best, bound
    if is_given and 0 < n_tried < most:
        # All of them were tried: whatever fits was found.
        return best, math.inf if best is None else best.value
    return best, bound


def _best_fitting(*plans: Plan | None) -> Plan | None:
    """Return the plan of least value that fits, the first of equal ones; None: none does."""
    known = [plan for plan in plans if plan is not None and fits(plan)]
    return min(known, key=lambda plan: plan.value, default=None)


def _lower_peak_with_waiting(posed: Posed, plan: Plan, deadline: Deadline) -> Plan:
    """Return the plan with the lower peak of two, one found where the most that can wait counts."""
    if plan.value <= plan.lower_bound and fits(plan):
        return plan
    found = _solved_again(posed, posed.cautious, deadline)
    if found is None:
        return plan
    other = plan_of_split(posed, replace(found, lower_bound=plan.lower_bound))
    return min(plan, other, key=lambda each: (not fits(each), each.value))


def _next_best(posed: Posed, most: int) -> Iterator[Split]:
    question = posed.question
    if question.cost is not None or question.objective == "peak_memory" or question.is_searched:
        return iter(())
    try:
        return islice(iter_best_splits(posed.problem, question.objective), most)
    except BalanceError:
        return iter(())  # no solver can be asked for the next best


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
