"""Replicas: stand-ins for the caller's layers, so that measuring cannot change the model.

A replica shares the memory of the parameters (unless its forward writes to them), but has
gradients, buffers and everything else of its own. So running statistics, gradients, training
flags and hooks of the model stay as they are, whatever happens while it is measured, and several
replicas can run side by side.
"""

from __future__ import annotations

import copy
from collections.abc import Container, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from gpipebal.errors import ProfileError

__all__ = ["layer_of_tensors", "own_bytes", "replicate"]


def replicate(
    names: Sequence[str],
    layers: Sequence[nn.Module],
    device: torch.device,
    *,
    private: Container[int] = (),
) -> list[nn.Module]:
    """Copy layers in training mode, with parameters that share the originals' memory.

    On another device than the parameters' own the values are copied there; so are those of the
    layers in `private` (by index).

    Raises:
        ProfileError: a layer cannot be copied.
    """
    memo: dict[int, Any] = {}
    for index, layer in enumerate(layers):
        for parameter in layer.parameters():
            if isinstance(parameter, UninitializedParameter):
                raise ProfileError(
                    "a model with lazy layers cannot be measured before its first forward.\n"
                    "Fix: run model(sample) once."
                )
            if parameter.device.type == "meta":
                raise ProfileError(
                    "a model without values cannot be measured: its parameters are on the meta "
                    "device.\nFix: make the model on a real device."
                )
            if id(parameter) not in memo:
                shared = nn.Parameter(
                    parameter.detach().to(device, copy=index in private),
                    requires_grad=parameter.requires_grad,
                )
                memo[id(parameter)] = shared
        for buffer in layer.buffers():
            memo.setdefault(id(buffer), buffer.detach().to(device, copy=True))
    replicas = []
    for name, layer in zip(names, layers, strict=True):
        try:
            replicas.append(copy.deepcopy(layer, memo).train())
        except Exception as error:
            raise ProfileError(
                f"layer {name!r} cannot be copied: {type(error).__name__}: {error}\n"
                "Fix: make the layer work with copy.deepcopy."
            ) from error
    return replicas


def layer_of_tensors(layers: Sequence[nn.Module]) -> dict[int, int]:
    """Map the identity of every parameter and buffer to the first layer that has it."""
    first: dict[int, int] = {}
    for index, layer in enumerate(layers):
        for tensor in (*layer.parameters(), *layer.buffers()):
            first.setdefault(id(tensor), index)
    return first


def own_bytes(layers: Sequence[nn.Module], index: int, owner: dict[int, int]) -> dict[str, int]:
    """Count the bytes of parameters, gradients and buffers that no earlier layer has."""

    def mine(tensor: Tensor) -> bool:
        return owner[id(tensor)] == index

    parameters = [p for p in layers[index].parameters() if mine(p)]
    return {
        "parameter_bytes": sum(p.nbytes for p in parameters),
        "gradient_bytes": sum(p.nbytes for p in parameters if p.requires_grad),
        "buffer_bytes": sum(b.nbytes for b in layers[index].buffers() if mine(b)),
    }
