"""Buffers of a layer that a micro-batch which is recomputed later keeps copies of.

The executor's rule (`gpipebal.pipeline.layers.buffers`): small buffers always, and statistics of
torch's normalisation layers; others if a forward writes to them or puts others in their place. An
estimate, which has no values, looks at the counts of writes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from gpipebal.pipeline.layers.buffers import is_always_copied
from gpipebal.pipeline.values.tensors import are_equal, parts_of

__all__ = ["copies_of_large", "kept_buffers"]


def copies_of_large(layer: nn.Module) -> list[tuple[Tensor, Tensor | int]]:
    """Copy the large buffers of a layer, to see later which a forward has written to.

    Returns:
        Each buffer and its copy; without values, how often it has been written to.
    """
    return [
        (buffer, buffer._version if buffer.device.type == "meta" else buffer.detach().clone())
        for module, buffer in _buffers(layer)
        if not is_always_copied(module, buffer)
    ]


def kept_buffers(layer: nn.Module, before: Sequence[tuple[Tensor, Tensor | int]]) -> list[Tensor]:
    """Return the buffers that a recomputed micro-batch keeps copies of; parts of sparse ones.

    Args:
        layer: The layer, after a forward.
        before: What `copies_of_large` returned before it.
    """
    always = [buffer for module, buffer in _buffers(layer) if is_always_copied(module, buffer)]
    written = [
        b
        for b, was in before
        if (not are_equal(b, was) if isinstance(was, Tensor) else b._version != was)
    ]
    known = {id(buffer) for buffer in (*always, *(buffer for buffer, _ in before))}
    replaced = [buffer for _, buffer in _buffers(layer) if id(buffer) not in known]
    return [part for buffer in always + written + replaced for part in parts_of(buffer)]


def _buffers(layer: nn.Module) -> Iterator[tuple[nn.Module, Tensor]]:
    """Yield the buffers that a forward of the layer may write to, each with its module."""
    for module in layer.modules():
        left_alone = getattr(type(module), "buffers_left_alone", ())
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in left_alone and not is_lazy(buffer):
                yield module, buffer
