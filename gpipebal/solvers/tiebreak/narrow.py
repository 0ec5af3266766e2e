"""The most even split, without looking at places where no cut can be.

Close to the smallest possible limit, cuts of long chains lie in narrow windows. How far a partition
extends is then worth knowing only there.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from gpipebal.solvers.chain import Limit, Windows
from gpipebal.solvers.tiebreak.envelope import cheapest_ends

__all__ = ["squares_in_windows"]


def squares_in_windows(
    loads: Sequence[int], limits: Sequence[Limit], windows: Windows
) -> tuple[int, ...]:
    """Find the leftmost split with the least sum of squared weights within windows.

    Args:
        loads: Prefix sums of the layers' weights.
        limits: What every partition keeps.
        windows: Where each bound can be.

    Complexity:
        O(w log N) for N layers and w places in all windows.

    Example:
        >>> sums = [0, 1, 2, 3, 4]
        >>> squares_in_windows(sums, [Limit(sums, sums, 3)], Windows([0, 1, 4], [0, 3, 4]))
        (0, 2, 4)
    """
    first, last = windows
    n_places, n_partitions = len(loads), len(first) - 1
    # Only places within windows are ever looked up.
    places: list[int] = []
    for one, two in zip(first[1:], last[1:], strict=True):
        places += range(max(one, places[-1] + 1 if places else 0), two + 1)
    entry = [0] * n_places
    for ends, starts, most in limits:
        start = 0
        for end in places:
            start = bisect_left(starts, ends[end] - most, max(start, entry[end]), end)
            entry[end] = start
    # From the right, so that the walk from the left meets the leftmost cut first; `after` and
    # `here` hold the costs after the next cut and after this one.
    after, here = [0] * n_places, [0] * n_places
    table: list[Sequence[int]] = []
    for j in range(n_partitions - 1, -1, -1):  # j: partition
        starts, ends = (first[j], last[j]), (first[j + 1], last[j + 1])
        if starts[0] == starts[1] and ends[0] == ends[1]:
            weight = loads[ends[0]] - loads[starts[0]]
            here[starts[0]] = weight * weight + after[ends[0]]
            table.append((ends[0],))
        else:
            table.append(cheapest_ends(loads, entry, after, here, starts, ends))
        after, here = here, after
    bounds = [0]
    for j in range(n_partitions):
        bounds.append(table[n_partitions - 1 - j][bounds[j] - first[j]])
    return tuple(bounds)
