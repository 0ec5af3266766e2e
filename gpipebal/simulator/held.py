"""What partitions hold, in bytes: each micro-batch at work, and what is there beside them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields

from gpipebal.errors import ProfileError
from gpipebal.memory.loss import AroundLoss
from gpipebal.memory.waiting import Stream

__all__ = ["CellBytes", "HeldBytes"]


@dataclass(frozen=True)
class CellBytes:
    """Bytes of one micro-batch in one partition.

    A need is the most at any one time of an action, beyond what the micro-batch holds while it
    runs: of a forward or recompute beyond what that leaves, of a backward beyond what it found.

    Attributes:
        kept: Its input, if it is recomputed later: from its forward to its recompute.
        graph: Its graph: from its forward or recompute to its backward.
        weights: What is left of the graph when the input's gradient is done; None: all of it.
        forward: Need of its forward.
        recompute: Need of its recompute.
        first_backward: Need of its backward where the parameters have no gradients yet; those that
            it makes are part of it.
        backward: Need of its backward where they have.
        output: What a forward of the last partition leaves for the caller.

    Raises:
        ProfileError: a size that is negative or no whole number.
    """

    kept: int = 0
    graph: int = 0
    weights: int | None = None
    forward: int = 0
    recompute: int = 0
    first_backward: int = 0
    backward: int = 0
    output: int = 0

    def __post_init__(self) -> None:
        for each in fields(self):
            size = getattr(self, each.name)
            if size is not None or each.name != "weights":
                _check_size(each.name, size)


@dataclass(frozen=True)
class HeldBytes:
    """Bytes that one partition holds: for its micro-batches, and beside them.

    Attributes:
        fixed: Parameters, buffers and optimizer state; and the mini-batch's input or target, which
            are there all the time.
        gradients: Gradients of its parameters, from the end of its first backward on.
        recorded: A micro-batch whose forward makes the graph.
        recomputed: One whose recompute does.
        streams: What it makes for other partitions, and is charged with until they take it.
        around: What the caller adds on the last partition, who gathers the outputs and computes
            the loss between the phases; None: nobody does.
        gradients_exist: Whether the gradients are there from the beginning.

    Raises:
        ProfileError: a size that is negative or no whole number.
    """

    fixed: int = 0
    gradients: int = 0
    recorded: CellBytes = field(default_factory=CellBytes)
    recomputed: CellBytes = field(default_factory=CellBytes)
    streams: Sequence[Stream] = ()
    around: AroundLoss | None = None
    gradients_exist: bool = False

    def __post_init__(self) -> None:
        _check_size("fixed", self.fixed)
        _check_size("gradients", self.gradients)


def _check_size(name: str, size: object) -> None:
    if type(size) is not int or not 0 <= size < 2**62:
        raise ProfileError(
            f"size is impossible: {name}={size!r} (expected a whole number of bytes, 0 or more).\n"
            "Fix: correct the value, or profile the model again."
        )
