"""Terms of a step, estimated: the loss, the gathering of outputs, the optimizer."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gpipebal.errors import ProfileError
from gpipebal.pipeline.meter import optimizer_states
from gpipebal.pipeline.values.tensors import bytes_of
from gpipebal.profile import LayerProfile
from gpipebal.profiler.chain.numbers import Arrived, Numbers
from gpipebal.profiler.chain.outputs import Outputs
from gpipebal.profiler.chain.value import Value
from gpipebal.profiler.estimate.constants import Constants
from gpipebal.profiler.estimate.costs import OperationCosts
from gpipebal.profiler.estimate.refused import without_values
from gpipebal.profiler.estimate.stand_ins import META, stand_in_for
from gpipebal.profiler.estimate.walk import run_on_stand_ins
from gpipebal.profiler.memory.sparse_gradients import gradient_like
from gpipebal.profiler.replicas.harmless import tensors_reached
from gpipebal.profiler.step.alike import global_hooks_left_out
from gpipebal.profiler.step.guessed import ValuesGuessed, part_of
from gpipebal.profiler.step.loss import LossChain, LossSurvey, describe_loss, loss_failed
from gpipebal.profiler.step.optimizer import Maker
from gpipebal.profiler.step.state import LARGEST_TABLE, over_table
from gpipebal.rates import DeviceRates

__all__ = ["estimate_gather", "estimate_loss", "estimate_optimizer"]

#: What to do about a loss that needs values.
_LAYERS_ALONE = "leave out loss_fn and target, and the layers are estimated without a loss; or "
_HOST = torch.device("cpu")


def estimate_loss(
    loss_fn: Callable[..., Tensor],
    target: Any,
    outputs: Arrived,
    numbers: Numbers,
    rates: DeviceRates,
) -> tuple[LayerProfile, tuple[str, ...]]:
    """Estimate a loss as a layer after the last.

    Args:
        loss_fn: The loss.
        target: Its target, without memory.
        outputs: What the loss is taken of.
        numbers: Numbers of all storages so far; new ones are added.
        rates: Rates of the device.

    Returns:
        The loss as a layer, and why its memory may be approximate.

    Raises:
        ProfileError: the loss failed.
    """
    called: Any = stand_in_for("loss", loss_fn) if isinstance(loss_fn, nn.Module) else loss_fn
    chain = LossChain(called, target, outputs.value, META)
    layer = chain.loss
    constants = Constants(tensors_reached(called))
    try:
        with without_values("the loss", _LAYERS_ALONE):
            memory, _, costs = run_on_stand_ins(
                chain, outputs, numbers, rates, constants, layer.target_tensors
            )
    except ProfileError as error:
        if str(error).startswith("the loss cannot be estimated"):
            raise
        raise loss_failed(error) from error.__cause__
    found = LossSurvey(chain, memory, costs.flops)
    return describe_loss(found, costs.times()), costs.approximate


def estimate_gather(outputs: Outputs, rates: DeviceRates) -> tuple[float, Value]:
    """Estimate the seconds to join the outputs of all micro-batches; return what they make."""
    with OperationCosts(rates) as costs:
        value = outputs.joined()
    return costs.seconds, value


def estimate_optimizer(maker: Maker, rates: DeviceRates) -> float | None:
    """Estimate the seconds of an optimizer's step, by the bytes that it reads and writes.

    Parameters of one kind are stepped once. Where a group is stepped at once, as most are on CUDA,
    all its parameters have their launches in common.

    Returns:
        Seconds; None if the optimizer cannot step stand-ins.
    """
    if maker.needs_closure:
        return None
    places = [place for place, is_stepped in enumerate(maker.stepped) if is_stepped]
    counts = Counter(map(maker.kind_of, places))
    first = {maker.kind_of(place): place for place in reversed(places)}
    seconds, launches, at_once = 0.0, 0, Counter[Any]()
    for kind, count in counts.items():
        place = first[kind]
        try:
            found = _costs_of_step(maker, place, rates)
        except Exception:
            return None
        if found is None:
            return None
        seconds += count * found.seconds
        if found.together and rates.device_type == "cuda":
            group = maker.group_of(place)
            at_once[group] = max(at_once[group], found.launches)
        else:
            launches += count * found.launches
    return seconds + (launches + at_once.total()) * rates.launch_time


class _StepCosts(NamedTuple):
    """What the step on one parameter takes.

    Attributes:
        seconds: Seconds without those of launches.
        launches: How many launches it takes.
        together: Whether they are for all parameters of a group at once.
    """

    seconds: float
    launches: int
    together: bool


def _costs_of_step(maker: Maker, place: int, rates: DeviceRates) -> _StepCosts | None:
    """Estimate the step on one parameter; None: it decides by values, which there are not.

    A table with a sparse gradient is stepped with values, in a small part: torch does not work with
    sparse tensors without. What is read of other parameters is guessed, if a small part of the
    parameter takes as long with values.
    """
    whole, step = maker.parameters[place].detach(), partial(_stepped, maker, place, rates)
    if place in maker.sparse:
        n_entries = maker.sparse[place].n_entries
        return over_table(whole, n_entries, lambda n, k: step(whole[:n], _HOST, k), _on_line)
    with ValuesGuessed() as of_whole:
        found = step(whole, META)
    if not of_whole.n_read:
        return found
    part = part_of(whole, LARGEST_TABLE)
    with ValuesGuessed() as of_part:
        guessed = step(part, META)
    known = step(part, _HOST)
    is_alike = math.isclose(guessed.seconds, known.seconds) and guessed.launches == known.launches
    return found if is_alike and of_part.n_read == of_whole.n_read else None


def _stepped(
    maker: Maker, place: int, rates: DeviceRates, like: Tensor, on: torch.device, entries: int = 0
) -> _StepCosts:
    """Count what a step on a stand-in costs.

    Args:
        maker: Makes the optimizer.
        place: Place of the parameter.
        rates: Rates of the device.
        like: What the stand-in is like.
        on: Where the stand-in is.
        entries: How many entries its gradient has, if that is sparse.
    """
    kind = maker.sparse.get(place)
    if kind is not None:
        kind = kind._replace(n_entries=entries)
    stepped, costs = nn.Parameter(torch.zeros_like(like, device=on)), OperationCosts(rates)
    # What earlier mini-batches have left is for all rows that they had.
    stepped.grad = gradient_like(kind, stepped, whole=True)
    stepper, is_fused = maker.make_plain([place], [stepped], rates.device_type)
    together = is_fused or any(group.get("foreach") for group in stepper.param_groups)
    for group in stepper.param_groups:
        if group.get("foreach"):  # its operations do not return what they write
            group["foreach"] = False
    with global_hooks_left_out():
        stepper.step()  # makes its state
        if kind is not None:
            stepped.grad = gradient_like(kind, stepped)
        with costs:
            stepper.step()
    if is_fused:  # one kernel, which reads everything once, and writes all but the gradient
        kept = [states.get(stepped, {}).values() for states in optimizer_states(stepper)]
        tensors = [stepped, *(one for each in kept for one in each if isinstance(one, Tensor))]
        n_bytes = bytes_of(stepped.grad) + 2 * sum(map(bytes_of, tensors))
        return _StepCosts(n_bytes / rates.bandwidth, 1, together)
    seconds = costs.seconds - costs.launches * rates.launch_time
    return _StepCosts(seconds, costs.launches, together)


def _on_line(less: _StepCosts, more: _StepCosts, times: float) -> _StepCosts:
    """Go on from the costs of one step to those of another one, and then so many times as far."""
    return more._replace(seconds=more.seconds + max(0.0, more.seconds - less.seconds) * times)
