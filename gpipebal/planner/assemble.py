"""A split and what it is predicted to cost, put into a plan."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from gpipebal.memory import partition_memory
from gpipebal.plan import PartitionPlan, PeakMemory, Plan
from gpipebal.planner.times import (
    Surroundings,
    durations,
    loss_of_micro_batch,
    pause_time,
    step_timeline,
    time_beside,
)
from gpipebal.profile import Profile
from gpipebal.schedule import SCHEDULES, Checkpoint
from gpipebal.timeline import Timeline

__all__ = ["CLOCK_MARGIN", "assemble", "equal_split", "peaks_in_time"]

#: How much longer than predicted any one partition may take, as a fraction, as far as memory goes.
#: Single cells vary so much on a machine with other work, and what others have made for the one
#: that is behind waits.
CLOCK_MARGIN = 0.3


def equal_split(n_layers: int, n_partitions: int) -> tuple[int, ...]:
    """Return the bounds of a split into equally many layers; earlier partitions take the rest.

    Example:
        >>> equal_split(7, 3)
        (0, 3, 5, 7)
    """
    small, n_large = divmod(n_layers, n_partitions)
    return tuple(j * small + min(j, n_large) for j in range(n_partitions + 1))


def peaks_in_time(
    profile: Profile,
    bounds: Sequence[int],
    *,
    chunks: int,
    checkpoint: Checkpoint,
    schedule: str,
    loss_inside: bool,
    shared_memory: bool,
    around: Surroundings | None = None,
) -> tuple[tuple[PeakMemory, ...], Timeline]:
    """Predict the peak memory of every partition in its timeline with a margin, and that timeline.

    What waits for a busy neighbour is counted as if that took longer by `CLOCK_MARGIN`.

    Under schedules that only torch runs, what each partition holds whatever the schedule.
    """
    pause = None if loss_inside else pause_time(profile, chunks)
    timeline = step_timeline(
        profile, bounds, chunks, checkpoint, schedule, loss_inside, pause, around
    )
    if schedule not in SCHEDULES:
        return _what_stays(profile, bounds), timeline
    memory = partition_memory(
        profile,
        bounds,
        chunks=chunks,
        checkpoint=checkpoint,
        schedule=schedule,
        loss_inside=loss_inside,
        shared_memory=shared_memory,
        timeline=timeline,
        margin=CLOCK_MARGIN,
    )
    return memory, timeline


def assemble(
    profile: Profile,
    bounds: Sequence[int],
    *,
    chunks: int,
    checkpoint: Checkpoint,
    schedule: str,
    loss_inside: bool,
    objective: str,
    value: float,
    lower_bound: float,
    status: str,
    method: str,
    makespan: float,
    bottleneck: float,
    equal_split_value: float | None,
    shared_memory: bool,
    around: Surroundings | None = None,
    limits: Sequence[int | None] | None = None,
    device_order: tuple[int, ...] = (),
    notes: tuple[str, ...] = (),
) -> Plan:
    """Put everything into a plan: times and memory of the partitions, and the step's time.

    `profile` is that at the rows of the plan's micro-batches. `around` has the devices, partition
    by partition, and the links, and `limits` the memory limit of each partition; None: nothing
    special. All else is as in `Plan`.
    """
    around = around or Surroundings()
    memory, timeline = peaks_in_time(
        profile,
        bounds,
        chunks=chunks,
        checkpoint=checkpoint,
        schedule=schedule,
        loss_inside=loss_inside,
        shared_memory=shared_memory,
        around=around,
    )
    if schedule not in SCHEDULES:
        notes = (*notes, f"Memory is that of the model: under {schedule!r} no more is predicted.")
    times = durations(profile, bounds, around=around)
    partitions = []
    for j, peak in enumerate(memory):
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
    pause = None if loss_inside else pause_time(profile, chunks)
    loss_known = pause is not None or (loss_inside and loss_of_micro_batch(profile) is not None)
    beside = time_beside(profile, loss_inside)
    step_time = None if not loss_known or beside is None else timeline.makespan + beside
    return Plan(
        partitions=tuple(partitions),
        chunks=chunks,
        rows=profile.rows,
        checkpoint=checkpoint,
        schedule=schedule,
        objective=objective,
        value=value,
        lower_bound=lower_bound,
        status=status,
        method=method,
        makespan=makespan,
        bottleneck=bottleneck,
        step_time=step_time,
        pause_time=pause,
        loss_inside=loss_inside,
        equal_split_value=equal_split_value,
        shared_memory=shared_memory,
        device_order=device_order,
        overlaps=around.overlaps,
        notes=notes,
        provenance=dict(profile.provenance),
    )


def _what_stays(profile: Profile, bounds: Sequence[int]) -> tuple[PeakMemory, ...]:
    """Return what each partition holds whatever the schedule."""
    found = []
    for start, end in pairwise(bounds):
        layers = profile.layers[start:end]
        states = [layer.optimizer_bytes for layer in layers]
        found.append(
            PeakMemory(
                parameters=sum(layer.parameter_bytes for layer in layers),
                gradients=sum(layer.gradient_bytes for layer in layers),
                buffers=sum(layer.buffer_bytes for layer in layers),
                optimizer=None if None in states else sum(b for b in states if b is not None),
            )
        )
    return tuple(found)
