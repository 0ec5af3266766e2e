"""What a given balance costs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise

from gpipebal.argument_kinds import check_kind, is_list, of_array
from gpipebal.errors import BalanceError
from gpipebal.plan import Plan
from gpipebal.plan.checks import check_chunks
from gpipebal.planner.assemble import equal_split
from gpipebal.planner.devices import DeviceCosts
from gpipebal.planner.execution import Way
from gpipebal.planner.plans import plan_of_way
from gpipebal.planner.posing import pose
from gpipebal.planner.question import Options, Size, ask
from gpipebal.problem import Link, to_bounds
from gpipebal.profile import Profile
from gpipebal.schedule import Checkpoint, check_count, check_schedule, modes_of

__all__ = ["evaluate"]


def evaluate(
    profile: Profile,
    balance: Iterable[int],
    *,
    chunks: int | None = None,
    checkpoint: Checkpoint = "except_last",
    schedule: str = "gpipe",
    loss_inside: bool | None = None,
    shared_memory: bool | None = None,
    gradients_exist: bool = False,
    devices: Sequence[DeviceCosts] | None = None,
    link: Link | None = None,
    memory_limit: Size | Sequence[Size | None] | None = None,
    reserve: Size | None = None,
) -> Plan:
    """Predict what a given balance costs, under the schedules that `GPipe` runs, in any modes.

    The makespan comes from the closed form where there is one (``'gpipe'``), and from a simulation
    of the schedule otherwise.

    The makespan is that of the layers alone, and takes every forward to be as long as one that
    records a graph. The plan's ``step_time`` is the best prediction: it includes the loss (inside
    the last partition, or together with the gather between the phases) and the optimizer, and
    counts forwards without a graph at their own times where the profile has them.

    Args:
        profile: Costs of the layers for one micro-batch.
        balance: Number of layers in each partition.
        chunks: Micro-batches per mini-batch; they have as many rows as in `solve`. None: the
            profile's.
        checkpoint: Which micro-batches are recomputed: one mode, or one for each partition.
        schedule: One of those that `GPipe` runs: ``'gpipe'`` or ``'1f1b'``.
        loss_inside: Whether the last partition computes the loss of each micro-batch, as in
            `GPipe.step`, or the caller computes that of the mini-batch, as in
            ``loss(pipe(x)).backward()``; None: the caller with ``'gpipe'``, the last partition with
            ``'1f1b'``.
        shared_memory: As for `solve`.
        gradients_exist: As for `solve`.
        devices: As for `solve`, in the order of the partitions.
        link: As for `solve`.
        memory_limit: As for `solve`. A balance that exceeds it is not refused: the plan shows the
            limit and the peak.
        reserve: As for `solve`.

    Returns:
        A `Plan` with status ``'feasible'`` and method ``'given'``. No order of the same actions
        takes less than its ``lower_bound``: a partition does all its work after the first
        micro-batch has come to it and before the last gradient goes back from it.

    Raises:
        BalanceError: a balance that does not add up to the number of layers, a count that is not
            1 or more, an unknown checkpoint mode, or not one per partition; or the caller's loss
            under a schedule that has no time between the phases for it.
        KindError: `profile` is not a Profile.
        UnsupportedPlanError: an unknown schedule.

    Complexity:
        O(n + k m) for n layers, k partitions and m micro-batches.

    Example:
        >>> profile = Profile.from_costs([1.0, 2.0, 3.0, 4.0], chunks=4)
        >>> plan = evaluate(profile, [3, 1], checkpoint=["always", "never"], schedule="1f1b")
        >>> plan.makespan, plan.lower_bound, plan.recomputed
        (96.0, 96.0, (4, 0))
    """
    check_kind("profile", profile, Profile)
    bounds = _bounds_of(balance, profile.n_layers)
    n_partitions = len(bounds) - 1
    chunks = None if chunks is None else check_chunks(chunks)
    modes = modes_of(of_array(checkpoint), n_partitions)
    schedule = check_schedule(schedule)
    options = Options(
        checkpoint=modes,
        schedule=schedule,
        loss_inside=loss_inside,
        shared_memory=shared_memory,
        gradients_exist=gradients_exist,
        devices=devices,
        link=link,
        memory_limit=memory_limit,
        reserve=reserve,
    )
    posed = pose(ask(profile, n_partitions, options), chunks)
    plan = plan_of_way(posed, Way(bounds, modes, range(n_partitions)))
    # The bound's sums are in another order, so it may be higher by a rounding error.
    return replace(plan, lower_bound=min(plan.makespan, _least_makespan(plan)), status="feasible")


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
    if not is_list(balance, in_order=True):
        raise BalanceError(
            f"balance is not a list: balance={balance!r:.60} (expected the number of layers of "
            f"each partition).\nFix: balance=[{n_layers}], all in one."
        )
    sizes = [check_count(f"balance[{j}]", size) for j, size in enumerate(balance)]
    if sum(sizes) != n_layers:
        n_partitions = min(max(1, len(sizes)), n_layers)
        fits = [end - start for start, end in pairwise(equal_split(n_layers, n_partitions))]
        raise BalanceError(
            f"balance does not fit the profile: sum(balance)={sum(sizes)} (expected {n_layers}, "
            f"the number of layers).\nFix: such as balance={fits}."
        )
    return to_bounds(sizes)
