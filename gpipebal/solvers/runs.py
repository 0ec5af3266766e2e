"""What runs of layers cost and which of them are allowed, as sets of ends.

A run begins at a place and ends at a later one. With memory limits, copies and rules, the ends
that are allowed from a place need not form an interval, and a longer run may be allowed where a
shorter one is not. So they are kept as sets: one whole number per place, whose bit ``end`` is set
if the run to `end` is allowed. Sets meet with ``&`` and join with ``|``, some sixty ends at a
time, and nothing is assumed about them.

A cost of a run is ``ends[end] - starts[start]``, but no less than ``floor[start]``: sums over
layers, copies at both ends, and the link to the partition, which is a machine of its own. Limiting
it allows the ends whose `ends` is at most a number: the first few in the order of `ends`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from operator import or_

import numpy as np

from gpipebal.problem import Problem
from gpipebal.schedule import CheckpointMode

__all__ = ["Cost", "Option", "behind", "modes_to_try", "options_of", "set_of"]


class Cost:
    """One cost of every run: ``max(ends[end] - starts[start], floor[start])``.

    Example:
        >>> cost = Cost([0, 2, 3, 6], [0, 2, 3, 6])
        >>> [bin(ends) for ends in cost.within(4)]
        ['0b111', '0b1111', '0b1111']
        >>> cost.above(4)
        6
    """

    def __init__(
        self,
        ends: Sequence[int],
        starts: Sequence[int],
        floor: Sequence[int] | None = None,
        layers: Sequence[int] | None = None,
    ) -> None:
        self.ends, self.starts, self.floor = ends, starts, floor
        #: Prefix sums of the layers alone: no run costs less than its layers.
        self.layers = ends if layers is None else layers
        self._limit: int | None = None
        self._counts: list[int] = []

    def of(self, start: int, end: int) -> int:
        """Return the cost of a run."""
        cost = self.ends[end] - self.starts[start]
        return cost if self.floor is None else max(cost, self.floor[start])

    @cached_property
    def _order(self) -> tuple[list[int], list[int]]:
        """Return `ends` in ascending order, and the sets of the first 0, 1, 2, ... of them."""
        order = sorted(range(len(self.ends)), key=self.ends.__getitem__)
        sets = list(accumulate((1 << end for end in order), or_, initial=0))
        return [self.ends[end] for end in order], sets

    def _count(self, limit: int) -> list[int]:
        if limit != self._limit:
            ascending = self._order[0]
            self._counts = [bisect_right(ascending, limit + s) for s in self.starts[:-1]]
            self._limit = limit
        return self._counts

    def within(self, limit: int) -> list[int]:
        """Return, for every start, the set of ends within a limit; ends before it included."""
        sets = self._order[1]
        if self.floor is None:
            return [sets[count] for count in self._count(limit)]
        columns = zip(self._count(limit), self.floor, strict=False)
        return [sets[count] if least <= limit else 0 for count, least in columns]

    def above(self, limit: int) -> int | None:
        """Return a number above a limit with no run's cost strictly between; None: none above."""
        ascending = self._order[0]
        n_places = len(ascending)
        counts = zip(self._count(limit), self.starts, strict=False)
        costs = [ascending[count] - start for count, start in counts if count < n_places]
        if self.floor is not None:
            costs += [least for least in self.floor if least > limit]
        return min(costs, default=None)


@dataclass(frozen=True)
class Option:
    """One way to run any part of the chain: on one kind of device, in one checkpoint mode.

    Attributes:
        mode: The checkpoint mode.
        forward: Cost of a run that limits the pace of the first phase.
        again: Cost of a run that limits the pace of the second phase: backward and recompute.
        load: Cost of a run in both phases together.
        once: Amount that a run adds to the makespan however many micro-batches there are.
        fits: For every start, the set of ends that are allowed.
    """

    mode: CheckpointMode
    forward: Cost
    again: Cost
    load: Cost
    once: Cost
    fits: Sequence[int]


