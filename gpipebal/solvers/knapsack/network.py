"""The ways through a chain that the knapsack chooses from, and which of them cannot be chosen.

A way goes through a chain from its first place to its last, step by step. A step costs something,
and leaves some bytes behind that are held from then on; during the step, more is needed
temporarily. The chain is gone through several times, as *walks*: for example, one forwards and one
backwards. All possible ways make a graph without cycles (`Network`); a node is a place, together
with whatever later steps depend on.

What decides is a *peak* (`Ceiling`): all that is held at the end, counted a number of times, plus
the highest moment of a walk, plus a constant. So this is a knapsack with several limits, some of
which are on a maximum instead of a sum.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

__all__ = ["Arc", "Ceiling", "Network", "decisive", "keeping", "stepped", "within"]

#: More bytes than any memory has.
_ENDLESS = 1 << 200


class Arc(NamedTuple):
    """One step through the chain.

    Attributes:
        end: The node that it leads to.
        cost: What it costs, 0 or more, a whole number.
        kept: Bytes that are held from then on, 0 or more.
        peaks: For each walk the most bytes at one moment of the step, beyond those that are held
            before it.
        name: Whatever the caller identifies it by.
    """

    end: Hashable
    cost: int
    kept: int
    peaks: tuple[int, ...]
    name: Any = None


class Ceiling(NamedTuple):
    """One peak: ``times`` what is held at the end, the highest moment of a walk, and ``beside``.

    Attributes:
        walk: Which walk it is; None: none.
        times: How often the bytes held at the end count.
        beside: Bytes that are added in any case; may be negative.
    """

    walk: int | None
    times: int
    beside: int

    def of(self, held: int, walks: Sequence[int]) -> int:
        """Return the peak of what is held at the end, and of the highest moment of each walk."""
        moment = 0 if self.walk is None else walks[self.walk]
        return self.times * held + moment + self.beside


@dataclass(frozen=True)
class Network:
    """All ways through a chain.

    Attributes:
        arcs: For every node except the ends, its steps; the nodes are in an order in which every
            step leads forward. The first one is the start, from which all others are reached.
        ends: The peaks that decide at each end.
        held: Bytes that are held at the start.
        n_walks: Number of walks.
    """

    arcs: Mapping[Any, Sequence[Arc]]
    ends: Mapping[Any, Sequence[Ceiling]]
    held: int = 0
    n_walks: int = 1

    @property
    def start(self) -> Hashable:
        """The node where every way begins."""
        return next(iter(self.arcs))

    @property
    def no_moments(self) -> tuple[int, ...]:
        """The highest moment of each walk before the first step: lower than all."""
        return (-_ENDLESS,) * self.n_walks

    def peak(self, arcs: Sequence[Arc]) -> int:
        """Return the largest peak of a way."""
        held, walks = self.held, self.no_moments
        for arc in arcs:
            held, walks = stepped(held, walks, arc)
        return max(ceiling.of(held, walks) for ceiling in self.ends[arcs[-1].end])

    def least(self, per: int, price: int) -> Mapping[Hashable, int]:
        """Return the least sum of ``per * cost + price * kept`` from every node to an end."""
        return {node: weight for node, (weight, _) in self._least(per, price).items()}

    def lightest(self, per: int, price: int) -> tuple[Arc, ...]:
        """Return the way whose sum of ``per * cost + price * kept`` is the least."""
        found, node, way = self._least(per, price), self.start, []
        while node not in self.ends:
            arc = found[node][1]
            assert arc is not None
            way.append(arc)
            node = arc.end
        return tuple(way)

    def _least(self, per: int, price: int) -> dict[Hashable, tuple[int, Arc | None]]:
        found: dict[Hashable, tuple[int, Arc | None]] = {end: (0, None) for end in self.ends}
        for node in reversed(self.arcs):
            found[node] = min(
                ((per * a.cost + price * a.kept + found[a.end][0], a) for a in self.arcs[node]),
                key=lambda option: option[0],
            )
        return found

    def least_before(self, per: int, price: int) -> Mapping[Hashable, int]:
        """Return the least sum of ``per * cost + price * kept`` from the start to every node."""
        found = {self.start: 0}
        for node, arcs in self.arcs.items():
            for arc in arcs:
                weight = found[node] + per * arc.cost + price * arc.kept
                found[arc.end] = min(weight, found.get(arc.end, weight))
        return found

    @cached_property
    def least_kept(self) -> Mapping[Hashable, int]:
        """The fewest bytes that can come to be held from every node to an end."""
        return self.least(0, 1)

    @cached_property
    def last_moments(self) -> Mapping[Hashable, tuple[int, ...]]:
        """For each end and walk, the least that a last step needs beyond what is then held."""
        found: dict[Hashable, tuple[int, ...]] = {}
        for arcs in self.arcs.values():
            for arc in arcs:
                if arc.end in self.ends:
                    own = tuple([peak - arc.kept for peak in arc.peaks])
                    other = found.get(arc.end, own)
                    found[arc.end] = tuple(min(pair) for pair in zip(own, other, strict=True))
        return found

    @cached_property
    def _peaks(self) -> Sequence[Sequence[tuple[int | None, int, int, int]]]:
        """For each end its ceilings, with the least that the last step needs."""
        return [
            [(c.walk, c.times, c.beside, 0 if c.walk is None else own[c.walk]) for c in ceilings]
            for ceilings, own in ((self.ends[end], own) for end, own in self.last_moments.items())
        ]

    def peak_bound(self, node: Hashable, held: int, walks: Sequence[int]) -> int:
        """Bound the peak of every way that goes on from here; at an end, return the peak."""
        if node in self.ends:
            return max([ceiling.of(held, walks) for ceiling in self.ends[node]])
        held += self.least_kept[node]
        lowest = None
        for ceilings in self._peaks:
            highest = None
            for walk, times, beside, last in ceilings:
                peak = times * held + beside
                if walk is not None:
                    peak += max(walks[walk], held + last)
                if highest is None or peak > highest:
                    highest = peak
            assert highest is not None
            if lowest is None or highest < lowest:
                lowest = highest
        assert lowest is not None
        return lowest

    def most_held(self, limit: int, walks: Sequence[int]) -> int:
        """Bound the bytes held at the end of every way whose peak is at most a limit.

        Args:
            limit: Bytes.
            walks: The highest moments of a way so far.
        """
        return max(
            min(_most_held(one, limit, walks) for one in ceilings) for ceilings in self._peaks
        )


def _most_held(ceiling: tuple[int | None, int, int, int], limit: int, walks: Sequence[int]) -> int:
    walk, times, beside, last = ceiling
    room = limit - beside
    most = _ENDLESS
    if walk is not None:
        most = (room - last) // (times + 1)
        room -= walks[walk]
    return min(most, room // times) if times else most


def stepped(held: int, walks: Sequence[int], arc: Arc) -> tuple[int, tuple[int, ...]]:
    """Return what is held, and the highest moment of each walk, after one more step."""
    moments = [
        walk if walk > held + peak else held + peak
        for walk, peak in zip(walks, arc.peaks, strict=True)
    ]
    return held + arc.kept, tuple(moments)


def decisive(network: Network) -> Network:
    """Leave out the peaks that are never the largest, and the walks that are then in no peak.

    Returns:
        A `Network` of the same ways with the same largest peaks; the name of each of its steps is
        the step of the given network that it comes from.
    """
    least = network.held + network.least_kept[network.start]
    pairs = range(network.n_walks)
    arcs = [arc for one in network.arcs.values() for arc in one]
    above = [[max(arc.peaks[i] - arc.peaks[k] for arc in arcs) for k in pairs] for i in pairs]

    def is_below(one: Ceiling, other: Ceiling, last: Sequence[int]) -> bool:
        """Whether one peak of a way is never larger than the other."""
        if other.walk is None:
            more, times = 0, other.times
            if one.walk is not None:
                return False
        elif one.walk is None:
            more, times = last[other.walk], other.times + 1
        else:
            more, times = -above[one.walk][other.walk], other.times
        return one.times <= times and one.beside <= other.beside + more + least * (
            times - one.times
        )

    ends: dict[Hashable, list[Ceiling]] = {}
    for end, ceilings in network.ends.items():
        left = list(dict.fromkeys(ceilings))
        for one in tuple(left):
            if any(is_below(one, o, network.last_moments[end]) for o in left if o is not one):
                left.remove(one)
        ends[end] = left
    walks = sorted({c.walk for left in ends.values() for c in left if c.walk is not None})
    number = {walk: k for k, walk in enumerate(walks)}
    return Network(
        {
            node: [
                arc._replace(peaks=tuple([arc.peaks[walk] for walk in walks]), name=arc)
                for arc in steps
            ]
            for node, steps in network.arcs.items()
        },
        {
            end: [c if c.walk is None else c._replace(walk=number[c.walk]) for c in left]
            for end, left in ends.items()
        },
        network.held,
        len(walks),
    )


def keeping(network: Network, stays: Callable[[Hashable, Arc], bool]) -> Network | None:
    """Leave out steps, and all that then leads nowhere, or is not reached.

    Args:
        network: All ways through the chain.
        stays: Tells whether a step from a node stays.

    Returns:
        What is left; None: there is no way.
    """
    left: dict[Hashable, list[Arc]] = {}
    for node in reversed(list(network.arcs)):
        steps = [
            arc
            for arc in network.arcs[node]
            if (arc.end in left or arc.end in network.ends) and stays(node, arc)
        ]
        if steps:
            left[node] = steps
    reached = {network.start}
    arcs: dict[Hashable, Sequence[Arc]] = {}
    for node in network.arcs:
        if node in reached and node in left:
            arcs[node] = left[node]
            reached.update(arc.end for arc in left[node])
    if not arcs:
        return None
    ends = {end: ceilings for end, ceilings in network.ends.items() if end in reached}
    return Network(arcs, ends, network.held, network.n_walks)


def within(network: Network, limit: int) -> Network | None:
    """Leave out steps that no way within a limit takes; None: there is no such way.

    A step is left out if it exceeds the limit even with the least that can be held before and after
    it. Without it, the least that is held elsewhere may be more, so this is repeated until nothing
    changes.

    Complexity:
        O(a) for a arcs, and some rounds.
    """
    left: Network | None = network
    n_before = -1
    while left is not None and n_before != (n_left := sum(map(len, left.arcs.values()))):
        n_before, left = n_left, _fitting(left, limit)
    return left


def _fitting(network: Network, limit: int) -> Network | None:
    """Leave out steps that exceed a limit with the least that can be held before and after them."""
    before = network.least_before(0, 1)

    def fits(node: Hashable, arc: Arc) -> bool:
        held, walks = stepped(network.held + before[node], network.no_moments, arc)
        return network.peak_bound(arc.end, held, walks) <= limit

    return keeping(network, fits)
