"""The most even split where cuts can be at many places: all starts of a partition at once.

A table over cuts and places, from the right. What a partition costs depends on its first layer and
on how many it has, not on which partition it is: so costs are written down once, a row for each
number of layers, for as long a piece of the chain as stays in the processor's cache. Then a cut
takes two operations on rows: add what follows each end, take the least. Everything is a machine
integer: see `gpipebal.solvers.tiebreak.near_even` for why it fits.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from math import isqrt
from operator import add, gt
from typing import NamedTuple

import numpy as np

from gpipebal.solvers.chain import Limit, Windows
from gpipebal.solvers.tiebreak.near_even import Even

__all__ = ["fits", "squares_by_rows"]

#: Number of costs that are written down at a time: a quarter of a megabyte.
_AT_HAND = 1 << 15

#: Up to `_FEW` ends it is not asked which are allowed; up to `_MANY` are compared one by one.
_FEW, _MANY = 12, 40

#: Larger than every number.
_TOO_LARGE = 2**62

Array = np.ndarray


def fits(loads: Sequence[int], limits: Sequence[Limit], even: Even) -> bool:
    """Tell whether all numbers fit into machine integers."""
    largest = [max(ends[-1], starts[-1]) + abs(most) for ends, starts, most in limits]
    return max(4 * even.most, loads[-1], *largest) < _TOO_LARGE


class _Places(NamedTuple):
    """All places where bounds can be, in order; what is between them is left out.

    Attributes:
        at: Weight before each place, less the excess of heavy layers.
        excess: Excess of heavy layers before each place.
        nearest: For each place, how many places further the nearest end of its partition is.
        farthest: The same for the farthest end.
        heads: For each bound, the index of its first place among all places.
        widths: For each bound, how many places it has.
    """

    at: Array
    excess: Array
    nearest: Array
    farthest: Array
    heads: list[int]
    widths: list[int]


def squares_by_rows(
    loads: Sequence[int],
    limits: Sequence[Limit],
    windows: Windows,
    even: Even,
    most_runs: int,
) -> tuple[int, ...] | None:
    """Find the leftmost split with the least sum of squared weights within windows.

    Args:
        loads: Prefix sums of the layers' weights.
        limits: What every partition keeps.
        windows: Where each bound can be.
        even: What `gpipebal.solvers.tiebreak.near_even.near_even` found; it `fits`.
        most_runs: How many runs may be looked at.

    Returns:
        Bounds; an empty tuple if every split in these windows is worse than the known one. None if
        more runs than `most_runs` would have to be looked at.

    Complexity:
        O(w l) for w places in all windows and l ends of each partition.

    Example:
        >>> sums = [0, 1, 2, 3, 4]
        >>> windows = Windows([0, 1, 4], [0, 3, 4])
        >>> squares_by_rows(sums, [Limit(sums, sums, 3)], windows, Even(2, (), 2), 99)
        (0, 2, 4)
    """
    places = _places(loads, limits, windows, even)
    spans = _spans(places)
    if any(map(gt, *spans)):
        return ()
    pieces = zip(places.widths, *spans, strict=False)
    if sum([width * (far + 1 - near) for width, near, far in pieces]) > most_runs:
        return None
    kept = _table(places, spans, even)
    if kept[0][0] > even.most:
        return ()
    at, excess, mean = places.at, places.excess, even.mean
    bounds, place, total = [0], 0, int(kept[0][0])
    for k, (head, row) in enumerate(zip(places.heads[1:], kept[1:], strict=True), 1):  # k: cut
        left, low, high = windows.first[k] - head, max(place + 1, head), head + len(row)
        if even.heavy or high - low > _FEW:
            low = max(place + int(places.nearest[place]), low)
            high = min(place + int(places.farthest[place]) + 1, high)
        after = row[low - head : high - head]
        if even.heavy or high - low > _MANY:
            far = at[low:high] - (int(at[place]) + mean)
            costs = far * far + after
            if even.heavy:
                costs += 2 * (excess[low:high] - excess[place]) * far
            place = low + int(costs.argmin())
            total = int(row[place - head])
        else:
            # An end that is not allowed comes after those that are, or costs more than the total.
            here, place = loads[bounds[-1]] + mean, low
            for end, rest in zip(loads[left + low : left + high], after.tolist(), strict=True):
                if (end - here) * (end - here) + rest == total:
                    total = rest
                    break
                place += 1
        bounds.append(left + place)
    return tuple(bounds)


def _table(places: _Places, spans: tuple[list[int], list[int]], even: Even) -> list[Array]:
    """Return the least that the partitions after each bound cost."""
    heads, widths = places.heads, places.widths
    n_places, n_partitions = len(places.at), len(heads) - 1
    nearest, farthest = spans
    never = even.most + 1
    # All bounds in a row; next to each there is as much room as its partition can miss it by.
    room = list(map(max, widths, [0, *widths], [0, 0, *widths]))
    begins = list(accumulate(map(add, room, widths), initial=0))
    heres = [begin + gap for begin, gap in zip(begins, room, strict=False)]
    line = np.full(begins[-1] + widths[-2] + max(farthest) - min(nearest), never)
    line[heres[-1]] = 0
    kept = [line[here : here + width] for here, width in zip(heres, widths, strict=True)]
    clip = (n_partitions + 2) * never >= _TOO_LARGE
    size = n_places * (max(farthest) + 1 - min(nearest))
    n_steps = max(1, n_partitions * _AT_HAND // size)
    # Where what follows the nearest ends of all starts begins in the row.
    begin, near, far = (np.array(each) for each in (heads, nearest, farthest))
    after = np.array(heres[1:]) + begin[:-1] + near - begin[1:]
    steps = list(
        zip(after.tolist(), (far - near + 1).tolist(), heads, widths, nearest, kept, strict=False)
    )
    plus, least_of = np.add, np.minimum.reduce
    for behind in range(n_partitions, 0, -n_steps):
        before = max(behind - n_steps, 0)
        low, high = heads[before], heads[behind - 1] + widths[behind - 1]
        short, long = min(nearest[before:behind]), max(farthest[before:behind])
        costs = _costs(places, even, (low, high), (short, long))
        ends = _ends(line, (long + 1 - short, len(line) - (long - short)))
        for end, many, head, width, least, row in reversed(steps[before:behind]):
            one, top = head - low, least - short
            of_runs = costs[top : top + many, one : one + width]
            least_of(plus(of_runs, ends[:many, end : end + width]), 0, None, row)
            if clip:
                np.minimum(row, never, out=row)
    return kept


def _places(loads: Sequence[int], limits: Sequence[Limit], windows: Windows, even: Even) -> _Places:
    """List all places, and how far apart the ends of a partition can be."""
    heads, pieces, behind, n_places = list[int](), list[tuple[int, int]](), 0, 0
    for low, high in zip(*windows, strict=True):
        heads.append(n_places - max(behind - low, 0))
        pieces.append((max(low, behind), high + 1))
        behind = high + 1
        n_places += behind - pieces[-1][0]

    def listed(numbers: Sequence[int]) -> Array:
        found: list[int] = []
        for low, high in pieces:
            found += numbers[low:high]
        return np.array(found, dtype=np.int64)

    weights = listed(loads)
    mean, at, excess = even.mean, weights, np.zeros_like(weights)
    # Which place is the last one before each heavy layer.
    before: list[int] = []
    for layer, more in even.heavy:
        before.append(int(weights.searchsorted(loads[layer], "right")) - 1)
        excess[before[-1] + 1 :] += more
    if before:
        at = weights - excess
    # No partition is farther from even than the known split in all.
    room = isqrt(even.most)
    nearest = at.searchsorted(at + (mean - room))
    farthest = at.searchsorted(at + (mean + room), "right") - 1
    beyond = n_places
    for place, (_, more) in zip(reversed(before), reversed(even.heavy), strict=True):
        # A partition can hold this much in addition to a heavy layer.
        little = isqrt(more * more + even.most) - more
        some = slice(0, place + 1)
        reach = at.searchsorted(at[some] + (mean + little), "right") - 1
        reach = np.minimum(np.maximum(reach, place), beyond)
        farthest[some] = np.where(farthest[some] > place, reach, farthest[some])
        beyond = place
    for ends, starts, most in limits:
        tails = weights if ends is loads else listed(ends)
        # Nothing starts at the last place, and not all lists have it.
        reach = (weights if starts is loads else listed(starts))[: n_places - 1] + most
        farthest[:-1] = np.minimum(farthest[:-1], tails.searchsorted(reach, "right") - 1)
    numbers = np.arange(n_places)
    widths = [high + 1 - low for low, high in zip(*windows, strict=True)]
    nearest = np.maximum(nearest - numbers, 1)
    return _Places(at, excess, nearest, farthest - numbers, heads, widths)


def _spans(places: _Places) -> tuple[list[int], list[int]]:
    """Return how many places further the nearest and the farthest end of each partition is."""
    heads, widths = np.array(places.heads), np.array(places.widths)
    n_partitions = len(heads) - 1
    pieces = np.empty(2 * n_partitions, dtype=np.int64)
    pieces[::2], pieces[1::2] = heads[:-1], heads[:-1] + widths[:-1]
    nearest = np.minimum.reduceat(places.nearest, pieces)[::2]
    farthest = np.maximum.reduceat(places.farthest, pieces)[::2]
    nearest = np.maximum(nearest, heads[1:] - heads[:-1] - widths[:-1] + 1)
    farthest = np.minimum(farthest, heads[1:] + widths[1:] - 1 - heads[:-1])
    return nearest.tolist(), farthest.tolist()


def _ends(row: Array, shape: tuple[int, int]) -> Array:
    """View a row so that entry [i, j] is the one at ``i + j``."""
    return np.ndarray(shape, row.dtype, row, 0, (row.itemsize, row.itemsize))


def _costs(places: _Places, even: Even, starts: tuple[int, int], spans: tuple[int, int]) -> Array:
    """Write down what partitions cost: a row for each span, a column for each start."""
    (low, high), (short, long) = starts, spans
    shape = (long - short + 1, high - low)
    behind = max(high + long - len(places.at), 0)
    ends = np.append(places.at[low + short : high + long], np.zeros(behind, dtype=np.int64))
    far = _ends(ends, shape) - (places.at[low:high] + even.mean)
    costs = far * far
    if even.heavy and places.excess[low] != places.excess[min(high + long, len(places.at)) - 1]:
        ends = np.append(places.excess[low + short : high + long], np.zeros(behind, dtype=np.int64))
        costs += 2 * (_ends(ends, shape) - places.excess[low:high]) * far
    # As unsigned numbers, those before the nearest end are far beyond the farthest.
    nearest = places.nearest[low:high]
    number = np.maximum(places.farthest[low:high] - nearest + 1, 0).view(np.uint64)
    beyond = (np.arange(short, long + 1)[:, None] - nearest).view(np.uint64)
    np.copyto(costs, even.most + 1, where=beyond >= number)
    return costs
