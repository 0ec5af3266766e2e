"""Replicas: stand-ins for the caller's layers, so that measuring cannot change the model.

A replica shares the memory of the parameters (unless its forward writes to them), but has
gradients, buffers and everything else of its own. So running statistics, gradients, training
flags and hooks of the model stay as they are, whatever happens while it is measured, and several
replicas can run side by side.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gpipebal.errors import ProfileError
from gpipebal.pipeline.layers.attributes import attributes_of
from gpipebal.profiler.replicas.compiled import compile_alike
from gpipebal.profiler.replicas.copying import copy_layer, parameter_like

__all__ = [
    "kept_by",
    "replicate",
    "stand_ins",
]


def replicate(
    names: Sequence[str],
    layers: Sequence[nn.Module],
    device: torch.device,
    *,
    private: Collection[int] = (),
    keep_modes: bool = True,
    known: Mapping[int, Any] | None = None,
) -> list[nn.Module]:
    """Copy layers, with parameters that share the originals' memory.

    On a device other than the parameters' own, their values are copied; so are those of the layers
    in `private` (by index), on any device. Compiled layers are compiled again. Weights of a
    recurrent layer that are not in one piece of memory are put into one, in a copy of their own, as
    a pipeline does when it moves a layer: cuDNN would otherwise copy them at every call.

    Args:
        names: Names of the layers.
        layers: The caller's layers, which have values (see `check_values`); they are not changed.
        device: Where the copies will be.
        private: Layers whose parameters are copied too.
        keep_modes: Whether all parts stay in training or evaluation mode; else all are trained.
        known: Substitutes for parameters of other layers, by identity: a layer may refer to them
            (by a hook that knows the model), and each copy of it would have copies of them all.

    Raises:
        ProfileError: a layer cannot be copied, or its parameters cannot be trained.
    """
    memo: dict[int, Any] = dict(known or {})
    # This includes parameters that another layer has too.
    own = {id(parameter) for k in private for parameter in layers[k].parameters()}
    for key in own:
        memo.pop(key, None)
    for index, layer in enumerate(layers):
        for parameter in layer.parameters():
            if parameter.is_inference():
                raise ProfileError(
                    f"layer {names[index]!r} cannot be trained: its parameters were made in "
                    "inference mode.\nFix: make the model outside of torch.inference_mode()."
                )
            if id(parameter) not in memo:
                values = parameter.detach().to(device, copy=id(parameter) in own)
                memo[id(parameter)] = parameter_like(parameter, values)
        for buffer in layer.buffers():
            if id(buffer) not in memo:
                memo[id(buffer)] = buffer.detach().to(device, copy=True)
    replicas = []
    for name, layer in zip(names, layers, strict=True):
        replicas.append(copy_layer(name, layer, memo, keep_modes=keep_modes))
        _flatten(replicas[-1])
        compile_alike(layer, replicas[-1])
    return replicas


def stand_ins(layers: Sequence[nn.Module], device: torch.device) -> dict[int, nn.Parameter]:
    """Return parameters that share the memory of those of layers on a device, by identity."""
    return {
        id(parameter): parameter_like(parameter, parameter.detach())
        for layer in layers
        for parameter in layer.parameters()
        if parameter.device == device and not parameter.is_inference()
    }


def _flatten(replica: nn.Module) -> None:
    """On CUDA, put the weights of recurrent layers into one piece, unless they are in one."""
    for part in replica.modules():
        if isinstance(part, nn.RNNBase):
            weights = part.parameters(recurse=False)
            if len({weight.untyped_storage().data_ptr() for weight in weights}) > 1:
                part.flatten_parameters()


def kept_by(layer: nn.Module) -> list[Tensor]:
    """Return what a layer keeps besides parameters: buffers, and tensors that are attributes."""
    parameters = set(map(id, layer.parameters()))
    found = {id(tensor): tensor for tensor in (*layer.buffers(), *attributes_of(layer))}
    return [tensor for key, tensor in found.items() if key not in parameters]
