"""How fast any split can be under a schedule without a closed form: a proven lower bound.

Take one partition of a split, with `a` its first layer. Its device cannot begin before the first
micro-batch has come through the layers before `a`. When it has passed back the last gradient, that
gradient has to go back through these layers. Between the two the device does all actions of its
row. And its first backward waits until a micro-batch has been through the whole chain and back to
it; the rest of its row is done after that::

    time ->  |- forwards before a -|-------- all of the row --------|- backwards before a -|
             |---- forwards of all, backwards after it ----|- rest of the row -|- before a -|

Both are sums of layers with coefficients that the schedule gives, and grow when the partition gets
longer at either end. So the smallest limit that all partitions of some split can keep is found like
the smallest bottleneck: a greedy probe decides, and bisection snaps to values that exist.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import pairwise
from operator import mul
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from gpipebal.schedule import Order
from gpipebal.schedule.actions import KINDS

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["Columns", "Relaxed", "Row", "rows_of"]


class Columns(NamedTuple):
    """Prefix sums of whole numbers: what each kind of action takes on one type of device.

    `input` and `weight` are the two parts of a backward; where it is done in one, it counts as
    `input`, since others wait for all of it.
    """

    forward: Sequence[int]
    recompute: Sequence[int]
    input: Sequence[int]
    weight: Sequence[int]


class Row(NamedTuple):
    """How many forwards, recomputes, input gradients and weight gradients a partition does.

    Counted four times: all of them; those up to its last input gradient; those from its first input
    gradient on; and those between the two.
    """

    all: tuple[int, int, int, int]
    to_last: tuple[int, int, int, int]
    from_first: tuple[int, int, int, int]
    between: tuple[int, int, int, int]


def rows_of(order: Order, *, recomputes: bool = True) -> list[Row]:
    """Count the actions of every partition of an order.

    Args:
        order: An order in which every partition has a backward.
        recomputes: Whether recomputes count; if not, the counts hold for all modes.

    Example:
        >>> from gpipebal.schedule import order_of
        >>> rows_of(order_of("1f1b", 2, 3))[0].from_first
        (1, 0, 3, 0)
    """
    forward, recompute, whole, first_part, weight = range(len(KINDS))
    rows = []
    by_partition = np.argsort(order.partitions, kind="stable")
    sizes = np.bincount(order.partitions, minlength=order.n_partitions)
    kinds_of = np.split(order.kinds[by_partition], np.cumsum(sizes)[:-1])
    for kinds in kinds_of:
        back = np.flatnonzero((kinds == whole) | (kinds == first_part))
        first, last = int(back[0]), int(back[-1]) + 1

        def count(part: NDArray[np.integer]) -> tuple[int, int, int, int]:
            found = np.bincount(part, minlength=len(KINDS)).tolist()
            again = found[recompute] if recomputes else 0
            return found[forward], again, found[whole] + found[first_part], found[weight]

        rows.append(
            Row(count(kinds), count(kinds[:last]), count(kinds[first:]), count(kinds[first:last]))
        )
    return rows


@dataclass(frozen=True)
class Relaxed:
    """The least that a run of layers costs as a certain partition, whatever the others are.

    Attributes:
        path: The least that layers take on any device, for the way through other partitions.
        own: For each partition, the prefix sums on its device.
        rows: For each partition, its actions.
        n_devices: Number of devices.

    Example:
        >>> from gpipebal.schedule import order_of
        >>> sums = Columns([0, 1, 2, 3], [0, 0, 0, 0], [0, 2, 4, 6], [0, 0, 0, 0])
        >>> relaxed = Relaxed(sums, [sums] * 3, rows_of(order_of("1f1b", 3, 4)), 3)
        >>> relaxed.cost(0, 0, 1), relaxed.smallest()
        (16, (18, (0, 1, 2, 3)))
    """

    path: Columns
    own: Sequence[Columns]
    rows: Sequence[Row]
    n_devices: int

    @property
    def n_layers(self) -> int:
        """Number of layers."""
        return len(self.path.forward) - 1

    def cost(self, partition: int, start: int, end: int) -> int:
        """Return a time that no split can beat if this run is this partition."""
        path, own, row = self.path, self.own[partition], self.rows[partition]
        forward = own.forward[end] - own.forward[start]
        times = (
            forward,
            own.recompute[end] - own.recompute[start],
            own.input[end] - own.input[start],
            own.weight[end] - own.weight[start],
        )
        ahead, return_way = path.forward[start], path.input[start]
        through = path.forward[-1] - path.forward[end] + ahead + forward
        through += path.input[-1] - path.input[end]
        return max(
            ahead + sum(map(mul, row.to_last, times)) + return_way,
            ahead + sum(map(mul, row.all, times)),
            through + sum(map(mul, row.between, times)) + return_way,
            through + sum(map(mul, row.from_first, times)),
        )

    def furthest(self, partition: int, start: int, last: int, limit: int) -> int:
        """Return the last end up to `last` at which a run keeps a limit; `start` if none does."""
        ends = range(start + 1, last + 1)
        kept = bisect_right(ends, limit, key=lambda end: self.cost(partition, start, end))
        return start + kept

    def nearest(self, partition: int, first: int, end: int, limit: int) -> int:
        """Return the first start from `first` on of a run within a limit; `end` if none is."""
        # The cost falls when the start moves right.
        starts = range(first, end)
        kept = bisect_left(starts, -limit, key=lambda start: -self.cost(partition, start, end))
        return first + kept

    def shared(self) -> int:
        """Bound the makespan by what all devices have to do together, and their waiting."""
        n_layers = self.n_layers
        work = 0
        for k in range(4):
            counts = {row.all[k] for row in self.rows}
            work += min(counts) * self.path[k][-1]
        # The device of partition d waits for at least d layers, forwards and backwards; but on the
        # way back it may still have gradients of weights to make.
        waiting = sum(
            self.path.forward[min(d, n_layers)]
            + (0 if self.rows[d].all[3] else self.path.input[min(d, n_layers)])
            for d in range(self.n_devices)
        )
        return -(-(work + waiting) // self.n_devices)

    def smallest(self) -> tuple[int, tuple[int, ...]]:
        """Find the smallest limit that partitions can keep, if some of them may be empty.

        What one layer costs depends on the partition, so a partition that takes as much as it can
        may leave the next one with a layer that costs too much there. Letting that one be empty
        makes the greedy probe exact, and the limit a little smaller than that of any split.

        Returns:
            The limit, and a split near it, without empty partitions.

        Complexity:
            O(P K log N) for N layers, K partitions and P probes, about 5 to 40.
        """
        n_layers, n_partitions = self.n_layers, len(self.rows)
        lower, upper = self.shared(), None
        best: tuple[int, ...] = ()
        trial, step = lower, max(lower // (4 * n_partitions), 1)
        while upper is None or lower < upper:
            bounds, refused = self._probe(trial)
            if bounds[-1] == n_layers:
                upper = max(lower, self.limit_of(bounds))
                best = bounds
            else:
                lower = min(refused)
            if upper is None:
                trial = max(lower, trial + step)
                step *= 4
            else:
                trial = (lower + upper) // 2
        filled = [0]
        for place in best[1:]:
            filled.append(max(place, filled[-1] + 1))
        return upper, tuple(filled)

    def limit_of(self, bounds: Sequence[int]) -> int:
        """Return the smallest limit that a split keeps: its makespan is not below that."""
        runs = enumerate(pairwise(bounds))
        return max(self.cost(j, start, end) for j, (start, end) in runs if start < end)

    def _probe(self, limit: int) -> tuple[tuple[int, ...], list[int]]:
        """Fill partitions from the left; return the bounds, and the limits that they missed."""
        n_layers, n_partitions = self.n_layers, len(self.rows)
        bounds = [0]
        refused = []
        for j in range(n_partitions):
            room = n_layers - (n_partitions - 1 - j)
            end = self.furthest(j, bounds[-1], room, limit)
            if end < room:
                refused.append(self.cost(j, bounds[-1], end + 1))
            bounds.append(end)
        return tuple(bounds), refused

    def windows(self, limit: int) -> list[tuple[int, int]]:
        """Return the first and the last place of each bound in splits within a limit.

        Where no split keeps the limit, the windows are empty.
        """
        n_layers, n_partitions = self.n_layers, len(self.rows)
        lasts = [0]
        for j in range(n_partitions):
            room = n_layers - (n_partitions - 1 - j)
            lasts.append(self.furthest(j, lasts[-1], room, limit))
        firsts = [n_layers]
        for j in reversed(range(n_partitions)):
            firsts.append(min(self.nearest(j, j, firsts[-1], limit), firsts[-1]))
        return list(zip(reversed(firsts), lasts, strict=True))

    def splits_within(self, limit: int, at_most: int) -> list[tuple[int, ...]] | None:
        """List the splits whose partitions all keep a limit, leftmost cuts first.

        Returns:
            None: there are, or seem to be, more than `at_most`.

        Complexity:
            O(K N log N) for N layers and K partitions, and what is listed.
        """
        found: list[tuple[int, ...]] = [(0,)]
        for j, (low, high) in enumerate(self.windows(limit)[1:]):
            last = cache(partial(self.furthest, j, last=high, limit=limit))
            further: list[tuple[int, ...]] = []
            for bounds in found:
                start = bounds[-1]
                further += ((*bounds, end) for end in range(max(low, start + 1), last(start) + 1))
                if len(further) > at_most:
                    return None
            found = further
        return found
