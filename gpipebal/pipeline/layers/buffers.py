"""The buffers of a partition's layers, which a forward may write to and its recompute must not.

A recompute starts from the buffers as they were before its forward, and leaves no trace in them:
batch normalisation counts each micro-batch once. So a checkpointed cell keeps copies of them. Small
buffers are always copied. So are the statistics of torch's normalisation layers, whose version does
not show a change, and which may not change on the first rows. Other large buffers are copied only
if they have been seen to change; if another one does, which its version tells, the recompute is
refused, and in the next mini-batch that buffer is copied.
A large buffer that a layer replaces by another tensor, as with a cache that grows, has not changed:
the cell holds on to it.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parameter import is_lazy

from gpipebal.errors import ModelError
from gpipebal.pipeline.layers.batchnorm import copy_before
from gpipebal.pipeline.layers.cached_weights import forget_cached_weights
from gpipebal.pipeline.layers.modules import Modules
from gpipebal.pipeline.layers.written import ParameterWrites
from gpipebal.pipeline.values.tensors import (
    are_equal,
    bytes_of,
    copy_of,
    is_shared,
    version_of,
)

__all__ = [
    "BufferSlot",
    "Buffers",
    "BuffersOfRun",
    "Copies",
    "Kept",
    "is_always_copied",
]

#: Where a buffer is: the module that has it, and its name there.
BufferSlot = tuple[nn.Module, str]

#: Bytes up to which a buffer is copied without asking whether any layer writes to it.
SMALL = 1 << 16


#: Stands for the buffer of a place that a module does not have.
_ABSENT = object()

#: Buffers by place: each with a copy, and how often it had been written to.
Copies = dict[BufferSlot, tuple[Tensor, Tensor, int | None]]


def is_always_copied(module: nn.Module, buffer: Tensor) -> bool:
    """Tell whether a cell that is recomputed copies a buffer without asking who writes to it."""
    return bytes_of(buffer) <= SMALL or (isinstance(module, _NormBase) and module.training)


class Kept(NamedTuple):
    """What a recompute has to know of its layers, besides their input; made before the forward.

    Attributes:
        writes: Writes to the parameters since then.
        copies: Buffers as they were before the forward; None: the forward filled in first values.
        others: Large buffers that no write has been seen to, and how often each was written to.
        empty: Buffers that were None. A buffer in none of the three did not exist.
    """

    writes: ParameterWrites
    copies: Mapping[BufferSlot, Tensor | None]
    others: Mapping[BufferSlot, tuple[Tensor, int | None]]
    empty: Set[BufferSlot]

    def again(self) -> Kept:
        """Return copies of the copies, for a recompute that will be followed by another."""
        copied = _Copied()
        copies = {p: None if t is None else copied.of(t) for p, t in self.copies.items()}
        return self._replace(copies=copies)

    def with_copies(self, changed: Mapping[BufferSlot, Tensor]) -> Kept:
        """Return the same, with copies of buffers that turned out to be written to."""
        others = {p: kept for p, kept in self.others.items() if p not in changed}
        return self._replace(copies={**self.copies, **changed}, others=others)


class _Copied:
    """One copy of each tensor: what a module writes to a shared buffer, the others see."""

    def __init__(self) -> None:
        self._made: dict[int, tuple[Tensor, Tensor]] = {}

    def of(self, tensor: Tensor) -> Tensor:
        """Return the copy of a tensor."""
        if id(tensor) not in self._made:
            self._made[id(tensor)] = tensor, copy_of(tensor.detach())
        return self._made[id(tensor)][1]


class Buffers:
    """The buffers of one partition.

    Args:
        modules: All modules of its layers.
        foreign: Buffers that layers of other partitions have too, by ``id``.
        unregistered: Modules that its layers have in lists or objects.

    Attributes:
        modules: As given.
        foreign: Where those of other partitions are.
    """

    def __init__(
        self,
        modules: Modules,
        foreign: Set[int] = frozenset(),
        unregistered: Sequence[nn.Module] = (),
    ) -> None:
        self.modules = modules
        every = [*modules, *unregistered]
        # A layer at several places of a chain may have one dictionary of buffers: it counts once.
        once: dict[int, tuple[nn.Module, Any]] = {}
        for module in every:
            once.setdefault(id(module._buffers), (module, module._buffers))
        self._modules = [module for module, _ in once.values()]
        self.foreign = frozenset(
            (module, name)
            for module in every
            for name, buffer in module._buffers.items()
            if id(buffer) in foreign
        )
        # Running statistics that are updated when the mini-batch is over.
        self._deferred = {
            (module, name)
            for module in every
            for name in getattr(type(module), "buffers_left_alone", ())
        }
        # No layer writes to them: other partitions' buffers, and these.
        self._left_alone = self.foreign | self._deferred
        # Large buffers that have been seen to change.
        self._written: set[BufferSlot] = set()
        # The modules' own buffers, while a recompute sees copies in their places.
        self._lent: dict[BufferSlot, Any] = {}
        # How often each of them had been written to by then, if a copy is in its place.
        self._unseen: list[tuple[BufferSlot, Tensor, int | None]] = []

    def keep(self, *, alone: bool = False) -> Kept:
        """Keep what a recompute will need; called before its forward.

        Args:
            alone: As for `ParameterWrites`.
        """
        writes = ParameterWrites(self.modules, alone=alone)
        copies: dict[BufferSlot, Tensor | None] = {}
        others: dict[BufferSlot, tuple[Tensor, int | None]] = {}
        empty: set[BufferSlot] = set()
        copied = _Copied()
        for place, buffer in self._slots():
            if buffer is None:
                empty.add(place)
            elif is_lazy(buffer):
                copies[place] = None
            elif place in self._deferred:
                copies[place] = copy_before(buffer)
            elif self._is_copied(place, buffer):
                copies[place] = copied.of(buffer)
            else:
                others[place] = (buffer, version_of(buffer))
        return Kept(writes, copies, others, empty)

    def _is_copied(self, place: BufferSlot, buffer: Tensor) -> bool:
        # A copy would get the gradient that is meant for the buffer; and of what several partitions
        # have there is one.
        if buffer.requires_grad or place in self.foreign:
            return False
        return is_always_copied(place[0], buffer) or place in self._written

    def copies(self, *, alone: bool = False) -> Copies:
        """Copy the large buffers, to see which a forward writes to; `alone`: only the foreign ones.

        Returns:
            Each buffer, its copy, and how often it has been written to.
        """
        copied = _Copied()
        return {
            place: (buffer, copied.of(buffer), version_of(buffer))
            for place, buffer in self._present()
            if not is_lazy(buffer)
            and (place in self.foreign or (not alone and bytes_of(buffer) > SMALL))
        }

    def note_changed(self, before: Copies) -> dict[BufferSlot, Tensor]:
        """Remember which of these buffers have changed; return them as they were.

        A buffer that requires a gradient is not remembered: no recompute may have a copy of it,
        and `check` reports it.

        Raises:
            ModelError: one that layers of another partition have too was written to.
        """
        changed = {}
        for place, (buffer, copy, version) in before.items():
            # If a foreign buffer is replaced, the other partitions lose it too.
            now = _buffer_of(*place) if place in self.foreign else buffer
            now = now if isinstance(now, Tensor) else None
            # By value too, because torch's batch normalisation writes without counting a version.
            if not are_equal(copy, now) or version_of(buffer) != version:
                changed[place] = copy
        for module, name in changed:
            if (module, name) in self.foreign:
                raise ModelError(
                    f"a buffer is written to by two partitions: {name!r} of a "
                    f"{type(module).__name__} (expected one at most).\n"
                    "Fix: choose a balance that has all layers with this buffer in one partition, "
                    "the last if the loss has it."
                )
        for place in changed:
            self.note_written(place)
        return {at: copy for at, copy in changed.items() if not before[at][0].requires_grad}

    def is_written(self, place: BufferSlot) -> bool:
        """Tell whether a large buffer has been seen to change."""
        return place in self._written

    def note_written(self, place: BufferSlot) -> None:
        """Remember that a large buffer changes."""
        self._written.add(place)

    def check(self, kept: Kept) -> None:
        """Make sure that the buffers without a copy are what they were before the forward.

        Raises:
            ModelError: one has been written to since.
        """
        for (module, name), (buffer, version) in kept.others.items():
            if version_of(buffer) == version:
                continue
            fix = "write to it between mini-batches"
            if buffer.requires_grad:
                what = "requires a gradient, and was written to since its forward"
            elif (module, name) in self.foreign:
                what = "belongs to several partitions, and was written to since its forward"
            else:
                self.note_written((module, name))
                what = "has changed since its forward, and had not before"
                fix = "run the mini-batch again, the buffer is copied from now on"
            raise ModelError(
                "a checkpointed micro-batch cannot be recomputed: buffer "
                f"{name!r} of a {type(module).__name__} {what}.\n"
                f"Fix: {fix}; or checkpoint='never'."
            )

    @contextmanager
    def replaced(self, kept: Kept) -> Iterator[None]:
        """Let the modules see the kept buffers during a block, and give them back their own."""
        forget_cached_weights(self._modules)
        try:
            self._lend(kept)
            yield
        finally:
            self.give_back()

    def check_own(self) -> None:
        """Make sure that the recompute which has ended wrote to the copies, and to nothing else.

        Raises:
            ModelError: it has written to a module's own buffer.
        """
        unseen, self._unseen = self._unseen, []
        for (module, name), own, version in unseen:
            # Parts of one tensor have one count, and another partition may have the others.
            if version_of(own) != version and not (own._is_view() and is_shared(own)):
                raise ModelError(
                    f"a recompute has written to buffer {name!r} of a {type(module).__name__} by "
                    "another way than the module's attribute, in which it had a copy: so it has "
                    "been written to twice for one micro-batch.\n"
                    f"Fix: let layers read it as self.{name} whenever they use it, and keep it in "
                    "no other object; or checkpoint='never'."
                )

    def _lend(self, kept: Kept) -> None:
        copied = _Copied()
        self._unseen = []
        for (module, name), copy in kept.copies.items():
            own = _buffer_of(module, name)
            self._lent[module, name] = own
            if isinstance(own, Tensor) and not (is_lazy(own) or (module, name) in self._left_alone):
                self._unseen.append(((module, name), own, version_of(own)))
            if copy is None and isinstance(own, Tensor) and not is_lazy(own):
                copy = copied.of(own)  # it has the first values, which must not be changed
            module._buffers[name] = copy
        for (module, name), (buffer, _) in kept.others.items():
            # Also those that are still the same: the recompute may replace them as the forward did.
            self._lent[module, name] = _buffer_of(module, name)
            module._buffers[name] = buffer
        # These were made by the forward, or by a later one.
        for (module, name), own in list(self._present()):
            if (module, name) not in self._lent and (module, name) not in self._left_alone:
                self._lent[module, name] = own
                if (module, name) in kept.empty:
                    module._buffers[name] = None
                else:
                    del module._buffers[name]

    def give_back(self) -> None:
        """Give the modules back their own buffers, once.

        A worker that hangs in `replaced` and is given up finds nothing left to give back if it ends
        after all.
        """
        lent, self._lent = self._lent, {}
        for (module, name), own in lent.items():
            if own is not _ABSENT:
                module._buffers[name] = own
            elif name in module._buffers:
                del module._buffers[name]

    def _slots(self) -> Iterator[tuple[BufferSlot, Tensor | None]]:
        for module in self._modules:
            for name, buffer in module._buffers.items():
                yield (module, name), buffer

    def _present(self) -> Iterator[tuple[BufferSlot, Tensor]]:
        return ((place, buffer) for place, buffer in self._slots() if buffer is not None)


class BuffersOfRun(Buffers):
    """The buffers of a run of layers that is recomputed by itself, or those of a loss.

    It remembers in which modes writes to them have been looked for.
    """

    def __init__(
        self,
        modules: Modules,
        foreign: Set[int] = frozenset(),
        unregistered: Sequence[nn.Module] = (),
    ) -> None:
        super().__init__(modules, foreign, unregistered)
        self._seen: set[Hashable] = set()

    def mode(self) -> Hashable:
        """Return the modes of all modules."""
        return tuple([module.training for module in self.modules])

    def begin(self) -> Copies:
        """Begin a forward whose recompute computes all weights again: it finds none in the cache.

        Returns:
            What `copies` does.
        """
        forget_cached_weights(self._modules)
        return self.copies()

    def copies(self, *, alone: bool = False) -> Copies:
        """Copy the large buffers, if writes to them have not been looked for yet."""
        return {} if self.mode() in self._seen else super().copies(alone=alone)

    def end_forward(self, kept: Kept, before: Copies) -> Kept:
        """Return what is kept, after a forward, with copies of what it turned out to write to."""
        kept.writes.end_forward()  # copies parameters, for which there may be no memory
        self._seen.add(self.mode())
        return kept.with_copies(self.note_changed(before))


def _buffer_of(module: nn.Module, name: str) -> Any:
    """Return a buffer; None where a module has kept a place for one, `_ABSENT` where it has not."""
    for known, buffer in module._buffers.items():  # of a scripted module it is not a dictionary
        if known == name:
            return buffer
    return _ABSENT
