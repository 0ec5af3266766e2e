"""A plan put as a question again, with what was not its own: limits, devices and links."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from gpipebal.errors import BalanceError
from gpipebal.kinds import check_kind
from gpipebal.plan import Plan
from gpipebal.planner.posing import Posed, pose
from gpipebal.planner.question import Options, Place, Size, ask
from gpipebal.problem import Link
from gpipebal.profile import Profile

__all__ = ["check_costs", "posed_again"]


def posed_again(
    profile: Profile,
    plan: Plan,
    memory_limit: Size | Sequence[Size | None] | None,
    reserve: Size | None,
    devices: Sequence[Place] | None,
    link: Link | None,
) -> Posed:
    """Put the plan as a question, with devices and limits in the order of its partitions."""
    check_kind("profile", profile, Profile)
    check_kind("plan", plan, Plan)
    names = tuple(name for part in plan.partitions for name in part.layers)
    prints = tuple(one for part in plan.partitions for one in part.fingerprints)
    if names != profile.names or prints != tuple(layer.fingerprint for layer in profile.layers):
        raise BalanceError(
            f"plan is of another chain than the profile: it has {len(names)} layers (expected the "
            f"same {profile.n_layers} layers).\nFix: give the profile that the plan was made from."
        )
    if memory_limit is None:
        memory_limit = [part.memory_limit for part in plan.partitions]
        reserve = 0
    elif isinstance(memory_limit, list | tuple) and len(memory_limit) == plan.n_partitions:
        memory_limit = [memory_limit[k] for k in plan.devices]
    if devices is not None and len(devices) == plan.n_partitions:
        devices = [devices[k] for k in plan.devices]
    options = Options(
        checkpoint=plan.modes,
        schedule=plan.schedule,
        loss_inside=plan.loss_inside,
        shared_memory=plan.shared_memory,
        gradients_exist=plan.gradients_exist,
        devices=devices,
        link=link,
        memory_limit=memory_limit,
        reserve=reserve,
    )
    if plan.rows != profile.rows:
        profile = profile.at_rows(plan.rows)
    # Of one size: it is the size of the plan's micro-batches, however many there are.
    profile = replace(profile, chunks=plan.chunks, other_sizes=())
    posed = pose(ask(profile, plan.n_partitions, options), plan.chunks)
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
