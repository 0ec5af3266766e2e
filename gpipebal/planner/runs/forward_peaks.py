"""The most that there is at one time in the forwards of runs of layers."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from gpipebal.memory.layer_peaks import first_forward_peak, forward_peak
from gpipebal.planner.runs.highest import Change, highest_before
from gpipebal.planner.runs.storage_tables import StorageTables

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Table = NDArray[Any]

__all__ = ["forward_peaks"]


def forward_peaks(tables: StorageTables, none: int, records: bool) -> Table:
    """Return the most that there is at one time in the forward of each run, without gradients.

    Args:
        tables: What the runs hold.
        none: The entry of layers that are not in a run: below every sum of bytes.
        records: Whether a graph is recorded.
    """
    chain, firsts, ends = tables.chain, tables.firsts, tables.ends
    needs, changes = tables.forward(records)
    peaks = tables.column([forward_peak(layer, records) for layer in chain.layers])
    needs = needs + peaks
    at_first = [
        first_forward_peak(chain.profile, k, chain.layers[k], records) for k in firsts.tolist()
    ]
    needs[np.arange(len(firsts)), firsts] += tables.column(at_first) - peaks[firsts]
    every = [*changes, *_copies_of_inputs(tables)]
    return highest_before(tables.from_first(needs, none), ends, every, none)


def _copies_of_inputs(tables: StorageTables) -> Iterator[Change]:
    """Yield copies of inputs that a later layer of the run writes to.

    They exist from the beginning of the run's forward until then.
    """
    profile, inputs, firsts = tables.chain.profile, tables.inputs, tables.firsts
    writers: dict[int, list[int]] = {}
    for k, layer in enumerate(profile.layers):
        for storage in layer.written:
            writers.setdefault(storage, []).append(k)
    for storage, places in writers.items():
        low, high = np.searchsorted(inputs.storages, (storage, storage + 1)).tolist()
        n_bytes = tables.column([profile.storages[storage]])[None, :]
        rows, ends_since = inputs.rows[low:high].tolist(), inputs.since[low:high].tolist()
        if storage in profile.inputs and firsts[0] == 0:  # of the mini-batch
            rows, ends_since = [0, *rows], [0, *ends_since]
        for row, since in zip(rows, ends_since, strict=True):
            first = int(firsts[row])
            writer = next((k for k in places if k >= first), first)
            if writer > first:  # what the first layer writes to belongs to its own peak
                ends = range(max(writer + 1, since), profile.n_layers + 1)
                copies = partial(n_bytes.repeat, writer + 1 - first, axis=1)
                yield Change(ends, first, copies, slice(row, row + 1))
