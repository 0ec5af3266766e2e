"""What partitions hold, in bytes: for each micro-batch at work, and besides."""

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

    A need is the most that an action holds at any one time, beyond what the micro-batch holds
    anyway: for a forward or recompute, beyond what it leaves; for a backward, beyond what it found.

    Attributes:
        kept: Its input, if it is recomputed later: from its forward to its recompute.
        graph: Its graph: from its forward or recompute to its backward.
        weights: The part of the graph that is left when the input's gradient is done; None: all.
        forward: Need of its forward.
        recompute: Need of its recompute.
        first_backward: Need of its backward if the parameters have no gradients yet; the gradients
            that it makes are part of it.
        backward: Need of its backward if they have.
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
    """Bytes that one partition holds: for its micro-batches, and besides.

    Attributes:
        fixed: Parameters, buffers and optimizer state; and the mini-batch's input or target, which
            are held all the time.
        gradients: Gradients of its parameters, from the end of its first backward on.
        recorded: For a micro-batch whose forward makes the graph.
        recomputed: For one whose recompute makes it.
        streams: What it makes for other partitions, and is charged with until they take it.
        around: What the caller adds on the last partition by gathering the outputs and computing
            the loss between the phases; None: nothing.
        gradients_exist: Whether the gradients exist from the beginning.

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
            f"size is impossible: {name}={size!r:.60} (expected a whole number of bytes, 0 or "
            "more).\nFix: correct the value, or profile the model again."
        )
