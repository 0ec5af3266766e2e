"""The bottleneck by exact bisection: known values, certificates, tables."""

from __future__ import annotations

from itertools import accumulate, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import dense_bottleneck
from solvers.cases import KNOWN_BOTTLENECKS

from gpipebal.problem import Problem
from gpipebal.solvers import bisection, split
from gpipebal.solvers.bisection import fill, floor, largest_layer, smallest_limit
from gpipebal.solvers.chain import (
    Limit,
    Windows,
    everywhere,
    meet,
    narrowed,
    reach_limit,
    reach_within,
)

COSTS = st.one_of(
    st.lists(st.integers(0, 3), min_size=1, max_size=40),
    st.lists(st.integers(0, 2**70), min_size=1, max_size=40),
    st.lists(st.sampled_from([1, 2, 1000]), min_size=1, max_size=40),
)


def windows_of(reach: list[int], n_partitions: int) -> Windows | None:
    """Find where each cut stands, if partitions extend no further than a list says."""
    return narrowed([reach_limit(reach)], everywhere(len(reach), n_partitions))


@pytest.mark.parametrize("name", KNOWN_BOTTLENECKS)
def test_known_bottlenecks(name: str) -> None:
    """Instances that other balancers get wrong have the bottleneck that is known."""
    costs, n_partitions, value = KNOWN_BOTTLENECKS[name]
    best = split(Problem.from_costs(costs, n_partitions), "bottleneck")
    assert best.value == best.lower_bound == value
    assert min(best.balance) >= 1


@settings(max_examples=150, deadline=None)
@given(COSTS, st.data())
def test_bottleneck_equals_table(costs: list[int], data: st.DataObject) -> None:
    """The value is that of the full table, and proven: with one unit less there is no split."""
    n_partitions = data.draw(st.integers(1, len(costs)))
    sums = list(accumulate(costs, initial=0))
    at_least = data.draw(st.sampled_from([0, floor(sums, n_partitions), largest_layer(sums, sums)]))
    found = smallest_limit(sums, sums, n_partitions, at_least=at_least)
    assert found.value == found.lower_bound == dense_bottleneck(costs, n_partitions)
    assert windows_of(reach_within(sums, sums, found.value), n_partitions) is not None
    if found.value > max(costs):
        assert windows_of(reach_within(sums, sums, found.value - 1), n_partitions) is None


@settings(max_examples=100, deadline=None)
@given(COSTS, st.data())
def test_bottleneck_above_at_most_is_proven(costs: list[int], data: st.DataObject) -> None:
    """Asked for too little, there is no split, but a bound that says so and is not too large."""
    n_partitions = data.draw(st.integers(1, len(costs)))
    sums = list(accumulate(costs, initial=0))
    least = data.draw(st.sampled_from([0, largest_layer(sums, sums)]))
    value = smallest_limit(sums, sums, n_partitions, at_least=least).value
    at_most = data.draw(st.integers(-1, value + 3))
    found = smallest_limit(sums, sums, n_partitions, at_least=least, at_most=at_most)
    if at_most >= value:
        assert found.bounds is not None
        assert found.value == value
    else:
        assert found.bounds is None
        assert at_most < found.lower_bound <= value


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=30), st.data()
)
def test_further_limits_are_kept(costs: list[tuple[int, int]], data: st.DataObject) -> None:
    """With a second cost limited, the smallest limit of the first is still exact."""
    n_partitions = data.draw(st.integers(1, len(costs)))
    first, second = (list(accumulate(column, initial=0)) for column in zip(*costs, strict=True))
    room = smallest_limit(second, second, n_partitions, at_least=max(two for _, two in costs))
    most = room.value + data.draw(st.integers(0, 5))
    reach = reach_within(second, second, most)
    least = largest_layer(first, first)
    limit = data.draw(st.sampled_from([Limit(second, second, most), reach_limit(reach)]))
    found = smallest_limit(first, first, n_partitions, at_least=0, limits=[limit])
    within = reach_within(first, first, found.value)
    assert windows_of(meet(reach, within), n_partitions) is not None
    if found.value > least:
        within = reach_within(first, first, found.value - 1)
        assert windows_of(meet(reach, within), n_partitions) is None


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 2**40) | st.integers(0, 3), st.integers(0, 9)),
        min_size=1,
        max_size=30,
    ),
    st.data(),
)
def test_what_is_known_changes_nothing(costs: list[tuple[int, int]], data: st.DataObject) -> None:
    """Begun from a filled split, within the same limits or looser ones, it ends at the same one."""
    n_partitions = data.draw(st.integers(1, len(costs)))
    first, second = (list(accumulate(column, initial=0)) for column in zip(*costs, strict=True))
    room = smallest_limit(second, second, n_partitions, at_least=0).value
    most = room + data.draw(st.integers(0, 5))
    alone = smallest_limit(
        first, first, n_partitions, at_least=0, limits=[Limit(second, second, most)]
    )
    # Filled with a looser limit of the first cost, and with one of the second that is kept.
    loose = data.draw(st.integers(alone.value, 2 * alone.value + 3))
    limits = [Limit(first, first, loose), Limit(second, second, most)]
    n_layers = len(costs)
    anywhere = [0] * (n_partitions - 1), range(n_layers - n_partitions + 1, n_layers)
    filled = [*fill(limits, *anywhere), n_layers]
    kept = max(second[end] - second[start] for start, end in pairwise(filled))
    for limit in (most, kept):
        known = smallest_limit(
            first,
            first,
            n_partitions,
            at_least=0,
            limits=[Limit(second, second, limit)],
            filled=filled,
        )
        again = smallest_limit(
            first, first, n_partitions, at_least=0, limits=[Limit(second, second, limit)]
        )
        assert known == again
    assert known.value >= alone.value


def test_windows_hold_the_cuts_of_all_valid_splits() -> None:
    """A cut stands exactly where some split into partitions of at most 2 layers puts it."""
    assert windows_of([2, 3, 4, 5, 5], 3) == ([0, 1, 3, 5], [0, 2, 4, 5])
    assert windows_of([2, 3, 4, 5, 5], 2) is None
    assert windows_of([2, 3, 4, 5, 5], 5) == ([0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5])


@settings(max_examples=150, deadline=None)
@given(COSTS, st.data())
def test_windows_are_the_same_without_a_list_of_all_places(
    costs: list[int], data: st.DataObject
) -> None:
    """Worked out for the places of cuts alone, windows are those of all limits met."""
    n_layers, n_partitions = len(costs), data.draw(st.integers(1, len(costs)))
    sums = list(accumulate(costs, initial=0))
    others = list(accumulate([cost**2 for cost in costs], initial=0))
    limits = [
        Limit(column, column, data.draw(st.integers(largest_layer(column, column), column[-1])))
        for column in (sums, others)
    ]
    reach = meet(*(reach_within(*limit) for limit in limits))
    found = narrowed(limits, everywhere(n_layers, n_partitions))
    assert found == windows_of(reach, n_partitions)


def test_layers_that_grow_take_few_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where every probe stops at the next larger layer, steps grow nevertheless."""
    sums = list(accumulate(range(1, 2001), initial=0))
    probes = 0

    def counted(*arguments: object) -> list[int]:
        nonlocal probes
        probes += 1
        return fill(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(bisection, "fill", counted)
    assert smallest_limit(sums, sums, 1999, at_least=0).value == 2000
    assert probes < 60