def modes_to_try(problem: Problem, partition: int) -> tuple[CheckpointMode, ...]:
    """Return the checkpoint modes that a partition may have, the fastest first.

    The slower of the open modes only save memory, so where memory does not matter there is one.

    Example:
        >>> modes_to_try(Problem([1], [1], [1], 1, chunks=4, checkpoint="auto"), 0)
        ('never',)
    """
    if problem.modes is None:
        return ("never",) if problem.memory is None else ("never", "except_last", "always")
    return (problem.modes[partition],)


def options_of(
    problem: Problem,
    device_type: int,
    modes: Sequence[CheckpointMode],
    fits: Sequence[list[int]],
    early: bool = False,
) -> list[Option]:
    """Describe the ways to run a partition on a device, the fastest first.

    Args:
        problem: The problem.
        device_type: Index into ``problem.costs.types``.
        modes: The modes, none faster than one before it.
        fits: For each mode, the ends that are allowed from each start.
        early: Whether `once` includes the recompute of the last micro-batch, which no backward
            hides in the last partition.

    Returns:
        One for each mode; two where a mode recomputes nothing in runs of frozen layers.
    """
    costs = problem.costs
    sums = costs.types[device_type]
    nothing = [0] * len(sums.forward)
    beside = not costs.overlaps
    send = costs.send if beside else nothing
    give_back = costs.give_back if beside else nothing
    link, link_back = (costs.send, costs.give_back) if not beside else (nothing, nothing)
    has_links = any(link) or any(link_back)

    def cost(layers: Sequence[int], copies: Sequence[int], floor: Sequence[int]) -> Cost:
        if not any(copies):
            return Cost(layers, layers, floor if has_links else None)
        ends = [total + copy for total, copy in zip(layers, copies, strict=True)]
        starts = [total - copy for total, copy in zip(layers, copies, strict=True)]
        return Cost(ends, starts, floor if has_links else None, layers)

    def added(*columns: Sequence[int]) -> list[int]:
        return list(map(sum, zip(*columns, strict=True)))

    copies, both_links = added(send, give_back), added(link, link_back)
    layers = added(sums.forward, sums.backward)
    forward = cost(sums.forward, send, link)
    options = []
    frozen = (2 << problem.n_frozen) - 1 if problem.n_frozen else 0
    ways: list[tuple[CheckpointMode, bool, Sequence[int]]] = []
    for mode, allowed in zip(modes, fits, strict=True):
        repeated = mode == "always" or (mode == "except_last" and problem.chunks > 1)
        if repeated and frozen:
            # Runs that end among frozen layers recompute nothing.
            ways.append((mode, False, [places & frozen for places in allowed]))
            ways.append((mode, True, [places & ~frozen for places in allowed]))
        else:
            ways.append((mode, repeated, allowed))
    for mode, repeated, ends in ways:
        recompute = sums.recompute if repeated else nothing
        again = cost(added(sums.backward, recompute), give_back, link_back)
        load = cost(added(layers, recompute), copies, both_links)
        # The last partition ends behind frozen layers, if not all are: one `once` for both ways.
        is_early = early and mode == "always" and problem.n_frozen < problem.n_layers
        passed = added(layers, sums.recompute) if is_early else layers
        once = Cost(
            added(passed, copies),
            [t - c - w for t, c, w in zip(passed, copies, both_links, strict=True)],
        )
        options.append(Option(mode, forward, again, load, once, ends))
    return options


def behind(n_layers: int, lengths: range) -> list[int]:
    """Return, for every start, the set of places that are one of these numbers of layers after it.

    Example:
        >>> [bin(ends) for ends in behind(3, lengths=range(1, 3))]
        ['0b110', '0b1100', '0b1000']
    """
    all_places = (1 << (n_layers + 1)) - 1
    from_start = (1 << lengths.stop) - (1 << lengths.start) if lengths else 0
    return [(from_start << start) & all_places for start in range(n_layers)]


def set_of(flags: np.ndarray) -> int:
    """Return the set of the places where an array is true.

    Example:
        >>> bin(set_of(np.array([True, False, True])))
        '0b101'
    """
    return int.from_bytes(np.packbits(flags, bitorder="little").tobytes(), "little")
