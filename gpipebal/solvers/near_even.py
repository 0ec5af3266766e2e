"""Where the cuts of the most even split can stand, by how uneven any split has to be.

Some split is known: then only splits are of interest whose sum of squares can be as small as its.
A stretch of layers has its least squares when its partitions are even, and single layers can spoil
that only if they are heavier than an even partition. These stay alone, more or less, and between
them there are stretches. Into how many partitions each stretch is cut, and how far a cut is from
where evenness wants it, costs so much at least; what costs more than the known split is left out.
What remains are windows whose width depends on how large single layers are, not on how long the
chain is.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate, islice, pairwise
from math import isqrt
from operator import sub

from gpipebal.solvers.chain import Limit, windows

__all__ = ["near_even_windows"]

#: With more heavy layers, or more ways to share partitions among stretches, too little is gained.
_MOST_HEAVY, _MOST_SHARES = 4, 8

_Windows = tuple[list[int], list[int]]


def near_even_windows(
    loads: Sequence[int], limits: Sequence[Limit], first: list[int], last: list[int]
) -> list[_Windows]:
    """Narrow windows to where the split with the least sum of squares can have its cuts.

    Args:
        loads: Prefix sums of the layers' weights.
        limits: What every partition keeps.
        first: First place of each bound; see `gpipebal.solvers.chain.windows`.
        last: Last place of each bound.

    Returns:
        Several such windows: in one of them is the split. The same ones if nothing is gained.

    Complexity:
        O(N + K log N) for N layers and K partitions.

    Example:
        >>> loads = list(range(101))
        >>> near_even_windows(loads, [], [0, 1, 2, 100], [0, 98, 99, 100])
        [([0, 32, 65, 100], [0, 35, 68, 100])]
    """
    total, n_partitions = loads[-1], len(first) - 1
    # Heavy is a little more than even, so that it stays more than what other layers share.
    weights = list(map(sub, loads[1:], loads))
    heavy = [k for k, weight in enumerate(weights) if 4 * n_partitions * weight > 5 * total]
    if len(heavy) > _MOST_HEAVY or len(heavy) >= n_partitions:
        return [(first, last)]
    stretches = list(zip([0, *[k + 1 for k in heavy]], [*heavy, len(weights)], strict=True))
    lengths = [loads[end] - loads[begin] for begin, end in stretches]
    free, n_even = sum(lengths), n_partitions - len(heavy)
    lightest = min([weights[k] for k in heavy], default=total)

    def rounded(shares: Sequence[int]) -> int:
        """Return the sum of squares of a split, less that of heavy layers."""
        known = _round(loads, limits, first, last, _even_ends(loads, stretches, shares))
        squares = sum([(loads[end] - loads[start]) ** 2 for start, end in pairwise(known)])
        return squares - sum([weights[k] ** 2 for k in heavy])

    most = rounded(_even_shares(lengths, n_even))
    # Two heavy layers in one partition would cost more than that.
    if most * n_even >= free * free + (n_even * lightest**2 - free * free // n_even):
        return [(first, last)]
    ways = list(islice(_shares(lengths, n_even, most, lightest), _MOST_SHARES + 1))
    if len(ways) > _MOST_SHARES:
        return [(first, last)]
    most = min([rounded(shares) for shares, _ in ways])
    found = []
    for shares, least in ways:
        slack = most - least
        if slack < 0:
            continue
        parts = list(zip(stretches, lengths, shares, strict=True))
        if any(
            number and length + number * (isqrt(slack) + 1) >= number * lightest
            for _, length, number in parts
        ):
            return [(first, last)]
        lows, highs = [0], [0]
        for (begin, end), length, number in parts:
            for k in range(0 if begin else 1, number + 1):
                # Beside a heavy layer there may be a little of the stretch.
                room = length
                if 0 < k < number:
                    room = isqrt(k * (number - k) * slack // number) + 1
                elif number:
                    room = slack * number // (2 * (number * lightest - length)) + 1
                place = loads[begin] + (k * length // number if number else 0)
                lows.append(bisect_left(loads, place - room, begin, end))
                highs.append(bisect_right(loads, place + 1 + room, begin, end + 1) - 1)
        found += _within(limits, lows, highs, first, last)
    return found


def _within(
    limits: Sequence[Limit],
    lows: Sequence[int],
    highs: Sequence[int],
    first: Sequence[int],
    last: Sequence[int],
) -> list[_Windows]:
    """Intersect windows, and narrow them to where valid splits are; nothing if there are none."""
    lows, highs = list(map(max, lows, first)), list(map(min, highs, last))
    for cut in range(1, len(lows)):
        lows[cut] = max(lows[cut], lows[cut - 1] + 1)
    for cut in range(len(highs) - 2, -1, -1):
        highs[cut] = min(highs[cut], highs[cut + 1] - 1)
    # More partitions than layers in some stretch leave no places.
    narrowed = windows(limits, lows, highs) if highs[0] == 0 else None
    return [] if narrowed is None else [narrowed]


def _even_shares(lengths: Sequence[int], n_even: int) -> list[int]:
    """Share partitions among stretches by their lengths, rounded so that all are used.

    Example:
        >>> _even_shares([5, 5, 20], 8)
        [1, 2, 5]
    """
    whole = max(sum(lengths), 1)
    passed = accumulate(lengths, initial=0)
    used = [(2 * n_even * length + whole) // (2 * whole) for length in passed]
    used[-1] = n_even
    return list(map(sub, used[1:], used))


def _even_ends(
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


def _round(
    loads: Sequence[int],
    limits: Sequence[Limit],
    first: Sequence[int],
    last: Sequence[int],
    targets: Sequence[int],
) -> list[int]:
    """Cut as close to targets as windows and limits allow."""
    bounds = [0]
    for target, low, high in zip(targets, first[1:], last[1:], strict=True):
        start = bounds[-1]
        low = max(low, start + 1)
        for ends, starts, most in limits:
            high = bisect_right(ends, starts[start] + most, low, high + 1) - 1
        place = bisect_left(loads, target, low, high)
        if place > low and target - loads[place - 1] < loads[place] - target:
            place -= 1
        bounds.append(place)
    return bounds


def _shares(
    lengths: Sequence[int], n_even: int, most: int, lightest: int
) -> Iterator[tuple[tuple[int, ...], int]]:
    """List the ways to share partitions among stretches that may keep a sum of squares.

    Yields:
        Numbers of partitions, and the sum of squares that they have at least.

    Example:
        >>> list(_shares([20, 10], 3, 320, 40))
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
            for shares, more in _shares(lengths[1:], left, most - least, lightest):
                yield (number, *shares), least + more


def _least_squares(length: int, number: int, lightest: int) -> int:
    """Bound the sum of squares of a stretch in so many partitions, between heavy layers.

    What would be more than a heavy layer in each partition is better put beside heavy layers.
    """
    if length <= number * lightest and number:
        return length * length // number
    return 2 * lightest * length - number * lightest**2
