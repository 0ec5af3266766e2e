"""Checkpoint modes: which micro-batches keep only their input, and are recomputed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from gpipebal.argument_kinds import check_kind, check_whole
from gpipebal.errors import BalanceError
from gpipebal.schedule.actions import Action, Schedule, check_size

__all__ = [
    "CHECKPOINT_MODES",
    "Checkpoint",
    "CheckpointMode",
    "check_checkpoint",
    "is_checkpointed",
    "modes_of",
    "with_recomputes",
]

CheckpointMode = Literal["always", "except_last", "never"]
#: One mode for all partitions, or one for each.
Checkpoint = CheckpointMode | Sequence[CheckpointMode]

#: Those that recompute more, and so take longer and keep less, come first.
CHECKPOINT_MODES: tuple[CheckpointMode, ...] = ("always", "except_last", "never")


def is_checkpointed(checkpoint: CheckpointMode, micro_batch: int, chunks: int) -> bool:
    """Tell whether a micro-batch keeps only its input and is recomputed in the backward.

    ``'except_last'`` spares the last micro-batch that exists, so `chunks` is the number of
    micro-batches of this mini-batch, which can be smaller than the number asked for.

    Example:
        >>> [is_checkpointed("except_last", i, 3) for i in range(3)]
        [True, True, False]
    """
    if checkpoint == "always":
        return True
    return checkpoint == "except_last" and micro_batch < chunks - 1


def modes_of(checkpoint: Checkpoint, n_partitions: int) -> tuple[CheckpointMode, ...]:
    """Return the checkpoint mode of each partition.

    Raises:
        BalanceError: an unknown mode, or not one per partition; or too many partitions.

    Example:
        >>> modes_of("never", 2), modes_of(["always", "never"], 2)
        (('never', 'never'), ('always', 'never'))
    """
    check_checkpoint(checkpoint)
    n_partitions = check_whole("n_partitions", n_partitions)
    check_size(n_partitions, 1)
    if isinstance(checkpoint, str):
        return (checkpoint,) * n_partitions
    if len(checkpoint) != n_partitions:
        raise BalanceError(
            f"checkpoint has a mode too many or too few: len(checkpoint)={len(checkpoint)} "
            f"(expected {n_partitions}, one per partition).\n"
            "Fix: give one mode for all partitions, or one for each."
        )
    return tuple(checkpoint)


def with_recomputes(schedule: Schedule, checkpoint: Checkpoint) -> Schedule:
    """Put a recompute before each backward of a checkpointed micro-batch.

    Where it would follow its own forward directly it is left out, because keeping the graph for
    that short time takes no more memory than making it twice. Recomputes that `schedule` already
    has are dropped.

    Args:
        schedule: The order of the other actions.
        checkpoint: Which micro-batches are recomputed, in all partitions or in each.

    Raises:
        BalanceError: an unknown checkpoint mode, or not one per partition.

    Example:
        >>> rows = ((Action(0, "F", 0), Action(0, "F", 1), Action(0, "B", 0), Action(0, "B", 1)),)
        >>> print(with_recomputes(Schedule("mine", rows), "always"))
        0F0 0F1 0R0 0B0 0R1 0B1
    """
    check_kind("schedule", schedule, Schedule, "schedule=make_schedule('gpipe', 2, 4)")
    modes = modes_of(checkpoint, schedule.n_partitions)
    chunks = schedule.chunks
    rows = []
    for old in schedule.rows:
        row: list[Action] = []
        for action in old:
            j, kind, i = action  # j: partition, i: micro-batch
            if kind == "R":
                continue
            follows = bool(row) and row[-1] == (j, "F", i)
            if kind in "BI" and not follows and is_checkpointed(modes[j], i, chunks):
                row.append(Action(j, "R", i))
            row.append(action)
        rows.append(tuple(row))
    return Schedule(schedule.name, tuple(rows), schedule.devices)


def check_checkpoint(checkpoint: object, *, or_auto: bool = False) -> None:
    """Refuse a checkpoint mode, or one in a sequence of modes, that does not exist.

    Args:
        checkpoint: What was given.
        or_auto: Whether an error names ``'auto'`` too, which the caller accepts.

    Raises:
        BalanceError: `checkpoint` is neither one of `CHECKPOINT_MODES` nor a sequence of them.
    """
    several = isinstance(checkpoint, (list, tuple)) and checkpoint
    known = [*CHECKPOINT_MODES, *(["auto"] if or_auto and not several else [])]
    for mode in several or (checkpoint,):
        if not isinstance(mode, str) or mode not in CHECKPOINT_MODES:
            raise BalanceError(
                f"checkpoint mode does not exist: checkpoint={mode!r:.60} "
                f"(expected one of {', '.join(map(repr, known))}).\n"
                "Fix: checkpoint='except_last'."
            )
