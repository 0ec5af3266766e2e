"""Copies of layers, which are measured in place of the caller's."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.overrides import TorchFunctionMode

from gpipebal.copies import deep_copy
from gpipebal.errors import ProfileError

__all__ = ["copy_layer"]


def copy_layer(
    name: str,
    layer: nn.Module,
    memo: dict[int, Any],
    *,
    keep_modes: bool,
    copying: TorchFunctionMode | None = None,
) -> nn.Module:
    """Copy a layer.

    Args:
        name: Its name.
        layer: The layer; it is only looked at.
        memo: What stands for which object, by identity, as `deep_copy` takes it.
        keep_modes: Whether its parts stay in training or evaluation mode; else all are trained.
        copying: Copies tensors; None: tensors of a graph are cut off from it.

    Raises:
        ProfileError: it cannot be copied.
    """
    try:
        copied: nn.Module = deep_copy(layer, memo, copying)
    except Exception as error:
        raise ProfileError(
            f"layer {name!r} cannot be copied: {type(error).__name__}: {error}\n"
            "Fix: make the layer work with copy.deepcopy."
        ) from error
    return copied if keep_modes else copied.train()
