"""Times of partitions and steps, from the times of the layers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from operator import mul

from gpipebal.errors import BalanceError
from gpipebal.planner.execution import Execution
from gpipebal.problem import Problem
from gpipebal.profile import LayerProfile, Profile, SideBySide
from gpipebal.schedule import (
    SCHEDULES,
    Checkpoint,
    CheckpointMode,
    Order,
    check_count,
    order_of,
    recomputes_of,
)
from gpipebal.simulator import Durations, place, weight_shares
from gpipebal.simulator.sharing import place_sharing
from gpipebal.timeline import Timeline

__all__ = [
    "durations",
    "loss_of_micro_batch",
    "order_for",
    "pause_time",
    "problem_of",
    "recomputes_for",
    "runnable",
    "step_timeline",
    "time_beside",
]


def pause_time(profile: Profile, chunks: int) -> float | None:
    """Predict the seconds of gather and loss between the phases; None if one was not measured.

    Both were measured for the mini-batch of the profile, and grow with the rows.
    """
    step = profile.step
    if step.gather_time is None:
        return None
    if step.whole_loss is not None:
        return (step.whole_loss.time + step.gather_time) * chunks / profile.chunks
    if step.loss is not None:
        return step.loss.time * chunks + step.gather_time * chunks / profile.chunks
    return None


def time_beside(profile: Profile, loss_inside: bool) -> float | None:
    """Predict the seconds of a step outside of its schedule; None if the optimizer is not known."""
    step = profile.step
    overhead = step.inside_overhead_time if loss_inside else step.overhead_time
    if step.optimizer_time is None:
        return None
    return step.optimizer_time + (overhead or 0.0)


def loss_of_micro_batch(profile: Profile) -> LayerProfile | None:
    """Return the times of the loss over one micro-batch; None if no loss was measured."""
    step = profile.step
    if step.loss is not None or step.whole_loss is None:
        return step.loss
    whole, m = step.whole_loss, profile.chunks
    return replace(
        whole,
        forward_time=whole.forward_time / m,
        backward_time=whole.backward_time / m,
        recompute_time=whole.recompute_time / m or whole.forward_time / m,
        no_grad_forward_time=None,
    )


def step_timeline(profile: Profile, bounds: Sequence[int], execution: Execution) -> Timeline:
    """Simulate a training step without its optimizer, as well as the profile tells."""
    inside = execution.loss_inside
    loss = loss_of_micro_batch(profile) if inside else None
    of_layers = durations(profile, bounds, execution, loss, without_graph=True)
    overhead = profile.step.cell_overhead_time or 0.0
    times = of_layers.longer_by(overhead)
    if execution.is_ours:
        times = replace(times, **_launches(profile, bounds, loss))
    order = order_for(execution.schedule, len(bounds) - 1, execution.chunks, execution.checkpoint)
    pause = None if inside else pause_time(profile, execution.chunks) or 0.0
    shares = profile.step.side_by_side
    alike = execution.devices is None and execution.links is None and execution.is_ours
    if shares is None or shares.changes_nothing or not alike or times.has_launches:
        return place(order, times, pause=pause, overlap=execution.overlaps)
    alone = _alone(of_layers, shares).longer_by(overhead)
    return place_sharing(order, times, alone, shares.n_partitions, pause=pause)


def _alone(times: Durations, shares: SideBySide) -> Durations:
    """Return what partitions take while no other one works."""
    kinds = ("forward", "no_grad_forward", "recompute", "backward")
    known = {kind: getattr(times, kind) for kind in kinds}
    return replace(
        times,
        **{
            kind: tuple(getattr(shares, kind) * seconds for seconds in known[kind])
            for kind in kinds
            if known[kind] is not None
        },
    )


def _launches(
    profile: Profile, bounds: Sequence[int], loss: LayerProfile | None
) -> dict[str, tuple[float, ...]]:
    """Add up what the one process of a `GPipe` needs to launch the work of each partition.

    Args:
        profile: Costs of the layers.
        bounds: First layer of each partition, then the number of layers.
        loss: A loss that the last partition computes behind its layers.

    Returns:
        Fields of `Durations`; none if the profile knows no host, because devices work by
        themselves, or are the host.
    """
    found = {}
    behind = () if loss is None else (loss,)
    runs = [profile.layers[start:end] for start, end in pairwise(bounds)]
    runs[-1] = (*runs[-1], *behind)
    for kind in ("forward", "backward"):
        times = [[getattr(layer, f"{kind}_host_time") for layer in run] for run in runs]
        if any(time is not None for run in times for time in run):
            found[f"{kind}_launch"] = tuple(math.fsum(time or 0.0 for time in run) for run in times)
    return found


def order_for(schedule: str, n_partitions: int, chunks: int, checkpoint: Checkpoint) -> Order:
    """Return the order of a schedule; two partitions on each device where it is interleaved.

    Raises:
        UnsupportedPlanError: an unknown schedule.
        BalanceError: partitions that cannot be dealt out evenly.
    """
    n_devices, each = _dealt_out(schedule, n_partitions)
    return order_of(schedule, n_devices, chunks, checkpoint, partitions_per_device=each)


def recomputes_for(
    schedule: str, n_partitions: int, chunks: int, checkpoint: Checkpoint
) -> tuple[int, ...]:
    """Count the micro-batches that each partition recomputes in the order of `order_for`."""
    n_devices, each = _dealt_out(schedule, n_partitions)
    return recomputes_of(schedule, n_devices, chunks, checkpoint, partitions_per_device=each)


def runnable(chunks: Sequence[int], schedule: str, n_partitions: int) -> tuple[int, ...]:
    """Return the numbers of micro-batches that a schedule can have; all of them if it has none.

    Example:
        >>> runnable((2, 3, 4, 5), "zb_h1", 2)
        (2, 3, 4)
    """
    if schedule in SCHEDULES:
        return tuple(chunks)
    found = []
    for count in chunks:
        try:
            order_for(schedule, n_partitions, count, "never")
        except BalanceError:
            continue
        found.append(count)
    return tuple(found or chunks)


def _dealt_out(schedule: str, n_partitions: int) -> tuple[int, int]:
    """Return the number of devices, and of partitions on each."""
    each = 2 if schedule == "interleaved_1f1b" and n_partitions % 2 == 0 else 1
    return n_partitions // each, each


def durations(
    profile: Profile,
    bounds: Sequence[int],
    execution: Execution,
    loss: LayerProfile | None = None,
    *,
    without_graph: bool = False,
) -> Durations:
    """Add up the times of every partition.

    Args:
        profile: Costs of the layers.
        bounds: First layer of each partition, then the number of layers.
        execution: What it runs on: its devices and links.
        loss: A loss that the last partition computes behind its layers.
        without_graph: Whether forwards of micro-batches that are recomputed later take the time
            that such a forward takes, as far as it is known.
    """
    devices, links = execution.devices, execution.links
    runs = list(pairwise(bounds))
    shares = weight_shares(profile)

    def add(
        name: str,
        time_of: Callable[[LayerProfile], float],
        shares: Sequence[float] | None = None,
    ) -> tuple[float, ...]:
        sums = []
        for j, (start, end) in enumerate(runs):
            device = None if devices is None else devices[j]
            own = None if device is None else getattr(device, name)
            layers = profile.layers[start:end]
            times = list(map(time_of, layers)) if own is None else list(own[start:end])
            if shares is not None:
                times = list(map(mul, times, shares[start:end]))
            elif loss is not None and end == bounds[-1]:
                times.append(time_of(loss))  # a loss has no weights
            total = math.fsum(times)
            sums.append(total if device is None else total * device.slowness)
        return tuple(sums)

    to, back = None, None
    if links is not None:
        to = (0.0, *(float(links.forward[cut - 1]) for cut in bounds[1:-1]))
        back = (*(float(links.backward[cut - 1]) for cut in bounds[1:-1]), 0.0)
    return Durations(
        forward=add("forward", lambda layer: layer.forward_time),
        recompute=add("recompute", lambda layer: layer.recompute_time),
        backward=add("backward", lambda layer: layer.backward_time),
        no_grad_forward=add("forward", _time_without_graph) if without_graph else None,
        weight_gradient=add("backward", lambda layer: layer.backward_time, shares),
        forward_transfer=to,
        backward_transfer=back,
    )


def _time_without_graph(layer: LayerProfile) -> float:
    known = layer.no_grad_forward_time
    return layer.forward_time if known is None else known


def problem_of(
    profile: Profile, partitions: int, chunks: int | None, checkpoint: CheckpointMode
) -> Problem:
    """Pose the question of the best balance to the solvers."""
    return Problem(
        forward=[layer.forward_time for layer in profile.layers],
        backward=[layer.backward_time for layer in profile.layers],
        recompute=[layer.recompute_time for layer in profile.layers],
        n_partitions=partitions,
        chunks=profile.chunks if chunks is None else check_count("chunks", chunks),
        checkpoint=checkpoint,
    )
