"""The most even split within one limit, without looking at places where no cut can stand.

With a single limit on the sum of each partition, and the limit the smallest possible one, cuts of
long chains stand in narrow windows. How far a partition extends is then worth knowing only there.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence

from gpipebal.solvers.envelope import cheapest_ends

__all__ = ["narrow_windows", "squares_in_windows"]


def narrow_windows(
    loads: Sequence[int], limit: int, n_partitions: int
) -> tuple[list[int], list[int]]:
    """Find where each cut stands in some split whose partitions weigh at most `limit`.

    Args:
        loads: Prefix sums of the layers' weights.
        limit: Largest weight of a partition; some split must keep it.
        n_partitions: Number of partitions.

    Returns:
        First and last place of each bound, as `gpipebal.solvers.chain.cut_windows`.

    Complexity:
        O(K log N) for N layers and K partitions.

    Example:
        >>> narrow_windows([0, 1, 2, 3, 4], 2, 3)
        ([0, 1, 2, 4], [0, 2, 3, 4])
    """
    n_layers = len(loads) - 1
    last = [0]
    for room in range(n_layers - n_partitions + 1, n_layers + 1):
        last.append(min(bisect_right(loads, loads[last[-1]] + limit) - 1, room))
    first = [n_layers]
    for k in range(n_partitions - 1, 0, -1):  # k: cut
        first.append(max(bisect_left(loads, loads[first[-1]] - limit), k))
    first.append(0)
    return first[::-1], last


def squares_in_windows(
    loads: Sequence[int], limit: int, first: Sequence[int], last: Sequence[int]
) -> tuple[int, ...]:
    """Find the leftmost split with the least sum of squared weights within windows.

    Args:
        loads: Prefix sums of the layers' weights.
        limit: Largest weight of a partition.
        first: First place of each bound; see `narrow_windows`.
        last: Last place of each bound.

    Complexity:
        O(w log N) for N layers and w places in all windows.

    Example:
        >>> squares_in_windows([0, 1, 2, 3, 4], 3, [0, 1, 4], [0, 3, 4])
        (0, 2, 4)
    """
    n_places, n_partitions = len(loads), len(first) - 1
    # Only places within windows are ever looked up.
    entry = [0] * n_places
    seen = 0
    for one, two in zip(first[1:], last[1:], strict=True):
        for end in range(max(one, seen), two + 1):
            entry[end] = bisect_left(loads, loads[end] - limit)
        seen = max(seen, two + 1)
    # From the right, so that the walk from the left meets the leftmost cut first; `after` and
    # `here` hold the costs behind the next cut and behind this one.
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
