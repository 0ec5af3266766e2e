"""What a step costs over the gathered output: joining it, and the loss over it."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from gpipebal.errors import GpipebalError, ProfileError
from gpipebal.pipeline.values.tensors import bytes_of
from gpipebal.profile import LayerProfile
from gpipebal.profile.sizes import COUNTS, FIXED, TIMES
from gpipebal.profiler.chain.clock import synchronize
from gpipebal.profiler.chain.failures import is_out_of_memory
from gpipebal.profiler.chain.gradients import needs_gradient
from gpipebal.profiler.chain.numbers import Arrived, Numbers
from gpipebal.profiler.chain.outputs import Outputs
from gpipebal.profiler.memory.layer_memory import LayerMemory
from gpipebal.profiler.step.loss import (
    describe_loss,
    loss_chain,
    loss_failed,
    survey_loss,
    tensors_of,
    times_of_loss,
)
from gpipebal.profiler.step.step import median_time
from gpipebal.profiler.times.rounds import Times

__all__ = ["GatheredTerms", "measure_gathered", "most_bytes", "scaled_gathered", "try_gathered"]

#: Repeats of the loss over the whole mini-batch; the median counts.
REPEATS = 5
#: The loss over a gathered output needs about this many times the output's bytes.
COPIES = 4

#: Seconds of joining, the loss over the joined output, and the storages of that output.
GatheredTerms = tuple[float, LayerProfile | None, tuple[int, ...]]


def try_gathered(
    outputs: Outputs,
    numbers: Numbers,
    device: torch.device,
    loss_fn: Callable[..., Tensor],
    target: Any,
) -> None:
    """Find out, before anything is clocked, whether a loss fits the gathered output at all.

    Micro-batches may have no such loss though the mini-batch has one.

    Raises:
        ProfileError: the loss failed; but not for lack of memory: a pipeline may need less.
    """
    try:
        # Measuring numbers storages, and will do so again.
        measure_gathered(outputs, copy.deepcopy(numbers), device, loss_fn, target)
    except GpipebalError as error:
        if not is_out_of_memory(error):
            raise


def measure_gathered(
    outputs: Outputs,
    numbers: Numbers,
    device: torch.device,
    loss_fn: Callable[..., Tensor] | None,
    target: Any,
) -> GatheredTerms:
    """Measure joining, and the loss over what is joined, as a caller computes it after ``pipe(x)``.

    Args:
        outputs: Outputs of the micro-batches, as far as the first one tells.
        numbers: Numbers of all storages so far; new ones are added.
        device: Where they are.
        loss_fn: The loss; None: there is none.
        target: Its target, of the mini-batch.

    Raises:
        ProfileError: the loss failed.
    """
    seconds = median_time(outputs.joined, device)
    if loss_fn is None:
        return seconds, None, ()
    value = outputs.joined()
    arrived = Arrived.of(value, outputs.first.known(), numbers, {})
    chain, times = loss_chain(loss_fn, target, value, device), Times()
    try:
        found = survey_loss(chain, arrived, numbers)
        for repeat in range(REPEATS + 1):
            synchronize(device)
            (times if repeat else Times()).run_loss(chain, value)  # the first warms up
    except ProfileError as error:
        raise loss_failed(error) from error.__cause__
    return seconds, describe_loss(found, times_of_loss(times)), arrived.storages


def most_bytes(layers: Sequence[nn.Module], memory: Sequence[LayerMemory]) -> int:
    """Return the most that one layer needs: parameters, gradients, and what it makes."""
    return max(
        2 * sum(map(bytes_of, layer.parameters())) + found.forward_peak_bytes + found.peaks.new
        for layer, found in zip(layers, memory, strict=True)
    )


def scaled_gathered(
    outputs: Outputs,
    numbers: Numbers,
    device: torch.device,
    loss: LayerProfile | None,
    target: Any,
    free_bytes: int,
) -> GatheredTerms | None:
    """Scale both up from two micro-batches and from the loss over one, where there is no room.

    Args:
        outputs: Outputs of the micro-batches.
        numbers: Numbers of all storages so far; new ones are added.
        device: Where they are.
        loss: The loss over one micro-batch; None: there is none.
        target: The loss's target, of the mini-batch.
        free_bytes: Bytes that are free.

    Returns:
        The terms; None: there is room to measure them.
    """
    first, sizes = outputs.first, outputs.sizes
    n_bytes = sum(numbers.bytes[number] for number in first.storages)
    share = sum(sizes) / max(1, sizes[0])
    if len(sizes) < 3 or COPIES * n_bytes * share <= free_bytes:
        return None
    seconds = median_time(replace(outputs, sizes=sizes[:2]).joined, device) * len(sizes) / 2
    if loss is None:
        return seconds, None, ()

    def larger(count: int) -> int:
        return math.ceil(count * share)

    grown = {n: numbers.new(larger(numbers.bytes[n])) for n in (*first.storages, *loss.saved)}
    of_leaves = [None if number is None else grown[number] for number in first.numbers]
    numbers.note(of_leaves, map(needs_gradient, first.value.leaves))
    known = {name: value for name, value in vars(loss).items() if value is not None}
    scaled: dict[str, Any] = {name: known[name] * share for name in TIMES if name in known}
    scaled |= {name: larger(known[name]) for name in COUNTS if name in known.keys() - FIXED}
    # Parts of a target that have no rows exist once.
    scaled["buffer_bytes"] = sum(map(bytes_of, tensors_of(target)))
    whole = replace(loss, saved=tuple(grown[number] for number in loss.saved), **scaled)
    return seconds, whole, tuple(grown[number] for number in first.storages)
