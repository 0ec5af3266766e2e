"""`training_step`: the timeline that a profile predicts for a training step of a plan."""

from __future__ import annotations

import math
from collections.abc import Iterable

from gpipebal.errors import BalanceError
from gpipebal.memory.recomputed_runs import with_runs
from gpipebal.plan import Plan
from gpipebal.planner.assemble import step_time
from gpipebal.planner.execution import Execution
from gpipebal.planner.times import step_timeline
from gpipebal.problem.bounds import to_bounds
from gpipebal.problem.chunking import as_planned, check_planned
from gpipebal.profile import Profile
from gpipebal.simulator import durations_of
from gpipebal.timeline import Timeline
from gpipebal.units import format_seconds

__all__ = ["training_step"]


def training_step(profile: Profile, plan: Plan) -> Timeline:
    """Predict the timeline of a training step, without its optimizer, as `Plan.step_time` has it.

    `simulate` knows only what a plan contains: the layers' own times, which its makespan is
    made of. A profile tells how these change in a step: how much faster a partition on a CPU is
    while others wait, what turning between forwards and backwards costs, that forwards without
    a graph take less, what the host needs to launch layers, and how long the loss takes. So
    this is the timeline to compare with a measured one.

    Args:
        profile: The profile that the plan was made from.
        plan: The plan; without devices or links of its own, because those have times of their own.

    Returns:
        A Timeline with source ``'simulated'``.

    Raises:
        BalanceError: the plan was made from other costs: another profile, other devices, links, or
            a quantile of the times.
        KindError: `profile` is not a Profile, or `plan` is not a Plan.

    Example:
        >>> from gpipebal.planner import solve
        >>> profile = Profile.from_costs([1.0, 2.0, 3.0], chunks=4)
        >>> plan = solve(profile, 2)
        >>> training_step(profile, plan).makespan == plan.makespan
        True
    """
    check_planned(profile, plan)
    profile, execution = with_runs(as_planned(profile, plan), plan.runs), Execution.of(plan)
    bounds = to_bounds(plan.balance)
    times = durations_of(profile, bounds)
    for kind in ("forward", "recompute", "backward"):
        planned = [getattr(part, f"{kind}_time") for part in plan.partitions]
        _check_alike(kind, getattr(times, kind), planned)
    transfers = [part.receive_time + part.return_time for part in plan.partitions]
    _check_alike("transfer", [0.0] * len(transfers), transfers)
    timeline = step_timeline(profile, bounds, execution)
    mine, theirs = step_time(profile, execution, timeline), plan.step_time
    if mine is not None and theirs is not None and not _are_alike(mine, theirs):
        raise _of_others(
            f"its training step takes {format_seconds(theirs)} (expected {format_seconds(mine)})"
        )
    return timeline


def _of_others(what: str) -> BalanceError:
    return BalanceError(
        f"plan was not made from this profile alone: {what}; other costs, devices, links or a "
        "quantile make others.\nFix: the profile that the plan was made from, on its own devices, "
        "or a plan of this one: evaluate(profile, balance)."
    )


def _are_alike(mine: float, theirs: float) -> bool:
    return math.isclose(mine, theirs, rel_tol=1e-6)


def _check_alike(kind: str, of_profile: Iterable[float], of_plan: Iterable[float]) -> None:
    for j, (mine, theirs) in enumerate(zip(of_profile, of_plan, strict=True)):
        if not _are_alike(mine, theirs):
            raise _of_others(
                f"partition {j} has a {kind} time of {format_seconds(theirs)} (expected "
                f"{format_seconds(mine)})"
            )
