"""`place`: durations on a schedule."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from gpipebal.argument_kinds import check_kind, check_mapping
from gpipebal.errors import BalanceError
from gpipebal.problem.checks import check_flag
from gpipebal.schedule import Order, Schedule
from gpipebal.schedule.actions import F
from gpipebal.simulator.durations import Durations, seconds_of
from gpipebal.simulator.engines import Times, run
from gpipebal.simulator.refusals import check_phases, check_rows, refuse
from gpipebal.simulator.wavefront import can_sweep, sweep
from gpipebal.simulator.work import Work, work_of
from gpipebal.timeline import ALL_KINDS, COPY_KIND, LAUNCH_KIND, EventTable, Timeline
from gpipebal.units import count

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Ints = NDArray[np.integer]
    Floats = NDArray[np.float64]

__all__ = ["place"]

Columns = tuple["Ints", "Ints", "Ints", "Floats", "Floats"]


def place(
    schedule: Schedule | Order,
    durations: Durations,
    *,
    pause: float | None = None,
    overlap: bool = True,
    late_recompute: bool = False,
    provenance: Mapping[str, Any] | None = None,
) -> Timeline:
    """Start every action of a schedule as early as its order and its needs allow.

    Args:
        schedule: Order of the actions of each device; an `Order` must come from `order_of`.
        durations: Seconds of each partition for one micro-batch.
        pause: Seconds between the last forward of all partitions and the first recompute or
            backward; None: no such wait.
        overlap: Whether transfers overlap with the devices' work, each direction of each cut over
            a link of its own that takes one at a time in the order in which they were handed in.
            If not, each copy keeps the sender busy after its action, and then the receiver before
            its own, as it does if data passes through the host's memory.
        late_recompute: Whether a recompute waits for the gradient too, as it does inside
            torch.utils.checkpoint.
        provenance: Provenance of the timeline, besides schedule and pause.

    Returns:
        A Timeline with source ``'simulated'``: the events in the order of the schedule's rows,
        then optimizer steps, copies, and launches by the host, if there are durations for them.

    Raises:
        BalanceError: not as many durations as partitions, an action that is unknown, occurs
            twice or in another partition's row, or one that waits for ever: for an action that
            does not exist, or in a circle; or a flag that is neither true nor false.
        ProfileError: `pause` is negative or not finite, or times are too large to be added.

    Complexity:
        O(n) for n actions; with many devices in numpy, in as many rounds as actions follow one
        another on the longest path. With a host O(n log k) for k devices.

    Example:
        >>> from gpipebal.schedule import gpipe_schedule
        >>> durations = Durations(forward=(1.0, 3.0), recompute=(0.0, 0.0), backward=(1.0, 1.0))
        >>> place(gpipe_schedule(2, 2, "never"), durations).makespan
        10.0
    """
    if not isinstance(schedule, Order):
        check_kind("schedule", schedule, Schedule, "schedule=make_schedule('gpipe', 2, 4)")
    check_kind("durations", durations, Durations, "durations=durations_of(profile, bounds)")
    if provenance is not None:
        check_mapping("provenance", provenance, "provenance={}")
    overlap = check_flag("overlap", overlap)
    late_recompute = check_flag("late_recompute", late_recompute)
    if durations.n_partitions != schedule.n_partitions:
        raise BalanceError(
            f"schedule and durations differ: schedule.n_partitions={schedule.n_partitions} "
            f"(expected {durations.n_partitions}, as many as durations).\n"
            f"Fix: make a schedule of {count(durations.n_partitions, 'partition')}."
        )
    if pause is not None:
        pause = seconds_of("pause", pause)
    is_given = not isinstance(schedule, Order)
    if isinstance(schedule, Schedule):
        check_rows(schedule)
        order = Order.of(schedule)
    else:
        order = schedule
    if pause is not None:
        check_phases(order)
    said = {"schedule": order.name, "pause": pause}
    if not (is_given or late_recompute) and can_sweep(order, durations):
        starts, ends = sweep(order, durations, pause)
        table = EventTable(order.partitions, order.kinds, order.micro_batches, starts, ends)
        said.update(provenance or {})
        return Timeline(table, order.n_partitions, "simulated", said)
    work = work_of(order, durations, late=late_recompute, overlap=overlap, check=is_given)
    times = None if work is None else _run(work, pause)
    if work is None or times is None:
        refuse(order.schedule(), late=late_recompute)
    if late_recompute:
        said["late_recompute"] = True
    if durations.has_transfers:
        said["overlap"] = overlap
    said.update(provenance or {})
    table = _events(work, times, durations)
    return Timeline(table, order.n_partitions, "simulated", said, order.shared_devices)


def _events(work: Work, times: Times, durations: Durations) -> EventTable:
    """Return the actions, then optimizer steps, copies, and launches by the host."""
    order, n = work.order, work.order.n_actions
    starts, ends = times.starts[:n], times.ends[:n]
    columns = [(order.partitions, order.kinds, order.micro_batches, starts, ends)]
    if durations.optimizer is not None:
        done = times.ends if work.tail is None else times.arrivals
        columns.append(_optimizer_steps(order, done, durations.optimizer))
    columns += _copies(work, times) + _launches(work, times)
    if len(columns) == 1:
        return EventTable(*columns[0])
    return EventTable(*(np.concatenate(parts) for parts in zip(*columns, strict=True)))


def _run(work: Work, pause: float | None) -> Times | None:
    """Place all actions, in two phases if there is a pause; None: some would wait for ever."""
    times = Times(work)
    first, last = work.order.offsets[:-1], work.order.offsets[1:]
    if pause is None:
        return times if run(work, times, first, last, 0.0) else None
    turns = _turns(work.order)
    if not run(work, times, first, turns, 0.0):
        return None
    # A link may go on while the caller computes; a device that copies by itself is done only
    # when the copy is.
    done = times.ends if work.tail is None else times.arrivals
    forwards = done[: work.nothing][work.order.kinds == F]
    barrier = float(forwards.max(initial=0.0)) + pause
    return times if run(work, times, turns, last, barrier) else None


def _turns(order: Order) -> Ints:
    """Return for each row the place of its first action that is not a forward."""
    others = np.append(np.flatnonzero(order.kinds != F), order.n_actions)
    turns = others[np.searchsorted(others, order.offsets[:-1])]
    return np.minimum(turns, order.offsets[1:])


def _optimizer_steps(order: Order, done: Floats, seconds: tuple[float, ...]) -> Columns:
    """Let every device step the parameters of its partitions when its row is done."""
    clocks = [
        float(done[last - 1]) if last > first else 0.0
        for first, last in zip(order.offsets, order.offsets[1:], strict=False)
    ]
    starts, ends = [], []
    for d, time in zip(order.devices.tolist(), seconds, strict=True):
        starts.append(clocks[d])
        clocks[d] += time
        ends.append(clocks[d])
    return _columns("O", np.arange(order.n_partitions), 0, np.array(starts), np.array(ends))


def _copies(work: Work, times: Times) -> list[Columns]:
    """Return the transfers, each as a copy into the partition that receives it."""
    order, n = work.order, work.order.n_actions
    columns = []
    leaving = work.send if work.tail is None else work.tail
    if leaving is not None:
        which = np.flatnonzero(leaving[:n] > 0)
        partitions = order.partitions[which] + np.where(order.kinds[which] == F, 1, -1)
        ends = times.arrivals[which]
        # Rounding must not let a copy begin before its time.
        starts = np.maximum(times.ends[which], ends - leaving[which])
        columns.append(_columns(COPY_KIND, partitions, order.micro_batches[which], starts, ends))
    if work.lead is not None:
        which = np.flatnonzero(work.lead[:n] > 0)
        ends = times.starts[which]
        starts = np.maximum(0.0, ends - work.lead[which])
        partitions = order.partitions[which]
        columns.append(_columns(COPY_KIND, partitions, order.micro_batches[which], starts, ends))
    return columns


def _launches(work: Work, times: Times) -> list[Columns]:
    if times.launch_starts is None or times.launch_ends is None:
        return []
    order, n = work.order, work.order.n_actions
    found = (times.launch_starts[:n], times.launch_ends[:n])
    by_time = np.argsort(found[0], kind="stable")
    starts, ends = (column[by_time] for column in found)
    partitions, micro_batches = order.partitions[by_time], order.micro_batches[by_time]
    return [_columns(LAUNCH_KIND, partitions, micro_batches, starts, ends)]


def _columns(
    kind: str, partitions: Ints, micro_batches: Ints | int, starts: Floats, ends: Floats
) -> Columns:
    n = len(partitions)
    return (
        partitions.astype(np.int32),
        np.full(n, ALL_KINDS.index(kind), dtype=np.uint8),
        np.broadcast_to(np.asarray(micro_batches, dtype=np.int32), (n,)),
        starts,
        ends,
    )
