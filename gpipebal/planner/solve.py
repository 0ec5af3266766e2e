"""The best balance of a profiled chain, with its proof."""

from __future__ import annotations

from collections.abc import Sequence

from gpipebal.errors import UnsupportedPlanError
from gpipebal.plan import Plan
from gpipebal.planner.assemble import assemble, equal_split
from gpipebal.planner.times import problem_of
from gpipebal.problem import Problem
from gpipebal.profile import Profile
from gpipebal.schedule import CheckpointMode, check_count, check_schedule
from gpipebal.solvers import Objective, split

__all__ = ["make_plan", "solve"]


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
    problem = problem_of(profile, partitions, chunks, checkpoint)
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
        UnsupportedPlanError: the problem leaves the checkpoint modes open.
    """
    checkpoint = problem.checkpoint
    if checkpoint == "auto":
        raise UnsupportedPlanError(
            "a plan needs the checkpoint mode of each partition: checkpoint='auto' (expected "
            "modes).\nFix: pose the problem with the modes that were found."
        )
    value_of = problem.makespan if objective == "makespan" else problem.bottleneck
    return assemble(
        profile,
        problem.check_bounds(bounds),
        chunks=problem.chunks,
        checkpoint=checkpoint,
        schedule="gpipe",
        loss_inside=False,
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
