"""What the backwards of runs of layers hold, besides gradients, that depends on where the run ends.

One table of what each layer's backward needs serves for all ends, as if every run went on. Where a
run ends, what it passes on is another's, what all of its layers hand through is copied, and its
output may be kept by the caller. These amounts are changes of the table, for one end or for many in
a row.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import pairwise, starmap
from typing import TYPE_CHECKING, Any

import numpy as np

from gpipebal.memory.layer_peaks import copied
from gpipebal.planner.runs.chain import Stretch
from gpipebal.planner.runs.highest import Change
from gpipebal.planner.runs.storage_tables import StorageTables

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Table = NDArray[Any]

__all__ = ["RunEnds"]


class RunEnds:
    """Tells what runs hold that depends on where they end, besides gradients.

    Args:
        tables: Tables of the runs.
        idle_to_end: Which of the runs to the end of the chain receive no gradient.
        chunks: Micro-batches of a mini-batch.
    """

    def __init__(self, tables: StorageTables, idle_to_end: Table, chunks: int) -> None:
        self._tables, self._idle_to_end = tables, idle_to_end
        self._chain, self._profile = tables.chain, tables.chain.profile
        self._chunks, self._n = chunks, tables.chain.profile.n_layers
        self._firsts = tables.firsts

    def changes(self, *, recomputed: bool, exist: bool) -> Iterator[Change]:
        """Yield what the layers before the last of a run need more, or less, at some ends.

        Args:
            recomputed: Whether the runs are recomputed before their backward.
            exist: Whether gradients exist when the backward begins.

        Complexity:
            For N runs' first layers and a chain of n layers, to apply them: O(N l) for each skip
            connection that goes past l layers; and O(N l) for each end where values are passed on
            that l layers have handed through.
        """
        for stretch in self._chain.handed:
            yield from self._handed(stretch, recomputed)
        for end in range(2, self._n + (self._chain.loss is None)):
            yield from self._copies_at_start(end, exist)
        if self._chunks == 1 and self._chain.loss is None and not recomputed:
            yield from self._kept_by_caller()

    def _copies_at_start(self, end: int, exist: bool) -> Iterator[Change]:
        """Yield copies of what the whole run hands through, made when the backward begins."""
        firsts = self._chain.firsts_that_hand_through(end)
        of_first = {k: copied(self._profile.layers[k], exist) for k in firsts}
        at_begin = {k: n_bytes for k, n_bytes in of_first.items() if n_bytes}
        if at_begin:
            copies = [at_begin.get(k, 0) for k in self._firsts.tolist()]
            first, last = min(at_begin), end - 1
            column = self._tables.column(copies)[:, None]
            yield Change(range(end, end + 1), first, partial(column.repeat, last - first, axis=1))

    def _handed(self, stretch: Stretch, recomputed: bool) -> Iterator[Change]:
        """Yield what runs pass on, at some ends in a row."""
        storage, begin, stop, handing = stretch
        # Longer runs may have it in their input, too.
        longer = range(begin + 1, stop)
        entered = [k for k in self._tables.inputs.ends_of(storage) if k in longer] if longer else []
        for ends in starmap(range, pairwise([begin, *entered, stop])):
            comes_in = self._comes_in(storage, handing, ends.start, recomputed)
            first, behind = int(comes_in.min()) - 1, ends.stop - 2
            if first < behind:
                n_bytes = -self._chain.bytes[storage]
                yield Change(ends, first, partial(self._held, n_bytes, comes_in, first, behind))

    def _comes_in(self, storage: int, handing: int, end: int, recomputed: bool) -> Table:
        """Return where runs to an end begin to hold what they pass on; `never`: nowhere.

        Where they are `recomputed`, only if they have received it.
        """
        inputs = self._tables.inputs
        mine = self._firsts <= handing
        mine &= self._firsts > self._chain.others_until.get(storage, -1)
        if recomputed:
            mine &= inputs.have(storage, end)
        return np.where(mine, inputs.comes_in(storage, end), self._chain.never)

    def _held(self, n_bytes: int, comes_in: Table, low: int, stop: int) -> Table:
        """Return bytes of what comes in somewhere, at the layers from `low` to before `stop`."""
        is_held: Table = comes_in[:, None] <= np.arange(low + 1, stop + 1)[None, :]
        return is_held.astype(self._tables.kind) * n_bytes

    def _kept_by_caller(self) -> Iterator[Change]:
        """Yield what the caller keeps of the last run's graph, where no graph holds it yet."""
        for storage in set(self._profile.layers[-1].outputs):
            comes_in = self._tables.inputs.comes_in(storage, self._n)
            in_graph = (comes_in < self._chain.never) & ~self._idle_to_end
            in_graph &= self._firsts > self._chain.others_until.get(storage, -1)
            missing = comes_in[:, None] > np.arange(1, self._n)[None, :]
            kept: Table = (missing & in_graph[:, None]).astype(self._tables.kind)
            amounts = partial(np.multiply, kept, self._chain.bytes[storage])
            yield Change(range(self._n, self._n + 1), 0, amounts)
