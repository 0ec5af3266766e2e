"""The best plan for a question: solved for each number of micro-batches, and checked for limits."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import NamedTuple

from gpipebal.errors import BalanceError
from gpipebal.plan import Plan
from gpipebal.planner.execution import Way
from gpipebal.planner.plans import fits, plan_of_split
from gpipebal.planner.posing import Posed, pose
from gpipebal.planner.search.all_ways import all_ways
from gpipebal.planner.search.best_way import best_way
from gpipebal.planner.search.descent import Descent, Found
from gpipebal.planner.search.lower_bounds import quick_bound_of
from gpipebal.planner.search.lower_limits import under_lower_limits
from gpipebal.planner.search.remaining import proven
from gpipebal.planner.search.row_peaks import RowPeaks
from gpipebal.planner.search.solved import solved
from gpipebal.problem import Device, Problem
from gpipebal.solvers import Split, iter_best_splits
from gpipebal.solvers.deadline import Deadline
from gpipebal.solvers.sets.levels import MOST_STATES, count_states
from gpipebal.solvers.sets.peak import least_shortage

__all__ = ["MOST_WAYS", "Best", "best_of", "best_of_all", "least_peak_plan"]

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


def best_of(posed: Posed, *, thorough: bool = True) -> Best:
    """Find the best plan, or a good one, at one number of micro-batches.

    Limits are first checked with the least that may wait for other partitions. Where that is not
    all, the plan that is found exceeds a limit, or its peak is higher than what was minimised. Then
    all ways are tried if they are few. If they are many, a search by small changes begins at that
    plan, and at others: at those found under lower and lower limits, and with the most that can
    wait. The next best splits are tried, too. At last all that could still be better is gone
    through, as far as that is quick. The gap tells between which values the best plan is.

    Time that is up ends the search for better plans. As long as none is known that fits, all of
    this is tried all the same, but each search on the way returns the first split that it finds.

    Args:
        posed: The question.
        thorough: Whether all of this is done where ways are many; if not, small changes begin at
            that plan only.
    """
    question = posed.question
    deadline = Deadline(question.time_limit)
    found = solved(posed, posed.problem, question.time_limit)
    if found is None:
        return Best(None, math.inf)
    if found.lower_bound < found.value:
        # A solver that is out of time may have a worse bound than this quick one.
        found = found.with_bound(max(found.lower_bound, quick_bound_of(posed)))
    plan, rows = plan_of_split(posed, found), RowPeaks(posed)
    is_peak = question.minimised == "peak_memory"
    if fits(plan) and (plan.value <= plan.lower_bound or not is_peak):
        if plan.gap and posed.problem.is_limited:
            plan = _descended(rows, found, [Way.of(plan)], deadline) or plan
            plan = proven(rows, plan, deadline, thorough=thorough)
        return Best(plan, plan.lower_bound)
    starts = _starts(posed, found, plan, deadline) if thorough else [Way.of(plan)]
    descended = partial(_descended, rows, found, starts, deadline)
    ways = all_ways(posed, _MOST_PEAK_WAYS if is_peak else MOST_WAYS)
    if ways is not None:
        return Best(*best_way(posed, ways, found, deadline, descended))
    best, bound = descended(), found.lower_bound
    if thorough:
        n_places = posed.problem.n_layers * posed.problem.n_partitions
        if best is None or (best.value > bound and n_places <= _FEW_PLACES):
            best, bound = _among_next(posed, best, bound, deadline)
        if best is None and not math.isinf(bound):
            best = _by_least_peak(rows, found, deadline)
    if best is None:
        return Best(None, bound)
    best = proven(rows, best.with_bound(bound), deadline, thorough=thorough)
    return Best(best if is_peak else _noted(best), best.lower_bound)


def _descended(
    rows: RowPeaks, split: Split, starts: Iterable[Way], deadline: Deadline
) -> Plan | None:
    """Return the best plan that fits of those that small changes lead to; None: none fits."""
    descent, bound = Descent(rows.posed, rows), split.lower_bound
    best: Found | None = None
    for start in starts:
        found = descent.from_here(start, deadline)
        if found is not None and (best is None or found.standing < best.standing):
            best = found
        if best is None or not best.standing.fits:
            continue
        if deadline.is_up or best.standing.value <= bound:
            break
    if best is None or not best.standing.fits:
        return None
    value = best.standing.value
    changed = best.way.split(value, min(bound, value), split.method)
    return plan_of_split(rows.posed, changed).with_bound(min(bound, value))


def _starts(posed: Posed, split: Split, plan: Plan, deadline: Deadline) -> Iterator[Way]:
    """Yield ways from which small changes may lead to a good plan."""
    yield Way.of(plan)
    again = partial(_solved_again, posed, deadline=deadline)
    if posed.problem.is_limited:
        yield from map(Way.of, under_lower_limits(posed, split, plan, again))
    cautious = again(posed.cautious)
    if cautious is not None:
        yield Way(cautious.bounds, cautious.modes, cautious.order)
    if not posed.problem.is_limited:
        return
    for problem in (posed.cautious, posed.problem):
        in_order = [replace(problem, any_order=False)] if problem.any_order else []
        for one in [problem, *in_order]:
            short = None if count_states(one) > MOST_STATES else least_shortage(one)
            if short is not None:
                yield Way(short[1].bounds, short[1].modes, short[1].order)


def _solved_again(posed: Posed, problem: Problem, deadline: Deadline) -> Split | None:
    """Solve a variant of a question that has been answered, in the time that is left."""
    try:
        return solved(posed, problem, deadline.left)
    except BalanceError:
        return None  # HiGHS found nothing in time; there is another answer


def _by_least_peak(rows: RowPeaks, split: Split, deadline: Deadline) -> Plan | None:
    """Begin at the plan with the least peak memory; None: nothing fits there either."""
    least = least_peak_plan(rows.posed)
    plan = None if least is None else _descended(rows, split, [Way.of(least)], deadline)
    return None if plan is None else replace(plan, notes=(*plan.notes, _BY_PEAK))


def least_peak_plan(posed: Posed) -> Plan | None:
    """Find the plan with the least peak memory, whatever the limits; once for each question.

    None: nothing limits it, or what is minimised is a cost, or the least peak itself.
    """
    minimised = posed.question.minimised
    if not posed.problem.is_limited or minimised in ("cost", "peak_memory"):
        return None
    if "least peak" not in posed.known:
        posed.known["least peak"] = _least_peak_plan(posed)
    return posed.known["least peak"]


def _least_peak_plan(posed: Posed) -> Plan | None:
    question = posed.question
    devices = question.devices and tuple(
        replace(device, memory_limit=None) if isinstance(device, Device) else device
        for device in question.devices
    )
    # The method that was asked for is for another objective.
    by_peak = replace(
        question, objective="peak_memory", method="auto", devices=devices, limits=None
    )
    free = pose(by_peak, posed.chunks)
    if count_states(free.problem) > MOST_STATES:
        # No orders are searched for this objective.
        free = pose(replace(by_peak, any_order=False), posed.chunks)
    return best_of(free).plan


def _noted(plan: Plan) -> Plan:
    """Say why a plan under limits is not proven, unless it is."""
    note = "A split that is better by the least that may wait in it exceeds a limit by its own."
    return replace(plan, notes=(*plan.notes, note)) if plan.gap else plan


def _among_next(
    posed: Posed, best: Plan | None, bound: float, deadline: Deadline
) -> tuple[Plan | None, float]:
    """Try the next best splits while there is time; return the best that fits, and a bound."""
    # Then one split is one plan, and no split that comes later in the ranking is better.
    is_given = not posed.is_open
    descent, n_tried = Descent(posed), 0
    most = _MOST_TRIED if best is not None else _MOST_UNTIL_ONE_FITS
    for other in _next_best(posed, most):
        if is_given:
            bound = max(bound, other.lower_bound)
        if best is not None and (deadline.is_up or other.lower_bound >= best.value):
            return best, bound
        n_tried += 1
        plan = descent.with_better_modes(plan_of_split(posed, other))
        if fits(plan):
            best = plan if best is None or plan.value < best.value else best
            if is_given:
                return best, bound
    if is_given and 0 < n_tried < most:
        # All of them were tried: whatever fits was found.
        return best, math.inf if best is None else best.value
    return best, bound


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
    bound = math.inf
    for k in sorted(range(len(posed)), key=lower_bounds.__getitem__):
        if best is not None and lower_bounds[k] >= best[1].value:
            break
        plan, lower_bound = best_of(posed[k])
        bound = min(bound, lower_bound)
        if plan is not None and (best is None or plan.value < best[1].value):
            best = posed[k], plan
    if best is None:
        return None
    return best[0], best[1].with_bound(bound)
