"""Recompute only some layers inside the partitions of a plan, where memory demands it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from gpipebal.errors import InfeasibleError
from gpipebal.plan import Plan
from gpipebal.planner.advice import has_plan, with_more
from gpipebal.planner.devices import DeviceCosts
from gpipebal.planner.posing import Posed
from gpipebal.planner.question import Size
from gpipebal.planner.recompute.choice import LayerRecompute
from gpipebal.planner.recompute.posing import check_costs, posed_again
from gpipebal.planner.recompute.run_choice import MOST_ROUNDS, RunChoice
from gpipebal.planner.recompute.ways import SearchTime
from gpipebal.planner.shortage import named_layers
from gpipebal.problem import Link
from gpipebal.profile import Profile
from gpipebal.solvers.deadline import NO_DEADLINE
from gpipebal.units import format_bytes

__all__ = ["recompute_layers"]


def recompute_layers(
    profile: Profile,
    plan: Plan,
    *,
    memory_limit: Size | Sequence[Size | None] | None = None,
    reserve: Size | None = None,
    devices: Sequence[DeviceCosts] | None = None,
    link: Link | None = None,
    time_limit: float | None = None,
) -> LayerRecompute:
    """Choose which layers of a plan's partitions to recompute, so that they fit at the least cost.

    For every partition that exceeds its limit, minimises the seconds of recomputing layers, over
    all ways to recompute some *runs* of its layers: a run keeps nothing but its input, and its
    forward is done again, for every micro-batch, when the backward comes to it. The graphs of all
    other layers are kept. A partition that the plan recomputes as a whole, by ``checkpoint``, is
    left as it is if it fits, and otherwise gets runs instead. Less time in one partition makes no
    makespan longer, so no other choice for the same plan has a smaller makespan.

    Two parts of the memory are known only for a whole choice: what may wait for busy neighbours,
    and, where partitions share one memory, values without a gradient that are held because an
    earlier partition saves them. Bounds leave out both. Where they decide, the limit is tightened
    by them, then other runs are tried in all partitions together, and the status is ``'feasible'``.

    Layers that stash or pop skip connections are in no run. Nor does any run have a layer whose
    output lies in the memory of the run's input (except for a part of the output that has no
    gradient, such as a mask that is passed along). A profile does not tell whether the first layer
    of the chain writes to its input: if it does and is in a run, the run keeps copies of the
    micro-batches in flight, which are not counted.

    Args:
        profile: The profile that the plan was made from.
        plan: Balance, micro-batches, checkpoint modes and schedule, ``'gpipe'`` or ``'1f1b'``.
        memory_limit: As for `solve`; None: the plan's limits.
        reserve: As for `solve`, if a memory limit is given.
        devices: The devices that the plan was made for, in the order in which `solve` was given
            them.
        link: As for `solve`.
        time_limit: Seconds to search for each partition, and again for what would fit where this
            fits none; None: as long as it takes.

    Returns:
        A `LayerRecompute`: the runs, and a `Plan` that has them, with the predicted times and
        memory. `GPipe.from_plan` runs it; `gpipebal.pipeline.with_recompute` makes layers in
        another pipeline recompute these runs.

    Raises:
        BalanceError: there is no limit, or a reserve without one; the profile is not the plan's; or
            another argument that makes no sense, such as a negative `time_limit`.
        KindError: `profile` is not a Profile, or `plan` no Plan.
        InfeasibleError: a partition exceeds its limit whatever is recomputed; or, where what waits
            for busy neighbours decides and there are many runs, it exceeds the limit with all runs
            that were tried. The text says which partition and which of the two it is, which limit
            would do, and whether `solve` finds a plan with modes of its own for this one.
        UnsupportedPlanError: a schedule whose memory is not known.

    Complexity:
        That of `gpipebal.solvers.knapsack.knapsack.cheapest` for each partition; a partition of n
        layers has O(n^2) runs for each set of shared storages that can be held.

    Example:
        >>> from gpipebal.planner import evaluate
        >>> profile = Profile.from_costs([1.0, 2.0, 1.0], saved_bytes=[40, 90, 20], chunks=4)
        >>> plan = evaluate(profile, [3], checkpoint="never")
        >>> chosen = recompute_layers(profile, plan, memory_limit=400)
        >>> chosen.runs, chosen.recompute_times, chosen.status
        ((range(1, 2),), (2.0,), 'optimal')
    """
    posed = posed_again(profile, plan, memory_limit, reserve, devices, link, time_limit)
    search = RunChoice(posed, plan, SearchTime(posed.question.time_limit), posed.problem.limits)
    check_costs(plan, search.before)
    found = search.answer()
    if isinstance(found, int):
        raise _infeasible(posed, plan, found, all_tried=search.all_tried)
    return found


def _infeasible(posed: Posed, plan: Plan, j: int, *, all_tried: bool) -> InfeasibleError:
    """Say which partition lacks most (else j), whatever is recomputed, and which limit would do."""
    time = SearchTime(posed.question.time_limit)
    needs = RunChoice(posed, plan, time, posed.problem.limits).needed()
    pairs = list(zip(needs, posed.problem.limits, strict=True))
    lacks = [0 if one is None else max(0, n - one) for n, one in pairs]
    j = lacks.index(max(lacks)) if any(lacks) else j
    limit, shortage = posed.problem.limits[j], max(1, lacks[j])
    assert limit is not None
    first = sum(plan.balance[:j])
    layers = named_layers(posed.profile.names, first, first + plan.balance[j])
    enough = _enough(posed, plan, needs)
    fix = "a plan with more partitions, or more and smaller micro-batches"
    if enough is not None:
        fix = _larger_limits(posed, plan, enough)
    asked = replace(posed.question, checkpoint="auto", chunks=(posed.chunks,), deadline=NO_DEADLINE)
    inside = replace(asked, loss_inside=True)
    if has_plan(asked):
        fix += "; or solve with checkpoint='auto', and recompute no single layers"
    elif not asked.loss_inside and has_plan(inside):
        fix += "; or solve with checkpoint='auto', loss_inside=True (and train with pipe.step)"
    which, least = "whichever of its layers are recomputed", "at least"
    if not all_tried:
        # Without what may wait for busy neighbours some runs fit, and there are many.
        which = "with any of the runs that were tried, for what may wait for busy neighbours"
        least = "with the runs that need least by themselves"
    return InfeasibleError(
        f"partition {j} does not fit its device, {which}: it may "
        f"use {format_bytes(limit)} (expected {format_bytes(shortage)} more). It has {layers}, "
        f"and needs {format_bytes(needs[j])} {least}.\nFix: {fix}.",
        j,
        shortage,
    )


def _enough(posed: Posed, plan: Plan, needs: Sequence[int]) -> list[int] | None:
    """Find how many bytes more let all partitions fit; None: not found.

    One that then fits as it is may make others wait for it, and these need more than before.
    """
    limits = posed.problem.limits
    lacks, time = [0] * plan.n_partitions, SearchTime(posed.question.time_limit)
    for _ in range(MOST_ROUNDS):
        pairs = zip(needs, limits, lacks, strict=True)
        before, lacks = lacks, [0 if one is None else max(n - one, x) for n, one, x in pairs]
        common = posed.question.limits
        if isinstance(common, int):
            usable = common - posed.question.reserve_of(common)
            most = max((one or 0) + n - usable for one, n in zip(limits, lacks, strict=True))
            # It grows for all at once, but not the lower limits that devices have of their own.
            lacks = [max(n, most) if x == usable else n for n, x in zip(lacks, limits, strict=True)]
        if lacks == before:
            return None  # it would not fit this time either
        more = [None if one is None else one + n for one, n in zip(limits, lacks, strict=True)]
        if not isinstance(RunChoice(posed, plan, time, more).answer(), int):
            return lacks
        needs = RunChoice(posed, plan, time, more).needed()
    return None


def _larger_limits(posed: Posed, plan: Plan, lacks: Sequence[int]) -> str:
    """Write the limits that leave each partition some bytes more, as the caller gives them.

    A partition may have two, one of its device's own: the lower one counts. Those that are large
    enough already are not named.

    Args:
        posed: The plan as a question, in the order of its partitions.
        plan: The plan.
        lacks: How many bytes more each partition has to be allowed, some of them above 0.
    """
    question, limits = posed.question, posed.question.limits
    each = limits if isinstance(limits, tuple) else (limits,) * plan.n_partitions
    own = tuple(getattr(device, "memory_limit", None) for device in question.devices or ())
    needed = [(limit or 0) + lack for limit, lack in zip(posed.problem.limits, lacks, strict=True)]

    def enough(limit: int, need: int) -> int:
        usable = limit - question.reserve_of(limit)
        return with_more(question, limit, max(0, need - usable))

    pairs = list(zip(each, needed, strict=True))
    more = tuple(None if limit is None else enough(limit, need) for limit, need in pairs)
    pairs = list(zip(own, needed, strict=False))
    more_own = tuple(None if limit is None else max(limit, need) for limit, need in pairs)
    texts = []
    if more != each and isinstance(limits, int):
        texts.append(f"memory_limit={max(limit or 0 for limit in more)}")
    elif more != each:
        reserve = "" if question.reserve is None else f", reserve={question.reserve}"
        texts.append(f"memory_limit={_as_given(plan, more)}{reserve}")
    if more_own != own:
        texts.append(f"devices with memory_limit={_as_given(plan, more_own)}, in their order")
    return " and ".join(texts)


def _as_given(plan: Plan, of_partitions: Sequence[int | None]) -> list[int | None]:
    """Put what partitions have into the order in which the devices were given."""
    given = dict(zip(plan.places, of_partitions, strict=True))
    return [given[k] for k in range(plan.n_partitions)]
