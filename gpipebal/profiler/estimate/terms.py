"""Terms of a step, estimated: the loss, the gathering of outputs, the optimizer."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor, nn

from gpipebal.errors import ProfileError
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
from gpipebal.profiler.replicas.harmless import tensors_reached
from gpipebal.profiler.step.alike import global_hooks_left_out
from gpipebal.profiler.step.guessed import found_by_guesses
from gpipebal.profiler.step.loss import LossChain, LossSurvey, describe_loss, loss_failed
from gpipebal.profiler.step.optimizer import Maker
from gpipebal.profiler.step.state import LARGEST_TABLE, over_table, second_step
from gpipebal.rates import DeviceRates

__all__ = ["estimate_gather", "estimate_loss", "estimate_optimizer"]

#: What to do about a loss that needs values.
_LAYERS_ALONE = "leave out loss_fn and target, and the layers are estimated without a loss; or "


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
    return describe_loss(found, costs.times), costs.approximate


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
    sparse tensors without.
    """
    whole, step = maker.parameters[place].detach(), partial(_stepped, maker, place, rates)
    if place in maker.sparse:
        n_entries = maker.sparse[place].n_entries
        return over_table(whole, n_entries, lambda n, k: step(whole[:n], "cpu", k), _on_line)
    return found_by_guesses(step, whole, LARGEST_TABLE, _are_alike)


def _are_alike(one: _StepCosts, other: _StepCosts) -> bool:
    return math.isclose(one.seconds, other.seconds) and one.launches == other.launches


def _stepped(
    maker: Maker, place: int, rates: DeviceRates, like: Tensor, on: str, entries: int = 0
) -> _StepCosts:
    """Count what the second step on a stand-in costs; arguments as of `second_step`."""
    second = second_step(maker, [place], rates.device_type, like, on, entries)
    stepper = second.stepper
    if second.is_fused:  # one kernel, which reads everything once, and writes all but the gradient
        n_bytes = sum(map(bytes_of, second.gradients))
        n_bytes += 2 * sum(map(bytes_of, (*second.stand_ins, *second.state)))
        return _StepCosts(n_bytes / rates.bandwidth, 1, together=True)
    together = any(group.get("foreach") for group in stepper.param_groups)
    for group in stepper.param_groups:
        if group.get("foreach"):  # its operations do not return what they write
            group["foreach"] = False
    with global_hooks_left_out(), OperationCosts(rates) as costs:
        stepper.step()
    seconds = costs.seconds - costs.launches * rates.launch_time
    return _StepCosts(seconds, costs.launches, together)


def _on_line(less: _StepCosts, more: _StepCosts, times: float) -> _StepCosts:
    """Go on from the costs of one step to those of another one, and then so many times as far."""
    return more._replace(seconds=more.seconds + max(0.0, more.seconds - less.seconds) * times)
