"""Fingerprints: to notice that a layer is not the one that was profiled."""

from __future__ import annotations

import enum
import functools
import hashlib
import re
from collections.abc import Mapping, Set
from typing import Any

__all__ = ["fingerprint", "is_same_layer", "is_uninitialized"]

#: What is hashed, and how: fingerprints of another version tell nothing.
_VERSION = "2:"
#: Attributes of attributes are looked at to this depth.
_DEPTH = 4
_PLAIN = (type(None), bool, int, float, complex, str, bytes, range, enum.Enum)
#: Where a function or an object is, which is another place in each process.
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


def fingerprint(layer: Any) -> str:
    """Hash what decides a layer's costs: classes, options, shapes of its parameters and buffers.

    Options are what ``extra_repr()`` of a class says, and public attributes: numbers, texts, names
    of functions and lists of these. What may change while the layer is trained does not count:
    values of tensors, the mode, hooks, and attributes whose names begin with an underscore.

    Args:
        layer: A `torch.nn.Module`. Only its methods are called, so this needs no torch.

    Returns:
        A version and 16 hexadecimal digits. Two layers that were made alike have the same.
    """
    # A substitute that runs the layer in another way has the fingerprint of the layer.
    layer = getattr(layer, "stands_for", layer)
    parts = []
    for name, module in layer.named_modules():
        options = _ADDRESS.sub("", module.extra_repr())
        parts.append(f"{name}:{type(module).__qualname__}({options})")
        parts += [
            f"{name}.{attribute}={_described(value, _DEPTH)}"
            for attribute, value in sorted(vars(module).items())
            if not attribute.startswith("_") and attribute != "training"
        ]
    parts += [
        f"{name}:{tuple(tensor.shape)}:{tensor.dtype}:{tensor.requires_grad}"
        for named in (layer.named_parameters(), layer.named_buffers())
        for name, tensor in named
    ]
    digest = hashlib.blake2b("\n".join(parts).encode(errors="replace"), digest_size=8)
    return f"{_VERSION}{digest.hexdigest()}"


def is_same_layer(known: str, layer: Any) -> bool | None:
    """Tell whether a layer has a fingerprint.

    None: the fingerprint is empty, or of another version; or the layer is lazy, and has no shapes
    yet.
    """
    if not known.startswith(_VERSION):
        return None
    if any(map(is_uninitialized, (*layer.parameters(), *layer.buffers()))):
        return None
    return known == fingerprint(layer)


def is_uninitialized(tensor: Any) -> bool:
    """Tell whether a parameter or buffer gets its shape in the first forward, as in lazy layers."""
    return hasattr(type(tensor), "cls_to_become")


def _described(value: Any, depth: int) -> str:
    """Describe a value so that two equal ones have the same description in every process."""
    kind = type(value).__qualname__
    if isinstance(value, _PLAIN):
        return repr(value)
    # By its class: a configuration may have a shape too, or an answer to any name.
    if hasattr(type(value), "__array__") and hasattr(value, "dtype"):
        return f"{tuple(value.shape)}:{value.dtype}"
    if kind == "dtype":
        return str(value)
    if not depth:
        return kind
    if isinstance(value, functools.partial):
        inside = {"func": value.func, "args": value.args, "keywords": value.keywords}
        return f"{kind}{_described(inside, depth - 1)}"
    if callable(value) and hasattr(value, "__qualname__"):
        return f"{getattr(value, '__module__', None)}.{value.__qualname__}"
    if isinstance(value, Mapping):
        items = [
            f"{_described(k, depth - 1)}: {_described(v, depth - 1)}" for k, v in value.items()
        ]
        return f"{kind}{items}"
    if isinstance(value, (list, tuple)):
        return f"{kind}{[_described(item, depth - 1) for item in value]}"
    if isinstance(value, Set):
        return f"{kind}{sorted(_described(item, depth - 1) for item in value)}"
    if type(value).__module__.partition(".")[0] == "torch":
        return kind  # a compiler, a generator: not a configuration
    public = {name: v for name, v in getattr(value, "__dict__", {}).items() if name[:1] != "_"}
    return f"{kind}{_described(public, depth - 1)}" if public else kind
