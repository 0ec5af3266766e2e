"""How much less the backwards of runs of layers need because of where the run ends.

One table of what each layer's backward needs serves for all ends, as if every run went on. Where a
run ends, some of this memory is not needed: for example, gradients of skip connections that go past
the end are among those that the backward starts from. The amounts that are subtracted are of two
kinds. Some stay the same for many ends in a row: those of the same skip connections past all of
these ends, or of the same uses of tied parameters. They are subtracted once for all of these ends,
and where they change, only from there on. The others belong to one end, and begin a few layers
before it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from gpipebal.memory.layer_peaks import copied, freed
from gpipebal.planner.runs.skip_gradients import SkipGradients
from gpipebal.planner.runs.storage_tables import StorageTables
from gpipebal.planner.runs.tie_tables import TieTables

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Table = NDArray[Any]

    #: The first layer from which on something is subtracted, and a table of as many layers as it is
    #: subtracted from; it may be one row that holds for all.
    Less = tuple[int, Table]

__all__ = ["RunEnds"]


class _Lasting(NamedTuple):
    """An amount that is subtracted for several ends.

    Attributes:
        first: The first layer from which on it is subtracted.
        columns: Called as ``columns(low, stop)``, with `low` no less than `first` and `stop` no
            more than `end`; returns what is subtracted from layers `low` to ``stop - 1``, as a
            table or a row for all.
        end: The first layer after those that it is subtracted from; None: there is none.
    """

    first: int
    columns: Callable[[int, int], Table]
    end: int | None = None

    @classmethod
    def of(cls, first: int, amounts: Table) -> _Lasting:
        """Return amounts of some layers, beginning with the first."""
        return cls(
            first,
            lambda low, stop: amounts[:, low - first : stop - first],
            first + amounts.shape[1],
        )


class RunEnds:
    """Subtracts the amounts that depend on where runs end.

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
        self._firsts = np.array(tables.firsts)

    def correct(
        self, before: Table, inner: Table, highest: Table, *, again: bool, exist: bool
    ) -> None:
        """Correct the highest of the layers before the last of every run.

        Args:
            before: For each run to each end, column 0 being end 1, the highest of its layers but
                the last; changed where something is subtracted.
            inner: What each layer needs in a run that goes on after it.
            highest: The running maximum of `inner` along each row.
            again: Whether the runs are recomputed before their backward.
            exist: Whether gradients exist when the backward begins.

        Complexity:
            For each variant of a run: O(n) once for the chain of n layers; O(l) for each skip
            connection that goes past l layers; O(n) for each use of a tied parameter; and O(l) for
            each end where values are passed on that l layers have handed through.
        """
        needs = _Needs(inner, highest)
        for _, group in groupby(range(2, self._n + 1), key=self._lasting_key):
            ends = list(group)
            needs.take_off(dict(self._lasting(ends[-1], again, exist)), self._last(ends[-1]))
            for end in ends:
                last = self._last(end)
                own = [less for less in self._own(end, again, exist) if less[0] < last]
                if own:
                    before[:, end - 1] = needs.highest_less(own, last)
                elif last > needs.start:
                    before[:, end - 1] = needs.highest_before(last)

    def _last(self, end: int) -> int:
        """Return the last layer of the runs to an end: the loss, if one follows the last layer."""
        return end - 1 if end < self._n else len(self._chain.layers) - 1

    def _goes_on(self, end: int) -> bool:
        """Tell whether a backward of the runs to an end starts from gradients it is given."""
        return end < self._n or self._chain.loss is None

    def _lasting_key(self, end: int) -> Hashable:
        """Return a key for all that is not one end's own: ends with equal keys share it."""
        if end == self._n:  # the caller or the loss comes next
            return None
        past = tuple(k for k in self._chain.crossing[end] if self._source(k) < end - 1)
        return past, self._ties.uses_before(end), tuple(self._handed_from_before(end))

    def _lasting(self, end: int, again: bool, exist: bool) -> Iterator[tuple[Hashable, _Lasting]]:
        """Yield what is subtracted for this end and others, by names that stay the same."""
        for t, n_uses in enumerate(self._ties.uses_before(end)):
            if n_uses > 1:
                first, amounts = self._ties.less(t, n_uses, exist)
                yield ("tie", t, n_uses), _Lasting.of(first, amounts)
        if self._goes_on(end):
            yield from self._skip_gradients(end, exist)
        for storage, handing in self._handed_from_before(end) if end < self._n else ():
            comes_in = self._handed_comes_in(storage, handing, again)
            held = self._held(storage, comes_in)
            first = int(comes_in.min(initial=self._tables.n_columns + 1)) - 1
            yield ("handed", storage, handing), _Lasting(first, held)

    def _own(self, end: int, again: bool, exist: bool) -> Iterator[Less]:
        last = self._last(end)
        if self._goes_on(end):
            yield from self._through(end, exist)
            yield from self._skips_of_start(end)
        if end < self._n and self._chain.shared_memory:
            for storage, handing in self._chain.handed_at[end].items():
                if handing == end - 1:
                    comes_in = self._handed_comes_in(storage, handing, again)
                    first = int(comes_in.min(initial=self._tables.n_columns + 1)) - 1
                    if first < last:
                        yield first, self._held(storage, comes_in)(first, last)
        if end == self._n and self._chunks == 1 and self._chain.loss is None and not again:
            yield from self._kept_by_caller(last)

    def _source(self, skip: int) -> int:
        return self._profile.skips[skip].source

    def _skip_sources(self, end: int) -> set[int]:
        """Return the layers before the last whose skip connections go past an end."""
        return {k for k in map(self._source, self._chain.crossing[end]) if k < end - 1}

    def _skip_gradients(self, end: int, exist: bool) -> Iterator[tuple[Hashable, _Lasting]]:
        """Yield gradients of skip connections that go past the end.

        They are among those that the backward starts from, and do not wait.
        """
        for k in self._chain.crossing[end]:
            source = self._source(k)
            if source < end - 1:
                n_bytes = self._skips.held[k][:, None]
                yield ("skip", k), _Lasting(source, _everywhere(n_bytes))
        for source in self._skip_sources(end):
            # The backward started from these, and does not free them.
            n_bytes = self._row([-freed(self._profile.layers[source], exist)])
            if source in self._skips.value_gradients:
                n_bytes = n_bytes * ~self._skips.value_gradients[source][1][:, None]
            yield ("source", source), _Lasting.of(source, n_bytes)

    def _through(self, end: int, exist: bool) -> Iterator[Less]:
        """Yield gradients that are not made a second time: the backward started from them.

        They are of what is handed through to the end, or parts of those at the end.
        """
        profile, sources = self._profile, self._skip_sources(end)
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
            less = self._row([n_bytes])
            if k not in sources:
                less = less - freed(layer, exist)
            if k in self._skips.value_gradients:
                more, is_held = (each[:, None] for each in self._skips.value_gradients[k])
                less = less + more
                if k not in sources:
                    less = less + is_held * freed(layer, exist)
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

    def _skips_of_start(self, end: int) -> Iterator[Less]:
        """Yield gradients of popped skips that are, or are parts of, what the backward starts from.

        They do not wait in memory of their own in runs with the layer that stashed them.
        """
        layers, last = self._profile.layers, self._last(end)
        for destination in range(end - 1, 0, -1):
            for k in self._skips.popped(destination):
                source = self._source(k)
                if self._profile.skips[k].gradient_is_given:
                    n_bytes = self._skips.held[k] * (self._firsts <= source)
                    columns = min(destination, last) - source
                    yield source, n_bytes[:, None].repeat(columns, axis=1)
            if not layers[destination].hands_back_given:
                return

    def _handed_from_before(self, end: int) -> Sequence[tuple[int, int]]:
        """Return what runs to an end pass on from layers before their last, and which runs do."""
        if not self._chain.shared_memory:
            return []
        handed = self._chain.handed_at[end]
        return [(storage, last) for storage, last in handed.items() if last < end - 1]

    def _handed_comes_in(self, storage: int, handing: int, again: bool) -> Table:
        """Return the first end at which runs hold what they pass on; a later one than all: never.

        Where they are recomputed (`again`), only if they have received it.
        """
        tables = self._tables
        comes_in = tables.comes_in(storage)
        mine = self._firsts <= handing
        if storage in self._profile.inputs:
            mine &= self._firsts > 0
        if again:
            mine &= tables.is_received(storage)
        return np.where(mine, comes_in, tables.n_columns + 1)

    def _held(self, storage: int, comes_in: Table) -> Callable[[int, int], Table]:
        """Return a function for the bytes of a storage at layers, from where it comes in."""
        kind, n_bytes = self._tables.kind, self._tables.bytes[storage]

        def columns(low: int, stop: int) -> Table:
            is_held: Table = comes_in[:, None] <= np.arange(low + 1, stop + 1)[None, :]
            return is_held.astype(kind) * n_bytes

        return columns

    def _kept_by_caller(self, last: int) -> Iterator[Less]:
        """Yield what the caller keeps of the last run's graph, as negative amounts."""
        tables = self._tables
        for storage in set(self._profile.layers[-1].outputs):
            comes_in = tables.comes_in(storage)
            in_graph = (comes_in < tables.n_columns) & ~self._idle_to_end
            if storage in self._profile.inputs:
                in_graph &= (self._firsts > 0) & (not self._chain.shared_memory)
            missing = comes_in[:, None] > np.arange(1, last + 1)[None, :]
            yield 0, -(missing & in_graph[:, None]).astype(tables.kind) * tables.bytes[storage]

    def _row(self, numbers: Sequence[int]) -> Table:
        return np.array([numbers], dtype=self._tables.kind)


