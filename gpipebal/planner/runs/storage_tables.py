"""What runs of layers hold, for all runs at once: tables over first layers and ends.

`gpipebal.memory` walks through one partition with sets of storages. A planner asks about all
N (N + 1) / 2 runs. What a run holds is a union, so its size is not a sum over layers. But each
storage comes in at one place: the first layer of the run that saves it, or the run's input. All
runs that begin between two layers that save a storage meet it at the same place, so a table of
where storages come in takes two entries for every time that a storage is saved; adding them up
along rows and columns gives the size of every union.

Rows of the tables are *variants*: a first layer, and which skip connections the run pops, as they
are part of its input from the beginning. A chain without skip connections has one per layer.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from gpipebal.profile import LayerProfile, Profile

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Table = NDArray[Any]

__all__ = ["LayerChain", "StorageTables", "Variant"]

#: Row, column, and number.
_Entry = tuple[int, int, int]


class Variant(NamedTuple):
    """Runs from one first layer with the same input.

    Attributes:
        first: Index of the first layer.
        received: Storages of the input: the value, and the skips that the run pops.
        popped: Bytes of those skips, each counted by itself.
        popped_gradients: Bytes of their gradients.
        ends: First and last end of these runs.
    """

    first: int
    received: frozenset[int]
    popped: int
    popped_gradients: int
    ends: tuple[int, int]


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

    @cached_property
    def saved_at(self) -> Mapping[int, Sequence[int]]:
        """Where each storage is saved, in ascending order."""
        found: dict[int, list[int]] = {}
        for place, layer in enumerate(self.layers):
            for storage in set(layer.saved):
                found.setdefault(storage, []).append(place)
        return found

    @cached_property
    def bytes(self) -> Sequence[int]:
        """Bytes of every storage for its receiver: in one memory, 0 for the caller's."""
        sizes = list(self.profile.storages)
        for storage in self.profile.inputs if self.shared_memory else ():
            sizes[storage] = 0
        return sizes

    @cached_property
    def without_gradient(self) -> frozenset[int]:
        """Storages that no gradient goes back through."""
        return frozenset(self.profile.without_gradient)

    def is_kept(self, storage: int, first: int) -> bool:
        """Tell whether runs from a layer keep a storage of their input until the backward."""
        if storage not in self.without_gradient:
            return True
        places = self.saved_at.get(storage, ())
        return self.shared_memory and bool(places) and places[0] < first

    def handed_through(self) -> Iterator[tuple[int, int]]:
        """Yield first layer and end of runs of several layers that all hand something through.

        A loss at the end passes nothing on.
        """
        layers = self.profile.layers
        for end in range(2, len(layers) + (self.loss is None)):
            through = set(layers[end - 1].outputs)
            for k in range(end - 2, -1, -1):
                through &= set(layers[k + 1].handed_through)
                if not through:
                    break
                if not through.isdisjoint(layers[k].handed_through):
                    yield k, end

    @cached_property
    def skip_bytes(self) -> Sequence[int]:
        """Bytes of each skip connection."""
        return [self.profile.bytes_of(skip.storages) for skip in self.profile.skips]

    @cached_property
    def skip_gradient_bytes(self) -> Sequence[int]:
        """Bytes of the gradient of each skip connection."""
        return [self.profile.gradient_bytes_of(skip.storages) for skip in self.profile.skips]

    @cached_property
    def crossing(self) -> Sequence[Sequence[int]]:
        """For each place of a cut, the indices of the skip connections that go past it."""
        found: list[list[int]] = [[] for _ in range(len(self.layers) + 1)]
        for k, skip in enumerate(self.profile.skips):
            for place in range(skip.source + 1, skip.destination + 1):
                found[place].append(k)
        return found

    @cached_property
    def stashed_before(self) -> Sequence[Mapping[int, int]]:
        """For each layer, the storages stashed before it, with the layer that last stashed each."""
        adds: dict[int, set[int]] = {}
        removes: dict[int, set[int]] = {}
        for skip in self.profile.skips:
            if skip.source != skip.destination:
                adds.setdefault(skip.source, set()).update(skip.storages)
                removes.setdefault(skip.destination, set()).update(skip.storages)
        now: dict[int, int] = {}
        found = []
        for place in range(len(self.layers)):
            found.append(dict(now))
            for storage in removes.get(place, ()):
                now.pop(storage, None)
            now.update(dict.fromkeys(adds.get(place, ()), place))
        return found

    @cached_property
    def handed_at(self) -> Sequence[Mapping[int, int]]:
        """For each end, the storages that runs pass on there, with the last first layer that does.

        Runs to the last end pass on the chain's output.
        """
        profile, all_ends = self.profile, list[Mapping[int, int]]()
        for end in range(profile.n_layers + 1):
            found: dict[int, int] = {}
            for k in self.crossing[end]:
                source = profile.skips[k].source
                for storage in profile.skips[k].storages:
                    found[storage] = max(source, found.get(storage, source))
            if end:
                found.update(dict.fromkeys(profile.layers[end - 1].outputs, end - 1))
            all_ends.append(found)
        return all_ends

    @cached_property
    def variants(self) -> Sequence[Variant]:
        """All variants, by first layer and then by what they pop."""
        profile, found = self.profile, []
        n_layers = profile.n_layers
        for first in range(n_layers):
            received = frozenset(profile.layers[first - 1].outputs if first else profile.inputs)
            skips = sorted(self.crossing[first], key=lambda k: profile.skips[k].destination)
            start, popped, gradients = first + 1, 0, 0
            for k in skips:
                end = profile.skips[k].destination
                if end >= start:
                    found.append(Variant(first, received, popped, gradients, (start, end)))
                    start = end + 1
                received = received.union(profile.skips[k].storages)
                popped += self.skip_bytes[k]
                gradients += self.skip_gradient_bytes[k]
            found.append(Variant(first, received, popped, gradients, (start, n_layers)))
        return found


