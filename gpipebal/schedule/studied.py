"""Schedules that can be simulated but not run by `GPipe`; torch.distributed.pipelining runs them.

In the interleaved ones every device has several partitions, dealt out in turn: of 6 partitions on
2 devices the first has 0, 2 and 4, the second 1, 3 and 5. So a micro-batch visits every device
several times, and fills and drains the pipeline in smaller steps. With a zero-bubble schedule the
gradients of the weights, for which no partition waits, are moved into time that is otherwise idle::

    # zero bubble, 3 devices, 4 micro-batches, F, I and W take one clock each: 14 clocks.
    # device 0  012..Aa3BbCcDd
    # device 1  .01.A2Ba3CbDcd
    # device 2  ..0A1B2Ca3Dbcd
"""

from __future__ import annotations

from gpipebal.errors import BalanceError
from gpipebal.schedule.actions import Action, Schedule, check_count, check_size
from gpipebal.schedule.checkpoint import Checkpoint, with_recomputes
from gpipebal.schedule.executed import in_two_phases

__all__ = [
    "gpipe_in_order_schedule",
    "interleaved_schedule",
    "looped_bfs_schedule",
    "zero_bubble_schedule",
]


def gpipe_in_order_schedule(
    n_devices: int, chunks: int, checkpoint: Checkpoint = "never"
) -> Schedule:
    """Order a mini-batch as GPipe does, but with backwards from the first micro-batch on.

    Args:
        n_devices: Number of devices, 1 or more.
        chunks: Number of micro-batches, 1 or more.
        checkpoint: Which micro-batches are recomputed, in all partitions or in each.

    Raises:
        BalanceError: a count below 1, more actions than a memory holds, or an unknown mode.

    Source:
        torch.distributed.pipelining, ``ScheduleGPipe``.

    Example:
        >>> print(gpipe_in_order_schedule(2, 2, "always"))
        0F0 0F1 0R0 0B0 0R1 0B1
        1F0 1F1 1R0 1B0 1R1 1B1
    """
    n_devices = check_count("devices", n_devices)
    chunks = check_count("chunks", chunks)
    return in_two_phases("gpipe_in_order", n_devices, chunks, checkpoint, last_first=False)


def interleaved_schedule(
    n_devices: int,
    chunks: int,
    checkpoint: Checkpoint = "never",
    *,
    partitions_per_device: int = 2,
) -> Schedule:
    """Order a mini-batch so that each device takes turns between several partitions.

    Micro-batches go in groups, as many as there are devices (or a few more): a device runs the
    group through its first partition, then through its second, and so on. After some forwards
    ahead, fewer the later the device comes, forwards and backwards alternate.

    Args:
        n_devices: Number of devices, 1 or more.
        chunks: Number of micro-batches, 1 or more; with `n_devices` or more of them, a multiple of
            ``chunks // n_devices``, which is the number of groups.
        checkpoint: Which micro-batches are recomputed, in all partitions or in each.
        partitions_per_device: How many partitions every device has, 1 or more.

    Raises:
        BalanceError: a count below 1, more actions than a memory holds, chunks that cannot be
            divided into groups, or an unknown mode.

    Source:
        Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using
        Megatron-LM", SC 2021, section 2.2.2; in the form of torch.distributed.pipelining's
        ``ScheduleInterleaved1F1B``, which allows other numbers of micro-batches too. Differs:
        recomputes are actions of their own.

    Example:
        >>> print(interleaved_schedule(2, 2))
        0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1
        1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1
    """
    schedule = _looped("interleaved_1f1b", n_devices, chunks, partitions_per_device, hop=2)
    return with_recomputes(schedule, checkpoint)


def looped_bfs_schedule(
    n_devices: int,
    chunks: int,
    checkpoint: Checkpoint = "never",
    *,
    partitions_per_device: int = 2,
) -> Schedule:
    """Order a mini-batch so that each device does all of a partition before its next partition.

    All micro-batches go through a device's first partition, then through its second, and so on;
    the backwards go the same way back, the last micro-batch first. With one partition per device
    it is GPipe. It keeps all micro-batches in flight, and lets the devices communicate about all
    micro-batches of a partition, or fetch its parameters, once in each direction.

    Args:
        n_devices: Number of devices, 1 or more.
        chunks: Number of micro-batches, 1 or more.
        checkpoint: Which micro-batches are recomputed, in all partitions or in each.
        partitions_per_device: How many partitions every device has, 1 or more.

    Raises:
        BalanceError: a count below 1, more actions than a memory holds, or an unknown mode.

    Source:
        Lamy-Poirier, "Breadth-First Pipeline Parallelism", MLSys 2023, section 4; in the form of
        torch.distributed.pipelining's ``ScheduleLoopedBFS``. Differs: recomputes are actions of
        their own.

    Example:
        >>> print(looped_bfs_schedule(2, 2))
        0F0 0F1 2F0 2F1 2B1 2B0 0B1 0B0
        1F0 1F1 3F0 3F1 3B1 3B0 1B1 1B0
    """
    n_devices = check_count("devices", n_devices)
    chunks = check_count("chunks", chunks)
    loops = check_count("partitions_per_device", partitions_per_device)
    check_size(n_devices * loops, chunks)
    rows = []
    for d in range(n_devices):  # d: device
        own = range(d, n_devices * loops, n_devices)
        forwards = [Action(j, "F", i) for j in own for i in range(chunks)]  # j: partition
        backwards = [Action(j, "B", i) for j in reversed(own) for i in reversed(range(chunks))]
        rows.append((*forwards, *backwards))
    devices = tuple(range(n_devices)) * loops if loops > 1 else None
    return with_recomputes(Schedule("looped_bfs", tuple(rows), devices), checkpoint)


