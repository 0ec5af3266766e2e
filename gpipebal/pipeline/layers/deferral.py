"""Converted batch normalisation: a model whose statistics are deferred, the original left alone."""

from __future__ import annotations

import functools
import types
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from gpipebal.contents import attribute_values, contents_of
from gpipebal.errors import ModelError
from gpipebal.pipeline.layers.attributes import own_attributes
from gpipebal.pipeline.layers.batchnorm import DeferredBatchNorm, blank_deferred
from gpipebal.pipeline.layers.modules import own_state, shallow_copy
from gpipebal.pipeline.layers.own import warn_of_lazy_norms
from gpipebal.pipeline.layers.recomputed import Recomputed
from gpipebal.pipeline.process.caller import warn_caller

__all__ = ["check_own_forward", "convert_deferred_batch_norm", "defer_layers"]

#: Layers that are converted, with their subclasses.
_PLAIN = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


def convert_deferred_batch_norm(
    module: nn.Module, memo: dict[nn.Module, nn.Module] | None = None
) -> nn.Module:
    """Return a module whose BatchNorm layers are deferred.

    Parameters, buffers, hooks and everything else are shared with the original. Modules that
    contain a BatchNorm are replaced by shallow copies, so the original keeps its own layers;
    modules that contain none are the same objects.

    Args:
        module: Any module. Subclasses of BatchNorm1d, 2d and 3d are converted too; one whose
            ``forward`` does not call ``super().forward`` stays as it was.
        memo: What has been converted, so that a module that is in two places stays one.

    Returns:
        The converted module; `module` itself if it contains no BatchNorm to convert.

    Raises:
        ModelError: a module would run the original layer all the same: one that is compiled, whose
            forward was replaced on the instance, or that reaches its layers through a list or a
            function, for example.

    Warns:
        UserWarning: a SyncBatchNorm, or a scripted one, is left as it is.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        >>> converted = convert_deferred_batch_norm(model)
        >>> type(converted[1]).__name__, converted[1].weight is model[1].weight
        ('DeferredBatchNorm1d', True)
    """
    memo = {} if memo is None else memo
    if module not in memo:
        memo[module] = _converted(module, memo)
    return memo[module]


def defer_layers(layers: dict[str, nn.Module]) -> None:
    """Let all layers of a chain have deferred batch normalisations, in place.

    Raises:
        ModelError: that of a layer cannot be deferred.

    Warns:
        UserWarning: one is left as it is.
    """
    warn_of_lazy_norms(layers.values())
    memo: dict[nn.Module, nn.Module] = {}
    for name, layer in layers.items():
        layers[name] = convert_deferred_batch_norm(layer, memo)


def _check_converted(layer: Recomputed) -> None:
    """Refuse a layer that is recomputed by itself, if it runs what would have to be replaced."""
    if any(
        isinstance(inside, _PLAIN) and not isinstance(inside, DeferredBatchNorm)
        for inside in layer.modules()
    ):
        raise ModelError(
            "batch normalisation of a layer that is recomputed by itself cannot be deferred any "
            f"more: {type(layer.stands_for).__name__} runs it as it is.\n"
            "Fix: with_recompute(convert_deferred_batch_norm(model), runs)."
        )


def check_own_forward(module: nn.Module) -> None:
    """Refuse a module whose forward is bound to the original: a copy of it would run that.

    Raises:
        ModelError: it is one.
    """
    if "forward" in vars(module):
        raise ModelError(
            "batch normalisation cannot be deferred in a module that is compiled, or whose forward "
            f"was replaced: {type(module).__name__} runs the original.\n"
            "Fix: gpipebal.pipeline.convert_deferred_batch_norm(model) first, then compile or "
            "replace; or deferred_batch_norm=False."
        )


def _converted(module: nn.Module, memo: dict[nn.Module, nn.Module]) -> nn.Module:
    if isinstance(module, DeferredBatchNorm):
        return module
    if isinstance(module, _PLAIN):
        check_own_forward(module)
        deferred = blank_deferred(DeferredBatchNorm, type(module))
        deferred.__dict__.update(own_state(module))
        return deferred
    if isinstance(module, nn.SyncBatchNorm):
        warn_caller(
            "SyncBatchNorm is left as it is: its running statistics are updated once per "
            "micro-batch.",
        )
        return module
    if isinstance(module, torch.jit.ScriptModule):
        _warn_of_scripted(module)
        return module
    if isinstance(module, Recomputed):
        _check_converted(module)
        return module
    children = {
        name: convert_deferred_batch_norm(child, memo)
        for name, child in module._modules.items()
        if child is not None
    }
    if all(child is module._modules[name] for name, child in children.items()):
        return module
    check_own_forward(module)
    _check_other_ways(module, memo)
    converted: nn.Module = shallow_copy(module, {**module._modules, **children})
    return converted


def _warn_of_scripted(module: torch.jit.ScriptModule) -> None:
    names = {str(getattr(inside, "original_name", "")) for inside in module.modules()}
    if any(kind.__name__ in names for kind in _PLAIN):
        warn_caller(
            "a scripted batch normalisation is left as it is: its running statistics are updated "
            "once per micro-batch. Fix: script the model after "
            "gpipebal.pipeline.convert_deferred_batch_norm, or not at all.",
        )


def _check_other_ways(module: nn.Module, memo: dict[nn.Module, nn.Module]) -> None:
    """Refuse a module that has another reference to a replaced one: a copy would run the original.

    Args:
        module: The module.
        memo: What has been converted so far, including the modules inside this one.
    """
    replaced = {id(module), *(id(old) for old, new in memo.items() if new is not old)}
    for name, value in own_attributes(module).items():
        if _leads_to(value, replaced, set()):
            raise ModelError(
                "batch normalisation cannot be deferred in a module that also reaches it by an "
                f"attribute: {type(module).__name__}.{name} would run the original.\n"
                "Fix: keep the layers in an nn.ModuleList, and no function of self or of them in "
                "an attribute; or deferred_batch_norm=False."
            )


#: How many objects are searched for layers.
_MOST_OBJECTS = 10_000


def _leads_to(value: Any, modules: set[int], seen: set[int]) -> bool:
    """Tell whether a value is one of the given modules, or holds or calls one."""
    if id(value) in seen or len(seen) > _MOST_OBJECTS:
        return False
    seen.add(id(value))
    inside: Iterable[Any] = ()
    kind = type(value)  # what an object says of its class may be anything, or raise
    if issubclass(kind, nn.Module):
        if id(value) in modules:
            return True
        inside = value._modules.values()
    elif (contents := contents_of(value)) is not None:
        inside = contents
    elif issubclass(kind, Mapping):
        inside = attribute_values(value)
    elif issubclass(kind, functools.partial):
        inside = (value.func, *value.args, *value.keywords.values())
    elif issubclass(kind, types.MethodType):
        inside = (value.__self__,)
    elif issubclass(kind, types.FunctionType):
        inside = _contents(value)
    return any(_leads_to(each, modules, seen) for each in inside)


def _contents(function: types.FunctionType) -> Iterator[Any]:
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:
            continue  # not filled yet
    yield from function.__defaults__ or ()
