"""The highest of what the layers of runs need, while the ends of the runs are gone through."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Table = NDArray[Any]

__all__ = ["Change", "highest_before"]


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


def highest_before(needs: Table, columns: Table, changes: Iterable[Change], none: int) -> Table:
    """Return the highest of each row before a column, which is another one for each end.

    What changes from one end to the next is added, and taken off again after its last end. The
    maximum along the rows is then worked out again from there on. So an end costs as much as it
    changes, however much else holds at the same time; and ends that change nothing are done at
    once.

    Args:
        needs: What each layer needs: one row for each first layer; it is changed in place.
        columns: The column of each end, in ascending order; the first end is 1.
        changes: What is added for some ends.
        none: The highest where there is no column before.

    Example:
        >>> more = Change(range(2, 3), 0, lambda: np.array([[9]]))
        >>> highest_before(np.array([[1, 3, 2]]), np.array([0, 1, 3]), [more], -1)
        array([[-1, 10,  3]])
    """
    begin: dict[int, list[Change]] = {}
    stop: dict[int, list[Change]] = {}
    for change in changes:
        if change.ends:
            begin.setdefault(change.ends.start, []).append(change)
            stop.setdefault(change.ends.stop, []).append(change)
    found: Table = np.empty((len(needs), len(columns)), dtype=needs.dtype)
    # The maximum along each row up to every column, right in the columns before `right`.
    running, right = np.empty_like(needs), 0
    ends = range(1, len(columns) + 1)
    at = sorted({1, *begin, *stop}.intersection(ends))
    for end, following in pairwise([*at, ends.stop]):
        for how, made in ((np.subtract, stop), (np.add, begin)):
            for change in made.get(end, ()):
                first, amounts = change.first, change.amounts()
                changed = needs[change.rows, first : first + amounts.shape[1]]
                how(changed, amounts[:, : changed.shape[1]], out=changed)
                right = min(right, first)
        own = columns[end - 1 : following - 1]
        last = int(own[-1])
        if right < last:
            new = running[:, right:last]
            np.maximum.accumulate(needs[:, right:last], axis=1, out=new)
            if right:
                np.maximum(new, running[:, right - 1 : right], out=new)
            right = last
        found[:, end - 1 : following - 1] = running[:, own - 1]
    found[:, columns == 0] = none
    return found