def zero_bubble_schedule(
    n_devices: int,
    chunks: int,
    checkpoint: Checkpoint = "never",
    *,
    partitions_per_device: int = 1,
) -> Schedule:
    """Order a mini-batch as 1F1B with backwards in two parts, so that weights fill the idle time.

    Device d runs its d first input gradients without their weight gradients, which then follow as
    many input gradients later: no more micro-batches are in flight than under 1F1B's first device,
    and the last devices, which have time at the end, use it.

    Args:
        n_devices: Number of devices, 1 or more.
        chunks: Number of micro-batches, 1 or more; with `n_devices` or more of them, a multiple of
            ``chunks // n_devices``.
        checkpoint: Which micro-batches are recomputed, in all partitions or in each.
        partitions_per_device: 1 is ZB-H1; with more it is interleaved.

    Raises:
        BalanceError: a count below 1, more actions than a memory holds, chunks that cannot be
            divided into groups, or an unknown mode.

    Source:
        Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024, section 2.1 (ZB-H1); in the form
        of torch.distributed.pipelining's ``ScheduleInterleavedZeroBubble``. Differs: recomputes
        are actions of their own.

    Example:
        >>> print(zero_bubble_schedule(2, 3))
        0F0 0F1 0I0 0W0 0F2 0I1 0W1 0I2 0W2
        1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1W2
    """
    schedule = _looped("zb_h1", n_devices, chunks, partitions_per_device, hop=1, in_parts=True)
    return with_recomputes(schedule, checkpoint)


def _looped(
    name: str, n_devices: int, chunks: int, loops: int, *, hop: int, in_parts: bool = False
) -> Schedule:
    """Make the rows of a schedule that goes round the devices `loops` times.

    Args:
        name: Its name.
        n_devices: Number of devices.
        chunks: Number of micro-batches.
        loops: Partitions of every device.
        hop: How many more forwards a device runs ahead than the one after it.
        in_parts: Whether backwards come as input gradients and weight gradients.
    """
    n_devices = check_count("devices", n_devices)
    chunks = check_count("chunks", chunks)
    loops = check_count("partitions_per_device", loops)
    check_size(n_devices * loops, chunks)
    n_groups = max(1, chunks // n_devices)
    if chunks % n_groups:
        near = (m for far in range(chunks) for m in (chunks - far, chunks + far))
        fits = next(m for m in near if m % max(1, m // n_devices) == 0)
        raise BalanceError(
            f"micro-batches do not part into {n_groups} equal groups: chunks={chunks} (expected a "
            f"multiple of {n_groups}).\nFix: chunks={fits}."
        )
    size = chunks // n_groups
    steps = loops * chunks

    def cell(step: int) -> tuple[int, int]:
        """Return the turn (which of the device's partitions) and the micro-batch of a step."""
        group, rest = divmod(step, size * loops)
        return rest // size, group * size + rest % size

    rows = []
    for d in range(n_devices):  # d: device
        forwards, backwards = [], []
        for step in range(steps):
            turn, i = cell(step)  # i: micro-batch
            forwards.append(Action(turn * n_devices + d, "F", i))
            backwards.append((d + (loops - 1 - turn) * n_devices, i))
        ahead = min(steps, (loops - 1) * size + hop * (n_devices - 1 - d))
        row = forwards[:ahead]
        for step, (j, i) in enumerate(backwards):  # j: partition
            row += forwards[ahead + step : ahead + step + 1]
            row.append(Action(j, "I" if in_parts else "B", i))
            if in_parts and step >= d:
                row.append(_weight(backwards[step - d]))
        if in_parts:
            row += map(_weight, backwards[max(0, steps - d) :])
        rows.append(tuple(row))
    devices = tuple(range(n_devices)) * loops if loops > 1 else None
    return Schedule(name, tuple(rows), devices)


def _weight(cell: tuple[int, int]) -> Action:
    partition, micro_batch = cell
    return Action(partition, "W", micro_batch)
