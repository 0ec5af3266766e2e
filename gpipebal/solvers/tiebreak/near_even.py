"""Where the cuts of the most even split can be, given how uneven any split has to be.

One split is known; then only splits whose sum of squares can be as small are of interest. Layers
heavier than an even partition spoil evenness in any split, so the weight by which they exceed it is
left out: after that, every partition costs the square of its distance from even, and a partition
with a heavy layer pays in addition for the layers that it puts next to it. Costs are then small
numbers, none is negative, and all splits are cheaper by the same amount. The distance of a cut from
where evenness wants it has a least cost; places where that is more than the known split costs are
left out. What remains are windows whose width depends on how large single layers are, not on how
long the chain is.

Where the layers between heavy ones can be cut into only a few numbers of partitions, each of these
numbers has windows of its own: cuts are then close to where that many even partitions have them.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate, islice, pairwise
from math import isqrt
from typing import NamedTuple

from gpipebal.solvers.chain import Limit, Windows, narrowed
from gpipebal.solvers.tiebreak.heavy import (
    even_ends,
    even_shares,
    heavy_layers,
    possible_shares,
    stretches_between,
)

__all__ = ["Even", "near_even", "near_even_windows", "unevenness"]

#: With more ways to share partitions among stretches than this, all are treated as one.
_MOST_SHARES = 8


class Even(NamedTuple):
    """What is known of the most even split.

    Attributes:
        mean: Weight of an even partition that has no heavy layer.
        heavy: Layers that are heavier by more than other layers can be, and by how much.
        most: What a known split costs: its squared distances from `mean`, where a partition with
            a heavy layer is charged for what it would cost more than the heavy layer alone.
        ways: How many partitions there can be between heavy layers, and the sum of squares that
            these have at least; nothing if there are too many ways.
    """

    mean: int
    heavy: tuple[tuple[int, int], ...]
    most: int
    ways: tuple[tuple[tuple[int, ...], int], ...] = ()


def unevenness(loads: Sequence[int], known: Sequence[int]) -> Even:
    """Tell how even a split is.

    Example:
        >>> unevenness([0, 1, 2, 3, 5], [0, 3, 4])
        Even(mean=2, heavy=(), most=1, ways=())
    """
    mean = loads[-1] // (len(known) - 1)
    return Even(mean, (), sum([(loads[b] - loads[a] - mean) ** 2 for a, b in pairwise(known)]))


def near_even(loads: Sequence[int], limits: Sequence[Limit], windows: Windows) -> Even:
    """Find a split that is nearly even, and tell how even it is.

    Args:
        loads: Prefix sums of the layers' weights.
        limits: What every partition keeps.
        windows: Where each bound can be.

    Complexity:
        O(K log N) for N layers and K partitions.

    Example:
        >>> near_even([0, 1, 2, 12, 13], [], Windows([0, 1, 2, 4], [0, 2, 3, 4]))
        Even(mean=1, heavy=((2, 9),), most=1, ways=(((1, 1), 5),))
    """
    heavy = heavy_layers(loads, len(windows.first) - 1)
    even = _near_even(loads, limits, windows, heavy)
    # Two of them in one partition must cost more than the known split.
    if len(heavy) > 1 and 2 * min([excess for _, excess in even.heavy]) ** 2 <= even.most:
        return _near_even(loads, limits, windows, [])
    return even


def _near_even(
    loads: Sequence[int],
    limits: Sequence[Limit],
    windows: Windows,
    heavy: Sequence[int],
) -> Even:
    stretches = stretches_between(loads, heavy)
    lengths = [loads[end] - loads[begin] for begin, end in stretches]
    free, n_even = sum(lengths), len(windows.first) - 1 - len(heavy)
    mean = free // n_even
    weights = [loads[k + 1] - loads[k] for k in heavy]
    # From sums of squares, less those of heavy layers, to what partitions cost.
    less = mean * (2 * free - n_even * mean) + sum([weight**2 for weight in weights])

    def cost(known: Sequence[int]) -> int:
        return sum([(loads[end] - loads[start]) ** 2 for start, end in pairwise(known)]) - less

    def rounded(shares: Sequence[int]) -> list[int]:
        return _round(loads, limits, windows, even_ends(loads, stretches, shares))

    most = cost(rounded(even_shares(lengths, n_even)))
    ways: list[tuple[tuple[int, ...], int]] = []
    if heavy:
        squares, lightest = most + less - sum([weight**2 for weight in weights]), min(weights)
        # Two heavy layers in one partition would cost more than that.
        if squares * n_even < free * free + (n_even * lightest**2 - free * free // n_even):
            ways = list(
                islice(possible_shares(lengths, n_even, squares, lightest), _MOST_SHARES + 1)
            )
        if len(ways) > _MOST_SHARES:
            ways.clear()
        # Heavy layers set the limit: all other cuts are free to be where that is best.
        most = min([cost(rounded(shares)) for shares, _ in ways], default=most)
    more = [(k, weight - mean) for k, weight in zip(heavy, weights, strict=True)]
    return Even(mean, tuple(more), most, tuple(ways))


def near_even_windows(
    loads: Sequence[int],
    limits: Sequence[Limit],
    windows: Windows,
    even: Even,
) -> list[Windows]:
    """Narrow windows to where the split with the least sum of squares can have its cuts.

    Args:
        loads: Prefix sums of the layers' weights.
        limits: What every partition keeps.
        windows: Where each bound can be.
        even: What `near_even` found.

    Returns:
        One or several such sets of windows: the split is in one of them.

    Complexity:
        O(K log N) for N layers and K partitions.

    Example:
        >>> loads, everywhere = list(range(101)), Windows([0, 1, 2, 100], [0, 98, 99, 100])
        >>> near_even_windows(loads, [], everywhere, near_even(loads, [], everywhere))
        [Windows(first=[0, 32, 65, 100], last=[0, 35, 68, 100])]
    """
    n_partitions = len(windows.first) - 1
    # By the numbers of partitions between heavy layers, if few numbers are possible.
    of_ways = _windows_of_ways(loads, even, n_partitions)
    found = of_ways or [_windows_of_all(loads, even, n_partitions)]
    within = [_within(limits, one, windows) for one in found]
    return [one for one in within if one is not None]


def _windows_of_all(loads: Sequence[int], even: Even, n_partitions: int) -> Windows:
    """Return where cuts can be without costing too much."""
    n_layers = len(loads) - 1
    # Without their excess, heavy layers weigh as much as an even partition. With the weight `y`
    # before cut `k` more than its share, all partitions cost `y * y * K / (k * (K - k))` at least.
    passed = list(accumulate([excess for _, excess in even.heavy], initial=0))
    total = loads[-1] - passed[-1]
    begins = [0, *[layer + 1 for layer, _ in even.heavy]]
    ends = [*[layer for layer, _ in even.heavy], n_layers]
    reached = [loads[end] - excess for end, excess in zip(ends, passed, strict=True)][:-1]
    lows, highs = [0], [0]
    for k in range(1, n_partitions):  # k: cut
        room = isqrt(even.most * k * (n_partitions - k) // n_partitions) + 1
        share = k * total // n_partitions
        at = bisect_left(reached, share - room)
        lows.append(bisect_left(loads, share - room + passed[at], begins[at], ends[at]))
        at = bisect_left(reached, share + room + 2)
        # One after the last place; not before the first place of a stretch, as it is after that.
        beyond = bisect_right(loads, share + room + 1 + passed[at], begins[at], ends[at] + 1)
        highs.append(beyond - 1)
    return Windows([*lows, n_layers], [*highs, n_layers])


def _windows_of_ways(loads: Sequence[int], even: Even, n_partitions: int) -> list[Windows] | None:
    """Return where cuts can be, for each number of partitions between heavy layers.

    None if they are not known, or if heavy layers are too light to stay alone.
    """
    if not even.ways:
        return None
    heavy = [layer for layer, _ in even.heavy]
    stretches = stretches_between(loads, heavy)
    lengths = [loads[end] - loads[begin] for begin, end in stretches]
    free, n_even = sum(lengths), n_partitions - len(heavy)
    lightest = min([excess for _, excess in even.heavy]) + even.mean
    # Sums of squares, less those of heavy layers.
    most = even.most + even.mean * (2 * free - n_even * even.mean)
    found = []
    for shares, least in even.ways:
        slack = most - least
        if slack < 0:
            continue
        parts = list(zip(stretches, lengths, shares, strict=True))
        if any(
            number and length + number * (isqrt(slack) + 1) >= number * lightest
            for _, length, number in parts
        ):
            return None
        lows, highs = [0], [0]
        for (begin, end), length, number in parts:
            for k in range(0 if begin else 1, number + 1):
                # A heavy layer's partition may hold a little of the stretch.
                room = length
                if 0 < k < number:
                    room = isqrt(k * (number - k) * slack // number) + 1
                elif number:
                    room = slack * number // (2 * (number * lightest - length)) + 1
                place = loads[begin] + (k * length // number if number else 0)
                lows.append(bisect_left(loads, place - room, begin, end))
                highs.append(bisect_right(loads, place + 1 + room, begin, end + 1) - 1)
        found.append(Windows(lows, highs))
    return found


def _within(limits: Sequence[Limit], one: Windows, other: Windows) -> Windows | None:
    """Intersect windows, and narrow them to where valid splits are; None if there are none."""
    lows, highs = list(map(max, one.first, other.first)), list(map(min, one.last, other.last))
    for cut in range(1, len(lows)):
        lows[cut] = max(lows[cut], lows[cut - 1] + 1)
    for cut in range(len(highs) - 2, -1, -1):
        highs[cut] = min(highs[cut], highs[cut + 1] - 1)
    # More partitions than layers in some stretch leave no places.
    return narrowed(limits, Windows(lows, highs)) if highs[0] == 0 else None


def _round(
    loads: Sequence[int],
    limits: Sequence[Limit],
    windows: Windows,
    targets: Sequence[int],
) -> list[int]:
    """Cut as close to targets as windows and limits allow."""
    bounds = [0]
    for target, low, high in zip(targets, windows.first[1:], windows.last[1:], strict=True):
        start = bounds[-1]
        low = max(low, start + 1)
        for ends, starts, most in limits:
            high = bisect_right(ends, starts[start] + most, low, high + 1) - 1
        place = bisect_left(loads, target, low, high)
        if place > low and target - loads[place - 1] < loads[place] - target:
            place -= 1
        bounds.append(place)
    return bounds
