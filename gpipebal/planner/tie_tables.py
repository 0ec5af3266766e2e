"""Tied parameters, for all runs of layers at once: `gpipebal.memory.ties` in tables.

Rows are variants of runs, columns ends or layers, as in `gpipebal.planner.storage_tables`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from gpipebal.profile import Profile, TieProfile

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Table = NDArray[Any]

__all__ = ["TieTables"]


class TieTables:
    """Tables of tied parameters.

    Args:
        profile: Costs of the layers.
        firsts: First layer of each variant.
        kind: Type of the numbers.

    Attributes:
        counted_again: For the run to each end, bytes of gradients that are one, though several of
            its layers count them.
        others: Bytes of gradients that are another partition's at the end of the step.
        summed_apart: Bytes of sums beside its own gradients, if these exist before the step.
    """

    def __init__(self, profile: Profile, firsts: Table, kind: type) -> None:
        self._ties, self._firsts, self._kind = profile.ties, firsts, kind
        self._n = profile.n_layers
        ends = np.arange(1, self._n + 1)
        self.counted_again: Table = np.zeros((len(firsts), self._n), dtype=kind)
        self.others = self.counted_again.copy()
        self.summed_apart = self.counted_again.copy()
        for tie in self._ties:
            uses = np.searchsorted(tie.layers, ends)[None, :] - self._before(tie)[:, None]
            self.counted_again += np.maximum(uses - 1, 0).astype(kind) * tie.gradient_bytes
            has_none_before = (firsts <= tie.layers[0])[:, None]
            self.others += ((uses > 0) & ~has_none_before).astype(kind) * tie.gradient_bytes
            some_elsewhere = (uses > 0) & (uses < len(tie.layers)) & has_none_before
            self.summed_apart += some_elsewhere.astype(kind) * tie.gradient_bytes

    def copies(self, n_columns: int) -> Table:
        """Return what each layer's first backward needs beside gradients: a copy, or a sum."""
        table: Table = np.zeros((len(self._firsts), n_columns), dtype=self._kind)
        for tie in self._ties:
            rows, columns = self._first_uses(tie)
            table[rows, columns] += tie.gradient_bytes
        return table

    def uses_before(self, end: int) -> tuple[int, ...]:
        """Count the layers before an end that use each of them; `less` depends on no more."""
        return tuple(int(np.searchsorted(tie.layers, end)) for tie in self._ties)

    def less(self, end: int, n_columns: int, gradients_exist: bool) -> Iterator[tuple[int, Table]]:
        """Yield what to take off the backward of layers of the runs to an end.

        Args:
            end: The end.
            n_columns: How many layers from the chain's first on the tables have.
            gradients_exist: Whether the parameters have gradients when the backward begins.

        Yields:
            The first layer from which on something is taken off, and a table, or a row of it,
            that begins there.
        """
        layers = np.arange(n_columns)
        for tie, n_uses in zip(self._ties, self.uses_before(end), strict=True):
            if n_uses < 2:
                continue
            if not gradients_exist:
                behind = n_uses - np.searchsorted(tie.layers, layers + 1)
                again: Table = np.maximum(behind - 1, 0).astype(self._kind)
                yield 0, again[None, :] * tie.gradient_bytes
                continue
            # What waits to be added up, and the sum.
            rows, columns = self._first_uses(tie)
            several = self._before(tie)[rows] + 1 < n_uses
            rows, columns = rows[several], columns[several]
            more: Table = np.zeros((len(self._firsts), n_columns), dtype=self._kind)
            waits = (layers >= columns[:, None]) & (layers < tie.layers[n_uses - 1])
            more[rows] += waits.astype(self._kind)
            at = columns < n_columns
            more[rows[at], columns[at]] += 1
            first = tie.layers[0]
            yield first, -more[:, first:] * tie.gradient_bytes

    def _before(self, tie: TieProfile) -> Table:
        """Return how many layers with the parameters come before each variant's first."""
        return np.searchsorted(tie.layers, self._firsts)

    def _first_uses(self, tie: TieProfile) -> tuple[Table, Table]:
        """Return the variants from whose first layer on the parameters are used, and where."""
        before = self._before(tie)
        rows = np.nonzero(before < len(tie.layers))[0]
        return rows, np.array(tie.layers)[before[rows]]
