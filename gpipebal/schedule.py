"""Schedules: in which order each partition works, without times.

An action is one cell of work, written as partition, kind, micro-batch: ``1F3`` is the forward of
micro-batch 3 in partition 1, ``1R3`` its recompute, ``1B3`` its backward. A schedule is one
ordered row of actions per partition. It is plain data: the simulator places durations on it, the
executor's workers run it, and tests compare it with a drawing::

    # GPipe, 3 partitions, 4 micro-batches, one clock each, except_last: R and B take a clock.
    # 0F0 0F1 0F2 0F3 ... 0B3 0R2 0B2 0R1 0B1 0R0 0B0
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from gpipebal.errors import BalanceError, UnsupportedPlanError

__all__ = [
    "CHECKPOINT_MODES",
    "SCHEDULES",
    "Action",
    "Checkpoint",
    "CheckpointMode",
    "Kind",
    "Schedule",
    "check_checkpoint",
    "check_count",
    "check_schedule",
    "gpipe_schedule",
    "is_checkpointed",
    "make_schedule",
    "modes_of",
    "one_f_one_b_schedule",
]

CheckpointMode = Literal["always", "except_last", "never"]
#: One mode for all partitions, or one for each.
Checkpoint = CheckpointMode | Sequence[CheckpointMode]
Kind = Literal["F", "R", "B"]

CHECKPOINT_MODES: tuple[CheckpointMode, ...] = ("always", "except_last", "never")


class Action(NamedTuple):
    """One cell of work: `kind` is ``F`` forward, ``R`` recompute or ``B`` backward."""

    partition: int
    kind: Kind
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.partition}{self.kind}{self.micro_batch}"


@dataclass(frozen=True)
class Schedule:
    """The order of actions of every partition.

    Attributes:
        name: The rule that made it, such as ``'gpipe'``.
        rows: One tuple of actions per partition, in the order in which it runs them.
    """

    name: str
    rows: tuple[tuple[Action, ...], ...]

    @property
    def n_partitions(self) -> int:
        """Number of partitions (rows)."""
        return len(self.rows)

    @property
    def chunks(self) -> int:
        """Number of micro-batches."""
        return 1 + max((action.micro_batch for row in self.rows for action in row), default=-1)

    def phase(self, kinds: str) -> tuple[tuple[Action, ...], ...]:
        """Keep, in order, the actions whose kind is one of `kinds`, such as ``'RB'``."""
        return tuple(tuple(a for a in row if a.kind in kinds) for row in self.rows)

    def __str__(self) -> str:
        return "\n".join(" ".join(map(str, row)) for row in self.rows)


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
        BalanceError: an unknown mode, or not one per partition.

    Example:
        >>> modes_of("never", 2), modes_of(["always", "never"], 2)
        (('never', 'never'), ('always', 'never'))
    """
    check_checkpoint(checkpoint)
    if isinstance(checkpoint, str):
        return (checkpoint,) * n_partitions
    if len(checkpoint) != n_partitions:
        raise BalanceError(
            f"checkpoint has a mode too many or too few: len(checkpoint)={len(checkpoint)} "
            f"(expected {n_partitions}, one per partition).\n"
            "Fix: give one mode for all partitions, or one for each."
        )
    return tuple(checkpoint)


def gpipe_schedule(
    n_partitions: int, chunks: int, checkpoint: Checkpoint = "except_last"
) -> Schedule:
    """Order a mini-batch as GPipe does: all forwards, then all backwards, last one first.

    A recompute stands before its backward, so that a partition recomputes while the gradient
    is still on its way from the next one.

    Args:
        n_partitions: Number of partitions, 1 or more.
        chunks: Number of micro-batches, 1 or more.
        checkpoint: Which micro-batches are recomputed, in all partitions or in each.

    Raises:
        BalanceError: a count below 1, or an unknown checkpoint mode.

    Source:
        Huang et al., "GPipe: Efficient Training of Giant Neural Networks using Pipeline
        Parallelism", NeurIPS 2019, section 2.2. Differs: the last micro-batch goes backward
        first, as in torchgpipe, because 'except_last' has its activations still at hand.

    Example:
        >>> print(gpipe_schedule(2, 2, "always"))
        0F0 0F1 0R1 0B1 0R0 0B0
        1F0 1F1 1R1 1B1 1R0 1B0
    """
    check_count("partitions", n_partitions)
    check_count("chunks", chunks)
    rows = []
    for j, mode in enumerate(modes_of(checkpoint, n_partitions)):  # j: partition
        row = [Action(j, "F", i) for i in range(chunks)]  # i: micro-batch
        for i in reversed(range(chunks)):
            if is_checkpointed(mode, i, chunks):
                row.append(Action(j, "R", i))
            row.append(Action(j, "B", i))
        rows.append(tuple(row))
    return Schedule("gpipe", tuple(rows))


