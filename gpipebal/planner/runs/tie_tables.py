"""Tied parameters, for all runs of layers at once: `gpipebal.memory.ties` in tables.

Rows are variants of runs, columns ends or layers, as in `gpipebal.planner.runs.storage_tables`.
"""

from __future__ import annotations

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
        counted_again: For the run to each end, bytes of gradients that several of its layers count
            although there is only one.
        others: Bytes of gradients that belong to another partition at the end of the step.
        summed_apart: Bytes of sums in addition to the run's own gradients, if these exist before
            the step.
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
        """Return what each layer's first backward needs besides gradients: a copy, or a sum."""
        table: Table = np.zeros((len(self._firsts), n_columns), dtype=self._kind)
        for tie in self._ties:
            rows, columns = self._first_uses(tie)
            table[rows, columns] += tie.gradient_bytes
        return table

    def uses_before(self, end: int) -> tuple[int, ...]:
        """Count the layers before an end that use each tie; `less` depends on nothing else."""
        return tuple(int(np.searchsorted(tie.layers, end)) for tie in self._ties)

    def less(self, tie: int, n_uses: int, gradients_exist: bool) -> tuple[int, Table]:
        """Return what to subtract from the backward of layers, in runs that end after some uses.

        Args:
            tie: Index of the tie.
            n_uses: How many of the layers with these parameters come before the end: two or more.
            gradients_exist: Whether the parameters have gradients when the backward begins.

        Returns:
            The first layer from which on something is subtracted, and a table, or one row for all,
            that begins there and ends where nothing more is subtracted.
        """
        tied = self._ties[tie]
        last = tied.layers[n_uses - 1]
        layers = np.arange(last)
        if not gradients_exist:
            behind = n_uses - np.searchsorted(tied.layers, layers + 1)
            again: Table = np.maximum(behind - 1, 0).astype(self._kind)
            return 0, again[None, :] * tied.gradient_bytes
        # The gradients that wait to be added up, and their sum.
        rows, columns = self._first_uses(tied)
        several = self._before(tied)[rows] + 1 < n_uses
        rows, columns = rows[several], columns[several]
        more: Table = np.zeros((len(self._firsts), last), dtype=self._kind)
        more[rows] += (layers >= columns[:, None]).astype(self._kind)
        more[rows, columns] += 1
        first = tied.layers[0]
        return first, -more[:, first:] * tied.gradient_bytes

    def _before(self, tie: TieProfile) -> Table:
        """Return how many layers with the parameters come before each variant's first."""
        return np.searchsorted(tie.layers, self._firsts)

    def _first_uses(self, tie: TieProfile) -> tuple[Table, Table]:
        """Return the variants from whose first layer on the parameters are used, and where."""
        before = self._before(tie)
        rows = np.nonzero(before < len(tie.layers))[0]
        return rows, np.array(tie.layers)[before[rows]]