class _Needs:
    """What each layer needs, less what is subtracted for several ends.

    Attributes:
        start: Columns before this one are still those of the table for all ends.
    """

    def __init__(self, inner: Table, highest: Table) -> None:
        self._inner, self._highest = inner, highest
        self.start = inner.shape[1]
        self._changed, self._running = inner, highest
        self._lasting: Mapping[Hashable, _Lasting] = {}
        self._stop = 0

    def take_off(self, lasting: Mapping[Hashable, _Lasting], stop: int) -> None:
        """Subtract exactly these amounts from the columns before `stop`; keep unchanged ones."""
        differs = self._lasting.keys() ^ lasting.keys()
        both = {**self._lasting, **lasting}
        low = min([self._stop, *(both[key].first for key in differs)])
        self._lasting, self._stop = lasting, stop
        self.start = start = min((one.first for one in lasting.values()), default=stop)
        low = max(low, start)
        if low >= stop:
            return
        if self._changed is self._inner:
            self._changed, self._running = self._inner.copy(), self._highest.copy()
        changed = self._inner[:, low:stop].copy()
        for one in lasting.values():
            first, end = max(one.first, low), stop if one.end is None else min(one.end, stop)
            if first < end:
                changed[:, first - low : end - low] -= one.columns(first, end)
        running = np.maximum.accumulate(changed, axis=1)
        if low:
            before = self._highest if low == start else self._running
            np.maximum(running, before[:, low - 1 : low], out=running)
        self._changed[:, low:stop], self._running[:, low:stop] = changed, running

    def highest_before(self, column: int) -> Table:
        """Return the highest of each row in the columns before one that is not the first."""
        if column <= self.start:
            return self._highest[:, column - 1]
        return self._running[:, column - 1]

    def highest_less(self, amounts: Sequence[Less], stop: int) -> Table:
        """Return the highest of each row in the columns before `stop`, less further amounts."""
        low, start = min(first for first, _ in amounts), self.start
        columns = self._changed[:, max(low, start) : stop]
        if low < start:
            columns = np.concatenate([self._inner[:, low : min(start, stop)], columns], axis=1)
        found: Table = _less(columns, low, amounts).max(axis=1)
        return np.maximum(found, self.highest_before(low)) if low else found


def _everywhere(amount: Table) -> Callable[[int, int], Table]:
    """Return a function for the same amount at all layers."""
    return lambda low, stop: amount


def _less(table: Table, low: int, amounts: Sequence[Less]) -> Table:
    """Return columns of a table, the first of which has the number `low`, less amounts.

    Example:
        >>> _less(np.array([[5, 5, 5]]), 1, [(2, np.array([[4]]))])
        array([[5, 1, 5]])
    """
    found = table.copy()
    for first, each in amounts:
        found[:, first - low : first - low + each.shape[1]] -= each
    return found
