"""The best plan of a question: solved for each number of micro-batches, and held against limits."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice, pairwise
from typing import Literal

from gpipebal.errors import BalanceError, InfeasibleError
from gpipebal.plan import Plan
from gpipebal.planner.assemble import assemble, equal_split
from gpipebal.planner.posing import Posed
from gpipebal.planner.schedules import search, weight_shares
from gpipebal.planner.sensitivity import sensitivity
from gpipebal.planner.times import Surroundings, durations, order_for
from gpipebal.problem import Problem, to_bounds
from gpipebal.schedule import Checkpoint, CheckpointMode
from gpipebal.simulator import place
from gpipebal.solvers import Split, find, iter_best_splits, split_any_cost

__all__ = [
    "best_of",
    "best_of_all",
    "fits",
    "lower_bound_of",
    "plan_of_split",
    "solved",
    "with_sensitivity",
]

#: How many of the best splits are tried where the best one has too much waiting.
_MOST_TRIED = 16


def lower_bound_of(problem: Problem, objective: str) -> float:
    """Bound the makespan of every split from below, in no time; 0 for another objective.

    All micro-batches go through all layers once, and then again and again through the largest
    layer, or an even share, on the fastest device there is for it.

    Example:
        >>> lower_bound_of(Problem([1, 3], [2, 6], [1, 3], 2, chunks=3), "makespan")
        36
    """
    if objective != "makespan":
        return 0
    costs, never = problem.costs, "never"
    modes = [never] if problem.checkpoint == "auto" else _modes_of(problem)
    least = []
    for name in ("forward", "backward"):
        sums = [getattr(one, name) for one in costs.types]
        layers = [min(b - a for a, b in pair) for pair in zip(*map(pairwise, sums), strict=True)]
        least.append(layers)
    if never not in modes and problem.chunks > 1:
        sums = [one.recompute for one in costs.types]
        again = [min(b - a for a, b in pair) for pair in zip(*map(pairwise, sums), strict=True)]
        least.append([b + r for b, r in zip(least[1], again, strict=True)])
    n, repeats = problem.n_partitions, problem.chunks - 1
    slowest = [max(max(layers), -(-sum(layers) // n)) for layers in (least[0], least[-1])]
    return problem.to_time(sum(map(sum, least[:2])) + repeats * sum(slowest))


def _modes_of(problem: Problem) -> Sequence[str]:
    checkpoint = problem.checkpoint
    return [checkpoint] if isinstance(checkpoint, str) else list(checkpoint)


def best_of(posed: Posed) -> Plan | None:
    """Find the best plan at one number of micro-batches; None if nothing fits.

    Limits are first compared without what waits for busy neighbours. If the plan that is found
    exceeds one of them in its own timeline, the search is done again with the most that can wait,
    and the gap tells between which values the best plan is.
    """
    question = posed.question
    found = solved(posed, posed.problem)
    if found is None:
        return None
    plan = plan_of_split(posed, found)
    if question.objective == "peak_memory" and question.cost is None:
        plan = _least_waiting(posed, plan)
    if fits(plan):
        return plan
    careful = solved(posed, posed.cautious)
    others = [] if careful is None else [careful]
    for other in (*others, *_next_best(posed)):
        plan = plan_of_split(posed, _bounded(other, found.lower_bound))
        if fits(plan):
            note = (
                "A split that is better without what waits for busy neighbours exceeds a limit "
                "with it."
            )
            return replace(plan, notes=(*plan.notes, note)) if plan.gap else plan
    return None


def _bounded(split: Split, lower_bound: float) -> Split:
    optimal = split.value <= lower_bound
    return replace(
        split,
        lower_bound=min(lower_bound, split.value),
        status="optimal" if optimal else "feasible",
    )


def _least_waiting(posed: Posed, plan: Plan) -> Plan:
    """Return the plan with the lower peak, of that one and of one that expects the most to wait."""
    if plan.value <= plan.lower_bound:
        return plan
    careful = solved(posed, posed.cautious)
    if careful is None:
        return plan
    other = plan_of_split(posed, replace(careful, lower_bound=plan.lower_bound))
    return min(plan, other, key=lambda one: (not fits(one), one.value))


def _next_best(posed: Posed) -> Iterator[Split]:
    question = posed.question
    other = question.schedule != "gpipe" and question.objective == "makespan"
    if question.cost is not None or question.objective == "peak_memory" or other:
        return iter(())
    try:
        return islice(iter_best_splits(posed.problem, question.objective), _MOST_TRIED)
    except BalanceError:
        return iter(())  # no solver can be asked for the next best


def solved(posed: Posed, problem: Problem) -> Split | None:
    """Run the solver that the question asks for; None if nothing fits."""
    question = posed.question
    if question.schedule != "gpipe" and question.objective == "makespan" and not question.cost:
        try:
            return search(
                problem,
                question.schedule,
                weight_share=weight_shares(posed.profile),
                time_limit=question.time_limit,
            )
        except InfeasibleError:
            return None
    if question.cost is None:
        return find(problem, question.objective, question.method, time_limit=question.time_limit)
    return _any_cost(posed, problem)


def _any_cost(posed: Posed, problem: Problem) -> Split | None:
    question, rules = posed.question, problem.rules
    cost, modes = question.cost, problem.costs.modes(None)
    assert cost is not None
    uncut = frozenset[int]() if rules is None else rules.uncut
    pinned = () if rules is None else rules.pinned

    def allowed(start: int, end: int, j: int) -> float | None:
        if start in uncut or end in uncut:
            return None
        if any((start <= layer < end) != (partition == j) for layer, partition in pinned):
            return None
        limit = posed.limits[j]
        if limit is not None and problem.memory is not None:
            peaks = problem.memory.rows(start, j, modes[j])
            if end - start > len(peaks) or peaks[end - start - 1] > limit:
                return None
        found = cost(start, end, j)
        if found is not None and found < 0:
            raise BalanceError(
                f"cost of a run is negative: cost({start}, {end}, {j})={found!r} (expected 0 or "
                "more).\nFix: return None for what is not allowed."
            )
        return found

    n_layers, n_partitions = problem.n_layers, problem.n_partitions
    longest = None if rules is None else rules.max_layers
    try:
        value, bounds = split_any_cost(allowed, n_layers, n_partitions, max_layers=longest)
    except InfeasibleError:
        return None
    return Split(bounds, value, value, "optimal", "dense table", modes, tuple(range(n_partitions)))


def fits(plan: Plan) -> bool:
    """Whether every partition of a plan keeps its limit."""
    return all(
        part.memory_limit is None or part.memory.total <= part.memory_limit
        for part in plan.partitions
    )


def plan_of_split(posed: Posed, found: Split) -> Plan:
    """Put a split into a plan."""
    problem, question = posed.problem, posed.question
    bounds, modes, order = found.bounds, found.modes, found.order
    n = problem.n_partitions
    in_order = order == tuple(range(n))
    equal = equal_split(problem.n_layers, n)
    objective = "cost" if question.cost is not None else question.objective
    plan = assemble(
        posed.profile,
        bounds,
        chunks=posed.chunks,
        checkpoint=_checkpoint_of(modes),
        schedule=question.schedule,
        loss_inside=question.loss_inside,
        objective=objective,
        value=float(found.value),
        lower_bound=float(found.lower_bound),
        status=found.status,
        method=found.method,
        makespan=_makespan_of(posed, bounds, modes, order),
        bottleneck=float(problem.bottleneck(bounds, modes, order)),
        equal_split_value=_value_of(posed, equal, modes, order),
        shared_memory=question.shared_memory,
        around=_around(posed, order),
        limits=[posed.limits[k] for k in order] if posed.is_limited else None,
        device_order=() if in_order else order,
        notes=posed.notes,
    )
    if objective == "peak_memory":
        peak = max(part.memory.total for part in plan.partitions)
        status = "optimal" if peak <= found.lower_bound else "feasible"
        plan = replace(plan, value=peak, lower_bound=found.lower_bound, status=status)
    return plan


def _checkpoint_of(modes: Sequence[CheckpointMode]) -> Checkpoint:
    return modes[0] if len(set(modes)) == 1 else tuple(modes)


def _value_of(
    posed: Posed,
    bounds: Sequence[int],
    modes: Sequence[CheckpointMode],
    order: Sequence[int],
) -> float | None:
    """Return the objective's value of a split, whether or not it keeps limits and rules."""
    question, problem = posed.question, posed.problem
    runs = list(enumerate(pairwise(bounds)))
    if question.cost is not None:
        costs = [question.cost(a, b, j) for j, (a, b) in runs]
        known = [cost for cost in costs if cost is not None and math.isfinite(cost)]
        return float(max(known)) if len(known) == len(costs) else None
    if question.objective == "peak_memory":
        assert problem.memory is not None
        rows = problem.memory.rows
        return float(max(int(rows(a, j, modes[j])[b - a - 1]) for j, (a, b) in runs))
    if question.objective == "makespan":
        return _makespan_of(posed, bounds, modes, order)
    return float(problem.bottleneck(bounds, modes, order))


