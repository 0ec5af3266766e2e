"""The parts of a plan: its partitions, and what they need of memory."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from gpipebal.argument_kinds import keep_as_tuples
from gpipebal.records import another_kind, fields_of, path_in, text_of, tuple_of

__all__ = ["PartitionPlan", "PeakMemory", "read_part", "read_run"]


@dataclass(frozen=True)
class PeakMemory:
    """Parts of the peak memory of one partition, in bytes, at one moment; `total` is their sum.

    Attributes:
        parameters: Parameters.
        gradients: Gradients of the parameters.
        buffers: Buffers.
        optimizer: Optimizer state; None when it is not known, and then not counted.
        activations: What the micro-batches in flight keep for their backward.
        transient: What one action needs temporarily in addition to what is kept.
        outputs: On the last partition, the outputs, the target, the loss and their gradients, as
            far as they exist at that moment.
        waiting: What it has made and a busy neighbour has not taken yet: the most that there may
            be, in any timing; if predicted from a timeline, what waits in that.
    """

    parameters: int = 0
    gradients: int = 0
    buffers: int = 0
    optimizer: int | None = None
    activations: int = 0
    transient: int = 0
    outputs: int = 0
    waiting: int = 0

    @property
    def total(self) -> int:
        """Peak bytes."""
        known = (self.parameters, self.gradients, self.buffers, self.optimizer or 0)
        return sum(known) + self.activations + self.transient + self.outputs + self.waiting


@dataclass(frozen=True)
class PartitionPlan:
    """One partition: a run of layers, and its costs for one micro-batch.

    Attributes:
        layers: Names of its layers, in order; never empty.
        fingerprints: Short hashes of its layers, to notice a changed model.
        forward_time: Seconds of its forward.
        backward_time: Seconds of its backward, without recompute.
        recompute_time: Seconds of its recompute, whether or not the mode uses it.
        memory: Its predicted peak memory.
        memory_limit: Bytes that it may need, after the reserve is subtracted; None: no limit.
        receive_time: Seconds to bring a micro-batch into it from the partition before.
        return_time: Seconds to bring a gradient into it from the next partition.
        weight_time: Seconds of its backward that are gradients of weights, which no other
            partition waits for; None: half of it.
    """

    layers: tuple[str, ...]
    fingerprints: tuple[str, ...]
    forward_time: float
    backward_time: float
    recompute_time: float
    memory: PeakMemory = field(default_factory=PeakMemory)
    memory_limit: int | None = None
    receive_time: float = 0.0
    return_time: float = 0.0
    weight_time: float | None = None

    def __post_init__(self) -> None:
        keep_as_tuples(self)


def read_part(record: Any, where: str) -> PartitionPlan:
    """Read one partition of a file of a plan.

    Args:
        record: What the file has.
        where: Its place in the file, for errors.
    """
    content = fields_of(record, where, PartitionPlan, also=PartitionPlan.__dataclass_fields__)
    for name in ("layers", "fingerprints"):
        column = path_in(where, name)
        content[name] = tuple(
            text_of(text, path_in(column, k))
            for k, text in enumerate(tuple_of(content[name], column))
        )
    every = PeakMemory.__dataclass_fields__
    memory = fields_of(content["memory"], path_in(where, "memory"), PeakMemory, also=every)
    return PartitionPlan(**{**content, "memory": PeakMemory(**memory)})


def read_run(ends: Any, where: str) -> range:
    """Read one run of layers of a plan, from its first layer and the one past its last.

    Args:
        ends: What the caller or the file has.
        where: Its place in the plan, for errors.

    Raises:
        KindError: it is anything else.
    """
    found = tuple_of(ends, where)
    if len(found) != 2 or not all(type(end) is int for end in found):
        expected = "two whole numbers: the first layer, and one past the last"
        raise another_kind(where, ends, expected, "give ranges of layers")
    return range(*found)
