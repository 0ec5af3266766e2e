"""What runs of layers hold, for all runs at once: tables over first layers and ends.

`gpipebal.memory` walks through one partition with sets of storages. A planner asks about all
N (N + 1) / 2 runs. What a run holds is a union, so its size is not a sum over layers. But each
storage comes in at one place: the first layer of the run that saves it, or the run's input. All
runs that begin between two layers that save a storage meet it at the same place, so every time that
a storage is saved is a rectangle of a table: these first layers, and all ends from there on. So is
a skip connection that runs stash for later ones, or a storage that they pass on. Numbers at the
corners of all rectangles, added up along rows and columns, give the size of every union.

Rows of the tables are first layers. Columns are ends; or they are layers, and then the table is
that of the shortest run from each first layer, and says what changes in longer ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import numpy as np

from gpipebal.planner.runs.chain import LayerChain
from gpipebal.planner.runs.highest import Change
from gpipebal.planner.runs.inputs import RunInputs, Strips

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Table = NDArray[Any]

__all__ = ["StorageTables"]

#: First layer and the one after the last, first column and the one after the last, and bytes.
_Rectangle = tuple[int, int, int, int, int]


class StorageTables:
    """Tables of unions for the runs from some layers: one row for each, one column for each place.

    Args:
        chain: The layers.
        firsts: First layers of the runs.
        kind: Type of the numbers: `numpy.int64`, or `object` for larger ones.

    Attributes:
        ends: The column of the runs to each end of the chain's: with a loss, one more for the last.
        inputs: What the runs have in their input.
        saved: Bytes of what the runs to each end save, without what is the caller's.
        received: Bytes of the input of the runs to each end, without what is the caller's.
        not_kept: Of these, bytes that have no gradient and do not belong to the runs until the
            backward.
        kept: Bytes of saved storages and of the input, without those in `not_kept` that nothing
            saves.
    """

    def __init__(self, chain: LayerChain, firsts: range, kind: type) -> None:
        self.chain, self.kind = chain, kind
        self.n_columns = len(chain.layers) + 1
        self.firsts = np.array(firsts)
        self.ends = np.array([*range(1, chain.profile.n_layers), len(chain.layers)])
        self.inputs = RunInputs(chain, self.firsts, kind)
        self.saved = self._filled(self._saved())
        inputs = self.inputs
        ends = np.full_like(inputs.rows, self.n_columns)
        of_input = Strips(inputs.rows, inputs.since, inputs.since, ends, inputs.n_bytes)
        self.received = self._stripped(of_input)
        self.not_kept = self._stripped(of_input.of(~inputs.is_kept))
        until_saved = of_input._replace(stop=inputs.saved_by)
        self.kept = self.saved + self._stripped(until_saved.of(inputs.is_kept))

    def column(self, numbers: Sequence[int]) -> Table:
        """Return numbers of bytes, one for each column."""
        return np.array(numbers, dtype=self.kind)

    def at_ends(self, table: Table) -> Table:
        """Return a copy of the columns of the ends."""
        return np.take(table, self.ends, axis=1)

    def from_first(self, table: Table, none: int) -> Table:
        """Return a table of layers that has no moment before the first layer of each run."""
        columns = np.arange(table.shape[1])
        return np.where(columns[None, :] >= self.firsts[:, None], table, none)

    def _saved(self) -> Iterator[_Rectangle]:
        for storage, places in self.chain.saved_at.items():
            before = -1
            for place in places:
                low = max(before + 1, self._own_from(storage))
                yield low, place + 1, place + 1, self.n_columns, self.chain.bytes[storage]
                before = place

    def _own_from(self, storage: int) -> int:
        """Return the first layer from which on runs own what they have of a storage.

        The mini-batch is the caller's; runs from the first layer on do not have another one. Nor do
        runs that have the layer which keeps what it outputs.
        """
        return 1 + self.chain.others_until.get(storage, -1)

    def of_skips(self, n_bytes: Sequence[int], *, popped: bool) -> Table:
        """Add up bytes of skips that the runs to each end pop from before, or stash for later."""
        rectangles = []
        for skip, number in zip(self.chain.profile.skips, n_bytes, strict=True):
            begin, stop = skip.source + 1, skip.destination + 1
            if popped:
                rectangles.append((begin, stop, stop, self.n_columns, number))
            else:
                rectangles.append((0, begin, begin, stop, number))
        return self._filled(rectangles)

    def in_graphs(self, storages: Iterable[int]) -> Table:
        """Return the bytes of storages that the graphs of the runs to the last end hold."""
        last, never = self.chain.profile.n_layers, self.chain.never
        return self._of_last(
            (storage, self.inputs.comes_in(storage, last) < never) for storage in set(storages)
        )

    def in_inputs(self, storages: Iterable[int], *, kept: bool) -> Table:
        """Return the bytes of storages that are in the input of the runs to the last end.

        Args:
            storages: The storages.
            kept: Only of those that the runs keep until the backward, saved or not.
        """
        found = []
        for storage in set(storages):
            held = self.inputs.have(storage, self.chain.profile.n_layers)
            if kept:
                held &= self.chain.are_kept(storage, self.firsts)
            found.append((storage, held))
        return self._of_last(found)

    def _of_last(self, held: Iterable[tuple[int, Table]]) -> Table:
        """Add up storages, each in those rows that have it as their own."""
        total: Table = np.zeros(len(self.firsts), dtype=self.kind)
        for storage, rows in held:
            own = self.firsts >= self._own_from(storage)
            total += (rows & own) * self.chain.bytes[storage]
        return total

    @cached_property
    def handed(self) -> Table:
        """Bytes of what the runs to each end keep of what they pass on.

        That is their output, and skips that they stash for later runs. Where partitions do not
        share a memory, they pass on copies.
        """
        found = self._filled(
            (0, min(stretch.last_first, saved) + 1, first, stop, self.chain.bytes[stretch.storage])
            for stretch in self.chain.handed
            for first, stop, saved in self.chain.by_saved(stretch)
        )
        strips, entry = self._passing()
        until_saved = strips._replace(stop=np.minimum(strips.stop, self.inputs.saved_by[entry]))
        return found + self._stripped(until_saved.of(self.inputs.is_kept[entry]))

    @cached_property
    def passing(self) -> Table:
        """Bytes of the input that the runs to each end pass on as it is."""
        return self._stripped(self._passing()[0])

    @cached_property
    def passing_kept(self) -> Table:
        """Bytes of `passing` that are in the runs' graphs."""
        strips, entry = self._passing()
        saved_by = self.inputs.saved_by[entry]
        first = np.where(self.inputs.is_kept[entry], 0, saved_by)
        return self._stripped(strips._replace(first=np.maximum(strips.first, first)))

    def _passing(self) -> tuple[Strips, Table]:
        """Return where runs pass on what is in their input, and which entry of the input it is."""
        inputs = self.inputs
        entry, first, stop = inputs.meeting(self.chain.handed)
        rows, since = inputs.rows[entry], inputs.since[entry]
        n_bytes = inputs.n_bytes[entry]
        return Strips(rows, since, np.maximum(first, since), stop, n_bytes), entry

    def forward(self, records: bool) -> tuple[Table, Sequence[Change]]:
        """Return what there is while each layer runs forward, without what it needs itself.

        Args:
            records: Whether a graph is recorded.

        Returns:
            A table of layers, for the shortest runs; and what longer ones have in addition.
        """
        chain, rectangles = self.chain, list[_Rectangle]()
        for stretch in chain.alive:
            low, n_bytes = self._own_from(stretch.storage), chain.bytes[stretch.storage]
            parts = [(stretch.first, stretch.stop, -1)]
            for first, stop, saved in chain.by_saved(stretch) if records else parts:
                rectangles.append(
                    (max(low, saved + 1), stretch.last_first + 1, first, stop, n_bytes)
                )
        found, changes = self._by_layer(self.inputs.forward_strips(records))
        found = found + self._filled(rectangles)[:, :-1]
        return found + self.saved[:, :-1] if records else found, changes

    @cached_property
    def backward(self) -> tuple[Table, Sequence[Change]]:
        """What the graph has kept by the end of each layer: for the shortest runs, and changes."""
        found, changes = self._by_layer(self.inputs.backward_strips())
        return found + self.saved[:, 1:], changes

    def _by_layer(self, strips: Strips) -> tuple[Table, Sequence[Change]]:
        """Make a table of layers of the parts that all runs have, and changes of the others."""
        late = strips.since > self.firsts[strips.rows] + 1
        found = self._stripped(strips.of(~late))[:, :-1]
        later = strips.of(late)
        later = later.of(np.argsort(later.since, kind="stable"))
        changes = []
        for end in np.unique(later.since).tolist():
            low, high = np.searchsorted(later.since, (end, end + 1)).tolist()
            own = later.of(slice(low, high))
            # The layers before a run's first do not matter.
            first = int(np.maximum(own.first, self.firsts[own.rows]).min())
            rows = slice(int(own.rows.min()), int(own.rows.max()) + 1)
            ends = range(end, self.chain.profile.n_layers + 1)
            changes.append(Change(ends, first, partial(self._part, first, rows, own), rows))
        return found, changes

    def _part(self, first: int, rows: slice, strips: Strips) -> Table:
        """Add up numbers over parts of rows, in some rows and the columns from one on."""
        width = min(int(strips.stop.max()), self.n_columns) - first
        table: Table = np.zeros((rows.stop - rows.start, width + 1), dtype=self.kind)
        row, low = strips.rows - rows.start, np.clip(strips.first - first, 0, width)
        np.add.at(table, (row, low), strips.n_bytes)
        np.add.at(table, (row, np.clip(strips.stop - first, low, width)), -strips.n_bytes)
        return table[:, :-1].cumsum(axis=1)

    def _filled(self, rectangles: Iterable[_Rectangle]) -> Table:
        """Make a table of rectangles, in which their numbers are added up."""
        columns: Table = np.array(list(rectangles), dtype=self.kind).reshape(-1, 5).T
        low, stop, first, end = columns[:4].astype(np.int64)
        above = self.firsts[0]
        return self._added(low - above, stop - above, first, end, columns[4])

    def _stripped(self, strips: Strips) -> Table:
        """Make a table of parts of rows, in which their numbers are added up."""
        rows, _, first, stop, numbers = strips
        return self._added(rows, rows + 1, first, stop, numbers)

    def _added(self, low: Table, stop: Table, first: Table, end: Table, numbers: Table) -> Table:
        """Add up numbers, each over the rows and columns from some on to before others."""
        n_rows = len(self.firsts)
        table: Table = np.zeros((n_rows + 1, self.n_columns + 1), dtype=self.kind)
        if not numbers.size:
            return table[:-1, :-1]
        low, first = np.clip(low, 0, n_rows), np.clip(first, 0, self.n_columns)
        stop, end = np.clip(stop, low, n_rows), np.clip(end, first, self.n_columns)
        for row, begun in ((low, numbers), (stop, -numbers)):
            np.add.at(table, (row, first), begun)
            np.add.at(table, (row, end), -begun)
        summed: Table = table.cumsum(axis=0).cumsum(axis=1)
        return summed[:-1, :-1]
