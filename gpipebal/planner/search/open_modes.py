"""Checkpoint modes that are open: slower ones where memory is lacking, faster ones where it is not.

Searches choose modes by the least that may wait for other partitions. A plan as a whole may show
that a mode needs too much, or that a faster one would have fitted.
"""

from __future__ import annotations

from dataclasses import replace

from gpipebal.plan import Plan
from gpipebal.planner.execution import Way
from gpipebal.planner.plans import fits, keeps_limit, plan_of_split, value_of
from gpipebal.planner.posing import Posed
from gpipebal.problem import to_bounds
from gpipebal.schedule import CHECKPOINT_MODES, CheckpointMode
from gpipebal.solvers.deadline import Deadline

__all__ = ["quicker", "roomier"]

#: The next mode for a partition that lacks memory for one.
_SLOWER: dict[CheckpointMode, CheckpointMode] = {"never": "except_last", "except_last": "always"}


def roomier(posed: Posed, plan: Plan) -> Plan:
    """Let partitions that exceed their limits recompute more, where modes are open.

    Returns:
        A plan that fits, if one is found with the same cuts and devices; else one that does not.
    """
    while posed.question.checkpoint == "auto" and not fits(plan):
        modes = _slower(plan)
        other = None if modes == plan.modes else _with_modes(posed, plan, modes)
        if other is None:
            break
        plan = other
    return plan


def _slower(plan: Plan) -> tuple[CheckpointMode, ...]:
    """Return a plan's modes, slower by one where memory is lacking, or in the neighbours of that.

    What waits in a partition waits for its neighbours, so their modes count too.
    """
    lacks = {j for j, part in enumerate(plan.partitions) if not keeps_limit(part)}
    beside = {j + step for j in lacks for step in (-1, 1)}
    for which in (lacks, beside, set(range(plan.n_partitions))):
        modes = tuple(
            _SLOWER.get(mode, mode) if j in which else mode for j, mode in enumerate(plan.modes)
        )
        if modes != plan.modes:
            return modes
    return plan.modes


def quicker(posed: Posed, plan: Plan, deadline: Deadline) -> Plan:
    """Give partitions faster modes, one after the other, as long as one fits, if modes are open.

    Args:
        posed: The question.
        plan: A plan that fits.
        deadline: When it is up, no more modes are tried.

    Returns:
        A plan that fits with the same cuts and devices, and a value that is no larger.

    Complexity:
        One plan for each mode that would fit if the least waited: mostly none.
    """
    before = None
    while plan is not before:
        before = plan
        for j in range(plan.n_partitions):
            for mode in _faster(posed, plan, j):
                if deadline.is_up:
                    return plan
                other = _with_modes(posed, plan, (*plan.modes[:j], mode, *plan.modes[j + 1 :]))
                if other is not None and other.value <= plan.value and fits(other):
                    plan = other
                    break
    return plan


def _faster(posed: Posed, plan: Plan, j: int) -> list[CheckpointMode]:
    """List faster modes of a partition, the fastest first.

    Left out is what does not fit whatever waits, or has a higher peak where the peak is minimised.
    """
    memory, part = posed.problem.memory, plan.partitions[j]
    if posed.question.checkpoint != "auto" or memory is None:
        return []
    highest = int(plan.value) if posed.question.minimised == "peak_memory" else None
    most = min((n for n in (part.memory_limit, highest) if n is not None), default=None)
    start, end = to_bounds(plan.balance)[j : j + 2]
    faster = CHECKPOINT_MODES[: CHECKPOINT_MODES.index(plan.modes[j]) : -1]
    return [mode for mode in faster if memory.fits(start, end, j, mode, most)]


def _with_modes(posed: Posed, plan: Plan, modes: tuple[CheckpointMode, ...]) -> Plan | None:
    """Return the plan with other modes, and the same bound and notes."""
    way = Way.of(plan)._replace(modes=modes)
    value = value_of(posed, way)
    if value is None:
        return None
    bound = min(plan.lower_bound, value)
    other = plan_of_split(posed, way.split(value, bound, plan.method)).with_bound(bound)
    return replace(other, notes=plan.notes)
