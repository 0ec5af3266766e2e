"""Tied parameters, for all runs of layers at once: `gpipebal.memory.ties` in tables.

Rows are first layers, columns ends or layers, as in `gpipebal.planner.runs.storage_tables`.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from gpipebal.planner.runs.highest import Change
from gpipebal.profile import Profile, TieProfile

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Table = NDArray[Any]

__all__ = ["TieTables"]


class TieTables:
    """Tables of tied parameters.

    Args:
        profile: Costs of the layers.
        firsts: First layers of the runs.
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

    def changes(self, gradients_exist: bool) -> Iterator[Change]:
        """Yield what backwards need more, or less, in runs to the ends after several uses.

        Args:
            gradients_exist: Whether the parameters have gradients when the backward begins.
        """
        for tie in self._ties:
            uses = enumerate(pairwise([*tie.layers, self._n]), start=1)
            for n_uses, (last, following) in uses:
                if n_uses > 1:
                    ends = range(last + 1, following + 1)
                    amounts = self._waiting if gradients_exist else self._made_later
                    first = tie.layers[0] if gradients_exist else 0
                    yield Change(ends, first, partial(amounts, tie, n_uses))

    def _made_later(self, tie: TieProfile, n_uses: int) -> Table:
        """Return the gradients that later ones of so many uses make anyway, as negative amounts."""
        layers = np.arange(tie.layers[n_uses - 1])
        behind = n_uses - np.searchsorted(tie.layers, layers + 1)
        again: Table = np.maximum(behind - 1, 0).astype(self._kind)
        return -again[None, :] * tie.gradient_bytes

    def _waiting(self, tie: TieProfile, n_uses: int) -> Table:
        """Return the gradients of so many uses that wait to be added up, and their sum."""
        first, last = tie.layers[0], tie.layers[n_uses - 1]
        rows, columns = self._first_uses(tie)
        several = self._before(tie)[rows] + 1 < n_uses
        rows, columns = rows[several], columns[several]
        more: Table = np.zeros((len(self._firsts), last - first), dtype=self._kind)
        more[rows] += (np.arange(first, last) >= columns[:, None]).astype(self._kind)
        more[rows, columns - first] += 1
        return more * tie.gradient_bytes

    def _before(self, tie: TieProfile) -> Table:
        """Return how many layers with the parameters come before each first one."""
        return np.searchsorted(tie.layers, self._firsts)

    def _first_uses(self, tie: TieProfile) -> tuple[Table, Table]:
        """Return the rows from whose first layer on the parameters are used, and where."""
        before = self._before(tie)
        rows = np.nonzero(before < len(tie.layers))[0]
        return rows, np.array(tie.layers)[before[rows]]
