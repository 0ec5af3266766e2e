"""Identity: whether two layers cost the same for the same input, so that one counts for both."""

from __future__ import annotations

import enum
import types
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gpipebal.pipeline.values.tensors import has_storage, plain_parts

__all__ = ["identity_of"]

#: Attributes of a module that are compared in another way.
_LOOKED_AT = ("_parameters", "_buffers", "_modules")
#: Attributes of attributes are compared to this depth; what lies below counts as the same only if
#: it is the same object.
_DEPTH = 4
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, enum.Enum)


def identity_of(layer: nn.Module) -> Hashable:
    """Return what two layers have in common only if they cost the same for the same input.

    That is more than a fingerprint, which leaves out private attributes: it includes classes,
    options, shapes of parameters and buffers and which of them are the same, modes, and every
    attribute. Objects count as equal only if they are one object, as a shared configuration is.
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
    lies: Hashable = tensor.layout
    if has_storage(tensor):
        lies = tensor.stride()
    elif not tensor.is_nested:  # sparse, or of a class with other tensors in it: these decide, too
        lies = (tensor.layout, *((tuple(part.shape), part.dtype) for part in plain_parts(tensor)))
    # The class of a tensor decides what runs.
    return (type(tensor), tuple(tensor.shape), lies, tensor.dtype, tensor.requires_grad)


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
