"""The layers of a chain as its runs see them: where storages are saved, live, and are passed on."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from gpipebal.profile import LayerProfile, Profile

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Table = NDArray[Any]

__all__ = ["LayerChain", "Stretch"]


class Stretch(NamedTuple):
    """Consecutive places at which runs have a storage, if they begin early enough.

    Attributes:
        storage: Index of the storage.
        first: The first of the places: layers or ends.
        stop: The place after them.
        last_first: The last first layer of such runs.
    """

    storage: int
    first: int
    stop: int
    last_first: int


@dataclass(frozen=True)
class LayerChain:
    """A profile's layers, followed by the loss if the last partition computes it.

    Attributes:
        profile: Costs of the layers.
        loss: The loss as a layer after the last; None: the caller computes it.
        shared_memory: Whether all partitions live in one memory.
    """

    profile: Profile
    loss: LayerProfile | None
    shared_memory: bool = False

    @cached_property
    def layers(self) -> tuple[LayerProfile, ...]:
        """All layers, with the loss."""
        return (*self.profile.layers, *([] if self.loss is None else [self.loss]))

    @property
    def never(self) -> int:
        """An end that no run has: it stands for what does not come in."""
        return len(self.layers) + 2

    @cached_property
    def saved_at(self) -> Mapping[int, Sequence[int]]:
        """Where each storage is saved, in ascending order."""
        found: dict[int, list[int]] = {}
        for place, layer in enumerate(self.layers):
            for storage in set(layer.saved):
                found.setdefault(storage, []).append(place)
        return found

    def saved_by(self, storage: int, firsts: Table) -> NDArray[np.int64]:
        """Return, for runs from each of some layers, the first end by which they save a storage."""
        places = self.saved_at.get(storage, ())
        ends = np.array([*(place + 1 for place in places), self.never], dtype=np.int64)
        found: NDArray[np.int64] = ends[np.searchsorted(places, firsts)]
        return found

    @cached_property
    def others_until(self) -> Mapping[int, int]:
        """By storage that exists all the time, the last first layer of runs that have it so.

        For the caller's storages that is the first layer, for others the one that keeps them.
        """
        return {**dict.fromkeys(self.profile.inputs, 0), **self.profile.keepers}

    @cached_property
    def bytes(self) -> Sequence[int]:
        """Bytes of every storage for its receiver: in one memory, 0 for those of others."""
        sizes = list(self.profile.storages)
        for storage in self.others_until if self.shared_memory else ():
            sizes[storage] = 0
        return sizes

    @cached_property
    def without_gradient(self) -> frozenset[int]:
        """Storages that no gradient goes back through."""
        return frozenset(self.profile.without_gradient)

    def are_kept(self, storage: int, firsts: Table) -> NDArray[np.bool_]:
        """Tell which runs keep a storage of their input until the backward, by first layers."""
        if storage not in self.without_gradient:
            return np.ones(len(firsts), dtype=bool)
        places = self.saved_at.get(storage, ())
        if not self.shared_memory or not places:
            return np.zeros(len(firsts), dtype=bool)
        kept: NDArray[np.bool_] = firsts > places[0]
        return kept

    def runs_that_hand_through(self) -> Iterator[tuple[int, int]]:
        """Yield first layer and end of runs of several layers that all hand something through.

        A loss at the end passes nothing on.
        """
        for end in range(2, self.profile.n_layers + (self.loss is None)):
            for first in self.firsts_that_hand_through(end):
                yield first, end

    def firsts_that_hand_through(self, end: int) -> Iterator[int]:
        """Yield the first layers of such runs to an end, the last of them first."""
        layers = self.profile.layers
        through = set(layers[end - 1].outputs)
        for k in range(end - 2, -1, -1):
            through &= set(layers[k + 1].handed_through)
            if not through:
                return
            if not through.isdisjoint(layers[k].handed_through):
                yield k

    @cached_property
    def skip_bytes(self) -> Sequence[int]:
        """Bytes of each skip connection."""
        return [self.profile.bytes_of(skip.storages) for skip in self.profile.skips]

    @cached_property
    def skip_gradient_bytes(self) -> Sequence[int]:
        """Bytes of the gradient of each skip connection."""
        return [self.profile.gradient_bytes_of(skip.storages) for skip in self.profile.skips]

    @cached_property
    def alive(self) -> Sequence[Stretch]:
        """Where storages live while a layer's forward runs, even if nothing saves them.

        They are what the layer is given, and, for longer, what layers before it have stashed.
        """
        adds: dict[int, set[int]] = {}
        removes: dict[int, set[int]] = {}
        for skip in self.profile.skips:
            if skip.source != skip.destination:
                adds.setdefault(skip.source, set()).update(skip.storages)
                removes.setdefault(skip.destination, set()).update(skip.storages)
        stashed: dict[int, int] = {}
        found: list[Mapping[int, int]] = [{}]
        for place, layer in enumerate(self.layers[:-1]):
            for storage in removes.get(place, ()):
                stashed.pop(storage, None)
            stashed.update(dict.fromkeys(adds.get(place, ()), place))
            found.append({**stashed, **dict.fromkeys(layer.outputs, place)})
        return list(_stretches(found))

    @cached_property
    def handed_at(self) -> Sequence[Mapping[int, int]]:
        """For each end, the storages that runs pass on there, with the last first layer that does.

        Runs to the last end pass on the chain's output.
        """
        skips = sorted(self.profile.skips, key=lambda skip: skip.source)
        all_ends: list[Mapping[int, int]] = [{}]
        for end, layer in enumerate(self.profile.layers, 1):
            handed: dict[int, int] = {}
            for skip in skips:
                if skip.source < end <= skip.destination:
                    handed.update(dict.fromkeys(skip.storages, skip.source))
            handed.update(dict.fromkeys(layer.outputs, end - 1))
            all_ends.append(handed)
        return all_ends

    @cached_property
    def handed(self) -> Sequence[Stretch]:
        """The ends at which runs pass storages on, without the last end, in a shared memory.

        Where partitions do not share one, they pass on copies.
        """
        return list(_stretches(self.handed_at[:-1])) if self.shared_memory else []

    @cached_property
    def passes_on_from(self) -> Sequence[tuple[int, int]]:
        """For each end, the last first layers of runs that pass on anything, and a gradient's.

        -1: there is none.
        """
        found = []
        for handed in self.handed_at:
            trained = handed.keys() - self.without_gradient
            gradient = max(map(handed.__getitem__, trained), default=-1)
            found.append((max(handed.values(), default=-1), gradient))
        return found

    def by_saved(self, stretch: Stretch) -> Iterator[tuple[int, int, int]]:
        """Part a stretch at the layers that save its storage.

        Yields:
            First place and stop of each part, and the last layer before it that saves the storage;
            -1: none does.
        """
        places = self.saved_at.get(stretch.storage, ())
        k = bisect_left(places, stretch.first)
        first, saved = stretch.first, places[k - 1] if k else -1
        for place in places[k:]:
            if place + 1 >= stretch.stop:
                break
            yield first, place + 1, saved
            first, saved = place + 1, place
        yield first, stretch.stop, saved


def _stretches(at: Sequence[Mapping[int, int]]) -> Iterator[Stretch]:
    """Find stretches of equal entries.

    Args:
        at: For each place, storages with a last first layer.

    Example:
        >>> list(_stretches([{}, {7: 0}, {7: 0}, {7: 2}]))
        [Stretch(storage=7, first=1, stop=3, last_first=0), \
Stretch(storage=7, first=3, stop=4, last_first=2)]
    """
    begun: dict[int, int] = {}
    before: Mapping[int, int] = {}
    for place, now in enumerate([*at, {}]):
        for storage, last in before.items() - now.items():
            yield Stretch(storage, begun.pop(storage), place, last)
        begun.update((storage, place) for storage, _ in now.items() - before.items())
        before = now
