"""What the partitions of a split are predicted to cost, in time and memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from gpipebal.memory import partition_memory
from gpipebal.memory.partitions import cells_of
from gpipebal.plan import PartitionPlan, PeakMemory
from gpipebal.planner.execution import Execution
from gpipebal.planner.times import pause_time, step_timeline
from gpipebal.problem.fits import check_enough_layers
from gpipebal.profile import Profile
from gpipebal.schedule import check_count
from gpipebal.simulator import durations_of
from gpipebal.timeline import Timeline

__all__ = ["assemble", "equal_split", "peaks_of", "step_time"]


def equal_split(n_layers: int, n_partitions: int) -> tuple[int, ...]:
    """Return the bounds of a split into equally many layers; earlier partitions take the rest.

    Raises:
        BalanceError: a number that is not a count, or more partitions than layers.

    Example:
        >>> equal_split(7, 3)
        (0, 3, 5, 7)
    """
    n_layers, n_partitions = (
        check_count("n_layers", n_layers),
        check_count("n_partitions", n_partitions),
    )
    check_enough_layers("n_partitions", n_partitions, n_layers)
    small, n_large = divmod(n_layers, n_partitions)
    return tuple(j * small + min(j, n_large) for j in range(n_partitions + 1))


def peaks_of(
    profile: Profile, bounds: Sequence[int], execution: Execution
) -> tuple[PeakMemory, ...]:
    """Predict the peak memory of every partition, which no timing of the step exceeds.

    Under schedules that only torch runs, it is the memory that partitions hold under any schedule.
    """
    if not execution.is_ours:
        cells = cells_of(profile, bounds, loss_inside=False, shared_memory=False)
        return tuple(replace(cell.fixed, gradients=cell.all_gradients) for cell in cells)
    return partition_memory(
        profile,
        bounds,
        chunks=execution.chunks,
        checkpoint=execution.checkpoint,
        schedule=execution.schedule,
        loss_inside=execution.loss_inside,
        shared_memory=execution.shared_memory,
        gradients_exist=execution.gradients_exist,
    )


def assemble(
    profile: Profile,
    bounds: Sequence[int],
    execution: Execution,
    limits: Sequence[int | None] | None = None,
) -> tuple[tuple[PartitionPlan, ...], float | None]:
    """Predict what every partition of a split costs, and the seconds of a training step.

    Args:
        profile: Costs of the layers, at the rows of the micro-batches.
        bounds: First layer of each partition, then the number of layers.
        execution: How it runs.
        limits: Memory limit of each partition; None: none.

    Returns:
        The partitions, and the seconds of a step; None if a part of the step was not measured.
    """
    times = durations_of(profile, bounds, devices=execution.devices, links=execution.links)
    partitions = []
    for j, peak in enumerate(peaks_of(profile, bounds, execution)):
        layers = profile.layers[bounds[j] : bounds[j + 1]]
        partitions.append(
            PartitionPlan(
                layers=tuple(layer.name for layer in layers),
                fingerprints=tuple(layer.fingerprint for layer in layers),
                forward_time=times.forward[j],
                backward_time=times.backward[j],
                recompute_time=times.recompute[j],
                memory=peak,
                memory_limit=None if limits is None else limits[j],
                receive_time=times.forward_transfer[j] if times.forward_transfer else 0.0,
                return_time=times.backward_transfer[j] if times.backward_transfer else 0.0,
                weight_time=times.weight_gradients[j],
            )
        )
    timeline = step_timeline(profile, bounds, execution)
    return tuple(partitions), step_time(profile, execution, timeline)


def step_time(profile: Profile, execution: Execution, timeline: Timeline) -> float | None:
    """Add to the schedule what a step takes besides it; None if something was not measured."""
    step = profile.step
    if execution.loss_inside:
        is_known = step.loss is not None or step.whole_loss is not None
        overhead = step.inside_overhead_time
    else:
        is_known = pause_time(profile, execution.chunks) is not None
        overhead = step.overhead_time
    if not is_known or step.optimizer_time is None:
        return None
    return timeline.makespan + (step.optimizer_time + (overhead or 0.0))
