"""How what the backwards of runs of layers need depends on where the run ends.

One table of what each layer's backward needs serves for all ends, as if every run went on, and
popped no skip connection. A longer run may pop more of them, whose gradients wait. And where a run
ends, some memory is not needed: for example, the gradient of a layer that ends the run is among
those that the backward starts from. These amounts are of two kinds. Some stay the same for many
ends in a row: those of skip connections that all of these runs pop, or of the same uses of tied
parameters. They are changes of the table, and stay in it for these ends. The others belong to one
end, begin a few layers before it, and are subtracted for this end alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import pairwise, starmap
from typing import TYPE_CHECKING, Any

import numpy as np

from gpipebal.memory.layer_peaks import copied, freed
from gpipebal.planner.runs.chain import Stretch
from gpipebal.planner.runs.highest import Change, Highest
from gpipebal.planner.runs.skip_gradients import SkipGradients
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
        skips: Gradients of skips in the same runs.
        idle_to_end: Which of the runs to the end of the chain receive no gradient.
        chunks: Micro-batches of a mini-batch.
    """

    def __init__(
        self,
        tables: StorageTables,
        ties: TieTables,
        skips: SkipGradients,
        idle_to_end: Table,
        chunks: int,
    ) -> None:
        self._tables, self._ties, self._skips = tables, ties, skips
        self._idle_to_end = idle_to_end
        self._chain, self._profile = tables.chain, tables.chain.profile
        self._chunks, self._n = chunks, tables.chain.profile.n_layers
        self._firsts = tables.firsts
        #: The last layer that pops something of each one that stashes.
        self._popped_by: dict[int, int] = {}
        for skip in self._profile.skips:
            last = self._popped_by.get(skip.source, 0)
            self._popped_by[skip.source] = max(last, skip.destination)

    def correct(
        self,
        before: Table,
        needs: Highest,
        changes: Sequence[Change],
        *,
        again: bool,
        exist: bool,
    ) -> None:
        """Correct the highest of the layers before the last of every run.

        Args:
            before: For each run to each end, column 0 being end 1, the highest of its layers but
                the last; changed where it is another for this end.
            needs: What each layer needs in a run that goes on after it.
            changes: What layers need in addition in the runs to some ends.
            again: Whether the runs are recomputed before their backward.
            exist: Whether gradients exist when the backward begins.

        Complexity:
            For N runs' first layers and a chain of n layers: O(N l) for each skip connection that
            goes past l layers; O(N n) for each end before which one is popped, and for each use of
            a tied parameter; and O(N l) for each end where values are passed on that l layers have
            handed through.
        """
        every = [*changes, *self._lasting(again, exist)]
        for end in needs.through(range(2, self._n + 1), every):
            last = self._last(end)
            own = [less for less in self._own(end, again, exist) if less[0] < last]
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

    def _lasting(self, again: bool, exist: bool) -> Iterator[Change]:
        """Yield what is added or subtracted for some ends in a row."""
        yield from self._ties.changes(exist)
        yield from self._skip_gradients(exist)
        yield from self._skips_of_start()
        for stretch in self._chain.handed:
            yield from self._handed_from_before(stretch, again)

    def _own(self, end: int, again: bool, exist: bool) -> Iterator[Less]:
        """Yield what is subtracted for one end alone."""
        last = self._last(end)
        if self._goes_on(end):
            yield from self._through(end, exist)
        if end < self._n and self._chain.shared_memory:
            for storage, handing in self._chain.handed_at[end].items():
                if handing == end - 1:
                    comes_in = self._handed_comes_in(storage, handing, end, again)
                    first = int(comes_in.min()) - 1
                    if first < last:
                        n_bytes = self._tables.chain.bytes[storage]
                        yield first, self._held(n_bytes, comes_in, first, last)
        if end == self._n and self._chunks == 1 and self._chain.loss is None and not again:
            yield from self._kept_by_caller(last)

    def _skip_gradients(self, exist: bool) -> Iterator[Change]:
        """Yield gradients of skip connections.

        Those of skips that a run pops wait, for the layer that stashed them or for the end. Those
        of skips that go past the end are among what the backward starts from.
        """
        for skip, held in zip(self._profile.skips, self._skips.held, strict=True):
            ends = range(skip.destination + 1, self._n + 1)
            yield self._alike(ends, range(skip.source, skip.destination), held)
        for source, destination in self._popped_by.items():
            # The backward started from these, and does not free them.
            n_bytes = self._column(freed(self._profile.layers[source], exist))
            if source in self._skips.value_gradients:
                n_bytes = n_bytes * ~self._skips.value_gradients[source][1]
            ends = range(source + 2, destination + 1)
            yield self._alike(ends, range(source, source + 1), n_bytes)

    def _skips_of_start(self) -> Iterator[Change]:
        """Yield gradients of popped skips that are, or are parts of, what the backward starts from.

        They do not wait in memory of their own in runs with the layer that stashed them.
        """
        layers, stop = self._profile.layers, self._n + self._goes_on(self._n)
        for destination in range(self._n - 1, 0, -1):
            ends = range(destination + 1, stop)
            for k in self._skips.popped(destination):
                skip = self._profile.skips[k]
                if skip.gradient_is_given:
                    less = -self._skips.held[k] * (self._firsts <= skip.source)
                    yield self._alike(ends, range(skip.source, destination), less)
            if not layers[destination].hands_back_given:
                stop = destination + 1

    def _through(self, end: int, exist: bool) -> Iterator[Less]:
        """Yield gradients that are not made a second time: the backward started from them.

        They are of what is handed through to the end, or parts of those at the end.
        """
        profile = self._profile
        through, is_start = set(profile.layers[end - 1].outputs), True
        further = profile.further_gradients(end - 1)
        amounts: list[Table] = []  # from the last layer but one to the first
        at_begin: dict[int, int] = {}
        for k in range(end - 2, -1, -1):
            layer, after = profile.layers[k], profile.layers[k + 1]
            through &= set(after.handed_through)
            is_start = is_start and after.hands_back_given
            if not through and not is_start:
                break
            # Further gradients too, as far as every later layer has as many.
            further = min(further, profile.further_gradients(k)) if through else 0
            n_bytes = profile.gradients_into(k)
            if not is_start:
                n_bytes = profile.gradient_bytes_of(through.intersection(layer.outputs)) + further
            n_bytes += layer.excess_gradient_bytes
            # What the backward started from is not freed.
            is_freed = self._popped_by.get(k, 0) < end
            less = self._row([n_bytes - is_freed * freed(layer, exist)])
            if k in self._skips.value_gradients:
                more, is_held = (each[:, None] for each in self._skips.value_gradients[k])
                less = less + more + is_held * (is_freed * freed(layer, exist))
            amounts.append(less)
            if not through.isdisjoint(layer.handed_through) and copied(layer, exist):
                at_begin[k] = copied(layer, exist)
        if not amounts:
            return
        first = end - 1 - len(amounts)
        yield first, np.hstack(np.broadcast_arrays(*amounts[::-1]))
        if at_begin:
            # Copied when the backward begins, in a run that begins with this layer.
            copies = [at_begin.get(k, 0) for k in self._firsts.tolist()]
            yield first, -self._row(copies).T.repeat(self._last(end) - first, axis=1)

    def _handed_from_before(self, stretch: Stretch, again: bool) -> Iterator[Change]:
        """Yield what runs pass on from layers before their last, at some ends in a row."""
        storage, begin, stop, last = stretch
        begin = max(begin, last + 2)
        if begin >= stop:
            return
        # Longer runs may have it in their input, too.
        entered = (end for end in self._tables.inputs.ends_of(storage) if begin < end < stop)
        for ends in starmap(range, pairwise([begin, *entered, stop])):
            comes_in = self._handed_comes_in(storage, last, ends.start, again)
            first, behind = int(comes_in.min()) - 1, ends.stop - 2
            if first < behind:
                n_bytes = -self._tables.chain.bytes[storage]
                yield Change(ends, first, partial(self._held, n_bytes, comes_in, first, behind))

    def _handed_comes_in(self, storage: int, handing: int, end: int, again: bool) -> Table:
        """Return where runs to an end begin to hold what they pass on; `never`: nowhere.

        Where they are recomputed (`again`), only if they have received it.
        """
        inputs = self._tables.inputs
        mine = self._firsts <= handing
        if storage in self._profile.inputs:
            mine &= self._firsts > 0
        if again:
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
            if storage in self._profile.inputs:
                in_graph &= (self._firsts > 0) & (not self._chain.shared_memory)
            missing = comes_in[:, None] > np.arange(1, last + 1)[None, :]
            n_bytes = self._chain.bytes[storage]
            yield 0, -(missing & in_graph[:, None]).astype(self._tables.kind) * n_bytes

    def _alike(self, ends: range, layers: range, amounts: Table) -> Change:
        """Return a change by amounts of each run that are the same at some layers."""
        # No run that begins behind these layers has one of them.
        rows = slice(0, int(np.searchsorted(self._firsts, layers.stop)))
        shape = rows.stop, len(layers)
        same = partial(np.broadcast_to, amounts[rows, None], shape)
        return Change(ends, layers.start, same, rows)

    def _column(self, number: int) -> Table:
        return np.full(len(self._firsts), number, dtype=self._tables.kind)

    def _row(self, numbers: Sequence[int]) -> Table:
        return np.array([numbers], dtype=self._tables.kind)
