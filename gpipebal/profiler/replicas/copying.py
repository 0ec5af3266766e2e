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

__all__ = ["copy_layer", "parameter_like"]


def parameter_like(parameter: nn.Parameter, values: Tensor) -> nn.Parameter:
    """Make a parameter of the same class, with these values.

    It has the same attributes, until `copy_layer` copies a layer that has the parameter.

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
    vars(made).update(vars(parameter))
    return made


def _copy_attributes(
    tensors: Iterable[Tensor], memo: dict[int, Any], copying: TorchFunctionMode | None
) -> None:
    """Give the copies of tensors copies of all that is an attribute of these.

    Tensors among the attributes go where the copy is.

    Args:
        tensors: Parameters and buffers.
        memo: Has their copies, and substitutes for objects, by identity.
        copying: Copies tensors; None: tensors of a graph are cut off from it.
    """
    for tensor in tensors:
        made = memo.get(id(tensor), tensor)
        if made is tensor:
            continue
        for name, each in vars(tensor).items():
            if not isinstance(each, Tensor):
                copied = deep_copy(each, memo, copying)
            elif made.is_meta:
                copied = torch.empty_like(each.detach(), device=made.device)
            else:
                copied = each.detach().to(made.device, copy=True)
            vars(made)[name] = copied


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
        _copy_attributes((*layer.parameters(), *layer.buffers()), memo, copying)
        copied: nn.Module = deep_copy(layer, memo, copying)
    except Exception as error:
        raise ProfileError(
            f"layer {name!r} cannot be copied: {said(error)}\n"
            "Fix: make the layer work with copy.deepcopy."
        ) from error
    if not keep_modes:
        copied.train()  # classes may have one of their own, that returns nothing
    return copied
