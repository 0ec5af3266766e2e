"""`solve`: from a profile to a plan."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from gpipebal.errors import UnsupportedPlanError
from gpipebal.memory import partition_memory
from gpipebal.plan import PartitionPlan, Plan
from gpipebal.problem import Problem
from gpipebal.profile import Profile
from gpipebal.schedule import CheckpointMode, check_count
from gpipebal.simulator import simulate
from gpipebal.solvers import Objective, split

__all__ = ["equal_split", "make_plan", "solve"]


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
        checkpoint: Which micro-batches are recomputed.
        schedule: ``'gpipe'``.
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
        UnsupportedPlanError: an unknown schedule.

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
    if schedule != "gpipe":
        raise UnsupportedPlanError(
            f"schedule is not known to the planner: schedule={schedule!r} (expected 'gpipe').\n"
            "Fix: schedule='gpipe'."
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
    if shared_memory is None:
        shared_memory = profile.provenance.get("device_type") == "cpu"
    memory = partition_memory(
        profile,
        problem.check_bounds(bounds),
        chunks=problem.chunks,
        checkpoint=problem.checkpoint,
        shared_memory=shared_memory,
    )
    partitions = []
    for j, peak in enumerate(memory):
        layers = profile.layers[bounds[j] : bounds[j + 1]]
        partitions.append(
            PartitionPlan(
                layers=tuple(layer.name for layer in layers),
                fingerprints=tuple(layer.fingerprint for layer in layers),
                forward_time=math.fsum(layer.forward_time for layer in layers),
                backward_time=math.fsum(layer.backward_time for layer in layers),
                recompute_time=math.fsum(layer.recompute_time for layer in layers),
                memory=peak,
            )
        )
    value_of = problem.makespan if objective == "makespan" else problem.bottleneck
    step = profile.step
    pause = None
    if step.loss_time is not None and step.gather_time is not None:
        # Measured for the mini-batch of the profile; both grow with the rows.
        pause = (step.loss_time + step.gather_time) * problem.chunks / profile.chunks
    plan = Plan(
        partitions=tuple(partitions),
        chunks=problem.chunks,
        rows=profile.rows,
        checkpoint=problem.checkpoint,
        schedule="gpipe",
        objective=objective,
        value=float(value_of(bounds)),
        lower_bound=float(lower_bound),
        status=status,
        method=method,
        makespan=float(problem.makespan(bounds)),
        bottleneck=float(problem.bottleneck(bounds)),
        pause_time=pause,
        equal_split_value=float(value_of(equal_split(problem.n_layers, problem.n_partitions))),
        shared_memory=shared_memory,
        provenance=dict(profile.provenance),
    )
    if pause is None or step.optimizer_time is None:
        return plan
    return replace(plan, step_time=simulate(plan, pause=pause).makespan + step.optimizer_time)


def equal_split(n_layers: int, n_partitions: int) -> tuple[int, ...]:
    """Return the bounds of a split into equally many layers; earlier partitions take the rest.

    Example:
        >>> equal_split(7, 3)
        (0, 3, 5, 7)
    """
    small, n_large = divmod(n_layers, n_partitions)
    return tuple(j * small + min(j, n_large) for j in range(n_partitions + 1))


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
