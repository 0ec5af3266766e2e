"""What measuring would change although it runs copies: things outside of layers that they use.

A layer may use a weight of another one through a function, ``lambda x: F.linear(x, other.weight)``,
and so may a loss. Copies of the layer have the same function, which has the same weight: its
gradients would go to the caller's weight. The same holds for the statistics of a batch
normalisation. Here they are looked for by the names in the code, before anything runs; what is
reached in other ways is seen when it is first used (`foreign`).

A call restores what it has found, so only one may be at work in a process: others wait.
"""

from __future__ import annotations

import functools
import inspect
import os
import threading
import types
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from gpipebal.contents import attribute_values, contents_of, size_of
from gpipebal.pipeline.layers.attributes import attributes_of
from gpipebal.profiler.replicas.caches import caches_kept
from gpipebal.profiler.replicas.compiled import is_compiled
from gpipebal.profiler.replicas.foreign import foreign_kept
from gpipebal.profiler.replicas.spoken import (
    global_names,
    held_by,
    is_others,
    spoken_in,
    spoken_of,
)

__all__ = ["left_alone", "reached_past", "tensors_reached", "uses_compiled", "weights_reached"]

#: Objects inside objects are looked at to this depth.
_DEPTH = 8
#: So many objects in a global list are looked at.
_FEW = 100
_at_work = threading.RLock()


def _renew() -> None:
    """Start afresh in a forked process: a thread that was at work does not exist there."""
    global _at_work
    _at_work = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew)


class _Reached:
    """What is reached from some objects.

    Attributes:
        leaves: Tensors with gradients.
        tensors: All tensors.
        weights: Parameters, and buffers of modules.
        shared: Modules that copies of these objects would share with them.
        is_compiled: Whether any of what was looked at is compiled.
    """

    def __init__(self, objects: Iterable[Any]) -> None:
        self.leaves: dict[int, Tensor] = {}
        self.tensors: dict[int, Tensor] = {}
        self.weights: dict[int, Tensor] = {}
        self.shared: dict[int, nn.Module] = {}
        self.is_compiled = False
        self._seen: set[tuple[int, bool]] = set()
        for each in objects:
            # A loss that is not a module is not copied, so it shares all that it holds.
            self._look(each, not isinstance(each, nn.Module), _DEPTH)

    def _look(self, value: Any, is_shared: bool, depth: int) -> None:
        kind = type(value)  # what an object says of its class may be anything, or raise
        if not depth or (id(value), is_shared) in self._seen or issubclass(kind, _NOTHING_IN):
            return
        self._seen.add((id(value), is_shared))
        if issubclass(kind, Tensor):
            self.tensors[id(value)] = value
            if isinstance(value, nn.Parameter):
                self.weights[id(value)] = value
            if value.is_leaf and value.requires_grad:
                self.leaves[id(value)] = value
            return
        self.is_compiled = self.is_compiled or is_compiled(value)
        if issubclass(kind, nn.Module) and is_shared:
            self.shared[id(value)] = value
        if issubclass(kind, types.FunctionType):
            for each in _used_by(value):
                self._look(each, True, depth - 1)
            return
        if issubclass(kind, nn.Module):
            for each in _methods_of(kind):
                # What its class has, its copies have too.
                self._look(each, is_shared or isinstance(each, nn.Module), depth)
            # Trees of modules may be deep: submodules do not count as a further depth.
            parts = (*value._modules.values(), *value._parameters.values())
            buffers = [buffer for buffer in value._buffers.values() if buffer is not None]
            self.weights.update((id(buffer), buffer) for buffer in buffers)
            for part in (*parts, *value._buffers.values()):
                self._look(part, is_shared, depth)
        for each in _inside(value):
            self._look(each, is_shared, depth - 1)


_NOTHING_IN = (
    type(None),
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    type,
    types.ModuleType,
    torch.dtype,
)


def _inside(value: Any) -> Iterable[Any]:
    kind = type(value)
    for held in (contents_of(value), held_by(value)):
        if held is not None:
            return held
    if issubclass(kind, nn.Module):
        kept = ("_parameters", "_buffers", "_modules")
        return [each for name, each in vars(value).items() if name not in kept]
    call = inspect.getattr_static(kind, "__call__", None)
    used = [call] if isinstance(call, types.FunctionType) else []
    return [*attribute_values(value), *used]


