"""Stand-ins without memory: layers on the meta device.

A layer's stand-in is a copy whose parameters, buffers and other tensors have shapes, dtypes and
storages, but no values. The caller's layer is only looked at.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode

from gpipebal.errors import ProfileError
from gpipebal.profiler.chain.failures import said
from gpipebal.profiler.replicas.copying import copy_layer, parameter_like

__all__ = ["META", "stand_in_for"]

META = torch.device("meta")


def stand_in_for(name: str, layer: nn.Module) -> nn.Module:
    """Copy a layer to the meta device.

    Args:
        name: Its name.
        layer: The layer; it is only looked at.

    Raises:
        ProfileError: it cannot be copied.
    """
    memo: dict[int, Any] = {}
    try:
        for parameter in layer.parameters():
            memo[id(parameter)] = parameter_like(parameter, _without_memory(parameter))
        for buffer in layer.buffers():
            memo[id(buffer)] = _without_memory(buffer)
    except (NotImplementedError, RuntimeError, TypeError) as error:
        # Classes of tensors, such as quantised ones, may not have this operation.
        raise ProfileError(
            f"layer {name!r} has a tensor that cannot be made without memory: {said(error)}\n"
            "Fix: method='measure'."
        ) from error
    stand_in = copy_layer(name, layer, memo, copying=_CopiesToMeta())
    for module in stand_in.modules():
        if isinstance(module, _BatchNorm) and module.momentum is None:
            module.momentum = 0.1  # the average over all batches would read their number
    return stand_in


def _without_memory(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor.detach(), device=META)


class _CopiesToMeta(TorchFunctionMode):
    """Makes copies of tensors without memory."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is not Tensor.__deepcopy__:
            return func(*args, **(kwargs or {}))
        tensor, memo = args
        if id(tensor) not in memo:
            copied = _without_memory(tensor)
            memo[id(tensor)] = copied.requires_grad_(tensor.requires_grad)
        return memo[id(tensor)]
