"""Metering: the peak memory of every partition while a pipeline runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from gpipebal.argument_kinds import check_kind
from gpipebal.contents import attribute_values, contents_of
from gpipebal.errors import KindError
from gpipebal.pipeline.gpipe import GPipe
from gpipebal.pipeline.layers.attributes import attributes_of
from gpipebal.pipeline.observers.ledger import Ledger
from gpipebal.pipeline.process.eager import run_eagerly

__all__ = ["MemoryMeter", "measure_memory", "optimizer_states"]


class MemoryMeter:
    """Peak memory of a metered block, in bytes.

    Attributes:
        ledger: The count of live storages from which the figures come.
        device_peak_bytes: Peak of the CUDA allocator per device, filled in when the block ends;
            empty on CPU.
    """

    def __init__(self, n_partitions: int) -> None:
        self.ledger = Ledger(n_partitions)
        self.device_peak_bytes: dict[str, int] = {}
        self._final: tuple[tuple[int, ...], int] | None = None

    def _end(self) -> None:
        # A mini-batch that began in the block may end later, and goes on counting until then.
        self._final = tuple(self.ledger.peaks), self.ledger.total_peak

    @property
    def peak_bytes(self) -> tuple[int, ...]:
        """The most that each partition held at one time.

        A partition holds its parameters, gradients, buffers and optimizer state, what its worker
        allocates, and what it has received from its neighbours. A tensor that several partitions
        have belongs to the first of them: a parameter, or the mini-batch where it is passed on.
        Of a larger tensor whose parts they keep, each has its parts, and the first the rest.
        What the caller makes of a tensor belongs to the partition that holds the tensor: an
        optimizer's intermediate results count with the parameter. The last partition holds the
        rest: gathered outputs, the loss and their gradients.
        """
        return tuple(self.ledger.peaks) if self._final is None else self._final[0]

    @property
    def total_peak_bytes(self) -> int:
        """The most that all partitions together held at one time."""
        return self.ledger.total_peak if self._final is None else self._final[1]


@contextmanager
def measure_memory(
    pipe: GPipe, optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None
) -> Iterator[MemoryMeter]:
    """Count live tensor memory by partition while a block runs.

    Every operation is watched, which makes the block several times slower: measure memory in a
    step of its own. What an operation uses inside and frees again is not counted. Layers that
    `torch.compile` compiled run as they were written: the figures are those of eager code.

    Args:
        pipe: The pipeline that runs in the block.
        optimizer: Its state counts towards the partitions of its parameters; or a list of several.

    Yields:
        A meter whose figures are final when the block ends.

    Raises:
        KindError: it is not a pipeline, or the optimizer is none.
        PipelineError: the pipeline is metered already.

    Complexity:
        About ten microseconds per operation, and one per freed storage.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from gpipebal import GPipe
        >>> pipe = GPipe(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), [1, 1], chunks=2)
        >>> with measure_memory(pipe) as meter:
        ...     pipe(torch.ones(4, 2)).sum().backward()
        >>> len(meter.peak_bytes), meter.total_peak_bytes > 0
        (2, True)
    """
    check_kind("pipe", pipe, GPipe, "pipe = GPipe(model, balance)")
    meter = MemoryMeter(len(pipe.balance))
    ledger = meter.ledger
    states = [] if optimizer is None else optimizer_states(optimizer)
    ledger.keep(_kept_in(pipe, states))
    devices = sorted({device for device in pipe.devices if device.type == "cuda"}, key=str)
    try:
        pipe.start_metering(ledger)
        for device in devices:
            torch.cuda.reset_peak_memory_stats(device)
        ledger.start_peak()
        # The workers' cells and what runs between them too.
        with run_eagerly(), ledger.watch(len(pipe.balance) - 1, follow=True):
            yield meter
    finally:
        try:
            pipe.stop_metering(ledger)
        except BaseException:  # an interrupt came in between
            pipe.stop_metering(ledger)
            raise
        meter._end()
        for device in devices:
            meter.device_peak_bytes[str(device)] = torch.cuda.max_memory_allocated(device)


def _kept_in(
    pipe: GPipe, states: Sequence[Mapping[Any, Mapping[str, Any]]]
) -> Iterator[tuple[int, Any]]:
    """Yield what partitions have all the time, each with the partition's number."""
    for j, partition in enumerate(pipe.partitions):
        for parameter in partition.parameters():
            if is_lazy(parameter):
                continue  # it comes into being in the first forward, and counts from then on
            yield from ((j, one) for one in (parameter, parameter.grad))
            for state in states:
                yield from ((j, one) for one in state.get(parameter, {}).values())
    # After all parameters: a layer may have one of another's in a list.
    for j, partition in enumerate(pipe.partitions):
        for one in chain(partition.buffers(), attributes_of(partition)):
            if not is_lazy(one):
                yield j, one


def optimizer_states(optimizer: Any) -> list[Mapping[Any, Mapping[str, Any]]]:
    """Return the states of optimizers, and of those that they wrap: by parameter, by name.

    Args:
        optimizer: An optimizer, or a list or tuple of several.

    Raises:
        KindError: one is no optimizer.

    Example:
        >>> len(optimizer_states(torch.optim.SGD([torch.ones(1)])))
        1
    """
    optimizers: list[Any] = list(optimizer) if isinstance(optimizer, (list, tuple)) else [optimizer]
    for one in optimizers:
        if isinstance(one, type) or not hasattr(one, "state"):
            got = f"optimizer={one.__name__}" if isinstance(one, type) else repr(type(one).__name__)
            raise KindError(
                f"optimizer is not an optimizer: got {got} (expected a torch.optim.Optimizer, or a "
                "list of several).\n"
                "Fix: optimizer=torch.optim.SGD(pipe.parameters()), say."
            )
        for value in attribute_values(one):
            parts = contents_of(value)
            for part in (value,) if parts is None else parts:
                is_new = all(part is not known for known in optimizers)
                if isinstance(part, torch.optim.Optimizer) and is_new:
                    optimizers.append(part)
    states: list[Any] = []
    for one in optimizers:
        # A wrapper's state is often the inner optimizer's own.
        if all(one.state is not known for known in states):
            states.append(one.state)
    return states
