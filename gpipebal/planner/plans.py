"""A split turned into a plan, with what it costs under the schedule that was asked for."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import assert_never

from gpipebal.plan import PartitionPlan, Plan
from gpipebal.planner.assemble import assemble, equal_split, peaks_of
from gpipebal.planner.execution import Execution, Way
from gpipebal.planner.own_cost import cost_of_run
from gpipebal.planner.posing import Posed
from gpipebal.planner.schedules.costs import ScheduleCosts
from gpipebal.planner.sensitivity import sensitivity
from gpipebal.planner.times import order_for, pause_time
from gpipebal.profile import Profile
from gpipebal.schedule import Order, modes_of, partitions_on_each
from gpipebal.simulator import durations_of, place, weight_shares
from gpipebal.solvers import Split
from gpipebal.text import either

__all__ = [
    "fits",
    "keeps_limit",
    "plan_of_split",
    "plan_of_way",
    "value_of",
    "with_sensitivity",
]

#: Most actions that are simulated to tell how decisive cuts are under other schedules.
_MOST_ACTIONS = 10**7
#: Most layers and actions that are gone through for the memory of all moves: under limits ...
_MOST_UNDER_LIMITS = 4_000
#: ... and where peak memory is the objective, as its search takes longer anyway.
_MOST_PEAK_WORK = 40_000


def fits(plan: Plan) -> bool:
    """Whether every partition of a plan keeps its limit."""
    return all(map(keeps_limit, plan.partitions))


def keeps_limit(part: PartitionPlan) -> bool:
    """Whether a partition needs no more memory than it may."""
    return part.memory_limit is None or part.memory.total <= part.memory_limit


def plan_of_split(posed: Posed, found: Split) -> Plan:
    """Turn a split into a plan."""
    problem, question, profile = posed.problem, posed.question, posed.profile
    bounds, order, n = found.bounds, found.order, problem.n_partitions
    way = Way(bounds, found.modes, order)
    if question.checkpoint != "auto":
        # The modes that were asked for: solvers see those that count under the schedule.
        way = way._replace(modes=modes_of(question.checkpoint, n))
    execution = posed.execution(way)
    limits = [posed.problem.limits[k] for k in order] if posed.problem.is_limited else None
    partitions, step_time = assemble(profile, bounds, execution, limits)
    notes = (*posed.notes, *_notes_on_ties(profile, bounds, execution))
    if not execution.is_ours:
        unknown = f"Memory is that of the model: under {execution.schedule!r} no more is predicted."
        notes = (*notes, unknown)
    value, lower_bound, status = float(found.value), float(found.lower_bound), found.status
    # As `select_method` names it: the status tells whether all splits were gone through.
    method = "schedule search" if found.method == "schedule enumeration" else found.method
    objective = question.minimised
    if objective == "peak_memory":
        # Solvers know a lower bound of it.
        value = max(part.memory.total for part in partitions)
        lower_bound = found.lower_bound
        status = "optimal" if value <= lower_bound else "feasible"
    return Plan(
        partitions=partitions,
        chunks=execution.chunks,
        rows=profile.rows,
        checkpoint=execution.checkpoint,
        schedule=execution.schedule,
        objective=objective,
        value=value,
        lower_bound=lower_bound,
        status=status,
        method=method,
        makespan=_makespan_of(posed, way),
        bottleneck=_bottleneck_of(posed, way),
        step_time=step_time,
        pause_time=None if execution.loss_inside else pause_time(profile, execution.chunks),
        optimizer_time=profile.step.optimizer_time,
        loss_inside=execution.loss_inside,
        equal_split_value=value_of(posed, way._replace(bounds=equal_split(problem.n_layers, n))),
        shared_memory=execution.shared_memory,
        gradients_exist=execution.gradients_exist,
        device_order=() if order == tuple(range(n)) else order,
        overlaps=execution.overlaps,
        notes=notes,
        provenance=dict(profile.provenance),
        mini_batch_rows=posed.mini_batch_rows,
    )


def _notes_on_ties(profile: Profile, bounds: Sequence[int], execution: Execution) -> Iterator[str]:
    """Say which partitions share parameters, as partitions on two devices cannot."""
    if execution.is_ours and execution.shared_memory:
        return
    n = len(bounds) - 1
    n_devices = n // partitions_on_each(execution.schedule, n)
    # What GPipe does not run has a process for each device, whatever memory they have.
    why = "Every process trains a copy of its own."
    if execution.is_ours:
        why = "A pipeline refuses a parameter on several devices."
    for tie in profile.ties:
        parts = {bisect_right(bounds, k) - 1: k for k in reversed(tie.layers)}
        if len({j % n_devices for j in parts}) > 1:
            names = [profile.names[k] for k in sorted(parts.values())]
            ways = ["give these partitions one device"] if execution.is_ours else []
            if profile.n_layers - (max(parts.values()) - min(parts.values())) >= n:
                ways.append(
                    f"keep the layers in one partition (keep_together=[{(names[0], names[-1])!r}])"
                )
            yield (
                f"Layers {', '.join(map(repr, names))} share parameters, in partitions "
                f"{', '.join(map(str, sorted(parts)))}: {either([*ways, 'untie them'])}. {why}"
            )


def plan_of_way(posed: Posed, way: Way) -> Plan:
    """Turn a way that is given into a plan, whose value is that of the question's objective."""
    value = value_of(posed, way)
    assert value is not None
    return plan_of_split(posed, way.split(value, 0.0, "given"))


