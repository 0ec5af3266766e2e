"""Stand-ins without memory: layers and values on the meta device.

A layer's stand-in is a copy whose parameters, buffers and other tensors have shapes, dtypes and
storages, but no values. The caller's layer is only looked at.
"""

from __future__ import annotations

import copy
import enum
import types
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter
from torch.overrides import TorchFunctionMode

from gpipebal.errors import ProfileError
from gpipebal.pipeline.microbatch import flatten, unflatten
from gpipebal.profiler.value import Value

__all__ = [
    "META",
    "Leaf",
    "check_not_lazy",
    "identity_of",
    "resized",
    "stand_in_for",
    "stand_in_of",
    "value_of",
]

META = torch.device("meta")

_LAZY = (UninitializedParameter, UninitializedBuffer)
#: Attributes of a module that are compared in another way, or that decide nothing.
_LOOKED_AT = ("_parameters", "_buffers", "_modules", "training")
#: Attributes of attributes are compared so deep; what lies below counts as the same only if it is
#: the same object.
_DEPTH = 4
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, enum.Enum)


def stand_in_for(name: str, layer: nn.Module) -> nn.Module:
    """Copy a layer to the meta device, in training mode.

    Raises:
        ProfileError: it cannot be copied.
    """
    memo: dict[int, Any] = {}
    for parameter in layer.parameters():
        memo[id(parameter)] = nn.Parameter(_without_memory(parameter), parameter.requires_grad)
    for buffer in layer.buffers():
        memo[id(buffer)] = _without_memory(buffer)
    try:
        with _CopiesToMeta():
            stand_in = copy.deepcopy(layer, memo).train()
    except Exception as error:
        raise ProfileError(
            f"layer {name!r} cannot be copied: {type(error).__name__}: {error}\n"
            "Fix: make the layer work with copy.deepcopy."
        ) from error
    for module in stand_in.modules():
        if isinstance(module, _BatchNorm) and module.momentum is None:
            module.momentum = 0.1  # the average over all batches would read their number
    return stand_in


def check_not_lazy(name: str, layer: nn.Module) -> None:
    """Refuse a layer whose parameters have no shapes yet.

    Raises:
        ProfileError: it has such.
    """
    if any(isinstance(t, _LAZY) for t in (*layer.parameters(), *layer.buffers())):
        raise ProfileError(
            f"layer {name!r} has no shapes yet: it is lazy (expected parameters with shapes).\n"
            "Fix: run model(sample) once."
        )


def stand_in_of(value: Any, rows: int | None = None) -> Any:
    """Make a stand-in for a value, a pytree; with `rows`, of as many along dim 0 of each tensor."""
    leaves, structure = flatten(value)
    return unflatten(
        [resized(leaf, rows) if isinstance(leaf, Tensor) else leaf for leaf in leaves],
        structure,
    )


def resized(tensor: Tensor, rows: int | None) -> Tensor:
    """Return a tensor without memory of the same kind, with `rows` along dim 0."""
    base = _without_memory(tensor)
    if rows is None or not base.dim() or base.shape[0] == rows:
        return base
    # As a copy of a slice has it: strides of a dense tensor keep their order.
    return base[:rows].clone() if rows < base.shape[0] else base.new_empty((rows, *base.shape[1:]))


def _without_memory(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor.detach(), device=META)


class _CopiesToMeta(TorchFunctionMode):
    """Copies of tensors are made without memory."""

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
    """A tensor on its way between layers, by what decides costs.

    Attributes:
        shape: Its shape.
        stride: Its strides.
        offset: Where it begins in its storage.
        dtype: Its dtype.
        needs_gradient: Whether it requires a gradient.
        storage: Number of its storage.
        storage_bytes: Bytes of its storage.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    needs_gradient: bool
    storage: int
    storage_bytes: int

    @classmethod
    def of(cls, tensor: Tensor, storage: int) -> Leaf:
        """Describe a tensor whose storage has this number."""
        return cls(
            tuple(tensor.shape),
            tuple(tensor.stride()),
            int(tensor.storage_offset()),
            tensor.dtype,
            tensor.requires_grad,
            storage,
            tensor.untyped_storage().nbytes(),
        )

    def make(self, storages: dict[int, Any]) -> Tensor:
        """Make such a tensor; `storages` holds those made so far, by number."""
        if self.storage not in storages:
            holder = torch.empty(self.storage_bytes, dtype=torch.uint8, device=META)
            storages[self.storage] = holder.untyped_storage()
        made = torch.empty(0, dtype=self.dtype, device=META)
        made.set_(storages[self.storage], self.offset, self.shape, self.stride)
        return made.requires_grad_(self.needs_gradient)


def identity_of(layer: nn.Module) -> Hashable:
    """Return what two layers have in common only if they cost the same for the same input.

    That is more than a fingerprint, which knows nothing of attributes that a class does not tell:
    classes, options, shapes of parameters and which of them are the same, and every attribute;
    objects count as equal only if they are one object, as a shared configuration is.
    """
    known: dict[int, int] = {}

    def tensors(named: Mapping[str, Tensor | None]) -> Hashable:
        return tuple(
            (name, None if t is None else (known.setdefault(id(t), len(known)), *_kind_of(t)))
            for name, t in named.items()
        )

    return tuple(
        (
            path,
            type(module),
            tensors(module._parameters),
            tensors(module._buffers),
            tuple(
                (name, _plain(value, _DEPTH))
                for name, value in vars(module).items()
                if name not in _LOOKED_AT
            ),
        )
        for path, module in layer.named_modules(remove_duplicate=False)
    )


def _kind_of(tensor: Tensor) -> tuple[Hashable, ...]:
    return (tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.requires_grad)


def _plain(value: Any, depth: int) -> Hashable:
    if isinstance(value, _PLAIN):
        return type(value), value
    if isinstance(value, (type, types.FunctionType, types.BuiltinFunctionType)):
        return id(value)
    if isinstance(value, Tensor):
        return "tensor", *_kind_of(value)
    if depth and isinstance(value, Mapping):
        items: Sequence[Any] = [x for pair in value.items() for x in pair]
        return type(value), tuple(_plain(item, depth - 1) for item in items)
    if depth and isinstance(value, (list, tuple, set, frozenset)):
        return type(value), tuple(_plain(item, depth - 1) for item in value)
    return id(value)


def value_of(sample: Any, rows: int) -> Value:
    """Make a stand-in for a micro-batch of a sample."""
    return Value.of(stand_in_of(sample, rows))
