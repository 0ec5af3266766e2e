"""Outputs in memory that the layers of a partition keep: sent as they are, or copied.

What crosses a cut is never written to by its sender afterwards: others read it while the next
micro-batch is under way, and once more when they recompute. What a layer computes is new memory,
unless it is that of a buffer or a parameter, which the next forward may write to. So after every
forward the outputs are compared with what the layers have then: a buffer may first be returned in a
later micro-batch, and a layer may keep what it returns (a hidden state). An output in the memory of
a buffer or parameter is copied before it is sent

* if it is a buffer that recomputes copy without asking (a small one, or batch statistics);
* if a forward has been seen to write to it, or if it counts no writes;
* if this forward has put it there: nobody knows yet what the next one does with it.

Others are sent as they are, because they may be large: tables, tied weights. Copies of them are
sent from the first write on. If a write comes in the middle of a mini-batch that has sent the
tensor itself, others may have read it before or after: that mini-batch is refused.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import Parameter, is_lazy

from gpipebal.errors import ModelError
from gpipebal.pipeline.layers.buffers import Buffers, BufferSlot, is_always_copied
from gpipebal.pipeline.values.microbatch import copied
from gpipebal.pipeline.values.tensors import has_storage, plain_parts, storage_key, version_of

__all__ = ["Counted", "ReturnedTensors"]

#: Tensors before a forward, by ``id``: each, kept alive, with how often it had been written to.
Counted = dict[int, tuple[Tensor, int | None]]

_PLAIN = frozenset({Tensor, Parameter})


class _Seen(NamedTuple):
    """A buffer or parameter that has been returned.

    Attributes:
        tensor: The tensor, which is not kept from being freed.
        place: Where it was: the module that has it, and its name there.
        version: How often it had been written to when it was sent.
        sent_in: The mini-batch that it was last sent in as it is; None: only copies were.
    """

    tensor: weakref.ref[Tensor]
    place: BufferSlot
    version: int | None
    sent_in: weakref.ref[Any] | None


class ReturnedTensors:
    """The buffers and parameters that a partition returns.

    Belongs to the partition's worker.

    Args:
        modules: All modules of the layers.
        buffers: Their buffers. To those that layers of other partitions have too no layer writes.
    """

    def __init__(self, modules: Sequence[nn.Module], buffers: Buffers) -> None:
        self._modules = list(modules)
        self._buffers = buffers
        held: list[Any] = [
            names for module in modules for names in (module._parameters, module._buffers)
        ]
        # Views of dictionaries show later changes. A scripted module has no dictionaries, and
        # gives lists.
        self._views = [names.values() for names in held if isinstance(names, dict)]
        self._scripted = [names for names in held if not isinstance(names, dict)]
        self._seen: dict[int, _Seen] = {}
        self._written_parameters: set[BufferSlot] = set()

    def count(self, mini_batch: Any, *, first: bool = False) -> Counted:
        """Count the writes to what has been returned before; called before the layers run.

        Args:
            mini_batch: Tells mini-batches apart, by identity.
            first: Count those of all buffers and parameters: nothing may have been returned yet.
        """
        counted: Counted = {}
        if first:
            counted.update((id(one), (one, version_of(one))) for _, one in self._slots())
        for key, seen in list(self._seen.items()):
            tensor = seen.tensor()
            if tensor is None:
                del self._seen[key]
            else:
                # Between two forwards of a mini-batch nobody may write to what it has sent.
                is_sent = seen.sent_in is not None and seen.sent_in() is mini_batch
                counted[key] = tensor, seen.version if is_sent else version_of(tensor)
        return counted

    def send(self, outputs: list[Any], before: Counted, mini_batch: Any) -> list[Any]:
        """Return the outputs as they may be sent.

        Args:
            outputs: Leaves of what the layers returned.
            before: What `count` returned before they ran.
            mini_batch: As for `count`.

        Raises:
            ModelError: the layers have written to a tensor that this mini-batch has sent.
        """
        if self._seen:
            self._check(before, mini_batch)
        copies = set()
        for k, place, tensor in self._find(outputs):
            version = version_of(tensor)
            if self._is_copied(place, tensor):
                copies.add(k)
            elif id(tensor) in before and before[id(tensor)][1] == version:
                self._see(place, tensor, weakref.ref(mini_batch))
            else:
                copies.add(k)
                self._see(place, tensor, None)
        return copied(outputs, copies) if copies else outputs

    def _see(self, place: BufferSlot, tensor: Tensor, sent_in: weakref.ref[Any] | None) -> None:
        self._seen[id(tensor)] = _Seen(weakref.ref(tensor), place, version_of(tensor), sent_in)

    def _check(self, before: Counted, mini_batch: Any) -> None:
        """Find out which of the tensors that were returned earlier have been written to."""
        for key, seen in list(self._seen.items()):
            tensor, version = before[key]
            if version_of(tensor) == version:
                continue
            del self._seen[key]
            self._note_written(seen.place)
            if seen.sent_in is not None and seen.sent_in() is mini_batch:
                module, name = seen.place
                what = "buffer" if name in module._buffers else "parameter"
                raise ModelError(
                    f"{what} {name!r} of a {type(module).__name__} was written to while others "
                    "read it: its layer has returned it in an earlier micro-batch, and had not "
                    "written to it before.\n"
                    "Fix: run the mini-batch again, copies of it are sent from now on; or let the "
                    "layer return a clone()."
                )

    def _note_written(self, place: BufferSlot) -> None:
        module, name = place
        if name in module._parameters:
            self._written_parameters.add(place)
        else:
            self._buffers.note_written(place)

    def _is_copied(self, place: BufferSlot, tensor: Tensor) -> bool:
        """Tell whether copies of a buffer or parameter are sent, whatever this forward did."""
        module, name = place
        if version_of(tensor) is None:
            return True
        if name in module._parameters:
            return place in self._written_parameters
        return is_always_copied(module, tensor) or self._buffers.is_written(place)

    def _find(self, outputs: Sequence[Any]) -> list[tuple[int, BufferSlot, Tensor]]:
        """Find outputs in the memory of buffers and parameters, each with these.

        Complexity:
            O(n) for n buffers, parameters and outputs, in every forward.
        """
        keys: dict[int, list[int]] = {}
        for k, leaf in enumerate(outputs):
            if isinstance(leaf, Tensor):
                for key in _storages_of(leaf):
                    keys.setdefault(key, []).append(k)
        if not keys or not self._any_in(keys):
            return []
        return [
            (k, place, tensor)
            for place, tensor in self._slots()
            for key in _storages_of(tensor)
            for k in keys.get(key, ())
        ]

    def _any_in(self, keys: Mapping[int, Any]) -> bool:
        """Tell quickly whether a buffer or parameter may have one of these storages."""
        scripted = (names.values() for names in self._scripted)
        every = chain.from_iterable(chain(self._views, scripted))
        found = [one for one in every if one is not None]
        if not _PLAIN.issuperset(map(type, found)):
            return True
        try:
            return not keys.keys().isdisjoint([one.untyped_storage()._cdata for one in found])
        except RuntimeError:  # one has no storage, such as a sparse one
            return True

    def _slots(self) -> Iterator[tuple[BufferSlot, Tensor]]:
        """Yield the buffers and parameters that layers may write to, each with its place."""
        foreign = self._buffers.foreign
        for module in self._modules:
            for name, one in chain(module._parameters.items(), module._buffers.items()):
                if one is not None and not is_lazy(one) and (module, name) not in foreign:
                    yield (module, name), one


def _storages_of(tensor: Tensor) -> list[int]:
    """Name the storages that a tensor has elements in."""
    if type(tensor) in _PLAIN and tensor.layout is torch.strided and not tensor.is_nested:
        return [storage_key(tensor)] if tensor.numel() else []
    # Where the rows of a jagged tensor begin is no element, and its copies share it.
    elements = tensor.values() if tensor.layout is torch.jagged else tensor
    return [
        storage_key(part) for part in plain_parts(elements) if has_storage(part) and part.numel()
    ]