def value_of(posed: Posed, way: Way) -> float | None:
    """Return the objective's value of a split, whether or not it keeps limits and rules.

    None where the caller's own cost of runs does not allow the split, or rules forbid it: nobody
    asks what runs cost that are forbidden.
    """
    question, bounds = posed.question, way.bounds
    if question.cost is not None:
        if question.rules is not None and not question.rules.keeps(bounds):
            return None
        costs = [cost_of_run(question.cost, a, b, j) for j, (a, b) in enumerate(pairwise(bounds))]
        known = [cost for cost in costs if cost is not None]
        return float(max(known)) if len(known) == len(costs) else None
    if question.objective == "peak_memory":
        return float(max(_peaks_of(posed, way)))
    if question.objective == "makespan":
        return _makespan_of(posed, way)
    if question.objective == "bottleneck":
        return _bottleneck_of(posed, way)
    assert_never(question.objective)


def _peaks_of(posed: Posed, way: Way) -> list[int]:
    """Return the peak memory of every partition of a split."""
    memory = peaks_of(posed.profile, way.bounds, posed.execution(way))
    return [peak.total for peak in memory]


def _makespan_of(posed: Posed, way: Way) -> float:
    """Return the makespan of a split: GPipe's formula, or a simulation."""
    if posed.question.schedule == "gpipe":
        return float(posed.problem.makespan(*way))
    execution = posed.execution(way)
    times = durations_of(
        posed.profile, way.bounds, devices=execution.devices, links=execution.links
    ).without_launches
    # As in the problem: all forwards take equally long, and devices do not slow each other down.
    times = replace(times, no_grad_forward=None)
    return place(_order_of(execution, len(way.modes)), times, overlap=execution.overlaps).makespan


def _order_of(execution: Execution, n_partitions: int) -> Order:
    return order_for(execution.schedule, n_partitions, execution.chunks, execution.checkpoint)


def _bottleneck_of(posed: Posed, way: Way) -> float:
    return float(posed.problem.bottleneck(way.bounds, posed.counted(way.modes), way.order))


def with_sensitivity(posed: Posed, plan: Plan) -> Plan:
    """Add how decisive each cut is; moved cuts are simulated where only a timeline can tell."""
    question, problem = posed.question, posed.problem
    way = Way.of(plan)
    n_moves, n_actions = 2 * (plan.n_partitions - 1), 3 * plan.n_partitions * plan.chunks
    if question.is_searched and n_moves * n_actions > _MOST_ACTIONS:
        return plan
    objective = question.minimised
    is_peak = objective == "peak_memory"
    work = n_moves * (problem.n_layers + n_actions)
    if is_peak and work > _MOST_PEAK_WORK:
        return plan
    waits = is_peak or (posed.problem.is_limited and work <= _MOST_UNDER_LIMITS)
    moves = sensitivity(
        problem,
        way._replace(modes=posed.counted(way.modes)),
        objective,
        question.cost,
        peaks=(lambda bounds: _peaks_of(posed, way._replace(bounds=bounds))) if waits else None,
        makespans=_simulator_of(posed, way) if question.is_searched else None,
    )
    return replace(plan, sensitivity=moves)


def _simulator_of(posed: Posed, way: Way) -> Callable[[Sequence[Sequence[int]]], list[float]]:
    """Return a function that simulates splits as the search for the best of them does."""
    actions = _order_of(posed.execution(way), posed.problem.n_partitions)
    shares = weight_shares(posed.profile)
    return ScheduleCosts(posed.problem, actions, way.order, shares).makespans