def _methods_of(kind: type) -> Iterator[Any]:
    """Yield the forward of a class of modules, and what it uses of the class, by the names."""
    names, seen = ["forward"], {"forward"}
    while names:
        name = names.pop()
        # Not of an instance: a scripted module has none until it is asked.
        method = inspect.getattr_static(kind, name, None)
        if issubclass(type(method), property):
            method = method.fget
        elif issubclass(type(method), (staticmethod, classmethod)):
            method = method.__func__
        if issubclass(type(method), types.FunctionType) and (
            name == "forward" or not is_others(method)
        ):
            yield method
            called = spoken_in(_inmost(method)) - seen
            seen |= called
            names += sorted(called)
        elif issubclass(type(method), (nn.Module, Tensor)):
            yield method


def _inmost(method: types.FunctionType) -> types.FunctionType:
    """Return the function that decorators have wrapped, `torch.compile` for example."""
    try:
        inside: Any = inspect.unwrap(method)
    except ValueError:
        return method  # it is wrapped in itself
    return inside if isinstance(inside, types.FunctionType) else method


def _used_by(function: types.FunctionType) -> Iterator[Any]:
    """Yield what a function uses besides its arguments, as far as names tell."""
    yield from function.__defaults__ or ()
    yield from (function.__kwdefaults__ or {}).values()
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:
            continue  # not filled yet
    for name in global_names(function):
        value: Any = function.__globals__.get(name)
        if issubclass(type(value), types.ModuleType) and not is_others(value):
            yield from filter(_can_hold_weights, spoken_of(value, function))
        elif _can_hold_weights(value):
            yield value


def _can_hold_weights(value: Any) -> bool:
    """Tell whether what has a global name may lead to weights, and is not too much to look at."""
    kind = type(value)
    if issubclass(kind, types.FunctionType):
        return not is_others(value)
    if issubclass(kind, (dict, list, tuple)):
        return (size_of(value) or 0) <= _FEW
    kinds = (nn.Module, Tensor, types.MethodType, functools.partial, types.SimpleNamespace)
    return issubclass(kind, kinds)


def reached_past(layer: nn.Module) -> bool:
    """Tell whether a layer uses parameters that it does not register, by a function or in a list.

    Other tensors that are attributes of the layer are its own.
    """
    kept = (tensor for tensor in attributes_of(layer) if not isinstance(tensor, nn.Parameter))
    own = {id(tensor) for tensor in (*layer.parameters(), *kept)}
    return bool(_Reached([layer]).leaves.keys() - own)


def uses_compiled(layer: nn.Module) -> bool:
    """Tell whether a layer, a part of it, or a function that it calls is compiled."""
    return _Reached([layer]).is_compiled


def tensors_reached(user: Any) -> list[Tensor]:
    """Return all tensors that a layer or a function can use, also those of others.

    They exist all the time, whichever layer has them.
    """
    return list(_Reached([user]).tensors.values())


def weights_reached(user: Any) -> list[Tensor]:
    """Return those of them that are parameters, or buffers of a module."""
    return list(_Reached([user]).weights.values())


@contextmanager
def left_alone(objects: Sequence[Any]) -> Iterator[None]:
    """Keep gradients as they are, and buffers and caches that are reached by functions.

    While the block runs there are no gradients; after it, the earlier ones are restored: the same
    tensors with the same values. A block of another thread waits until this one has ended.

    Args:
        objects: Layers, and functions such as a loss.
    """
    with _at_work, caches_kept(objects) as leaves, foreign_kept() as kept:
        reached = _Reached(objects)
        for module in reached.shared.values():
            kept.buffers(module)
        for leaf in {**leaves, **reached.leaves}.values():
            kept.gradient(leaf)
        for tensor in reached.tensors.values():
            # Of a class that torch does not know, or without values yet, there is no such form.
            if type(tensor) in (Tensor, nn.Parameter) and not tensor.is_nested:
                kept.form(tensor)
        yield