def _around(posed: Posed, order: Sequence[int]) -> Surroundings:
    devices = posed.problem.devices
    return Surroundings(
        None if devices is None else [devices[k] for k in order], posed.problem.links
    )


def _makespan_of(
    posed: Posed, bounds: Sequence[int], modes: Sequence[CheckpointMode], order: Sequence[int]
) -> float:
    """Return the makespan of a split: GPipe's formula, or a simulation."""
    schedule = posed.question.schedule
    if schedule == "gpipe":
        return float(posed.problem.makespan(bounds, modes, order))
    around = _around(posed, order)
    times = durations(posed.profile, bounds, around=around)
    actions = order_for(schedule, len(bounds) - 1, posed.chunks, _checkpoint_of(modes))
    return place(actions, times, overlap=around.overlaps).makespan


def with_sensitivity(posed: Posed, plan: Plan) -> Plan:
    """Add how decisive each cut is."""
    question = posed.question
    if question.schedule != "gpipe" and question.objective == "makespan" and not question.cost:
        return plan  # each moved cut would be a simulation
    moves = sensitivity(
        posed.problem,
        to_bounds(plan.balance),
        plan.modes,
        plan.devices,
        "cost" if question.cost is not None else question.objective,
        question.cost,
    )
    return replace(plan, sensitivity=moves)


def best_of_all(posed: Sequence[Posed]) -> tuple[Posed, Plan] | None:
    """Find the best plan among numbers of micro-batches; None if nothing fits.

    The most promising are solved first; what is bounded above the best one found is left out.
    """
    if len(posed) == 1:
        plan = best_of(posed[0])
        return None if plan is None else (posed[0], plan)
    bounds = [lower_bound_of(one.problem, one.question.objective) for one in posed]
    best: tuple[Posed, Plan] | None = None
    proven = math.inf
    for k in sorted(range(len(posed)), key=bounds.__getitem__):
        if best is not None and bounds[k] >= best[1].value:
            break
        plan = best_of(posed[k])
        if plan is not None:
            proven = min(proven, plan.lower_bound)
            if best is None or plan.value < best[1].value:
                best = posed[k], plan
    if best is None:
        return None
    lower_bound = min(proven, best[1].value)
    status: Literal["optimal", "feasible"] = (
        "optimal" if lower_bound >= best[1].value else "feasible"
    )
    return best[0], replace(best[1], lower_bound=lower_bound, status=status)
