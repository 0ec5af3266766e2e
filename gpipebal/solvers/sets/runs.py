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

from bisect import bisect_left, bisect_right
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
        >>> [[bin(ends) for ends in some] for some in cost.within(4, [range(2)])]
        [['0b111', '0b1111']]
        >>> cost.above(4, [range(2)])
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
        self._known: tuple[int, Sequence[range]] | None = None
        self._counts: list[list[int]] = []

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

    @cached_property
    def _hull(self) -> tuple[list[int], list[int]]:
        """Return the largest of `starts` up to each start, and the least of `ends` from each on."""
        lowest = list(accumulate(reversed(self.ends), min))
        return list(accumulate(self.starts, max)), lowest[::-1]

    def last_end(self, start: int, limit: int) -> int:
        """Return the last end that a run from this start or an earlier one can have within a limit.

        It may be further than any run reaches, but not less far; -1 if there is none.
        """
        highest, lowest = self._hull
        return bisect_right(lowest, limit + highest[start]) - 1

    def first_start(self, end: int, limit: int) -> int:
        """Return the first start from which a run to this end or a later one can be within a limit.

        It may be before any such run, but not behind it; the number of places if there is none.
        """
        highest, lowest = self._hull
        return bisect_left(highest, lowest[end] - limit)

    def _count(self, limit: int, starts: Sequence[range]) -> list[list[int]]:
        if (limit, starts) != self._known:
            ascending, heads = self._order[0], self.starts
            self._counts = [
                [bisect_right(ascending, limit + s) for s in heads[some.start : some.stop]]
                for some in starts
            ]
            self._known = limit, starts
        return self._counts

    def within(self, limit: int, starts: Sequence[range]) -> list[list[int]]:
        """Return, for ranges of starts, the sets of ends within a limit; ends before it included.

        For a range, there is a list with a set for each start.
        """
        sets = self._order[1]
        found = [[sets[count] for count in counts] for counts in self._count(limit, starts)]
        if self.floor is not None:
            for some, places in zip(starts, found, strict=True):
                for at, least in enumerate(self.floor[some.start : some.stop]):
                    if least > limit:
                        places[at] = 0
        return found

    def above(self, limit: int, starts: Sequence[range]) -> int | None:
        """Return a number above a limit with no run's cost strictly between; None: none above.

        Args:
            limit: The limit.
            starts: Ranges of starts of the runs that matter.
        """
        ascending, heads = self._order[0], self.starts
        n_places = len(ascending)
        costs: list[int] = []
        for some, counts in zip(starts, self._count(limit, starts), strict=True):
            pairs = zip(counts, heads[some.start : some.stop], strict=True)
            costs += [ascending[count] - start for count, start in pairs if count < n_places]
            if self.floor is not None:
                floors = self.floor[some.start : some.stop]
                costs += [least for least in floors if least > limit]
        return min(costs, default=None)


@dataclass(frozen=True)
class Option:
    """One way to run any part of the chain: on one kind of device, in one checkpoint mode.

    Attributes:
        mode: The checkpoint mode.
        forward: Cost of a run that limits the pace of the first phase.
        backward_phase: Cost of a run that limits the pace of the second phase: backward and
            recompute.
        load: Cost of a run in both phases together.
        once: Amount that a run adds to the makespan however many micro-batches there are.
        fits: For every start, the set of ends that are allowed.
    """

    mode: CheckpointMode
    forward: Cost
    backward_phase: Cost
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
        backward_phase = cost(added(sums.backward, recompute), give_back, link_back)
        load = cost(added(layers, recompute), copies, both_links)
        # The last partition ends behind frozen layers, if not all are: one `once` for both ways.
        is_early = early and mode == "always" and problem.n_frozen < problem.n_layers
        passed = added(layers, sums.recompute) if is_early else layers
        once = Cost(
            added(passed, copies),
            [t - c - w for t, c, w in zip(passed, copies, both_links, strict=True)],
        )
        options.append(Option(mode, forward, backward_phase, load, once, ends))
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