class StorageTables:
    """Tables of unions for some variants: one row for each, one column for each place.

    Args:
        chain: The layers.
        variants: Variants in the order of their first layers.
        kind: Type of the numbers: `numpy.int64`, or `object` for larger ones.

    Attributes:
        received: Bytes of each variant's input, without what is the caller's.
        graph: Bytes of input and saved storages of the runs to each end.
        kept: The same without inputs that have no gradient and that nothing saves: what belongs to
            the runs until the backward.
        handed: Of these, bytes that the run passes on: its output, and skips that it stashes for
            later runs.
        stashed: Bytes of skips that the runs to each end stash for later ones, each counted by
            itself.
        stashed_gradients: Bytes of the gradients of these skips.
        passing: Of each input, bytes that the runs to each end pass on as they are; where
            partitions do not share a memory, runs pass on copies.
        passing_kept: Of these, bytes that are in the runs' graphs.
        live: What else lives while each layer runs forward, if a graph is recorded.
        live_without_graph: The same if no graph is recorded.
    """

    def __init__(self, chain: LayerChain, variants: Sequence[Variant], kind: type) -> None:
        self.chain, self.variants, self.kind = chain, variants, kind
        self.n_columns = len(chain.layers) + 1
        self.firsts = [variant.first for variant in variants]
        self.bytes = chain.bytes
        self._received_by: dict[int, list[int]] = {}
        for v, variant in enumerate(variants):  # v: variant
            for storage in variant.received:
                self._received_by.setdefault(storage, []).append(v)
        self.received: Table = np.array(
            [
                sum(map(self.bytes.__getitem__, one.received)) if one.first else 0
                for one in variants
            ],
            dtype=kind,
        )
        self.graph = self._graph()
        self.kept = self._kept()
        self.handed, self.stashed, self.stashed_gradients = self._handed()
        self.passing, self.passing_kept = self._passing()
        self.live, self.live_without_graph = self._live()

    def _rows(self, first: int, last: int) -> tuple[int, int]:
        """Return the rows of the variants whose first layer is in a range."""
        return bisect_left(self.firsts, first), bisect_right(self.firsts, last)

    def _added(self, entries: list[_Entry]) -> Table:
        """Make a table of entries (row, column, number), each for its row and all below."""
        table: Table = np.zeros((len(self.variants) + 1, self.n_columns + 1), dtype=self.kind)
        if entries:
            rows, columns, numbers = zip(*entries, strict=True)
            np.add.at(table, (list(rows), list(columns)), np.array(numbers, dtype=self.kind))
        return np.cumsum(table, axis=0, dtype=self.kind)[:-1]

    def _next_saved(self, storage: int, first: int) -> int | None:
        """Return the first layer of a run that saves a storage."""
        places = self.chain.saved_at.get(storage, ())
        k = bisect_left(places, first)
        return places[k] if k < len(places) else None

    def _last_saved(self, storage: int, end: int) -> int:
        """Return the last layer before an end that saves a storage; -1: none."""
        places = self.chain.saved_at.get(storage, ())
        k = bisect_left(places, end)
        return places[k - 1] if k else -1

    def _graph(self) -> Table:
        entries = []
        for storage, places in self.chain.saved_at.items():
            before = -1
            for place in places:
                low, high = self._rows(before + 1, place)
                if low < high:
                    n_bytes = self.bytes[storage]
                    entries += [(low, place + 1, n_bytes), (high, place + 1, -n_bytes)]
                before = place
        table = self._added(entries)
        for storage, rows in self._received_by.items():
            for v in rows:
                saved = self._next_saved(storage, self.firsts[v])
                if saved is not None:
                    # It exists from the beginning, and does not come in again.
                    table[v, saved + 1] -= self.bytes[storage]
        return np.cumsum(table, axis=1, dtype=self.kind)[:, :-1] + self.received[:, None]

    def _kept(self) -> Table:
        table = self.graph
        for storage in self.chain.without_gradient.intersection(self._received_by):
            table = table.copy() if table is self.graph else table
            for v in self._received_by[storage]:
                if self.firsts[v] and not self.chain.is_kept(storage, self.firsts[v]):
                    saved = self._next_saved(storage, self.firsts[v])
                    until = None if saved is None else saved + 1
                    table[v, :until] -= self.bytes[storage]
        return table

    def _handed(self) -> tuple[Table, Table, Table]:
        """Return what runs keep of what they pass on; what they stash; and gradients of that."""
        chain, profile = self.chain, self.chain.profile
        entries: list[_Entry] = []
        stashed: list[_Entry] = []
        gradients: list[_Entry] = []
        for end in range(1, profile.n_layers):
            for storage, last in self.chain.handed_at[end].items():
                saved = min(last, self._last_saved(storage, end))
                if saved >= 0:
                    low, high = self._rows(0, saved)
                    n_bytes = self.bytes[storage]
                    entries += [(low, end, n_bytes), (high, end, -n_bytes)]
            for k in chain.crossing[end]:
                low, high = self._rows(0, profile.skips[k].source)
                for found, n_bytes in (
                    (stashed, chain.skip_bytes[k]),
                    (gradients, chain.skip_gradient_bytes[k]),
                ):
                    found += [(low, end, n_bytes), (high, end, -n_bytes)]
        table = self._added(entries)[:, :-1]
        for end in range(1, profile.n_layers):
            for storage, last in self.chain.handed_at[end].items():
                saved = self._last_saved(storage, end)
                for v in self._received_by.get(storage, ()):
                    first = self.firsts[v]
                    if first == 0 and saved >= 0:
                        table[v, end] -= self.bytes[storage]  # the caller's
                    elif first and saved < first <= last and chain.is_kept(storage, first):
                        table[v, end] += self.bytes[storage]
        return table, self._added(stashed)[:, :-1], self._added(gradients)[:, :-1]

    def _passing(self) -> tuple[Table, Table]:
        found: Table = np.zeros((2, len(self.variants), self.n_columns), dtype=self.kind)
        if self.chain.shared_memory:
            for end in range(1, self.chain.profile.n_layers):
                for storage, last in self.chain.handed_at[end].items():
                    for v in self._received_by.get(storage, ()):
                        if self.firsts[v] <= last:
                            found[0, v, end] += self.bytes[storage]
                            if self.comes_in(storage)[v] <= end:
                                found[1, v, end] += self.bytes[storage]
        return found[0], found[1]

    def _live(self) -> tuple[Table, Table]:
        with_graph, without = [], []
        places: dict[int, list[tuple[int, int, int]]] = {}
        for layer in range(1, len(self.chain.layers)):
            alive = dict(self.chain.stashed_before[layer])
            alive.update(dict.fromkeys(self.chain.layers[layer - 1].outputs, layer - 1))
            for storage, last in alive.items():
                n_bytes = self.bytes[storage]
                saved = self._last_saved(storage, layer)
                places.setdefault(storage, []).append((layer, saved, last))
                low, high = self._rows(0, last)
                without += [(low, layer, n_bytes), (high, layer, -n_bytes)]
                low = min(self._rows(saved + 1, last)[0], high)
                with_graph += [(low, layer, n_bytes), (high, layer, -n_bytes)]
        tables = self._added(with_graph)[:, :-1], self._added(without)[:, :-1]
        for storage, rows in self._received_by.items():
            for layer, saved, last in places.get(storage, ()):
                for v in rows:
                    if self.firsts[v] <= last:
                        tables[1][v, layer] -= self.bytes[storage]
                        if saved < self.firsts[v]:
                            tables[0][v, layer] -= self.bytes[storage]
        return tables

    def is_received(self, storage: int) -> NDArray[np.bool_]:
        """Tell which variants have a storage in their input."""
        found = np.zeros(len(self.variants), dtype=bool)
        found[self._received_by.get(storage, [])] = True
        return found

    def comes_in(self, storage: int) -> NDArray[np.int64]:
        """Return, for each variant, the first end whose runs keep a storage."""
        never = self.n_columns + 1
        places = self.chain.saved_at.get(storage, ())
        found = np.full(len(self.variants), never, dtype=np.int64)
        before = -1
        for place in places:
            low, high = self._rows(before + 1, place)
            found[low:high] = place + 1
            before = place
        for v in self._received_by.get(storage, ()):
            if self.chain.is_kept(storage, self.firsts[v]):
                found[v] = self.firsts[v]
        return found
