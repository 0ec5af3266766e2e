"""Terms of a step, estimated: the loss, the gathering of outputs, the optimizer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from gpipebal.errors import ProfileError
from gpipebal.profile import LayerProfile
from gpipebal.profiler.chain.numbers import Arrived, Numbers
from gpipebal.profiler.chain.outputs import Outputs
from gpipebal.profiler.chain.value import Value
from gpipebal.profiler.estimate.constants import Constants
from gpipebal.profiler.estimate.costs import OperationCosts, find_costs
from gpipebal.profiler.estimate.refused import without_values
from gpipebal.profiler.estimate.stand_ins import META, stand_in_for
from gpipebal.profiler.estimate.walk import acting_as_device
from gpipebal.profiler.memory.storages import measure_layer_memory
from gpipebal.profiler.replicas.harmless import tensors_reached
from gpipebal.profiler.step.alike import global_hooks_left_out
from gpipebal.profiler.step.loss import LossChain, describe_loss, loss_failed
from gpipebal.profiler.step.optimizer import Maker
from gpipebal.profiler.times.rounds import Times
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
    there = [*layer.target_tensors, *constants.stand_ins]
    try:
        with without_values("the loss", _LAYERS_ALONE), acting_as_device(rates) as notes, constants:
            chain.find_written(0, outputs.value)
            costs = find_costs(chain, outputs.value, rates)
            memory, _ = measure_layer_memory(chain, 0, outputs, numbers, there)
    except ProfileError as error:
        if str(error).startswith("the loss cannot be estimated"):
            raise
        raise loss_failed(error) from error.__cause__
    times = Times(
        loss_forward=[costs.forward_time],
        loss_backward=[costs.backward_time],
        loss_without_graph=[costs.no_grad_forward_time],
    )
    described = describe_loss(memory, layer, times, costs.flops)
    described = replace(
        described,
        forward_host_time=costs.forward_host_time,
        backward_host_time=costs.backward_host_time,
    )
    return described, tuple(sorted(notes | set(costs.approximate)))


def estimate_gather(outputs: Outputs, rates: DeviceRates) -> tuple[float, Value]:
    """Estimate the seconds to join the outputs of all micro-batches; return what they make."""
    with OperationCosts(rates) as costs:
        value = outputs.joined()
    return costs.seconds, value


def estimate_optimizer(maker: Maker, rates: DeviceRates) -> float | None:
    """Estimate the seconds of an optimizer's step, by the bytes that it reads and writes.

    Parameters of one shape are stepped once; of those with sparse gradients as many rows as there
    are entries, as if these were dense. On CUDA optimizers work on all parameters in one
    launch per operation; elsewhere on one parameter after the other.

    Returns:
        Seconds; None if the optimizer cannot work without values.
    """
    if maker.needs_closure:
        return None
    places = [place for place, is_stepped in enumerate(maker.stepped) if is_stepped]
    counts = Counter(map(maker.kind_of, places))
    first = {maker.kind_of(place): place for place in reversed(places)}
    seconds, most_launches = 0.0, 0
    for kind, count in counts.items():
        place = first[kind]
        parameter, sparse = maker.parameters[place].detach(), maker.sparse.get(place)
        worked_on = parameter if sparse is None else parameter[: sparse.n_entries]
        stepped = nn.Parameter(torch.empty_like(worked_on, device=META))
        stepped.grad = torch.empty_like(stepped)
        costs = OperationCosts(rates)
        try:
            stepper, _ = maker.make_plain([place], [stepped])
            with global_hooks_left_out():
                stepper.step()  # makes its state
                with costs:
                    stepper.step()
        except Exception:
            return None
        arithmetic = costs.seconds - costs.launches * rates.launch_time
        if rates.device_type == "cuda":
            seconds += count * arithmetic
            most_launches = max(most_launches, costs.launches)
        else:
            seconds += count * costs.seconds
    return seconds + most_launches * rates.launch_time
