"""The highest of what the layers of runs need, while the ends of the runs are gone through."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Table = NDArray[Any]

    #: The first layer from which on something is subtracted, and a table of as many layers as it is
    #: subtracted from; it may be one row that holds for all.
    Less = tuple[int, Table]

__all__ = ["Change", "Highest"]


class Change(NamedTuple):
    """What layers need in addition, in the runs to some ends.

    Attributes:
        ends: These ends.
        first: The first layer that needs it.
        amounts: Makes a table, whose columns are layers from the first on; it may be one row that
            holds for all runs.
        rows: Of which runs these are.
    """

    ends: range
    first: int
    amounts: Callable[[], Table]
    rows: slice = slice(None)


class Highest:
    """The highest of each row before a column, in a table that changes from end to end.

    What changes from one end to the next is added, and taken off again after its last end. So it
    costs as much as it changes, however much else holds at the same time.

    Args:
        needs: What each layer needs: one row for each first layer; it is changed in place.
    """

    def __init__(self, needs: Table) -> None:
        self._needs = needs
        #: The running maximum along each row; right in the columns before `_right`.
        self.running = np.maximum.accumulate(needs, axis=1)
        self._right = needs.shape[1]
        #: The highest before the column that was asked for last; None: of no column.
        self._known: tuple[int, Table] | None = None

    def through(self, ends: range, changes: Iterable[Change]) -> Iterator[int]:
        """Go through ends; at each, those changes hold whose `ends` have it, none begun before."""
        begin: dict[int, list[Change]] = {}
        stop: dict[int, list[Change]] = {}
        for change in changes:
            if change.ends:
                begin.setdefault(change.ends.start, []).append(change)
                stop.setdefault(change.ends.stop, []).append(change)
        for end in ends:
            for change in stop.get(end, ()):
                self._make(change, np.subtract)
            for change in begin.get(end, ()):
                self._make(change, np.add)
            yield end

    def _make(self, change: Change, how: np.ufunc) -> None:
        first, amounts = change.first, change.amounts()
        if not amounts.size:
            return
        changed = self._needs[change.rows, first : first + amounts.shape[1]]
        how(changed, amounts[:, : changed.shape[1]], out=changed)
        self._right = min(self._right, first)
        if self._known is not None and first < self._known[0]:
            self._known = None

    def has_changed(self, column: int) -> bool:
        """Tell whether the highest before a column may be another than at the beginning."""
        return column > self._right

    def before(self, column: int) -> Table:
        """Return the highest of each row in the columns before one that is not the first."""
        if column <= self._right:
            return self.running[:, column - 1]
        start, found = self._right, self.running[:, self._right - 1] if self._right else None
        if self._known is not None and self._known[0] <= column:
            start, found = self._known
        if start < column:
            new = self._needs[:, start:column].max(axis=1)
            found = new if found is None else np.maximum(found, new)
        assert found is not None
        self._known = column, found
        return found

    def before_less(self, column: int, amounts: Sequence[Less]) -> Table:
        """Return the highest of each row in the columns before one, less further amounts."""
        low = min(first for first, _ in amounts)
        found: Table = _less(self._needs[:, low:column], low, amounts).max(axis=1)
        return np.maximum(found, self.before(low)) if low else found


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
