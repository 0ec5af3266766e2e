"""Large buffers that the layers of a partition return, and may begin to write to later.

Others read such a buffer while the next micro-batch is under way. As long as no layer writes to it,
it is sent as it is. From the first write on copies are sent, as of those that the first forward
writes to.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from gpipebal.errors import ModelError
from gpipebal.pipeline.layers.buffers import SMALL, Buffers, BufferSlot
from gpipebal.pipeline.values.microbatch import copied
from gpipebal.pipeline.values.tensors import bytes_of, parts_of, storage_key, version_of

__all__ = ["ReturnedBuffers"]


class ReturnedBuffers:
    """The large buffers of a partition that are sent as they are.

    Belongs to the partition's worker.

    Args:
        buffers: The buffers of the partition.
    """

    def __init__(self, buffers: Buffers) -> None:
        self._buffers = buffers
        # Each with the mini-batch that it was last sent in (None: only copies were); neither is
        # kept from being freed.
        self._sent: dict[BufferSlot, tuple[weakref.ref[Tensor], weakref.ref[Any] | None]] = {}

    def counts(self) -> dict[BufferSlot, int | None]:
        """Count how often each of them has been written to; called before the layers run."""
        return {place: version_of(buffer()) for place, (buffer, _) in self._sent.items()}

    def send(
        self, outputs: list[Any], before: Mapping[BufferSlot, int | None], mini_batch: Any
    ) -> list[Any]:
        """Return the outputs as they may be sent, with copies of buffers that change.

        Args:
            outputs: Leaves of what the layers returned.
            before: What `counts` returned before they ran, or `Buffers.counts`. A buffer that is
                not among them has never been looked at, so that this time its copy is sent.
            mini_batch: Tells mini-batches apart, by identity.

        Raises:
            ModelError: the layers have written to a buffer that this mini-batch has sent.
        """
        if self._sent:
            self._check(before, mini_batch)
        copies = set()
        for k, slots in self._find(outputs).items():
            for place, buffer in slots:
                version = version_of(buffer)
                if version is None or self._buffers.is_written(place):
                    copies.add(k)
                elif before.get(place) == version:
                    self._sent[place] = weakref.ref(buffer), weakref.ref(mini_batch)
                else:
                    copies.add(k)
                    self._sent.setdefault(place, (weakref.ref(buffer), None))
        return copied(outputs, copies) if copies else outputs

    def _check(self, before: Mapping[BufferSlot, int | None], mini_batch: Any) -> None:
        for place, (buffer, sent_in) in list(self._sent.items()):
            alive = buffer()
            if alive is not None and version_of(alive) == before.get(place):
                continue
            del self._sent[place]
            if alive is None:
                continue
            self._buffers.note_written(place)
            if sent_in is not None and sent_in() is mini_batch:
                module, name = place
                raise ModelError(
                    f"buffer {name!r} of a {type(module).__name__} was written to while others "
                    "read it: its layer has returned it in an earlier micro-batch, and had not "
                    "written to it before.\n"
                    "Fix: run the mini-batch again, copies of the buffer are sent from now on; or "
                    "let the layer return a clone()."
                )

    def _find(self, outputs: Sequence[Any]) -> dict[int, list[tuple[BufferSlot, Tensor]]]:
        """Find outputs in the memory of large buffers, each with these buffers."""
        # What autograd has computed is new, unless it was written into a buffer: then the first
        # forward has shown that.
        leaves = {
            k: storage_key(leaf)
            for k, leaf in enumerate(outputs)
            if isinstance(leaf, Tensor) and leaf.grad_fn is None
            if leaf.layout == torch.strided and not leaf.is_nested
            if leaf.numel() and leaf.untyped_storage().nbytes() > SMALL
        }
        if not leaves:
            return {}
        places: dict[int, list[tuple[BufferSlot, Tensor]]] = {}
        for place, buffer in self._buffers.of_layers():
            if not is_lazy(buffer) and _is_large(buffer):
                for part in parts_of(buffer):
                    places.setdefault(storage_key(part), []).append((place, buffer))
        return {k: places[key] for k, key in leaves.items() if key in places}


def _is_large(buffer: Tensor) -> bool:
    if buffer.layout == torch.strided and not buffer.is_nested:
        return buffer.nbytes > SMALL
    return bytes_of(buffer) > SMALL
