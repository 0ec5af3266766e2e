"""What runs have in their input, and from which end on.

A run is given a value, and the skip connections that it pops from before it: those whose popping
layer comes before its end. So of the runs from one layer, longer ones have more in their input. But
each storage enters only once: there is one entry for each storage and first layer, with the end
from which on runs have it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from gpipebal.planner.runs.chain import LayerChain, Stretch

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Table = NDArray[Any]

__all__ = ["RunInputs", "Strips"]


class Strips(NamedTuple):
    """Bytes in parts of rows, in the runs from some end on: one number of each for every part.

    Attributes:
        rows: The row.
        since: The first of the ends.
        first: The first column.
        stop: The column after the last.
        n_bytes: The bytes in each of these columns.
    """

    rows: Table
    since: Table
    first: Table
    stop: Table
    n_bytes: Table

    def of(self, which: Table | slice) -> Strips:
        """Return some of the parts."""
        return Strips(*(column[which] for column in self))


class RunInputs:
    """The storages in the inputs of all runs from some layers.

    The mini-batch, the input of runs from the first layer on, is not counted: it is the caller's.

    Args:
        chain: The layers.
        firsts: First layers of the runs, one for each row of the tables.
        kind: Type of the numbers.

    Attributes:
        storages: For each entry its storage, in ascending order.
        rows: Its row.
        since: The first end whose runs have it in their input; 0: all.
        saved_by: The first end whose runs save it, too.
        is_kept: Whether the runs keep it until the backward, saved or not.
        n_bytes: Its bytes.
    """

    def __init__(self, chain: LayerChain, firsts: Table, kind: type) -> None:
        self._chain, self._firsts = chain, firsts
        self._since = self._find()
        storages, rows, since, saved_by, is_kept = [], [], [], [], []
        for storage, ends in sorted(self._since.items()):
            own = np.flatnonzero(ends < chain.never)
            storages.append(np.full(len(own), storage))
            rows.append(own)
            since.append(ends[own])
            saved_by.append(chain.saved_by(storage, firsts[own]))
            is_kept.append(chain.are_kept(storage, firsts[own]))
        self.storages, self.rows, self.since, self.saved_by = map(
            _joined, (storages, rows, since, saved_by)
        )
        self.is_kept = _joined(is_kept).astype(bool)
        self.n_bytes: Table = np.array(chain.bytes, dtype=kind)[self.storages]

    def _find(self) -> dict[int, Table]:
        """Return, for each storage, the first end whose runs have it in their input."""
        chain, profile = self._chain, self._chain.profile
        found: dict[int, Table] = {}

        def of(storage: int) -> Table:
            if storage not in found:
                found[storage] = np.full(len(self._firsts), chain.never)
            return found[storage]

        for skip in profile.skips:
            bounds = skip.source + 1, skip.destination + 1
            low, high = np.searchsorted(self._firsts, bounds).tolist()
            if low < high:
                for storage in skip.storages:
                    part = of(storage)[low:high]
                    np.minimum(part, skip.destination + 1, out=part)
        for row, first in enumerate(self._firsts.tolist()):
            for storage in profile.layers[first - 1].outputs if first else ():
                of(storage)[row] = 0
        return found

    def ends_of(self, storage: int) -> Sequence[int]:
        """Return the ends from which on some runs have a storage in their input, in order."""
        if storage not in self._since:
            return []
        ends: list[int] = np.unique(self._since[storage]).tolist()
        return [end for end in ends if end < self._chain.never]

    def have(self, storage: int, end: int) -> NDArray[np.bool_]:
        """Tell which runs to an end have a storage in their input, row by row."""
        if storage not in self._since:
            return np.zeros(len(self._firsts), dtype=bool)
        found: NDArray[np.bool_] = self._since[storage] <= end
        return found

    def comes_in(self, storage: int, end: int) -> NDArray[np.int64]:
        """Return, for the runs to an end, the first place at which they keep a storage.

        Places are counted as ends of what the run has done by then; `LayerChain.never`: nowhere.
        """
        found = self._chain.saved_by(storage, self._firsts)
        kept = self.have(storage, end) & self._chain.are_kept(storage, self._firsts)
        return np.where(kept, self._firsts, found)

    def forward_strips(self, records: bool) -> Strips:
        """Return what the input adds to what there is while a layer's forward runs.

        That is all of it, but not what is counted anyway: what layers of the run have saved by
        then, if a graph is recorded, and what lives there without that.
        """
        saved_by = self.saved_by if records else np.full_like(self.saved_by, self._chain.never)
        entry, first, stop = self.meeting(self._chain.alive)
        whole = Strips(self.rows, self.since, 0 * self.rows, saved_by, self.n_bytes)
        stop = np.minimum(stop, saved_by[entry])
        less = Strips(self.rows[entry], self.since[entry], first, stop, -self.n_bytes[entry])
        return Strips(*map(np.concatenate, zip(whole, less, strict=True)))

    def backward_strips(self) -> Strips:
        """Return what the input adds to the saved storages that there are in a layer's backward."""
        kept = np.flatnonzero(self.is_kept)
        zeros = 0 * self.rows
        return Strips(self.rows, self.since, zeros, self.saved_by - 1, self.n_bytes).of(kept)

    def meeting(self, stretches: Sequence[Stretch]) -> tuple[Table, Table, Table]:
        """Find the entries whose storages runs also have in stretches of places.

        Returns:
            Indices of entries, and the first place and the stop of each stretch of their storage,
            as far as the entry's runs begin early enough for it.
        """
        table = np.array(sorted(stretches), dtype=np.int64).reshape(-1, 4)
        storages, first, stop, last = table.T
        low = np.searchsorted(storages, self.storages)
        counts = np.searchsorted(storages, self.storages, side="right") - low
        entry = np.repeat(np.arange(len(counts)), counts)
        at = np.arange(len(entry)) + np.repeat(low - (np.cumsum(counts) - counts), counts)
        early = self._firsts[self.rows[entry]] <= last[at]
        entry, at = entry[early], at[early]
        return entry, first[at], stop[at]


def _joined(parts: Sequence[Table]) -> Table:
    return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)
