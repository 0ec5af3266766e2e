"""Buffers of a layer that a micro-batch which is recomputed later keeps copies of.

The executor's rule (`gpipebal.pipeline.layers.buffers`): small buffers always, and statistics of
torch's normalisation layers; others if a forward writes to them or puts others in their place. The
counts of writes tell, since a forward may leave what an earlier one of the same input has left; and
the values, which an estimate has not.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from gpipebal.pipeline.layers.buffers import is_always_copied
from gpipebal.pipeline.values.tensors import are_equal, plain_parts, version_of

__all__ = ["copies_of_large", "kept_buffers"]


#: A buffer, its copy (None: it has no values), and how often it has been written to.
_Large = tuple[Tensor, Tensor | None, int | None]


def copies_of_large(layer: nn.Module) -> list[_Large]:
    """Copy the large buffers of a layer, to see later which a forward has written to.

    Returns:
        Each buffer, its copy (without values None), and how often it has been written to.
    """
    return [
        (buffer, None if buffer.is_meta else buffer.detach().clone(), version_of(buffer))
        for module, buffer in _buffers(layer)
        if not is_always_copied(module, buffer)
    ]


def kept_buffers(layer: nn.Module, before: Sequence[_Large]) -> list[Tensor]:
    """Return the buffers that a recomputed micro-batch keeps copies of, as plain tensors.

    Args:
        layer: The layer, after a forward.
        before: What `copies_of_large` returned before it.
    """
    always = [buffer for module, buffer in _buffers(layer) if is_always_copied(module, buffer)]
    written = [
        buffer
        for buffer, copy, version in before
        if version_of(buffer) != version or (copy is not None and not are_equal(buffer, copy))
    ]
    known = {id(buffer) for buffer in (*always, *(buffer for buffer, *_ in before))}
    replaced = [buffer for _, buffer in _buffers(layer) if id(buffer) not in known]
    return [part for buffer in always + written + replaced for part in plain_parts(buffer)]


def _buffers(layer: nn.Module) -> Iterator[tuple[nn.Module, Tensor]]:
    """Yield the buffers that a forward of the layer may write to, each with its module."""
    for module in layer.modules():
        left_alone = getattr(type(module), "buffers_left_alone", ())
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in left_alone and not is_lazy(buffer):
                yield module, buffer
