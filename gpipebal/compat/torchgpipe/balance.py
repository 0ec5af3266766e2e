"""torchgpipe's balance functions: the number of partitions comes first.

They measure and solve as gpipebal's own do: every layer is measured at least once, and the result
is optimal for the measured values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

import gpipebal.balance
from gpipebal.argument_kinds import check_kind
from gpipebal.errors import ProfileError

__all__ = ["balance_by_size", "balance_by_time", "balance_cost"]


def balance_by_time(
    partitions: int,
    module: nn.Module,
    sample: Any,
    *,
    timeout: float = 1.0,
    device: torch.device | str | int | None = None,
) -> list[int]:
    """Balance a model by the measured time of its layers, forward plus backward.

    Args:
        partitions: Number of partitions.
        module: An `nn.Sequential`; its children are the layers.
        sample: Input of the size of one micro-batch; a tuple is one input.
        timeout: Seconds for the repeats; every layer is measured at least once.
        device: Where to measure; None: the first CUDA device, or the CPU.

    Returns:
        Number of layers in each partition.

    Raises:
        ProfileError: a parameter has a gradient already, or a layer failed (a ValueError).
        BalanceError: `partitions` is below 1 or above the number of layers (a ValueError).
        ModelError: `module` is not an `nn.Sequential` (a TypeError).
        DeviceError: `device` does not exist.

    Example:
        >>> model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> sum(balance_by_time(2, model, torch.ones(4, 8), timeout=0.1))
        3
    """
    _check_order(partitions, "partitions, module, sample")
    # Anything that is not a module is refused below.
    for name, parameter in module.named_parameters() if isinstance(module, nn.Module) else ():
        if parameter.grad is not None:
            raise ProfileError(
                f"some parameter already has gradient: {name!r} (expected none, as before "
                "training).\n"
                "Fix: module.zero_grad(), or gpipebal.balance_by_time, which does not mind."
            )
    return gpipebal.balance.balance_by_time(
        module, sample, partitions, device=device, timeout=timeout
    )


def balance_by_size(
    partitions: int,
    module: nn.Module,
    input: Any,
    *,
    chunks: int = 1,
    param_scale: float = 2.0,
    device: torch.device | str | int | None = None,
) -> list[int]:
    """Balance a model by the memory of its layers, on a CPU as well as on a CUDA device.

    A layer counts with what it saves for the whole mini-batch, and not for one micro-batch as in
    torchgpipe: without checkpoints all of them are held at once.

    Args:
        partitions: Number of partitions.
        module: An `nn.Sequential`; its children are the layers.
        input: A mini-batch; a tuple is one input.
        chunks: Micro-batches that a mini-batch will be divided into.
        param_scale: Bytes held per byte of parameters: 2 for plain SGD, 4 for Adam.
        device: Where to measure; None: the first CUDA device, or the CPU.

    Returns:
        Number of layers in each partition.

    Raises:
        ProfileError, BalanceError, ModelError, DeviceError: as for `balance_by_time`.

    Example:
        >>> model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 8))
        >>> sum(balance_by_size(2, model, torch.ones(4, 8), chunks=2))
        3
    """
    _check_order(partitions, "partitions, module, input")
    return gpipebal.balance.balance_by_size(
        module, input, partitions, chunks=chunks, param_scale=param_scale, device=device
    )


def balance_cost(cost: Sequence[float], partitions: int) -> list[int]:
    """Split a list of costs into consecutive parts with the smallest possible largest sum.

    Args:
        cost: One cost per layer, 0 or more.
        partitions: Number of parts.

    Returns:
        Number of costs in each part.

    Raises:
        BalanceError: more parts than costs, or an impossible cost (a ValueError).

    Example:
        >>> balance_cost([1, 1, 1, 1, 1, 1, 1], 4)
        [1, 2, 2, 2]
    """
    return gpipebal.balance.balance_cost(cost, partitions)


def _check_order(partitions: object, order: str) -> None:
    """Refuse arguments that come in the order of gpipebal's own functions."""
    if isinstance(partitions, nn.Module):
        check_kind("partitions", partitions, int, f"give them in this order: {order}")
