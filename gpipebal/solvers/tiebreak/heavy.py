"""Layers too heavy for an even partition, and how many partitions there are between them."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate
from operator import sub

__all__ = ["even_ends", "even_shares", "heavy_layers", "possible_shares", "stretches_between"]

#: With more heavy layers than this, heavy layers are not treated apart from others.
_MOST_HEAVY = 4


def heavy_layers(loads: Sequence[int], n_partitions: int) -> list[int]:
    """List the layers that are heavier than an even partition; nothing if they are many.

    Example:
        >>> heavy_layers([0, 1, 2, 12, 13], 3)
        [2]
    """
    # Heavy is a little more than even, so that it stays more than the even share of other layers.
    least = 5 * loads[-1] // (4 * n_partitions)
    n_layers = len(loads) - 1
    # No layer within as much weight is heavier than that.
    heavy, start = list[int](), 0
    while start < n_layers and len(heavy) <= _MOST_HEAVY:
        start = bisect_right(loads, loads[start] + least, start) - 1
        if start < n_layers and loads[start + 1] - loads[start] > least:
            heavy.append(start)
            start += 1
    return heavy if len(heavy) <= min(_MOST_HEAVY, n_partitions - 1) else []


def stretches_between(loads: Sequence[int], heavy: Sequence[int]) -> list[tuple[int, int]]:
    """Return the first layer of each stretch between heavy layers, and the one after its last."""
    return list(zip([0, *[k + 1 for k in heavy]], [*heavy, len(loads) - 1], strict=True))


def even_shares(lengths: Sequence[int], n_even: int) -> list[int]:
    """Share partitions among stretches by their lengths, rounded so that all are used.

    Example:
        >>> even_shares([5, 5, 20], 8)
        [1, 2, 5]
    """
    whole = max(sum(lengths), 1)
    passed = accumulate(lengths, initial=0)
    used = [(2 * n_even * length + whole) // (2 * whole) for length in passed]
    used[-1] = n_even
    return list(map(sub, used[1:], used))


def even_ends(
    loads: Sequence[int], stretches: Sequence[tuple[int, int]], shares: Sequence[int]
) -> list[int]:
    """Return the weight before the end of each partition, if layers could be cut anywhere.

    Stretches are cut evenly, and every layer between two stretches is a partition.
    """
    ends: list[int] = []
    for (begin, end), number in zip(stretches, shares, strict=True):
        start, length = loads[begin], loads[end] - loads[begin]
        ends += [start] if begin else []
        ends += [start + length * k // number for k in range(1, number + 1)]
    return [*ends[:-1], loads[-1]]


def possible_shares(
    lengths: Sequence[int], n_even: int, most: int, lightest: int
) -> Iterator[tuple[tuple[int, ...], int]]:
    """List the ways to share partitions among stretches that may keep a sum of squares.

    Yields:
        Numbers of partitions, and the sum of squares that they have at least.

    Example:
        >>> list(possible_shares([20, 10], 3, 320, 40))
        [((2, 1), 300)]
    """
    length, rest = lengths[0], sum(lengths[1:])
    if len(lengths) == 1:
        least = _least_squares(length, n_even, lightest)
        if least <= most:
            yield (n_even,), least
        return
    even = min(length * n_even // max(length + rest, 1), n_even)
    # Away from the even share it only gets worse.
    for numbers in (range(even, -1, -1), range(even + 1, n_even + 1)):
        for number in numbers:
            least = _least_squares(length, number, lightest)
            left = n_even - number
            if number != even and least + _least_squares(rest, left, lightest) > most:
                break
            for shares, more in possible_shares(lengths[1:], left, most - least, lightest):
                yield (number, *shares), least + more


def _least_squares(length: int, number: int, lightest: int) -> int:
    """Bound the sum of squares of a stretch in `number` partitions, between heavy layers.

    Weight beyond that of a heavy layer in each partition is better put next to heavy layers.
    """
    if length <= number * lightest and number:
        return length * length // number
    return 2 * lightest * length - number * lightest**2
