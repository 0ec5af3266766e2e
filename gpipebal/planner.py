"""From a profile to a plan: `solve` finds the balance, `evaluate` is given one."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import pairwise

from gpipebal.errors import BalanceError, UnsupportedPlanError
from gpipebal.memory import partition_memory
from gpipebal.plan import PartitionPlan, Plan
from gpipebal.problem import Problem, to_bounds
from gpipebal.profile import LayerProfile, Profile
from gpipebal.schedule import (
    Checkpoint,
    CheckpointMode,
    check_count,
    check_schedule,
    make_schedule,
    modes_of,
)
from gpipebal.simulator import Durations, place, simulate
from gpipebal.solvers import Objective, split

__all__ = ["equal_split", "evaluate", "make_plan", "solve"]


def solve(
    profile: Profile,
    partitions: int,
    *,
    chunks: int | None = None,
    checkpoint: CheckpointMode = "except_last",
    schedule: str = "gpipe",
    objective: Objective = "makespan",
    method: str = "auto",
    shared_memory: bool | None = None,
) -> Plan:
    """Find the best split of a profiled chain into partitions, with its proof.

    Minimises `objective` over all splits into exactly `partitions` non-empty runs of consecutive
    layers. Among equally good splits the one with the smaller bottleneck is taken, then the one
    with the smaller sum of squares of the partitions' times, then the one with the leftmost cuts.

    Args:
        profile: Costs of the layers for one micro-batch.
        partitions: Number of partitions, 1 to the number of layers.
        chunks: Micro-batches per mini-batch, each of the profile's rows; None: the profile's.
        checkpoint: Which micro-batches are recomputed, in all partitions.
        schedule: ``'gpipe'``. What a balance costs under ``'1f1b'``, or with a checkpoint mode
            for each partition, is for `evaluate` to say.
        objective: ``'makespan'``, the seconds from the first forward to the last backward of a
            mini-batch; or ``'bottleneck'``, the largest time of a partition for one micro-batch.
        method: Name of an algorithm, or ``'auto'``; see `gpipebal.solvers.select_method`.
        shared_memory: Whether all partitions live in one memory, which decides what a cut costs;
            None: if the profile was taken on a CPU.

    Returns:
        A `Plan`, whose ``status`` is ``'optimal'`` when ``value == lower_bound``.

    Raises:
        BalanceError: a count that is not 1 or more, more partitions than layers, an unknown
            checkpoint mode, objective or method.
        UnsupportedPlanError: a schedule other than ``'gpipe'``, or a mode for each partition.

    Complexity:
        O(n + k log n) steps per probe for n layers and k partitions, with some tens of probes;
        plus the tie-break.

    Source:
        See `gpipebal.solvers`.

    Example:
        >>> plan = solve(Profile.from_costs([1.0, 2.0, 3.0, 4.0]), 2, chunks=4)
        >>> plan.balance, plan.status
        ((3, 1), 'optimal')
    """
    if check_schedule(schedule) != "gpipe":
        raise UnsupportedPlanError(
            f"the best balance is not known under this schedule: schedule={schedule!r} (expected "
            "'gpipe').\n"
            f"Fix: gpipebal.planner.evaluate(profile, balance, schedule={schedule!r}) tells what "
            "a balance costs; or schedule='gpipe'."
        )
    if isinstance(checkpoint, (list, tuple)):
        raise UnsupportedPlanError(
            "the best balance is not known with a checkpoint mode for each partition: "
            f"checkpoint={checkpoint!r} (expected one mode).\n"
            "Fix: gpipebal.planner.evaluate(profile, balance, checkpoint=...) tells what a balance "
            "costs; or give one mode."
        )
    check_count("partitions", partitions)
    problem = _problem_of(profile, partitions, chunks, checkpoint)
    found = split(problem, objective, method)
    return make_plan(
        profile,
        problem,
        found.bounds,
        objective=objective,
        lower_bound=found.lower_bound,
        status=found.status,
        method=found.method,
        shared_memory=shared_memory,
    )


def make_plan(
    profile: Profile,
    problem: Problem,
    bounds: Sequence[int],
    *,
    objective: Objective = "makespan",
    lower_bound: float = 0.0,
    status: str = "feasible",
    method: str = "given",
    shared_memory: bool | None = None,
) -> Plan:
    """Put a split and what it is predicted to cost into a plan.

    Args:
        profile: Costs of the layers.
        problem: The same costs, as the solver sees them.
        bounds: First layer of each partition, then the number of layers.
        objective: What `lower_bound` bounds.
        lower_bound: A proven bound on the objective.
        status: ``'optimal'`` or ``'feasible'``.
        method: How the split was found.
        shared_memory: As for `solve`.

    Raises:
        BalanceError: `bounds` is no split of the chain.
    """
    value_of = problem.makespan if objective == "makespan" else problem.bottleneck
    return _assemble(
        profile,
        problem.check_bounds(bounds),
        chunks=problem.chunks,
        checkpoint=problem.checkpoint,
        schedule="gpipe",
        objective=objective,
        value=float(value_of(bounds)),
        lower_bound=float(lower_bound),
        status=status,
        method=method,
        makespan=float(problem.makespan(bounds)),
        bottleneck=float(problem.bottleneck(bounds)),
        equal_split_value=float(value_of(equal_split(problem.n_layers, problem.n_partitions))),
        shared_memory=shared_memory,
    )


def evaluate(
    profile: Profile,
    balance: Iterable[int],
    *,
    chunks: int | None = None,
    checkpoint: Checkpoint = "except_last",
    schedule: str = "gpipe",
    shared_memory: bool | None = None,
) -> Plan:
    """Predict what a given balance costs, under any schedule and checkpoint modes.

    The makespan comes from the closed form where there is one (``'gpipe'`` with one mode), and
    from a simulation of the schedule otherwise.

    A plan for ``'gpipe'`` is that of ``loss(pipe(x)).backward()``, with gather and loss between
    the phases; one for ``'1f1b'`` is that of `GPipe.step`, where the last partition computes the
    loss of each micro-batch. How the loss parts into forward and backward is not in a profile:
    half of its time is taken for each.

    Args:
        profile: Costs of the layers for one micro-batch.
        balance: Number of layers in each partition.
        chunks: Micro-batches per mini-batch, each of the profile's rows; None: the profile's.
        checkpoint: Which micro-batches are recomputed: one mode, or one for each partition.
        schedule: ``'gpipe'`` or ``'1f1b'``.
        shared_memory: As for `solve`.

    Returns:
        A `Plan` with status ``'feasible'`` and method ``'given'``. No order of the same actions
        takes less than its ``lower_bound``: a partition does all its work between the first
        micro-batch's way to it and the last one's way back.

    Raises:
        BalanceError: a balance that does not add up to the number of layers, a count that is not
            1 or more, an unknown checkpoint mode, or not one per partition.
        UnsupportedPlanError: an unknown schedule.

    Complexity:
        O(n + k m) for n layers, k partitions and m micro-batches.

    Example:
        >>> profile = Profile.from_costs([1.0, 2.0, 3.0, 4.0], chunks=4)
        >>> plan = evaluate(profile, [3, 1], checkpoint=["always", "never"], schedule="1f1b")
        >>> plan.makespan, plan.lower_bound, plan.recomputed
        (96.0, 96.0, (4, 0))
    """
    bounds = _bounds_of(balance, profile.n_layers)
    n_partitions = len(bounds) - 1
    chunks = profile.chunks if chunks is None else check_count("chunks", chunks)
    modes = modes_of(checkpoint, n_partitions)
    check_schedule(schedule)
    makespan = _makespan(profile, bounds, chunks, modes, schedule)
    equal = equal_split(profile.n_layers, n_partitions)
    plan = _assemble(
        profile,
        bounds,
        chunks=chunks,
        checkpoint=checkpoint if isinstance(checkpoint, str) else modes,
        schedule=schedule,
        objective="makespan",
        value=makespan,
        lower_bound=0.0,
        status="feasible",
        method="given",
        makespan=makespan,
        equal_split_value=_makespan(profile, equal, chunks, modes, schedule),
        shared_memory=shared_memory,
    )
    # Added up in another order the bound may be higher by a rounding error.
    return replace(plan, lower_bound=min(makespan, _least_makespan(plan)))


def equal_split(n_layers: int, n_partitions: int) -> tuple[int, ...]:
    """Return the bounds of a split into equally many layers; earlier partitions take the rest.

    Example:
        >>> equal_split(7, 3)
        (0, 3, 5, 7)
    """
    small, n_large = divmod(n_layers, n_partitions)
    return tuple(j * small + min(j, n_large) for j in range(n_partitions + 1))


def _assemble(
    profile: Profile,
    bounds: Sequence[int],
    *,
    chunks: int,
    checkpoint: Checkpoint,
    schedule: str,
    objective: str,
    value: float,
    lower_bound: float,
    status: str,
    method: str,
    makespan: float,
    equal_split_value: float,
    shared_memory: bool | None,
    bottleneck: float | None = None,
) -> Plan:
    """Put everything into a plan: times and memory of the partitions, and the step's time."""
    if shared_memory is None:
        shared_memory = profile.provenance.get("device_type") == "cpu"
    memory = partition_memory(
        profile,
        bounds,
        chunks=chunks,
        checkpoint=checkpoint,
        schedule=schedule,
        shared_memory=shared_memory,
    )
    durations = _durations(profile, bounds)
    partitions = []
    for j, peak in enumerate(memory):
        layers = profile.layers[bounds[j] : bounds[j + 1]]
        partitions.append(
            PartitionPlan(
                layers=tuple(layer.name for layer in layers),
                fingerprints=tuple(layer.fingerprint for layer in layers),
                forward_time=durations.forward[j],
                backward_time=durations.backward[j],
                recompute_time=durations.recompute[j],
                memory=peak,
            )
        )
    step = profile.step
    pause = None
    if schedule == "gpipe" and step.loss_time is not None and step.gather_time is not None:
        # Measured for the mini-batch of the profile; both grow with the rows.
        pause = (step.loss_time + step.gather_time) * chunks / profile.chunks
    plan = Plan(
        partitions=tuple(partitions),
        chunks=chunks,
        rows=profile.rows,
        checkpoint=checkpoint,
        schedule=schedule,
        objective=objective,
        value=value,
        lower_bound=lower_bound,
        status=status,
        method=method,
        makespan=makespan,
        bottleneck=0.0,
        pause_time=pause,
        equal_split_value=equal_split_value,
        shared_memory=shared_memory,
        provenance=dict(profile.provenance),
    )
    if bottleneck is None:
        bottleneck = max(plan.micro_batch_time(j) for j in range(plan.n_partitions))
    return replace(plan, bottleneck=bottleneck, step_time=_step_time(plan, profile))


