"""Schedules: in which order each partition works, without times.

An action is one cell of work, written as partition, kind, micro-batch: ``1F3`` is the forward of
micro-batch 3 in partition 1, ``1R3`` its recompute, ``1B3`` its backward. A schedule is one
ordered row of actions per partition. It is plain data: the simulator places durations on it, the
executor's workers run it, and tests compare it with a drawing::

    # GPipe, 3 partitions, 4 micro-batches, one clock each, except_last: R and B take a clock.
    # 0F0 0F1 0F2 0F3 ... 0B3 0R2 0B2 0R1 0B1 0R0 0B0
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from gpipebal.errors import BalanceError

__all__ = [
    "CHECKPOINT_MODES",
    "Action",
    "CheckpointMode",
    "Kind",
    "Schedule",
    "check_checkpoint",
    "check_count",
    "gpipe_schedule",
    "is_checkpointed",
]

CheckpointMode = Literal["always", "except_last", "never"]
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


def gpipe_schedule(
    n_partitions: int, chunks: int, checkpoint: CheckpointMode = "except_last"
) -> Schedule:
    """Order a mini-batch as GPipe does: all forwards, then all backwards, last one first.

    A recompute stands before its backward, so that a partition recomputes while the gradient
    is still on its way from the next one.

    Args:
        n_partitions: Number of partitions, 1 or more.
        chunks: Number of micro-batches, 1 or more.
        checkpoint: Which micro-batches are recomputed.

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
    check_checkpoint(checkpoint)
    rows = []
    for j in range(n_partitions):  # j: partition
        row = [Action(j, "F", i) for i in range(chunks)]  # i: micro-batch
        for i in reversed(range(chunks)):
            if is_checkpointed(checkpoint, i, chunks):
                row.append(Action(j, "R", i))
            row.append(Action(j, "B", i))
        rows.append(tuple(row))
    return Schedule("gpipe", tuple(rows))


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
    """Refuse a checkpoint mode that does not exist.

    Raises:
        BalanceError: `checkpoint` is not one of `CHECKPOINT_MODES`.
    """
    if checkpoint not in CHECKPOINT_MODES:
        raise BalanceError(
            f"checkpoint mode does not exist: checkpoint={checkpoint!r} "
            f"(expected one of {', '.join(map(repr, CHECKPOINT_MODES))}).\n"
            "Fix: checkpoint='except_last'."
        )
