"""Cards that are none, to see without CUDA which work waits for which.

All tensors are on the CPU, where an operation has run when it returns. But each has a place, the
host or a card, and an operation on a card's tensors is noted as work on the stream that is current
for this card in its thread: there CUDA would only have launched it. A stream comes behind its own
earlier work, and behind what those events tell of that it has waited for.

Two things are wrong. Work on memory that another stream works on, and that does not come behind
that. And memory that is given away too early: torch's allocator gives what is freed to the next
tensor that is made on the same stream, and waits for the work of other streams on it only if
`record_stream` has named them.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree
from torch import Tensor

from gpipebal.pipeline.minibatch.minibatch import MiniBatch
from gpipebal.pipeline.process.modes import ThreadedDispatchMode
from gpipebal.pipeline.randomness import randomness
from gpipebal.pipeline.values import lane
from gpipebal.pipeline.values.tensors import has_storage, plain_parts, storage_key

__all__ = ["HOST", "Cards"]

#: Where memory is not that of a card.
HOST = torch.device("cpu")

#: Held while streams and memory are looked at. Memory dies at any time, here too.
_lock = threading.RLock()

#: What normalisation writes to in a forward, though its operations do not declare it.
_STATISTICS = ("running_mean", "running_var")


class _Event:
    """A point of a stream: how far it was behind every stream."""

    def __init__(self, device: torch.device, behind: Mapping[_Stream, int]) -> None:
        self.device, self.behind = device, dict(behind)

    def synchronize(self) -> None:
        raise AssertionError("the host waits for a card")


class _Stream:
    """A stream, and for every stream the number of its last operation that this one is behind."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.behind: dict[_Stream, int] = {self: 0}
        # Memory that was allocated on it, and is free.
        self.free: list[_Memory] = []

    def record_event(self) -> _Event:
        with _lock:
            return _Event(self.device, self.behind)

    def wait_event(self, event: _Event) -> None:
        with _lock:
            for stream, number in event.behind.items():
                self.behind[stream] = max(number, self.behind.get(stream, 0))

    def is_behind(self, work: Mapping[_Stream, int]) -> bool:
        return all(self.behind.get(stream, 0) >= number for stream, number in work.items())


@dataclass(eq=False)
class _Memory:
    """A storage on a card: the stream that it was allocated on, and the work on it."""

    device: torch.device
    stream: _Stream
    written: dict[_Stream, int] = field(default_factory=dict)
    used: dict[_Stream, int] = field(default_factory=dict)
    recorded: set[_Stream] = field(default_factory=set)


class _Thread(threading.local):
    """What is current in a thread: a card, by card a stream; and whether it notes operations."""

    def __init__(self) -> None:
        self.device = torch.device("cuda", 0)
        self.streams: dict[torch.device, _Stream] = {}
        self.notes = True


