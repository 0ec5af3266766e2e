"""What a partition holds all the time, whatever its schedule."""

from __future__ import annotations

from collections.abc import Iterable

from gpipebal.plan import PeakMemory
from gpipebal.profile import LayerProfile

__all__ = ["fixed_memory"]


def fixed_memory(layers: Iterable[LayerProfile]) -> PeakMemory:
    """Add up parameters, buffers and optimizer state, in bytes; the rest is 0.

    The optimizer's state counts only if it is known for all layers.
    """
    layers = tuple(layers)
    states = [layer.optimizer_bytes for layer in layers]
    return PeakMemory(
        parameters=sum(layer.parameter_bytes for layer in layers),
        buffers=sum(layer.buffer_bytes for layer in layers),
        optimizer=None if None in states else sum(state or 0 for state in states),
    )
