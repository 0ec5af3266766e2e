"""What a training step costs beside the layers: gather, loss and optimizer."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gpipebal.errors import ProfileError
from gpipebal.pipeline.ledger import Ledger
from gpipebal.pipeline.microbatch import unflatten
from gpipebal.pipeline.parting import gather_leaves
from gpipebal.profile import StepTerms

__all__ = ["measure_step", "optimizer_state_bytes"]

#: Repeats of each term; the median counts.
REPEATS = 5
#: Parameters of at most this many bytes are stepped; the time of more is scaled up.
LARGEST_STEPPED = 2**28

OptimizerFactory = Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer]


def measure_step(
    outputs: Sequence[Any],
    structure: Any,
    sizes: Sequence[int],
    *,
    loss_fn: Callable[..., Tensor] | None,
    target: Any,
    optimizer: OptimizerFactory | None,
    parameters: Sequence[nn.Parameter],
    device: torch.device,
) -> StepTerms:
    """Measure gather, loss and optimizer step, with all the threads that the caller has.

    Args:
        outputs: Leaves of the output of the largest micro-batch, the first.
        structure: Their pytree.
        sizes: Rows of each micro-batch of a mini-batch.
        loss_fn: Called as ``loss_fn(output, target)``, or ``loss_fn(output)`` if `target` is
            None; None: the loss is not measured.
        target: Target of the whole mini-batch.
        optimizer: Makes an optimizer of a list of parameters; None: not measured.
        parameters: The model's parameters; they are not changed.
        device: Where outputs and parameters are.

    Raises:
        ProfileError: the loss or the optimizer failed.
    """
    dims = [0] * len(outputs)
    parts = [[_rows_of(leaf, rows, sizes[0]) for leaf in outputs] for rows in sizes]
    gather_time = _median_time(lambda: gather_leaves(parts, structure, dims), device)
    loss_time = loss_bytes = None
    if loss_fn is not None:
        leaves = gather_leaves(parts, structure, dims)
        needs = [isinstance(leaf, Tensor) and leaf.requires_grad for leaf in outputs]

        def run_loss() -> None:
            given = [
                leaf.detach().requires_grad_() if wants else leaf
                for leaf, wants in zip(leaves, needs, strict=True)
            ]
            value = unflatten(given, structure)
            loss = loss_fn(value) if target is None else loss_fn(value, target)
            loss.backward()

        try:
            ledger = Ledger()
            ledger.hold(leaves, 0)
            with ledger.watch(0):
                run_loss()
            loss_bytes = ledger.total_peak
            loss_time = _median_time(run_loss, device)
        except Exception as error:
            raise ProfileError(
                f"the loss failed: {type(error).__name__}: {error}\n"
                "Fix: give a loss_fn and a target for the output of the whole mini-batch."
            ) from error
    optimizer_time = None if optimizer is None else _time_optimizer(optimizer, parameters, device)
    return StepTerms(gather_time, loss_time, loss_bytes, optimizer_time)


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
        optimizer_ = optimizer(stand_ins)
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


def _time_optimizer(
    optimizer: OptimizerFactory, parameters: Sequence[nn.Parameter], device: torch.device
) -> float:
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

        def run_step() -> None:
            for parameter in stepped:
                parameter.grad = grads[id(parameter)]
            stepper.step()
            stepper.zero_grad()

        grads = {id(p): torch.full_like(p, 1e-6) for p in stepped}
        seconds = _median_time(run_step, device)
    except Exception as error:
        raise ProfileError(
            f"the optimizer failed: {type(error).__name__}: {error}\n"
            "Fix: give a callable that makes an optimizer of a list of parameters, such as "
            "lambda parameters: torch.optim.SGD(parameters, lr=0.1)."
        ) from error
    return seconds * sum(p.nbytes for p in trainable) / max(1, n_bytes)


def _rows_of(leaf: Any, rows: int, of_rows: int) -> Any:
    """Cut the output of a micro-batch down to that of a smaller one."""
    if not isinstance(leaf, Tensor):
        return leaf
    if leaf.dim() == 0 or of_rows == 0:
        return leaf.detach()
    return leaf.detach()[: rows * leaf.shape[0] // of_rows]


def _median_time(work: Callable[[], Any], device: torch.device) -> float:
    work()
    times = []
    for _ in range(REPEATS):
        _synchronize(device)
        start = time.perf_counter()
        work()
        _synchronize(device)
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
