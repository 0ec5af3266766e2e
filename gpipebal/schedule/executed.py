"""The schedules that `GPipe` runs: one partition per device, forwards and whole backwards."""

from __future__ import annotations

from gpipebal.schedule.actions import Action, Schedule, check_count, check_size
from gpipebal.schedule.checkpoint import Checkpoint, is_checkpointed, modes_of

__all__ = ["MOST_WAITING", "gpipe_schedule", "in_two_phases", "one_f_one_b_schedule"]

#: `GPipe` lets a partition begin a forward when fewer of its outputs than this wait for the next
#: partition, and a backward when fewer of its gradients wait for the one before. With one, times
#: that vary from one micro-batch to the next would make partitions wait for each other.
MOST_WAITING = 2


def gpipe_schedule(
    n_partitions: int, chunks: int, checkpoint: Checkpoint = "except_last"
) -> Schedule:
    """Order a mini-batch as GPipe does: all forwards, then all backwards, last one first.

    A recompute comes before its backward, so that a partition recomputes while the gradient
    is still on its way from the next one.

    Args:
        n_partitions: Number of partitions, 1 or more.
        chunks: Number of micro-batches, 1 or more.
        checkpoint: Which micro-batches are recomputed, in all partitions or in each.

    Raises:
        BalanceError: a count below 1, more actions than a memory holds, or an unknown checkpoint
            mode.

    Source:
        Huang et al., "GPipe: Efficient Training of Giant Neural Networks using Pipeline
        Parallelism", NeurIPS 2019, section 2.2. Differs: the last micro-batch runs its backward
        first, as in torchgpipe, because 'except_last' has its activations still at hand.

    Example:
        >>> print(gpipe_schedule(2, 2, "always"))
        0F0 0F1 0R1 0B1 0R0 0B0
        1F0 1F1 1R1 1B1 1R0 1B0
    """
    n_partitions = check_count("partitions", n_partitions)
    chunks = check_count("chunks", chunks)
    return in_two_phases("gpipe", n_partitions, chunks, checkpoint, last_first=True)


def in_two_phases(
    name: str, n_partitions: int, chunks: int, checkpoint: Checkpoint, *, last_first: bool
) -> Schedule:
    """Order a mini-batch so that all forwards come before all recomputes and backwards.

    Args:
        name: Its name.
        n_partitions: Number of partitions.
        chunks: Number of micro-batches.
        checkpoint: Which micro-batches are recomputed.
        last_first: Whether the backwards begin with the last micro-batch.
    """
    check_size(n_partitions, chunks)
    rows = []
    for j, mode in enumerate(modes_of(checkpoint, n_partitions)):  # j: partition
        row = [Action(j, "F", i) for i in range(chunks)]  # i: micro-batch
        for i in range(chunks)[:: -1 if last_first else 1]:
            if is_checkpointed(mode, i, chunks):
                row.append(Action(j, "R", i))
            row.append(Action(j, "B", i))
        rows.append(tuple(row))
    return Schedule(name, tuple(rows))


def one_f_one_b_schedule(
    n_partitions: int, chunks: int, checkpoint: Checkpoint = "never"
) -> Schedule:
    """Order a mini-batch so that each backward comes as soon as it can: one forward, one backward.

    Partition j first runs as many forwards as there are partitions after it, so at most
    ``n_partitions - j`` micro-batches are in flight there at once. A recompute comes before its
    backward; where it would follow its own forward directly it is left out, because keeping the
    graph for that short time takes no more memory than making it twice.

    Args:
        n_partitions: Number of partitions, 1 or more.
        chunks: Number of micro-batches, 1 or more.
        checkpoint: Which micro-batches are recomputed, in all partitions or in each.

    Raises:
        BalanceError: a count below 1, more actions than a memory holds, or an unknown checkpoint
            mode.

    Source:
        Narayanan et al., "Memory-Efficient Pipeline-Parallel DNN Training", ICML 2021, section
        2.2 (PipeDream-Flush). Differs: modes per partition, and recomputes that are left out.

    Example:
        >>> print(one_f_one_b_schedule(2, 3))
        0F0 0F1 0B0 0F2 0B1 0B2
        1F0 1B0 1F1 1B1 1F2 1B2
    """
    n_partitions = check_count("partitions", n_partitions)
    chunks = check_count("chunks", chunks)
    check_size(n_partitions, chunks)
    rows = []
    for j, mode in enumerate(modes_of(checkpoint, n_partitions)):  # j: partition
        ahead = min(chunks, n_partitions - 1 - j)
        row = [Action(j, "F", i) for i in range(ahead)]  # i: micro-batch
        for i in range(chunks):
            if ahead + i < chunks:
                row.append(Action(j, "F", ahead + i))
            if is_checkpointed(mode, i, chunks) and row[-1] != Action(j, "F", i):
                row.append(Action(j, "R", i))
            row.append(Action(j, "B", i))
        rows.append(tuple(row))
    return Schedule("1f1b", tuple(rows))
