"""What a training step costs beside the layers and the loss: gather and optimizer."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gpipebal.errors import ProfileError
from gpipebal.pipeline.ledger import Ledger
from gpipebal.profiler.clock import synchronize
from gpipebal.profiler.loss import gathered_value
from gpipebal.profiler.value import Value

__all__ = [
    "OptimizerFactory",
    "OptimizerPeaks",
    "measure_gather",
    "measure_optimizer",
    "optimizer_peaks",
    "optimizer_state_bytes",
]

#: Repeats of each term; the median counts.
REPEATS = 5
#: Parameters of at most this many bytes are stepped; the time of more is scaled up.
LARGEST_STEPPED = 2**28
#: Bytes that no cache holds: writing so many leaves nothing else in it.
BEYOND_CACHES = 2**26

OptimizerFactory = Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer]


def measure_gather(outputs: Value, sizes: Sequence[int], device: torch.device) -> float:
    """Return the seconds to join the outputs of all micro-batches, stand-ins for them.

    Args:
        outputs: Output of the first micro-batch, the largest.
        sizes: Rows of each micro-batch.
        device: Where it is.
    """
    return _median_time(lambda: gathered_value(outputs, sizes), device)


def optimizer_state_bytes(
    optimizer: OptimizerFactory, parameters: Sequence[nn.Parameter]
) -> list[int] | None:
    """Find the bytes of state that an optimizer keeps for each parameter.

    It takes one step on stand-ins without memory (meta tensors), so nothing is guessed and
    nothing is allocated. None if the optimizer cannot work on those.
    """
    stand_ins = [
        nn.Parameter(torch.empty_like(p, device="meta"), requires_grad=p.requires_grad)
        for p in parameters
    ]
    try:
        optimizer_, _ = _without_values(optimizer, stand_ins)
        for parameter in stand_ins:
            if parameter.requires_grad:
                parameter.grad = torch.empty_like(parameter)
        optimizer_.step()
    except Exception:
        return None
    return [
        sum(v.nbytes for v in optimizer_.state.get(p, {}).values() if isinstance(v, Tensor))
        for p in stand_ins
    ]


def _without_values(
    optimizer: OptimizerFactory, stand_ins: Sequence[nn.Parameter]
) -> tuple[torch.optim.Optimizer, bool]:
    """Make an optimizer of parameters on the meta device; return whether its step is fused.

    A fused step cannot run there. Told not to fuse, an optimizer keeps the same state.
    """
    made = optimizer(stand_ins)
    is_fused = False
    for group in made.param_groups:
        if group.get("fused"):
            is_fused = True
            group["fused"] = False
    return made, is_fused


class OptimizerPeaks(NamedTuple):
    """What an optimizer's step needs for a moment.

    Attributes:
        bytes: Largest memory of the step of each parameter, alone, beyond what was there.
        together: Whether all parameters are stepped at once, so that these add up.
    """

    bytes: list[int]
    together: bool


def optimizer_peaks(
    optimizer: OptimizerFactory, parameters: Sequence[nn.Parameter], device_type: str
) -> OptimizerPeaks | None:
    """Find the bytes that an optimizer's step needs beside parameters, gradients and state.

    It takes a second step on stand-ins without memory (meta tensors); parameters of one shape are
    stepped once. Optimizers of torch step all parameters at once on CUDA (``foreach``), and one
    after the other on a CPU, unless they are told otherwise. None if the optimizer cannot work
    without values.

    Args:
        optimizer: Makes an optimizer of a list of parameters.
        parameters: The model's parameters; they are not changed.
        device_type: Type of the device that they will be on.
    """
    known: dict[Any, int] = {}
    found, together = [], False
    for parameter in parameters:
        kind = (tuple(parameter.shape), parameter.stride(), parameter.dtype)
        if not parameter.requires_grad:
            found.append(0)
            continue
        if kind not in known:
            stand_in = nn.Parameter(torch.empty_like(parameter, device="meta"))
            stand_in.grad = torch.empty_like(stand_in)
            try:
                stepper, is_fused = _without_values(optimizer, [stand_in])
                for group in stepper.param_groups:
                    if device_type == "cuda" and group.get("foreach", False) is None:
                        group["foreach"] = not is_fused
                    together = together or bool(group.get("foreach"))
                stepper.step()  # makes its state
                ledger = Ledger()
                ledger.hold([stand_in, stand_in.grad, *stepper.state[stand_in].values()], 0)
                before = ledger.start_peak()
                with ledger.watch(0):
                    stepper.step()
            except Exception:
                return None
            # A fused step is one kernel, and makes nothing in between.
            known[kind] = 0 if is_fused else ledger.total_peak - before
        found.append(known[kind])
    return OptimizerPeaks(found, together)


def measure_optimizer(
    optimizer: OptimizerFactory, parameters: Sequence[nn.Parameter], device: torch.device
) -> float:
    """Return the seconds of an optimizer's step, on copies of the parameters.

    Args:
        optimizer: Makes an optimizer of a list of parameters.
        parameters: The model's parameters; they are not changed.
        device: Where they will be.

    Raises:
        ProfileError: the optimizer failed.
    """
    trainable = [p for p in parameters if p.requires_grad]
    stepped: list[nn.Parameter] = []
    n_bytes = 0
    for parameter in trainable:
        if stepped and n_bytes + parameter.nbytes > LARGEST_STEPPED:
            break
        stepped.append(nn.Parameter(parameter.detach().to(device, copy=True)))
        n_bytes += parameter.nbytes
    if not stepped:
        return 0.0
    try:
        stepper = optimizer(stepped)

        def prepare() -> None:
            for parameter in stepped:
                parameter.grad = torch.full_like(parameter, 1e-6)
            # A backward of the whole model lies before a step: nothing is left in the caches.
            elsewhere.fill_(0.0)

        def run_step() -> None:
            stepper.step()
            stepper.zero_grad()

        elsewhere = torch.empty(BEYOND_CACHES // 4, dtype=torch.float32, device=device)
        seconds = _median_time(run_step, device, prepare)
    except Exception as error:
        raise ProfileError(
            f"the optimizer failed: {type(error).__name__}: {error}\n"
            "Fix: give a callable that makes an optimizer of a list of parameters, such as "
            "lambda parameters: torch.optim.SGD(parameters, lr=0.1)."
        ) from error
    return seconds * sum(p.nbytes for p in trainable) / max(1, n_bytes)


def _median_time(
    work: Callable[[], Any], device: torch.device, prepare: Callable[[], None] = lambda: None
) -> float:
    """Clock some work; `prepare` comes before each time, and is not clocked."""
    prepare()
    work()
    times = []
    for _ in range(REPEATS):
        prepare()
        synchronize(device)
        start = time.perf_counter()
        work()
        synchronize(device)
        times.append(time.perf_counter() - start)
    return statistics.median(times)