def _step_time(plan: Plan, profile: Profile) -> float | None:
    """Predict the seconds of a training step; None if a part of it was not measured."""
    step = profile.step
    if step.optimizer_time is None or step.loss_time is None:
        return None
    if plan.schedule == "gpipe":
        if plan.pause_time is None:
            return None
        return simulate(plan, pause=plan.pause_time).makespan + step.optimizer_time
    half = step.loss_time / profile.chunks / 2
    *others, last = plan.partitions
    last = replace(
        last, forward_time=last.forward_time + half, backward_time=last.backward_time + half
    )
    return simulate(replace(plan, partitions=(*others, last))).makespan + step.optimizer_time


def _makespan(
    profile: Profile,
    bounds: Sequence[int],
    chunks: int,
    modes: Sequence[CheckpointMode],
    schedule: str,
) -> float:
    n_partitions = len(bounds) - 1
    if schedule == "gpipe" and len(set(modes)) == 1:
        return float(_problem_of(profile, n_partitions, chunks, modes[0]).makespan(bounds))
    order = make_schedule(schedule, n_partitions, chunks, modes)
    return place(order, _durations(profile, bounds)).makespan


def _durations(profile: Profile, bounds: Sequence[int]) -> Durations:
    def add(time_of: Callable[[LayerProfile], float]) -> tuple[float, ...]:
        return tuple(
            math.fsum(map(time_of, profile.layers[start:end])) for start, end in pairwise(bounds)
        )

    return Durations(
        forward=add(lambda layer: layer.forward_time),
        recompute=add(lambda layer: layer.recompute_time),
        backward=add(lambda layer: layer.backward_time),
    )


