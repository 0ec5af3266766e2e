"""Fingerprints: to notice that a layer is not the one that was profiled."""

from __future__ import annotations

import hashlib
from typing import Any

__all__ = ["fingerprint"]


def fingerprint(layer: Any) -> str:
    """Hash what decides a layer's costs: classes, options, and shapes of its parameters.

    Args:
        layer: A `torch.nn.Module`. Only its methods are called, so this needs no torch.

    Returns:
        16 hexadecimal digits. Two layers that were made alike have the same, whatever their
        parameters' values are.
    """
    parts = [
        f"{name}:{type(module).__qualname__}({module.extra_repr()})"
        for name, module in layer.named_modules()
    ]
    parts += [
        f"{name}:{tuple(p.shape)}:{p.dtype}:{p.requires_grad}"
        for name, p in layer.named_parameters()
    ]
    return hashlib.blake2b("\n".join(parts).encode(), digest_size=8).hexdigest()
