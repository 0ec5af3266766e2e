"""How what the backwards of runs of layers need depends on where the run ends.

One table of what each layer's backward needs serves for all ends, as if every run went on. Where a
run ends, some memory is not needed: for example, gradients of skip connections that go past the end
are among those that the backward starts from. These amounts are of two kinds. Some stay the same
for many ends in a row: those of skip connections past all of these ends, or of the same uses of
tied parameters. They are changes of the table, and stay in it for these ends. The others belong to
one end, begin a few layers before it, and are subtracted for this end alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import pairwise, starmap
from typing import TYPE_CHECKING, Any

import numpy as np

from gpipebal.memory.layer_peaks import copied
from gpipebal.planner.runs.chain import Stretch
from gpipebal.planner.runs.gradient_tables import GradientTables
from gpipebal.planner.runs.highest import Change, Highest
from gpipebal.planner.runs.storage_tables import StorageTables
from gpipebal.planner.runs.tie_tables import TieTables

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from gpipebal.planner.runs.highest import Less

    Table = NDArray[Any]

__all__ = ["RunEnds"]


class RunEnds:
    """Adds and subtracts the amounts that depend on where runs end.

    Args:
        tables: Tables of the runs.
        ties: Tables of tied parameters of the same runs.
        gradients: Tables of gradients of the same runs.
        idle_to_end: Which of the runs to the end of the chain receive no gradient.
        chunks: Micro-batches of a mini-batch.
    """

    def __init__(
        self,
        tables: StorageTables,
        ties: TieTables,
        gradients: GradientTables,
        idle_to_end: Table,
        chunks: int,
    ) -> None:
        self._tables, self._ties, self._gradients = tables, ties, gradients
        self._idle_to_end = idle_to_end
        self._chain, self._profile = tables.chain, tables.chain.profile
        self._chunks, self._n = chunks, tables.chain.profile.n_layers
        self._firsts = tables.firsts

    def correct(
        self,
        before: Table,
        needs: Highest,
        changes: Sequence[Change],
        *,
        recomputed: bool,
        exist: bool,
    ) -> None:
        """Correct the highest of the layers before the last of every run.

        Args:
            before: For each run to each end, column 0 being end 1, the highest of its layers but
                the last; changed where it is another for this end.
            needs: What each layer needs in a run that goes on after it.
            changes: What layers need in addition in the runs to some ends.
            recomputed: Whether the runs are recomputed before their backward.
            exist: Whether gradients exist when the backward begins.

        Complexity:
            For N runs' first layers and a chain of n layers: O(N l) for each skip connection that
            goes past l layers; O(N n) for each end before which one is popped, and for each use of
            a tied parameter; and O(N l) for each end where values are passed on that l layers have
            handed through.
        """
        every = [*changes, *self._lasting(recomputed, exist)]
        for end in needs.through(range(2, self._n + 1), every):
            last = self._last(end)
            own = [less for less in self._own(end, recomputed, exist) if less[0] < last]
            if own:
                before[:, end - 1] = needs.before_less(last, own)
            elif needs.has_changed(last):
                before[:, end - 1] = needs.before(last)

    def _last(self, end: int) -> int:
        """Return the last layer of the runs to an end: the loss, if one follows the last layer."""
        return end - 1 if end < self._n else len(self._chain.layers) - 1

    def _goes_on(self, end: int) -> bool:
        """Tell whether a backward of the runs to an end starts from gradients it is given."""
        return end < self._n or self._chain.loss is None

    def _lasting(self, recomputed: bool, exist: bool) -> Iterator[Change]:
        """Yield what is added or subtracted for some ends in a row."""
        yield from self._ties.changes(exist)
        yield from self._gradients.changes(exist)
        for stretch in self._chain.handed:
            yield from self._handed_from_before(stretch, recomputed)

    def _own(self, end: int, recomputed: bool, exist: bool) -> Iterator[Less]:
        """Yield what is subtracted for one end alone."""
        last = self._last(end)
        if self._goes_on(end):
            yield from self._copies_at_start(end, exist)
        if end < self._n and self._chain.shared_memory:
            for storage, handing in self._chain.handed_at[end].items():
                if handing == end - 1:
                    comes_in = self._handed_comes_in(storage, handing, end, recomputed)
                    first = int(comes_in.min()) - 1
                    if first < last:
                        n_bytes = self._tables.chain.bytes[storage]
                        yield first, self._held(n_bytes, comes_in, first, last)
        if end == self._n and self._chunks == 1 and self._chain.loss is None and not recomputed:
            yield from self._kept_by_caller(last)

    def _copies_at_start(self, end: int, exist: bool) -> Iterator[Less]:
        """Yield copies of what the whole run hands through, made when the backward begins."""
        firsts = self._chain.firsts_that_hand_through(end)
        of_first = {k: copied(self._profile.layers[k], exist) for k in firsts}
        at_begin = {k: n_bytes for k, n_bytes in of_first.items() if n_bytes}
        if at_begin:
            copies = [at_begin.get(k, 0) for k in self._firsts.tolist()]
            first, last = min(at_begin), self._last(end)
            yield first, -self._row(copies).T.repeat(last - first, axis=1)

    def _handed_from_before(self, stretch: Stretch, recomputed: bool) -> Iterator[Change]:
        """Yield what runs pass on from layers before their last, at some ends in a row."""
        storage, begin, stop, last = stretch
        begin = max(begin, last + 2)
        if begin >= stop:
            return
        # Longer runs may have it in their input, too.
        entered = (end for end in self._tables.inputs.ends_of(storage) if begin < end < stop)
        for ends in starmap(range, pairwise([begin, *entered, stop])):
            comes_in = self._handed_comes_in(storage, last, ends.start, recomputed)
            first, behind = int(comes_in.min()) - 1, ends.stop - 2
            if first < behind:
                n_bytes = -self._tables.chain.bytes[storage]
                yield Change(ends, first, partial(self._held, n_bytes, comes_in, first, behind))

    def _handed_comes_in(self, storage: int, handing: int, end: int, recomputed: bool) -> Table:
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

    def _kept_by_caller(self, last: int) -> Iterator[Less]:
        """Yield what the caller keeps of the last run's graph, as negative amounts."""
        for storage in set(self._profile.layers[-1].outputs):
            comes_in = self._tables.inputs.comes_in(storage, self._n)
            in_graph = (comes_in < self._chain.never) & ~self._idle_to_end
            in_graph &= self._firsts > self._chain.others_until.get(storage, -1)
            missing = comes_in[:, None] > np.arange(1, last + 1)[None, :]
            n_bytes = self._chain.bytes[storage]
            yield 0, -(missing & in_graph[:, None]).astype(self._tables.kind) * n_bytes

    def _row(self, numbers: Sequence[int]) -> Table:
        return np.array([numbers], dtype=self._tables.kind)
