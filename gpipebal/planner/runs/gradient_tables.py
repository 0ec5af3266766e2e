"""Memory of gradients, for all runs of layers at once: `gpipebal.memory.gradients` in tables.

Rows are first layers of runs, columns layers or ends. One table has what each layer finds in a run
that goes on after it; what a run to some end does not make, because its backward starts from it,
are changes of that table.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from gpipebal.memory.gradients import SumAtStart, sums_at_start
from gpipebal.memory.layer_peaks import chained_peak, uncopied_peak
from gpipebal.planner.runs.chain import LayerChain
from gpipebal.planner.runs.highest import Change
from gpipebal.profile.gradients import GradientMemory, StashedSum

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Table = NDArray[Any]

__all__ = ["GradientTables", "Living"]


class Living(NamedTuple):
    """An amount that lives while several layers run backwards; of every run, or the same for all.

    Attributes:
        amount: Bytes.
        since: The first layer that finds it.
        lowest: The least of these.
        until: The first layer that no longer finds it: its backward makes it.
    """

    amount: Table
    since: Table
    lowest: int
    until: int

    def columns(self, low: int, stop: int) -> Table:
        """Return what layers `low` to ``stop - 1`` find of it, all of them before `until`."""
        is_found = np.arange(low, stop)[None, :] >= self.since[:, None]
        found: Table = is_found.astype(self.amount.dtype) * self.amount[:, None]
        return found

    def taken_off(self) -> Table:
        """Return what the layers that find any of it need less without it, as negative numbers."""
        return -self.columns(self.lowest, self.until)


class GradientTables:
    """Tables of gradients.

    Args:
        chain: The layers.
        firsts: First layers of the runs.
        kind: Type of the numbers.

    Attributes:
        living: What lives while each layer runs backwards, in runs that go on after it.
        sums: What the last layer of the run to each end finds summed up, or sums up early.
    """

    def __init__(self, chain: LayerChain, firsts: Table, kind: type) -> None:
        self._profile, self._layers = chain.profile, chain.layers
        self._firsts, self._kind = firsts, kind
        self._flow = self._profile.gradient_flow
        self._parts = list(self._find_parts())
        self._alone: dict[bool, list[Table]] = {}
        self.living: Table = np.zeros((len(firsts), len(self._layers)), dtype=kind)
        for part in self._parts:
            self.living[:, part.lowest : part.until] += part.columns(part.lowest, part.until)
        n = self._profile.n_layers
        #: The ends of runs whose backward starts from gradients that it is given.
        self._goes_on = range(1, n + (chain.loss is None))
        self._sums = list(self._find_sums())
        self.sums: Table = np.zeros((len(firsts), n), dtype=kind)
        for one, ends in self._sums:
            self.sums[:, ends.start - 1 : ends.stop - 1] += self._of_sum(one)[:, None]
        for each in self._flow.sums:
            # It is summed up by the layer that finds it, which may be the last of a run.
            if each.maker < each.until and each.maker + 1 in self._goes_on:
                self.sums[:, each.maker] += self._of_stashed(each).amount

    def _find_sums(self) -> Iterator[tuple[SumAtStart, range]]:
        """Yield what is added up when a backward starts, and the ends of these runs, in a row."""
        begun: dict[SumAtStart, int] = {}
        for end in range(1, self._profile.n_layers + 1):
            found: set[SumAtStart] = set()
            if end < self._profile.n_layers:
                skips = self._profile.skips
                outgoing = [s for s in skips if s.source < end <= s.destination]
                found.update(sums_at_start(self._profile, end, outgoing))
            for one in begun.keys() - found:
                yield one, range(begun.pop(one), end)
            begun.update(dict.fromkeys(found - begun.keys(), end))

    def _column(self, numbers: Sequence[int]) -> Table:
        return np.array(numbers, dtype=self._kind)

    def _until(self, one: GradientMemory) -> Table:
        """Return the first layer that is given any of a piece of memory; see `GradientMemory`."""
        found = np.full(len(self._firsts), one.lowest_value)
        for low, stop in one.copied:
            found[(low <= self._firsts) & (self._firsts < stop)] = stop
        own = np.full(len(self._firsts), one.maker)
        for source in reversed(one.sources):
            own[self._firsts <= source] = source
        return np.minimum(found, own)

    def _find_parts(self) -> Iterator[Living]:
        """Yield what lives in runs: memory that they make, and copies for runs before them."""
        whole = set(range(len(self._flow.memory)))
        for skip, places in zip(self._profile.skips, self._flow.skips, strict=True):
            if skip.source == skip.destination:
                continue
            n_bytes = self._profile.gradient_bytes_of(skip.storages)
            amount, since = self._column([n_bytes]), np.array([skip.source])
            alone = [self._flow.memory[place] for place in places]
            own = (n_bytes, skip.destination, skip.destination, (skip.source,), ())
            if [tuple(one) for one in alone] == [own] and places[0] in whole:
                # Wherever the run begins, it is as large, and nothing else is in it.
                whole.discard(places[0])
            else:
                amount = amount * (self._firsts > skip.source)
            yield Living(amount, since, skip.source, skip.destination)
        for copy in self._flow.copies:
            is_there = (copy.first <= self._firsts) & (self._firsts <= copy.last)
            amount = self._column([copy.n_bytes]) * is_there
            yield Living(amount, np.array([copy.first]), copy.first, copy.last + 1)
        yield from map(self._of_stashed, self._flow.sums)
        for place in sorted(whole):
            one = self._flow.memory[place]
            yield Living(self._column([one.n_bytes]), self._until(one), one.lowest, one.maker)

    def _of_stashed(self, one: StashedSum) -> Living:
        """Return a sum of what a layer hands back, and a skip does."""
        amount = self._column([one.n_bytes]) * (self._firsts <= one.source)
        return Living(amount, np.array([one.since]), one.since, one.until)

    def peaks(self, exist: bool) -> Table:
        """Return what each layer's backward needs by itself in runs that go on after it.

        Args:
            exist: Whether gradients of parameters exist.
        """
        return np.stack(self._of_layers(exist), axis=1)

    def _of_layers(self, exist: bool) -> list[Table]:
        """Return `peak` of every layer. Several kinds of backwards ask for it."""
        if exist not in self._alone:
            self._alone[exist] = [self.peak(k, exist) for k in range(len(self._layers))]
        return self._alone[exist]

    def peak(self, k: int, exist: bool, started: frozenset[int] = frozenset()) -> Table:
        """Return what one layer's backward needs by itself in every run.

        Args:
            k: Its index; that of the loss is the number of layers.
            exist: Whether gradients of parameters exist.
            started: Memory that the backward of the run started from, and does not free.
        """
        layer = self._layers[k]
        kept = chained_peak(layer, exist, inside=True)
        of_runs: Table = np.zeros(len(self._firsts), dtype=self._kind)
        for place in self._flow.given[k]:
            one = self._flow.memory[place]
            if place in started:
                kept += one.n_bytes
            elif one.lowest < k:
                is_held = (self._until(one) < k) & (self._firsts < k)
                of_runs = of_runs + is_held.astype(self._kind) * one.n_bytes
        most = self._column([uncopied_peak(layer, exist, inside=True)])
        copies = [
            peak(layer, exist, inside=False) - peak(layer, exist, inside=True)
            for peak in (uncopied_peak, chained_peak)
        ]
        if any(copies):
            most = most + self.copied_at_cut(k, copies[0])
            of_runs = of_runs + self.copied_at_cut(k, copies[1])
        return np.minimum(most, of_runs + kept)

    def copied_at_cut(self, k: int, copies: int) -> Table:
        """Return how many bytes of copies layer k makes, in every run.

        They are of what the run is given too: the layer is the first, it pops what a layer before
        the run has stashed, or that has been handed through. So it counts if other layers give it
        as its value what it pops.

        Args:
            k: Its index.
            copies: Bytes of all copies, as it makes them as the first layer.
        """
        found = self._column([0]).repeat(len(self._layers))
        for first, n_bytes in self._given_at_cut(k).items():
            found[first] = copies if n_bytes is None else min(copies, n_bytes)
        made: Table = found[self._firsts]
        return made

    def _given_at_cut(self, k: int) -> dict[int, int | None]:
        """Return, by first layer, the bytes of what layer k and the run are given; None: of all."""
        value = self._profile.with_gradient(self._layers[k - 1].outputs if k else ())
        skips = [skip for skip in self._profile.skips if skip.source < skip.destination == k]
        if any(s.source + 1 < k and not value.isdisjoint(s.storages) for s in skips):
            return dict.fromkeys(range(k + 1))
        found: dict[int, int | None] = {}
        for storage in value.union(*(self._profile.with_gradient(s.storages) for s in skips)):
            firsts = {j for j in range(1, k) if storage in self._layers[j - 1].outputs}
            for skip in self._profile.skips:
                if skip.source < skip.destination <= k and storage in skip.storages:
                    firsts.update(range(skip.source + 1, skip.destination + 1))
            for first in firsts:
                found[first] = (found.get(first) or 0) + self._profile.storages[storage]
        if k and self._profile.further_gradients(k - 1) > 0:
            found = dict.fromkeys(found)
        found[k] = None
        return found

    def changes(self, exist: bool) -> Iterator[Change]:
        """Yield how runs to some ends differ from those that go on.

        The memory of gradients that their backward starts from is not made by it, nor freed by the
        layers that are given it; and several gradients of one tensor are added up.

        Args:
            exist: Whether gradients of parameters exist.
        """
        for part in self._parts:
            ends = range(part.lowest + 2, min(part.until + 1, self._goes_on.stop))
            if ends:
                yield Change(ends, part.lowest, part.taken_off)
        for k in range(self._profile.n_layers):
            yield from self._kept_from_start(k, exist)
        for one, ends in self._sums:
            shape = len(self._firsts), ends.stop - 2 - (one.source + 1)
            if shape[1] > 0:
                amounts = partial(np.broadcast_to, self._of_sum(one)[:, None], shape)
                yield Change(ends, one.source + 1, amounts)

    def _kept_from_start(self, k: int, exist: bool) -> Iterator[Change]:
        """Yield what layer k, if it is not the last, does not free: a backward starts from it."""
        ends_of: dict[int, range] = {}
        for place in self._flow.given[k]:
            memory = self._flow.memory[place]
            last = min(memory.maker, self._goes_on.stop - 1)
            ends_of[place] = range(max(memory.lowest, k) + 2, last + 1)
        bounds = {bound for ends in ends_of.values() if ends for bound in (ends.start, ends.stop)}
        for start, stop in pairwise(sorted(bounds)):
            started = frozenset(place for place, ends in ends_of.items() if start in ends)
            more = self.peak(k, exist, started) - self._of_layers(exist)[k]
            if more.any():
                yield Change(range(start, stop), k, partial(np.reshape, more, (-1, 1)))

    def _of_sum(self, one: SumAtStart) -> Table:
        """Return the bytes of a sum in every run."""
        found: Table = (self._firsts <= one.last_first).astype(self._kind) * one.n_bytes
        return found
