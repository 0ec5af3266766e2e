"""The loss as a layer behind the last one: over one micro-batch, and over the whole mini-batch."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gpipebal.errors import BalanceError, ProfileError
from gpipebal.pipeline.loss import call_loss
from gpipebal.pipeline.microbatch import flatten, unflatten
from gpipebal.pipeline.parting import count_rows, gather_leaves, scatter_leaves
from gpipebal.profile import LayerProfile
from gpipebal.profiler.chain import Chain
from gpipebal.profiler.clock import Span, seconds_of, synchronize
from gpipebal.profiler.flops import FlopCounter
from gpipebal.profiler.numbers import Arrived, Numbers
from gpipebal.profiler.replica import replicate
from gpipebal.profiler.storages import LayerMemory, measure_layer_memory
from gpipebal.profiler.value import Value

__all__ = [
    "LossChain",
    "LossLayer",
    "describe_loss",
    "gathered_value",
    "loss_chain",
    "loss_failed",
    "measure_whole_loss",
    "spread_of",
    "target_of",
]

#: Repeats of the loss over the whole mini-batch; the median counts.
REPEATS = 5


class LossLayer(nn.Module):
    """A layer that gives the loss of its input.

    Args:
        loss_fn: Called as ``loss_fn(output, target)``, or without a target ``loss_fn(output)``.
        target: Its target; None: there is none.
    """

    def __init__(self, loss_fn: Callable[..., Tensor], target: Any) -> None:
        super().__init__()
        self.loss_fn = loss_fn
        self.target = target

    def forward(self, output: Any) -> Tensor:
        """Compute the loss."""
        return call_loss(self.loss_fn, output, self.target)

    @property
    def target_tensors(self) -> list[Tensor]:
        """The tensors of the target."""
        return [leaf for leaf in flatten(self.target)[0] if isinstance(leaf, Tensor)]


class LossChain(Chain):
    """A chain whose only layer is the loss.

    Args:
        loss_fn: The loss; of a module a copy.
        target: Its target; None: there is none.
        start: What the loss is taken of.
        device: Where it is.

    Attributes:
        loss: The layer.
    """

    def __init__(
        self, loss_fn: Callable[..., Tensor], target: Any, start: Value, device: torch.device
    ) -> None:
        self.loss = LossLayer(loss_fn, target)
        is_module = isinstance(loss_fn, nn.Module)
        super().__init__(["loss"], [self.loss], device, start, first=1, only_inputs=not is_module)


def loss_chain(
    loss_fn: Callable[..., Tensor], target: Any, start: Value, device: torch.device
) -> LossChain:
    """Make a chain of the loss; a loss that is a module is replicated."""
    called: Any = loss_fn
    if isinstance(loss_fn, nn.Module):
        called = replicate(["loss"], [loss_fn], device)[0]
    return LossChain(called, target, start, device)


def target_of(target: Any, sizes: Sequence[int]) -> Any:
    """Return the target of the first micro-batch.

    Raises:
        ModelError: the target cannot be parted.
        BalanceError: it has other rows than the mini-batch.
    """
    if target is None:
        return None
    leaves, structure = flatten(target)
    dims = [0] * len(leaves)
    rows = count_rows(leaves, structure, dims, what="target")
    if rows != sum(sizes):
        raise BalanceError(
            f"target has other rows than the sample: {rows} (expected {sum(sizes)}).\n"
            "Fix: give one target per row."
        )
    return unflatten(scatter_leaves(leaves, sizes, dims)[0], structure)


def gathered_value(outputs: Value, sizes: Sequence[int]) -> Value:
    """Join stand-ins for the outputs of all micro-batches, made of those of the first."""
    parts = [[_rows_of(leaf, rows, sizes[0]) for leaf in outputs.leaves] for rows in sizes]
    # What has no rows can only be stacked.
    dims = [0 if isinstance(leaf, Tensor) and leaf.dim() else None for leaf in outputs.leaves]
    joined = [
        leaf.detach().requires_grad_(old.requires_grad) if isinstance(leaf, Tensor) else leaf
        for leaf, old in zip(
            gather_leaves(parts, outputs.structure, dims), outputs.leaves, strict=True
        )
    ]
    return Value(joined, outputs.structure)


def describe_loss(
    memory: LayerMemory,
    layer: LossLayer,
    *,
    forward: Sequence[float],
    backward: Sequence[float],
    without_graph: Sequence[float],
    flops: int | None,
) -> LayerProfile:
    """Describe a loss as a layer; its buffers are the target.

    Args:
        memory: Its memory.
        layer: The loss.
        forward: Seconds of each forward.
        backward: Seconds of each backward.
        without_graph: Seconds of each forward without a graph.
        flops: Its floating-point operations.
    """
    return LayerProfile(
        name="loss",
        kind=getattr(layer.loss_fn, "__name__", type(layer.loss_fn).__name__),
        forward_time=statistics.median(forward),
        backward_time=statistics.median(backward),
        recompute_time=statistics.median(forward),
        forward_spread=spread_of(forward),
        backward_spread=spread_of(backward),
        no_grad_forward_time=statistics.median(without_graph),
        flops=flops,
        buffer_bytes=sum(t.numel() * t.element_size() for t in layer.target_tensors),
        outputs=memory.outputs,
        saved=memory.saved,
        output_bytes=memory.output_bytes,
        forward_peak_bytes=memory.forward_peak_bytes,
        no_grad_forward_peak_bytes=memory.no_grad_forward_peak_bytes,
        backward_peak_bytes=memory.backward_peak_bytes,
        accumulating_peak_bytes=memory.accumulating_peak_bytes,
    )


def measure_whole_loss(
    loss_fn: Callable[..., Tensor],
    target: Any,
    outputs: Arrived,
    sizes: Sequence[int],
    numbers: Numbers,
    device: torch.device,
) -> tuple[LayerProfile, tuple[int, ...]]:
    """Measure the loss over the gathered outputs, as a caller computes it behind ``pipe(x)``.

    Args:
        loss_fn: The loss.
        target: Target of the mini-batch, on the device.
        outputs: Output of the first micro-batch.
        sizes: Rows of each micro-batch.
        numbers: Numbers of all storages so far; new ones are added.
        device: Where they are.

    Returns:
        The loss as a layer, and the storages of the gathered output.

    Raises:
        ProfileError: the loss failed.
    """
    value = gathered_value(outputs.value, sizes)
    arrived = Arrived.behind(outputs, value, numbers)
    chain = loss_chain(loss_fn, target, value, device)
    layer = chain.loss
    try:
        memory, _ = measure_layer_memory(chain, 0, arrived, numbers, layer.target_tensors)
        with FlopCounter() as counter:
            chain.forget()
        forward: list[float] = []
        backward: list[float] = []
        without: list[float] = []
        for repeat in range(REPEATS + 1):
            times: tuple[list[Span], list[Span | None], list[Span]] = [], [], []
            synchronize(device)
            chain.backward(*chain.record(times[0]), times[1])
            chain.forget(times[2])
            if repeat:  # the first warms up
                forward += seconds_of(times[0])
                backward += seconds_of(times[1])
                without += seconds_of(times[2])
    except ProfileError as error:
        raise loss_failed(error) from error.__cause__
    described = describe_loss(
        memory,
        layer,
        forward=forward,
        backward=backward,
        without_graph=without,
        flops=counter.total,
    )
    return described, arrived.storages


def loss_failed(error: ProfileError) -> ProfileError:
    """Say that not a layer but the loss failed, and with what."""
    cause = error.__cause__ or error
    return ProfileError(
        f"the loss failed: {type(cause).__name__}: {cause}\n"
        "Fix: give a loss_fn and a target for the output of the whole mini-batch."
    )


def spread_of(values: Sequence[float]) -> float:
    """Return the interquartile range of some values."""
    if len(values) < 2:
        return 0.0
    quartiles = statistics.quantiles(values, n=4, method="inclusive")
    return quartiles[2] - quartiles[0]


def _rows_of(leaf: Any, rows: int, of_rows: int) -> Any:
    """Cut the output of a micro-batch down to that of a smaller one."""
    if not isinstance(leaf, Tensor):
        return leaf
    if leaf.dim() == 0 or of_rows == 0 or rows == of_rows:
        return leaf.detach()
    return leaf.detach()[: rows * leaf.shape[0] // of_rows]
