"""Copies of layers, which are measured in place of the caller's."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from gpipebal.copies import deep_copy
from gpipebal.errors import ProfileError
from gpipebal.profiler.chain.failures import said

__all__ = ["buffer_like", "copy_attributes", "copy_layer", "parameter_like"]


def parameter_like(parameter: nn.Parameter, values: Tensor) -> nn.Parameter:
    """Make a parameter of the same class, with the same attributes and these values.

    Tensors among the attributes are copied; the rest is shared until `copy_attributes`.

    Args:
        parameter: The parameter; it is not changed.
        values: The tensor that the new one shares its memory with.
    """
    kind, needs = type(parameter), parameter.requires_grad
    if type(values) is Tensor and issubclass(kind, nn.Parameter) and kind is not nn.Parameter:
        # Not by its constructor, which may need more arguments.
        made: nn.Parameter = Tensor._make_subclass(kind, values, needs)
    else:
        made = nn.Parameter(values, needs)
    vars(made).update(_attributes(parameter, values))
    return made


def buffer_like(buffer: Tensor, values: Tensor) -> Tensor:
    """Give a tensor the attributes that a buffer has, as `parameter_like` does; return it."""
    vars(values).update(_attributes(buffer, values))
    return values


def _attributes(tensor: Tensor, values: Tensor) -> dict[str, Any]:
    """Return a tensor's attributes; tensors among them are copied to where the values are."""
    return {
        name: torch.empty_like(each.detach(), device=values.device)
        if isinstance(each, Tensor) and values.is_meta
        else each.detach().to(values.device, copy=True)
        if isinstance(each, Tensor)
        else each
        for name, each in vars(tensor).items()
    }


def copy_attributes(
    tensors: Iterable[Tensor], memo: dict[int, Any], copying: TorchFunctionMode | None = None
) -> None:
    """Give the copies of tensors copies of all that is an attribute of these, such as a dictionary.

    Args:
        tensors: Parameters and buffers.
        memo: Has their copies, and substitutes for objects, by identity.
        copying: Copies tensors; None: tensors of a graph are cut off from it.
    """
    for tensor in tensors:
        made = memo.get(id(tensor), tensor)
        if made is not tensor:
            for name, each in vars(tensor).items():
                if not isinstance(each, Tensor):
                    vars(made)[name] = deep_copy(each, memo, copying)


def copy_layer(
    name: str,
    layer: nn.Module,
    memo: dict[int, Any],
    *,
    keep_modes: bool = True,
    copying: TorchFunctionMode | None = None,
) -> nn.Module:
    """Copy a layer.

    Args:
        name: Its name.
        layer: The layer; it is not changed.
        memo: Substitutes for objects, by identity, as `deep_copy` takes them.
        keep_modes: Whether its parts stay in training or evaluation mode; else all are trained.
        copying: Copies tensors; None: tensors of a graph are cut off from it.

    Raises:
        ProfileError: it cannot be copied.
    """
    try:
        copy_attributes((*layer.parameters(), *layer.buffers()), memo, copying)
        copied: nn.Module = deep_copy(layer, memo, copying)
    except Exception as error:
        raise ProfileError(
            f"layer {name!r} cannot be copied: {said(error)}\n"
            "Fix: make the layer work with copy.deepcopy."
        ) from error
    if not keep_modes:
        copied.train()  # classes may have one of their own, that returns nothing
    return copied
