"""Times of partitions and steps, from the times of the layers."""

from __future__ import annotations

from collections.abc import Sequence

from gpipebal.errors import BalanceError
from gpipebal.memory.loss import loss_of_micro_batch
from gpipebal.planner.execution import Execution
from gpipebal.profile import Profile
from gpipebal.schedule import (
    SCHEDULES,
    Checkpoint,
    Order,
    order_of,
    partitions_on_each,
    recomputes_of,
)
from gpipebal.simulator import Durations, durations_of, place
from gpipebal.simulator.sharing import place_sharing
from gpipebal.timeline import Timeline

__all__ = [
    "order_for",
    "pause_time",
    "recomputes_for",
    "runnable",
    "step_timeline",
    "with_turns",
]


#: Where it turns or comes first, a cell takes at most this many times as long, or this fraction.
MOST_TURN = 4.0


def pause_time(profile: Profile, chunks: int) -> float | None:
    """Predict the seconds of gather and loss between the phases; None if one was not measured.

    Both were measured for the mini-batch of the profile, and scale with the rows.
    """
    step = profile.step
    if step.gather_time is None:
        return None
    if step.whole_loss is not None:
        return (step.whole_loss.time + step.gather_time) * chunks / profile.chunks
    if step.loss is not None:
        return step.loss.time * chunks + step.gather_time * chunks / profile.chunks
    return None


def step_timeline(profile: Profile, bounds: Sequence[int], execution: Execution) -> Timeline:
    """Simulate a training step without its optimizer, as far as the profile tells."""
    inside = execution.loss_inside
    loss = loss_of_micro_batch(profile) if inside else None
    of_layers = durations_of(
        profile, bounds, devices=execution.devices, links=execution.links, loss=loss
    )
    if not execution.is_ours:
        of_layers = of_layers.without_launches
    overhead = profile.step.cell_overhead_time or 0.0
    order = order_for(execution.schedule, len(bounds) - 1, execution.chunks, execution.checkpoint)
    pause = None if inside else pause_time(profile, execution.chunks) or 0.0
    shares = profile.step.side_by_side
    # Devices that differ only in their limits are like the profile's.
    alike = all(device.is_alike for device in execution.devices or ())
    known = alike and execution.links is None and execution.is_ours
    if known:
        of_layers = with_turns(profile, of_layers)
    times = of_layers.longer_by(overhead)
    if shares is None or shares.changes_nothing or not known or times.has_launches:
        return place(order, times, pause=pause, overlap=execution.overlaps)
    alone = of_layers.scaled(vars(shares)).longer_by(overhead)
    return place_sharing(order, times, alone, shares.n_partitions, pause=pause)


def with_turns(profile: Profile, durations: Durations) -> Durations:
    """Add how much longer cells take where they turn or come first, as far as a profile tells.

    Args:
        profile: What was measured, by itself and in the trial.
        durations: The durations of partitions of the profile's layers.
    """
    turns = profile.step.turns
    if turns is None:
        return durations
    totals = durations_of(profile, (0, profile.n_layers))
    factors = {}
    for name, seconds in vars(turns).items():
        times = getattr(totals, name.removeprefix("first_")) or totals.forward
        factor = 1 + seconds / times[0] if times[0] else 1.0
        # At few rows the work may take less than a turn that was measured at many.
        factors[name] = min(max(factor, 1 / MOST_TURN), MOST_TURN)
    return durations.turning(factors)


def order_for(schedule: str, n_partitions: int, chunks: int, checkpoint: Checkpoint) -> Order:
    """Return the order of a schedule; several partitions on each device where it shares them.

    Raises:
        UnsupportedPlanError: an unknown schedule.
        BalanceError: partitions that cannot be distributed evenly over the devices.
    """
    n_devices = n_partitions // partitions_on_each(schedule, n_partitions)
    return order_of(schedule, n_devices, chunks, checkpoint)


def recomputes_for(
    schedule: str, n_partitions: int, chunks: int, checkpoint: Checkpoint
) -> tuple[int, ...]:
    """Count the micro-batches that each partition recomputes in the order of `order_for`."""
    n_devices = n_partitions // partitions_on_each(schedule, n_partitions)
    return recomputes_of(schedule, n_devices, chunks, checkpoint)


def runnable(chunks: Sequence[int], schedule: str, n_partitions: int) -> tuple[int, ...]:
    """Return the numbers of micro-batches that a schedule can have; if it can have none, all.

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
