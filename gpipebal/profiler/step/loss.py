"""The loss as a layer after the last one."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gpipebal.errors import GpipebalError, ProfileError
from gpipebal.pipeline.minibatch.loss import call_loss
from gpipebal.pipeline.values.microbatch import flatten
from gpipebal.pipeline.values.tensors import bytes_of
from gpipebal.profile import LayerProfile
from gpipebal.profiler.chain.chain import Chain
from gpipebal.profiler.chain.failures import said
from gpipebal.profiler.chain.numbers import Arrived, Numbers
from gpipebal.profiler.chain.value import Value
from gpipebal.profiler.memory.flops import flops_of
from gpipebal.profiler.memory.layer_memory import LayerMemory
from gpipebal.profiler.memory.storages import measure_layer_memory
from gpipebal.profiler.replicas.replica import replicate
from gpipebal.profiler.times.rounds import Times
from gpipebal.profiler.times.settle import spread_of

__all__ = [
    "LossChain",
    "LossLayer",
    "LossSurvey",
    "describe_loss",
    "loss_chain",
    "loss_failed",
    "survey_loss",
    "times_of_loss",
]


class LossLayer(nn.Module):
    """A layer that returns the loss of its input.

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
        return tensors_of(self.target)


def tensors_of(target: Any) -> list[Tensor]:
    """Return the tensors of a target."""
    return [leaf for leaf in flatten(target)[0] if isinstance(leaf, Tensor)]


class LossChain(Chain):
    """A chain whose only layer is the loss.

    Args:
        loss_fn: The loss; if it is a module, a copy of it.
        target: Its target; None: there is none.
        start: The input of the loss.
        device: Where the input is.

    Attributes:
        loss: The layer.
    """

    shares = True

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


class LossSurvey(NamedTuple):
    """A loss as a chain, its memory, and its operations."""

    chain: LossChain
    memory: LayerMemory
    flops: int | None


def survey_loss(chain: LossChain, outputs: Arrived, numbers: Numbers) -> LossSurvey:
    """Find out all about a loss, as a layer after the last, that needs no repeats.

    Args:
        chain: The loss.
        outputs: What it is taken of.
        numbers: Numbers of all storages so far; new ones are added.

    Raises:
        GpipebalError: it cannot be computed.
    """
    chain.find_written(0, outputs.value)
    memory, _ = measure_layer_memory(chain, 0, outputs, numbers, chain.loss.target_tensors)
    return LossSurvey(chain, memory, flops_of(chain, 0, outputs.value))


def times_of_loss(times: Times) -> dict[str, float]:
    """Return the columns of a layer profile that say how long a loss took."""
    forward, backward = times.loss_forward, times.loss_backward
    return {
        "forward_time": statistics.median(forward),
        "backward_time": statistics.median(backward),
        "recompute_time": statistics.median(forward),
        "forward_spread": spread_of(forward),
        "backward_spread": spread_of(backward),
        "no_grad_forward_time": statistics.median(times.loss_without_graph),
    }


def describe_loss(found: LossSurvey, times: Mapping[str, Any]) -> LayerProfile:
    """Describe a loss as a layer; its buffers are the target.

    Args:
        found: What was found out about it.
        times: Columns of a layer profile that say how long it takes.
    """
    layer, memory = found.chain.loss, found.memory
    return LayerProfile(
        name="loss",
        kind=getattr(layer.loss_fn, "__name__", type(layer.loss_fn).__name__),
        **times,
        flops=found.flops,
        buffer_bytes=sum(map(bytes_of, layer.target_tensors)),
        outputs=memory.outputs,
        saved=memory.saved,
        output_bytes=memory.output_bytes,
        forward_peak_bytes=memory.forward_peak_bytes,
        no_grad_forward_peak_bytes=memory.no_grad_forward_peak_bytes,
        backward_peak_bytes=memory.peaks.new,
        accumulating_peak_bytes=memory.peaks.added,
        kept_buffer_bytes=memory.kept_buffer_bytes,
        saved_buffer_bytes=memory.saved_buffer_bytes,
    )


def loss_failed(error: ProfileError) -> ProfileError:
    """Say that the loss failed, and not a layer, and with which error."""
    cause = error.__cause__ or error
    if isinstance(cause, GpipebalError):  # it says a fix of its own
        return ProfileError(f"the loss failed: {cause}")
    return ProfileError(
        f"the loss failed: {said(cause)}\n"
        "Fix: give a loss_fn and a target for the output of the whole mini-batch."
    )