def _least_makespan(plan: Plan) -> float:
    """Bound the makespan from below, whatever the order of the plan's actions.

    The first micro-batch reaches a partition through the forwards of those before it, and the
    partition's last backward is followed by theirs.
    """
    around = 0.0
    least = 0.0
    for part, recomputed in zip(plan.partitions, plan.recomputed, strict=True):
        both = part.forward_time + part.backward_time
        least = max(least, around + plan.chunks * both + recomputed * part.recompute_time)
        around += both
    return least


def _bounds_of(balance: Iterable[int], n_layers: int) -> tuple[int, ...]:
    sizes = [check_count(f"balance[{j}]", size) for j, size in enumerate(balance)]
    if sum(sizes) != n_layers:
        n_partitions = min(max(1, len(sizes)), n_layers)
        fits = [end - start for start, end in pairwise(equal_split(n_layers, n_partitions))]
        raise BalanceError(
            f"balance does not fit the profile: sum(balance)={sum(sizes)} (expected {n_layers}, "
            f"the number of layers).\nFix: such as balance={fits}."
        )
    return to_bounds(sizes)


def _problem_of(
    profile: Profile, partitions: int, chunks: int | None, checkpoint: CheckpointMode
) -> Problem:
    return Problem(
        forward=[layer.forward_time for layer in profile.layers],
        backward=[layer.backward_time for layer in profile.layers],
        recompute=[layer.recompute_time for layer in profile.layers],
        n_partitions=partitions,
        chunks=profile.chunks if chunks is None else check_count("chunks", chunks),
        checkpoint=checkpoint,
    )
