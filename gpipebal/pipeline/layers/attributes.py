"""Tensors and modules that layers keep as attributes, in addition to what they have registered."""

from __future__ import annotations

import types
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from gpipebal.contents import attributes_in, contents_of, size_of

__all__ = [
    "MOST_INSIDE",
    "attributes_of",
    "inside_of",
    "own_attributes",
    "tensors_in",
    "unregistered_in",
]

#: How deep values inside values are looked at; how many a container may have to be looked into; and
#: how many containers and objects are looked into in all.
_DEPTH, MOST_INSIDE, _MOST = 5, 1000, 10_000
_FUNCTIONS = (types.FunctionType, types.MethodType, types.BuiltinFunctionType)
_OF_OTHERS = (nn.Module, type, *_FUNCTIONS, types.ModuleType)
_REGISTERED = ("_parameters", "_buffers", "_modules")
#: Attributes that every module has: what is registered, hooks and switches.
_OF_MODULES = frozenset(vars(nn.Module()))


def inside_of(value: Any) -> Sequence[Any]:
    """Return what is in a container, or the attributes of an object; nothing if there are too many.

    Modules (of torch and of Python), classes and functions count as empty: what they have is not
    the layer's own.
    """
    size = size_of(value)
    if size is not None:
        return (contents_of(value) or ()) if size <= MOST_INSIDE else ()
    if issubclass(type(value), _OF_OTHERS):
        return ()
    attributes = attributes_in(value)
    return list(dict.values(attributes)) if dict.__len__(attributes) <= MOST_INSIDE else ()


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in a value, in containers and objects in it too, each place once.

    Example:
        >>> import torch
        >>> [tensor.numel() for tensor in tensors_in({"a": [torch.ones(2)], "b": 1})]
        [2]
    """
    return _found_in([value], Tensor, set())


def _found_in(values: Iterable[Any], kind: type, seen: set[int]) -> Iterator[Any]:
    """Yield the objects of a class in values, in containers and objects in them too.

    Args:
        values: The values.
        kind: The class; in objects of it nothing is looked for.
        seen: Receives, by ``id``, what has been looked into; that is not looked into again.
    """
    waiting = [(value, _DEPTH) for value in values]
    while waiting:
        value, depth = waiting.pop()
        if issubclass(type(value), kind):
            yield value
        elif depth and id(value) not in seen and len(seen) < _MOST:
            seen.add(id(value))
            waiting += [(each, depth - 1) for each in inside_of(value)]


def attributes_of(layer: nn.Module) -> Iterator[Tensor]:
    """Yield the tensors that a layer keeps as plain attributes of its modules.

    Example:
        >>> import torch
        >>> layer = nn.Linear(2, 2)
        >>> layer.table = torch.ones(3)
        >>> [tensor.numel() for tensor in attributes_of(layer)]
        [3]
    """
    for module in layer.modules():
        for name, value in vars(module).items():
            if name not in _REGISTERED:
                yield from tensors_in(value)


def unregistered_in(layers: Sequence[nn.Module]) -> list[nn.Module]:
    """List the modules that layers keep in containers or objects, where torch does not find them.

    Example:
        >>> layer = nn.Linear(2, 2)
        >>> layer.kept = [nn.Tanh()]
        >>> unregistered_in([layer])
        [Tanh()]
    """
    registered = {id(module): module for layer in layers for module in layer.modules()}
    found: dict[int, nn.Module] = {}
    seen: set[int] = set()
    waiting = list(registered.values())
    while waiting:
        attributes = own_attributes(waiting.pop()).values()
        for module in _found_in(attributes, nn.Module, seen):
            for one in module.modules():
                if id(one) not in registered and id(one) not in found:
                    found[id(one)] = one
                    waiting.append(one)
    return list(found.values())


def own_attributes(module: nn.Module) -> dict[str, Any]:
    """Return the attributes of a module but for those that every module has.

    Example:
        >>> own_attributes(nn.Dropout(0.5))
        {'p': 0.5, 'inplace': False}
    """
    return {name: value for name, value in vars(module).items() if name not in _OF_MODULES}
