"""A plan posed as a question again, with what a plan does not contain: devices, links, limits."""

from __future__ import annotations

import math
from collections.abc import Sequence

from gpipebal.argument_kinds import is_list
from gpipebal.errors import BalanceError
from gpipebal.plan import Plan
from gpipebal.planner.devices import DeviceCosts
from gpipebal.planner.posing import Posed, posed_as
from gpipebal.planner.question import Options, Size, check_memory_limit
from gpipebal.problem import Link
from gpipebal.problem.chunking import check_planned
from gpipebal.profile import Profile
from gpipebal.units import count

__all__ = ["check_costs", "posed_again"]


def posed_again(
    profile: Profile,
    plan: Plan,
    memory_limit: Size | Sequence[Size | None] | None,
    reserve: Size | None,
    devices: Sequence[DeviceCosts] | None,
    link: Link | None,
    time_limit: float | None,
) -> Posed:
    """Pose the plan as a question, with devices and limits in the order of its partitions.

    Raises:
        BalanceError: the profile is not the plan's, nothing limits the memory, or an argument makes
            no sense.
        KindError: `profile` is not a Profile, or `plan` no Plan.
    """
    check_planned(profile, plan)
    if plan.runs:
        raise BalanceError(
            "layers of the plan are recomputed by themselves already: "
            f"plan.runs has {count(len(plan.runs), 'run')} (expected none).\n"
            "Fix: give the plan that they were chosen for, `before` of what recompute_layers gave."
        )
    limits = check_memory_limit(memory_limit, plan.n_partitions)
    if limits is None:
        if reserve is not None:
            raise BalanceError(
                f"reserve is taken off a limit, and none is given: reserve={reserve!r:.60}, "
                "memory_limit=None (expected a limit where a reserve is given: from those of the "
                "plan it is taken off already).\nFix: reserve=None, or memory_limit='16 GiB'."
            )
        limits = tuple(part.memory_limit for part in plan.partitions)
        reserve = 0
    elif isinstance(limits, tuple):
        limits = tuple(limits[k] for k in plan.places)
    if devices is not None and is_list(devices, in_order=True):
        devices = list(devices)
        if len(devices) == plan.n_partitions:
            devices = [devices[k] for k in plan.places]
    options = Options(
        devices=devices,
        link=link,
        memory_limit=limits,
        reserve=reserve,
        time_limit=time_limit,
    )
    posed = posed_as(plan, profile, options)
    if not posed.problem.is_limited:
        raise BalanceError(
            "nothing limits the memory: memory_limit=None, and the plan has no limits (expected "
            "bytes).\nFix: memory_limit='16 GiB', or whatever a device has."
        )
    return posed


def check_costs(plan: Plan, again: Plan) -> None:
    """Refuse a plan whose times are not those of the profile."""
    if not math.isclose(again.makespan, plan.makespan, rel_tol=1e-9):
        raise BalanceError(
            f"plan has other costs than the profile: plan.makespan={plan.makespan!r} (expected "
            f"{again.makespan!r}).\nFix: give the profile that the plan was made of (with a "
            "quantile, gpipebal.planner.at_quantile(profile, quantile)), and its devices and link."
        )