def one_f_one_b_schedule(
    n_partitions: int, chunks: int, checkpoint: Checkpoint = "never"
) -> Schedule:
    """Order a mini-batch so that each backward comes as soon as it can: one forward, one backward.

    Partition j first runs as many forwards as there are partitions behind it, so at most
    ``n_partitions - j`` micro-batches are in flight there at once. A recompute stands before its
    backward; where it would follow its own forward directly it is left out, because keeping the
    graph for that moment takes no more memory than making it twice.

    Args:
        n_partitions: Number of partitions, 1 or more.
        chunks: Number of micro-batches, 1 or more.
        checkpoint: Which micro-batches are recomputed, in all partitions or in each.

    Raises:
        BalanceError: a count below 1, or an unknown checkpoint mode.

    Source:
        Narayanan et al., "Memory-Efficient Pipeline-Parallel DNN Training", ICML 2021, section
        2.2 (PipeDream-Flush). Differs: modes per partition, and recomputes that are left out.

    Example:
        >>> print(one_f_one_b_schedule(2, 3))
        0F0 0F1 0B0 0F2 0B1 0B2
        1F0 1B0 1F1 1B1 1F2 1B2
    """
    check_count("partitions", n_partitions)
    check_count("chunks", chunks)
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


#: The schedules that can be built, by name.
SCHEDULES = {"gpipe": gpipe_schedule, "1f1b": one_f_one_b_schedule}


def check_schedule(name: object) -> str:
    """Return the name of a schedule that can be built.

    Raises:
        UnsupportedPlanError: there is none of this name.
    """
    if not isinstance(name, str) or name not in SCHEDULES:
        raise UnsupportedPlanError(
            f"schedule cannot be built: schedule={name!r} (expected one of "
            f"{', '.join(map(repr, SCHEDULES))}).\nFix: schedule='gpipe'."
        )
    return name


def make_schedule(
    name: str, n_partitions: int, chunks: int, checkpoint: Checkpoint = "except_last"
) -> Schedule:
    """Order a mini-batch by the schedule of this name.

    Raises:
        UnsupportedPlanError: there is none of this name.
        BalanceError: a count below 1, or an unknown checkpoint mode.

    Example:
        >>> print(make_schedule("1f1b", 1, 2, "always"))
        0F0 0B0 0F1 0B1
    """
    return SCHEDULES[check_schedule(name)](n_partitions, chunks, checkpoint)


def check_count(name: str, value: object) -> int:
    """Return `value` as an int of 1 or more.

    A float that is a whole number is taken, as torchgpipe did for balances and chunks.

    Raises:
        BalanceError: `value` is not a whole number, or below 1.
    """
    whole = isinstance(value, float) and value.is_integer()
    if isinstance(value, bool) or not (whole or hasattr(value, "__index__")):
        raise BalanceError(
            f"{name} is not a whole number: {name}={value!r} (expected an int of 1 or more).\n"
            f"Fix: {name}=1, or more."
        )
    count = int(value)  # type: ignore[call-overload]  # an index or a whole float, see above
    if count < 1:
        raise BalanceError(
            f"{name} is too small: {name}={count} (expected 1 or more).\nFix: {name}=1, or more."
        )
    return int(count)


def check_checkpoint(checkpoint: object) -> None:
    """Refuse a checkpoint mode, or one in a sequence of modes, that does not exist.

    Raises:
        BalanceError: `checkpoint` is neither one of `CHECKPOINT_MODES` nor a sequence of them.
    """
    if isinstance(checkpoint, (list, tuple)) and checkpoint:
        for mode in checkpoint:
            check_checkpoint(mode)
        return
    if not isinstance(checkpoint, str) or checkpoint not in CHECKPOINT_MODES:
        raise BalanceError(
            f"checkpoint mode does not exist: checkpoint={checkpoint!r} "
            f"(expected one of {', '.join(map(repr, CHECKPOINT_MODES))}).\n"
            "Fix: checkpoint='except_last'."
        )
