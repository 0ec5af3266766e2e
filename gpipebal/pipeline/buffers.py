"""The buffers of a partition's layers, which a forward may write to and its recompute must not.

A recompute starts from the buffers as they were before its forward, and leaves no trace in them:
batch normalisation counts each micro-batch once. So a checkpointed cell keeps copies of them. Small
buffers are always copied. Of large ones only those that have been seen to change; if another one
changes, which its version tells, the recompute is refused, and the next mini-batch is copied for.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from gpipebal.errors import ModelError

__all__ = ["Buffers", "Kept", "Place"]

#: Where a buffer stands: the module that has it, and its name there.
Place = tuple[nn.Module, str]

#: Bytes up to which a buffer is copied without asking whether anybody writes to it.
SMALL = 1 << 16


class Kept:
    """What a checkpointed cell keeps of the buffers.

    Attributes:
        copies: Buffers as they were before the forward.
        versions: Which tensors the others were, and how often each had been written to.
    """

    __slots__ = ("copies", "versions")

    def __init__(self, copies: Mapping[Place, Tensor], versions: Mapping[Place, object]) -> None:
        self.copies = copies
        self.versions = versions

    def again(self) -> Kept:
        """Return copies of the copies, for a recompute that will be followed by another."""
        return Kept({p: tensor.clone() for p, tensor in self.copies.items()}, self.versions)


class Buffers:
    """The buffers of one partition.

    Args:
        modules: All modules of its layers.
        foreign: Buffers that layers of other partitions have too.
    """

    def __init__(self, modules: Sequence[nn.Module], foreign: frozenset[Place]) -> None:
        self._modules = modules
        self._foreign = foreign
        # Large buffers that have been seen to change.
        self._written: set[Place] = set()
        # What stands in the modules' places while a recompute sees copies.
        self._lent: dict[Place, Tensor | None] = {}

    def keep(self) -> Kept:
        """Keep what a recompute will need; called before its forward."""
        copies, versions = {}, {}
        for place, buffer in self._present():
            if place in self._foreign:
                continue  # nobody writes to it, and another worker may be reading it
            if buffer.nbytes <= SMALL or place in self._written:
                copies[place] = buffer.detach().clone()
            else:
                versions[place] = _version(buffer)
        return Kept(copies, versions)

    def copies(self, *, alone: bool = False) -> dict[Place, Tensor]:
        """Copy the large buffers, to see which a forward writes to; `alone`: the foreign ones."""
        return {
            place: buffer.detach().clone()
            for place, buffer in self._present()
            if (
                place in self._foreign if alone else buffer.nbytes > SMALL or place in self._foreign
            )
        }

    def look(self, before: Mapping[Place, Tensor]) -> dict[Place, Tensor]:
        """Remember which of these buffers have changed; return them as they were.

        Raises:
            ModelError: one that layers of another partition have too was written to.
        """
        changed = {}
        for place, copy in before.items():
            # By value, because torch's batch normalisation writes without counting a version.
            if not _equal(copy, place[0]._buffers[place[1]]):
                changed[place] = copy
        for module, name in changed:
            if (module, name) in self._foreign:
                raise ModelError(
                    f"a buffer is written to by two partitions: {name!r} of a "
                    f"{type(module).__name__} (expected one at most).\n"
                    "Fix: choose a balance that has all layers with this buffer in one partition."
                )
        self._written.update(changed)
        return changed

    def check(self, kept: Kept) -> None:
        """Make sure that the buffers without a copy are what they were before the forward.

        Raises:
            ModelError: one has been written to since.
        """
        for (module, name), version in kept.versions.items():
            buffer = module._buffers.get(name)
            if buffer is None or _version(buffer) != version:
                self._written.add((module, name))
                raise ModelError(
                    "a checkpointed micro-batch cannot be recomputed: buffer "
                    f"{name!r} of a {type(module).__name__} has changed since its forward, and had "
                    "not before.\n"
                    "Fix: run the mini-batch again, the buffer is copied from now on; or "
                    "checkpoint='never'."
                )

    @contextmanager
    def replaced(self, kept: Kept) -> Iterator[None]:
        """Let the modules see the kept copies in a block, and give them back their own."""
        for (module, name), copy in kept.copies.items():
            self._lent[module, name] = module._buffers.get(name)
            module._buffers[name] = copy
        try:
            yield
        finally:
            self.give_back()

    def give_back(self) -> None:
        """Give the modules back their own buffers, once.

        A worker that hangs in `replaced` and is given up finds nothing left to give back, should
        it ever end.
        """
        lent, self._lent = self._lent, {}
        for (module, name), own in lent.items():
            module._buffers[name] = own

    def _present(self) -> Iterator[tuple[Place, Tensor]]:
        for module in self._modules:
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    yield (module, name), buffer


def _version(buffer: Tensor) -> object:
    return id(buffer), None if buffer.is_inference() else buffer._version


def _equal(left: Tensor, right: Tensor | None) -> bool:
    return right is not None and left.shape == right.shape and torch.equal(left, right)
