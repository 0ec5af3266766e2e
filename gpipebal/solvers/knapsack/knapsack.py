"""What to keep and what to recompute: the cheapest way through a chain under a limit of bytes.

**Bound.** At its end a walk is at least as high as what is held there, so a limit on peaks is also
a limit on what is held. Where every byte has a price instead of a limit, the best way is found in
one pass over the graph, and the price at which it just meets the limit gives a bound on every way
(Lagrange's): on whole ways, and, as the pass begins at the end, on the rest of a way from any node.

**Steps that are on no good way** are left out first: those with which the limit is exceeded, and
those whose bound is above the cost of a way that is known.

**Search.** Unfinished ways are taken up in the order of their bounds, so the first one that arrives
is the best, and when time runs out the next one's bound holds for all. An unfinished way that is
neither cheaper nor lower, in bytes held or in any walk, than another at the same node is dropped.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from gpipebal.solvers.deadline import Deadline
from gpipebal.solvers.knapsack.network import (
    Arc,
    Network,
    decisive,
    keeping,
    stepped,
    within,
)

__all__ = ["Way", "cheapest", "lowest"]

#: Labels taken up between two looks at the clock.
_BETWEEN_LOOKS = 256
#: Labels kept at each node while a first way is looked for.
_WIDTH = 8


@dataclass(frozen=True)
class Way:
    """A way through a network.

    Attributes:
        arcs: Its steps.
        cost: The sum of their costs.
        lower_bound: No way within the limit costs less.
        peak: Its largest peak.
    """

    arcs: tuple[Arc, ...]
    cost: int
    lower_bound: int
    peak: int


class _Label(NamedTuple):
    """A way from the start to a node; `before` is the label that it extends."""

    node: Hashable
    cost: int
    held: int
    walks: tuple[int, ...]
    arc: Arc | None
    before: _Label | None

    def extended(self, arc: Arc) -> _Label:
        """Return the way with one more step."""
        held, walks = stepped(self.held, self.walks, arc)
        return _Label(arc.end, self.cost + arc.cost, held, walks, arc, self)

    @property
    def arcs(self) -> tuple[Arc, ...]:
        """The steps of the way, as the caller gave them."""
        arcs: list[Arc] = []
        label: _Label | None = self
        while label is not None and label.arc is not None:
            arcs.append(label.arc.name)
            label = label.before
        return tuple(reversed(arcs))


#: Bounds what is minimised over all ways that extend a label; None: there is none.
_Bound = Callable[[_Label], "int | None"]


def cheapest(network: Network, limit: int, time_limit: float | None = None) -> Way | None:
    """Find the way of least cost whose peaks are all at most a limit.

    Args:
        network: All ways through the chain.
        limit: Bytes.
        time_limit: Seconds after which the cheapest way found so far is returned; None: no limit.
            If some way fits, one is always returned.

    Returns:
        A `Way`; it is the best if its cost equals its lower bound. None if no way fits.

    Complexity:
        O(a p + L d) for a arcs, p prices tried (some ten), and L labels that are taken up, each
        compared with d others at its node. L is at most the number of unfinished ways of which
        none is better than another in all of cost, bytes and walks: exponential at worst, as the
        problem is NP-hard.

    Source:
        Handler and Zang, "A dual algorithm for the constrained shortest path problem", Networks 10,
        1980, for the price; Desrochers and Soumis, "A generalized permanent labelling algorithm for
        the shortest path problem with time windows", INFOR 26, 1988, for labels in that order.
        Differs: what is limited is a peak along the way, not a sum alone.

    Example:
        >>> from gpipebal.solvers.knapsack.network import Ceiling
        >>> steps = {0: [Arc(1, 0, 8, (8,)), Arc(1, 5, 2, (9,))], 1: [Arc(2, 0, 1, (1,))]}
        >>> network = Network(steps, {2: [Ceiling(0, times=1, beside=0)]})
        >>> cheapest(network, 12).cost, cheapest(network, 18).cost, cheapest(network, 11)
        (5, 0, None)
    """
    left = within(decisive(network), limit)
    if left is None:
        return None
    grain = math.gcd(*(arc.cost for arcs in left.arcs.values() for arc in arcs))
    prices = _Prices(left, limit)
    first = _beam(left, prices.bound) or _lowest(left, limit)
    if first is None:
        return None
    left = prices.below(first.cost)
    found, proven = None, None
    if left is not None:
        bound = _Prices(left, limit, grain).bound
        found, proven = _search(left, bound, known=first.cost, time_limit=time_limit)
    best = found or first
    lower_bound = best.cost if proven is None else min(proven, best.cost)
    return Way(best.arcs, best.cost, lower_bound, network.peak(best.arcs))


def lowest(network: Network) -> Way:
    """Find a way whose largest peak is the least of all.

    Args:
        network: All ways through the chain.

    Returns:
        A `Way`; its cost is not minimised.

    Complexity:
        As for `cheapest`, without costs: mostly much less.

    Example:
        >>> from gpipebal.solvers.knapsack.network import Ceiling
        >>> steps = {0: [Arc(1, 0, 8, (8,)), Arc(1, 5, 2, (9,))], 1: [Arc(2, 0, 1, (1,))]}
        >>> lowest(Network(steps, {2: [Ceiling(0, times=1, beside=0)]})).peak
        12
    """
    found = _lowest(decisive(network))
    assert found is not None
    arcs = found.arcs
    return Way(arcs, found.cost, 0, network.peak(arcs))


def _lowest(network: Network, limit: int | None = None) -> _Label | None:
    """Return a way with the least peak; None: that peak is above the limit."""

    def bound(label: _Label) -> int:
        return network.peak_bound(label.node, label.held, label.walks)

    first = _beam(network, bound)
    assert first is not None
    known = bound(first)
    left = within(network, known)
    assert left is not None
    better, _ = _search(left, bound, known=known)
    found = better or first
    return found if limit is None or bound(found) <= limit else None


class _Prices:
    """Bounds from prices of bytes.

    Args:
        network: All ways through the chain.
        limit: Bytes that a peak may have.
        grain: A number that divides all costs.
    """

    def __init__(self, network: Network, limit: int, grain: int = 1) -> None:
        self._network, self._limit, self._grain = network, limit, max(grain, 1)
        self._most = network.most_held(limit, network.no_moments)
        self._prices = self._find_prices()
        self._rests = [(per, price, network.least(per, price)) for per, price in self._prices]

    def _sums(self, arcs: Sequence[Arc]) -> tuple[int, int]:
        held = self._network.held + sum(arc.kept for arc in arcs)
        return sum(arc.cost for arc in arcs), held

    def _find_prices(self) -> list[tuple[int, int]]:
        """Return pairs of weights, of a cost and of a byte; the last gives the best bound."""
        network, most = self._network, self._most
        cost, held = self._sums(network.lightest(1, 0))
        found = [(1, 0)]
        if held <= most:
            return found
        # A price above all costs: the fewest bytes possible, and of such ways the cheapest.
        above = 1 + sum(max(arc.cost for arc in arcs) for arcs in network.arcs.values())
        few_cost, few_held = self._sums(network.lightest(1, above))
        while held > few_held:
            # The price at which the two ways, of which only one holds too much, are worth the same.
            per, price = held - few_held, few_cost - cost
            found.append((per, price))
            new_cost, new_held = self._sums(network.lightest(per, price))
            if per * new_cost + price * new_held >= per * cost + price * held:
                break
            if new_held > most:
                cost, held = new_cost, new_held
            else:
                few_cost, few_held = new_cost, new_held
        return found

    def bound(self, label: _Label) -> int | None:
        """Bound the cost of all ways that extend a label."""
        network, node, held, walks = self._network, label.node, label.held, label.walks
        if network.peak_bound(node, held, walks) > self._limit:
            return None
        room = network.most_held(self._limit, walks) - held
        best = 0
        for per, price, rest in self._rests:
            # Bytes that are left over are worth their price.
            best = max(best, -((price * room - rest[node]) // per))
        grain = self._grain
        return label.cost + -(-best // grain) * grain

    def below(self, known: int) -> Network | None:
        """Leave out steps that are on no way with less cost; None: there is no such way."""
        network = self._network
        worth = self._most - network.held
        tables = [
            (per, price, network.least_before(per, price), rest, per * known + price * worth)
            for per, price, rest in self._rests
        ]

        def is_cheaper(node: Hashable, arc: Arc) -> bool:
            # With bytes at any of the prices.
            return all(
                before[node] + per * arc.cost + price * arc.kept + rest[arc.end] < most
                for per, price, before, rest, most in tables
            )

        return keeping(network, is_cheaper)


def _beam(network: Network, bound: _Bound) -> _Label | None:
    """Look for a good way, with a few labels at every node; None: none of them arrives."""
    start = _Label(network.start, 0, network.held, network.no_moments, None, None)
    waiting: dict[Hashable, list[tuple[int, int, _Label]]] = {network.start: [(0, 0, start)]}
    n_labels = 0
    for node in network.arcs:
        for value, _, label in sorted(waiting.pop(node, ()))[:_WIDTH]:
            for arc in network.arcs[node]:
                further = label.extended(arc)
                next_value = bound(further)
                if next_value is not None:
                    n_labels += 1
                    entry = (max(value, next_value), n_labels, further)
                    waiting.setdefault(arc.end, []).append(entry)
    arrived = [entry for entries in waiting.values() for entry in entries]
    return min(arrived)[2] if arrived else None


def _search(
    network: Network, bound: _Bound, *, known: int, time_limit: float | None = None
) -> tuple[_Label | None, int | None]:
    """Take up labels in the order of their bounds.

    Args:
        network: All ways through the chain.
        bound: Bounds what is minimised.
        known: The value of a way that is known already; others must have less.
        time_limit: Seconds after which to end; None: never.

    Returns:
        The best label at an end; None: none is better than `known`. And, if time ran out, the bound
        on all labels that were left; else None.
    """
    deadline = Deadline(time_limit)
    place = {node: k for k, node in enumerate((*network.arcs, *network.ends))}
    start = _Label(network.start, 0, network.held, network.no_moments, None, None)
    first = bound(start)
    if first is None or first >= known:
        return None, None
    # Of equal bounds the label that is farthest is taken first, then the one that is oldest.
    heap: list[tuple[int, int, int, _Label]] = [(first, 0, 0, start)]
    done: dict[Hashable, list[_Label]] = {node: [] for node in place}
    n_labels = n_taken = 0
    while heap:
        value, _, _, label = heapq.heappop(heap)
        if label.node in network.ends:
            return label, None
        n_taken += 1
        if n_taken % _BETWEEN_LOOKS == 0 and deadline.is_up:
            return None, value
        others = done[label.node]
        if any(_dominates(other, label) for other in others):
            continue
        others.append(label)
        for arc in network.arcs[label.node]:
            further = label.extended(arc)
            next_value = bound(further)
            if next_value is not None and next_value < known:
                n_labels += 1
                entry = (max(value, next_value), -place[arc.end], n_labels, further)
                heapq.heappush(heap, entry)
    return None, None


def _dominates(one: _Label, other: _Label) -> bool:
    return (
        one.cost <= other.cost
        and one.held <= other.held
        and all([a <= b for a, b in zip(one.walks, other.walks, strict=True)])
    )
