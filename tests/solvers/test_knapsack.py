"""The cheapest way under a limit of bytes, against all ways there are."""

from __future__ import annotations

import math
from collections.abc import Iterator

from hypothesis import given, settings
from hypothesis import strategies as st

from gpipebal.solvers.knapsack.knapsack import cheapest, lowest
from gpipebal.solvers.knapsack.network import Arc, Ceiling, Network, decisive, within

HUGE = 2**60 + 1


@st.composite
def networks(draw: st.DrawFn) -> Network:
    """Draw a few places with any steps between them, several walks and ends, also large numbers."""
    n, n_walks = draw(st.integers(1, 5)), draw(st.integers(1, 3))
    unit = draw(st.sampled_from([1, 1, HUGE]))
    size = st.integers(0, 9).map(unit.__mul__)
    below = st.integers(-3, 12).map(unit.__mul__)
    ends = [n, n + 1][: draw(st.integers(1, 2))]
    arcs = {}
    for place in range(n):
        later = st.sampled_from([*range(place + 1, n), *ends])
        arcs[place] = [
            Arc(end, draw(size), draw(size), tuple(draw(below) for _ in range(n_walks)), name)
            for name, end in enumerate([*draw(st.lists(later, max_size=3)), draw(later)])
        ]
    walk = st.none() | st.integers(0, n_walks - 1)
    ceiling = st.builds(Ceiling, walk, st.integers(0, 3), below)
    peaks = {end: draw(st.lists(ceiling, min_size=1, max_size=4)) for end in ends}
    reached = {0}
    for place in range(n):
        reached.update(arc.end for arc in arcs[place] if place in reached)
    used = {end: peak for end, peak in peaks.items() if end in reached}
    steps = {place: found for place, found in arcs.items() if place in reached}
    return Network(steps, used, draw(size), n_walks)


def ways(network: Network, node: object = 0) -> Iterator[tuple[Arc, ...]]:
    """Enumerate all ways from a node to an end."""
    if node in network.ends:
        yield ()
        return
    for arc in network.arcs[node]:
        for rest in ways(network, arc.end):
            yield (arc, *rest)


@settings(max_examples=250, deadline=None)
@given(networks(), st.data())
def test_cheapest_and_lowest_equal_brute_force(network: Network, data: st.DataObject) -> None:
    """The way found costs as little as any within the limit, and its bound says so."""
    costs = {way: sum(arc.cost for arc in way) for way in ways(network)}
    peaks = {way: network.peak(way) for way in costs}
    low = lowest(network)
    assert low.peak == min(peaks.values()) == network.peak(low.arcs)
    limit = data.draw(st.sampled_from(sorted(peaks.values()))) + data.draw(st.integers(-1, 1))
    fitting = [cost for way, cost in costs.items() if peaks[way] <= limit]
    found = cheapest(network, limit)
    if not fitting:
        assert found is None
        return
    assert found is not None
    assert found.cost == found.lower_bound == min(fitting) == costs[found.arcs]
    assert found.peak == peaks[found.arcs] <= limit


@settings(max_examples=100, deadline=None)
@given(networks(), st.integers(-2, 60))
def test_what_is_left_out_does_not_decide(network: Network, limit: int) -> None:
    """Without peaks that are never the largest, and steps that never fit, ways are the same."""
    peaks = {way: network.peak(way) for way in ways(network)}
    short = decisive(network)
    named = {tuple(arc.name for arc in way): short.peak(way) for way in ways(short)}
    assert named == peaks
    left = within(network, limit)
    fitting = {way for way, peak in peaks.items() if peak <= limit}
    assert fitting <= (set() if left is None else set(ways(left)))


def test_a_search_out_of_time_returns_a_way_with_its_bound() -> None:
    """Without time there is a way that fits, and a bound that the best way keeps."""
    sizes = [(7 * k) % 31 + 11 for k in range(36)]
    arcs = {
        k: [Arc(k + 1, 0, 5 * size + k % 3, (0,)), Arc(k + 1, size, k % 2, (0,))]
        for k, size in enumerate(sizes)
    }
    network = Network(arcs, {len(sizes): [Ceiling(0, 1, 0)]})
    limit = 5 * sum(sizes) // 3 + 2
    hurried, patient = cheapest(network, limit, time_limit=0), cheapest(network, limit)
    assert hurried is not None
    assert patient is not None
    assert patient.lower_bound == patient.cost <= hurried.cost
    assert 0 < hurried.lower_bound <= patient.cost
    assert hurried.peak <= limit


def test_equal_steps_need_no_search_of_all_their_orders() -> None:
    """Of steps that are all alike as many are taken as must be: no more labels than places."""
    n = 60
    arcs = {k: [Arc(k + 1, 0, 10, (12,)), Arc(k + 1, 3, 1, (12,))] for k in range(n)}
    network = Network(arcs, {n: [Ceiling(0, 7, 100)]})
    for fewer in (1, 17, 44):
        limit = 8 * (10 * n - 9 * fewer) + 100
        found = cheapest(network, limit + 11)
        assert found is not None
        assert found.cost == found.lower_bound
        assert math.isclose(found.cost, 3 * fewer, abs_tol=3)