class Cards:
    """Lets partitions work on cards, and notes what is wrong.

    Args:
        patch: Undoes it after the test.
        n: How many cards there are.

    Attributes:
        errors: What is wrong.
    """

    def __init__(self, patch: pytest.MonkeyPatch, n: int) -> None:
        self.errors: list[str] = []
        self._thread = _Thread()
        self._default = {device: _Stream(device) for device in map(_card, range(n))}
        self._memory: dict[int, _Memory] = {}
        self._references: dict[int, weakref.ref[Any]] = {}
        self._plain_to = Tensor.to
        patch.setattr(torch.cuda, "device_count", lambda: n)
        patch.setattr(torch.cuda, "Stream", _Stream)
        patch.setattr(torch.cuda, "current_stream", self._current)
        patch.setattr(torch.cuda, "set_stream", self._set_stream)
        patch.setattr(torch.cuda, "set_device", partial(setattr, self._thread, "device"))
        patch.setattr(torch.cuda, "stream", self._entered)
        patch.setattr(Tensor, "device", property(self._device_of))
        patch.setattr(Tensor, "is_cuda", property(lambda one: one.device.type == "cuda"))
        patch.setattr(Tensor, "record_stream", lambda one, stream: self._record(one, stream))
        patch.setattr(Tensor, "to", lambda one, *args, **kwargs: self._to(one, *args, **kwargs))
        patch.setattr(lane, "_settle_attention", lambda device: None)
        patch.setattr(randomness, "_device_of", lambda args, kwargs: HOST)
        run_row = MiniBatch._run_row

        def watched(mini_batch: MiniBatch, j: int, row: Any) -> None:
            with self.watching():
                run_row(mini_batch, j, row)

        patch.setattr(MiniBatch, "_run_row", watched)

    def watching(self) -> AbstractContextManager[Any]:
        """Return a context in which this thread's operations are noted; workers are in one."""
        return _Watch(self)

    def _current(self, device: torch.device | None = None) -> _Stream:
        device = self._thread.device if device is None else device
        return self._thread.streams.get(device, self._default[device])

    def _set_stream(self, stream: _Stream) -> None:
        self._thread.device = stream.device
        self._thread.streams[stream.device] = stream

    @contextmanager
    def _entered(self, stream: _Stream) -> Iterator[None]:
        device, before = self._thread.device, self._current(stream.device)
        self._set_stream(stream)
        try:
            yield
        finally:
            self._set_stream(before)
            self._thread.device = device

    def _device_of(self, tensor: Tensor) -> torch.device:
        with _lock:
            found = self._memory.get(storage_key(tensor)) if has_storage(tensor) else None
        return HOST if found is None else found.device

    def _record(self, tensor: Tensor, stream: _Stream) -> None:
        with _lock:
            memory = self._memory.get(storage_key(tensor))
            if memory is not None:  # there is none of a tensor without elements
                memory.recorded.add(stream)

    def _to(self, tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Copy a tensor to another place, as torch does: on the current streams of both cards."""
        target, source = args[0], tensor.device
        if not isinstance(target, torch.device):
            return self._plain_to(tensor, *args, **kwargs)
        if target == source:
            return tensor
        self._thread.notes = False
        copy = tensor.detach().clone()
        self._thread.notes = True
        streams = [self._current(one) for one in (source, target) if one != HOST]
        first, last = streams[0], streams[-1]
        first.wait_event(last.record_event())
        if source != HOST:
            self._note("copy", first, [tensor], [])
        if target != HOST:
            self._make("copy", copy, last)
            self._note("copy", first, [], [copy])
        last.wait_event(first.record_event())
        return copy

    def note(self, operation: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Take note of an operation, if it works on tensors of a card."""
        operands = _parts_in((args, kwargs))
        device = next((one.device for one in operands if one.is_cuda), HOST)
        if device == HOST or not self._thread.notes:
            return
        stream = self._current(device)
        made = [part for part in _parts_in(result) if self._make(operation, part, stream)]
        written = [part for one in _written(operation, args, kwargs) for part in one]
        self._note(operation, stream, operands, [*written, *made])

    def _make(self, operation: Any, tensor: Tensor, stream: _Stream) -> bool:
        """Give a tensor memory that is free, unless it has some: nobody must still work on it."""
        storage, key = tensor.untyped_storage(), storage_key(tensor)
        with _lock:
            if key in self._memory or not storage.nbytes():
                return False
            for memory in stream.free:
                others = {s: n for s, n in memory.used.items() if s not in memory.recorded}
                if not stream.is_behind(others):
                    self.errors.append(f"{operation} may be given memory that others still work on")
            stream.free.clear()
            self._memory[key] = _Memory(stream.device, stream)
            self._references[key] = weakref.ref(storage, partial(self._leave, key))
        return True

    def _note(
        self, operation: Any, stream: _Stream, read: list[Tensor], written: list[Tensor]
    ) -> None:
        """Take note of work on a stream."""
        with _lock:
            stream.behind[stream] += 1
            now = {stream: stream.behind[stream]}
            for tensors, is_write in ((read, False), (written, True)):
                for memory in [self._memory.get(storage_key(one)) for one in tensors]:
                    if memory is None:
                        continue
                    if not stream.is_behind(memory.used if is_write else memory.written):
                        self.errors.append(f"{operation} does not wait for others on its operands")
                    memory.used |= now
                    memory.written = now if is_write else memory.written

    def _leave(self, key: int, _: Any) -> None:
        with _lock:
            self._references.pop(key, None)
            memory = self._memory.pop(key, None)
            if memory is not None:
                memory.stream.free.append(memory)


class _Watch(ThreadedDispatchMode):
    """Notes the operations of a thread, but for those that only look at memory in another way."""

    def __init__(self, cards: Cards) -> None:
        super().__init__()
        self._cards = cards

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        aliases = [one.alias_info for one in func._schema.returns]
        if not any(one is not None and not one.is_write for one in aliases):
            self._cards.note(func, args, kwargs or {}, result)
        return result


def _card(index: int) -> torch.device:
    return torch.device("cuda", index)


def _parts_in(value: Any) -> list[Tensor]:
    leaves = [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]
    return [part for leaf in leaves for part in plain_parts(leaf) if has_storage(part)]


def _written(operation: Any, args: Any, kwargs: Any) -> Iterator[list[Tensor]]:
    """Yield the tensors that an operation writes to, by argument."""
    is_forward = not operation._schema.name.endswith("_backward")
    for place, argument in enumerate(operation._schema.arguments):
        is_write = argument.alias_info is not None and argument.alias_info.is_write
        if is_write or (is_forward and argument.name in _STATISTICS):
            yield _parts_in(args[place] if place < len(args) else kwargs.get(argument.name))
