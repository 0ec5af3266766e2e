"""Stand-ins without memory: layers and values on the meta device.

A layer's stand-in is a copy whose parameters, buffers and other tensors have shapes, dtypes and
storages, but no values. The caller's layer is only looked at.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode

from gpipebal.errors import ProfileError
from gpipebal.profiler.chain.failures import said
from gpipebal.profiler.replicas.copying import buffer_like, copy_layer, parameter_like

__all__ = ["META", "Leaf", "stand_in_for"]

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
            memo[id(buffer)] = buffer_like(buffer, _without_memory(buffer))
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


@dataclass(frozen=True)
class Leaf:
    """A tensor on its way between layers, described by what its costs depend on.

    Attributes:
        shape: Its shape.
        stride: Its strides.
        offset: Where it begins in its storage.
        dtype: Its dtype.
        needs_gradient: Whether it requires a gradient.
        storage: Number of its storage.
        storage_bytes: Bytes of its storage.
        is_view: Whether it is one of `Value.views`.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    needs_gradient: bool
    storage: int
    storage_bytes: int
    is_view: bool = False

    @classmethod
    def of(cls, tensor: Tensor, storage: int, *, is_view: bool = False) -> Leaf:
        """Describe a tensor whose storage has this number."""
        return cls(
            tuple(tensor.shape),
            tuple(tensor.stride()),
            int(tensor.storage_offset()),
            tensor.dtype,
            tensor.requires_grad,
            storage,
            tensor.untyped_storage().nbytes(),
            is_view,
        )

    def make(self, storages: dict[int, Any]) -> Tensor:
        """Make such a tensor; `storages` holds those made so far, by number."""
        if self.storage not in storages:
            holder = torch.empty(self.storage_bytes, dtype=torch.uint8, device=META)
            storages[self.storage] = holder.untyped_storage()
        made = torch.empty(0, dtype=self.dtype, device=META)
        made.set_(storages[self.storage], self.offset, self.shape, self.stride)
        return made.requires_grad_(self.needs_gradient)
