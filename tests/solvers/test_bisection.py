"""The bottleneck by exact bisection: known values, certificates, tables."""

from __future__ import annotations

from itertools import accumulate

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import dense_bottleneck
from solvers.cases import KNOWN_BOTTLENECKS

from gpipebal.problem import Problem
from gpipebal.solvers import split
from gpipebal.solvers.bisection import largest_layer, smallest_limit
from gpipebal.solvers.chain import cut_windows, meet, reach_within

COSTS = st.one_of(
    st.lists(st.integers(0, 3), min_size=1, max_size=40),
    st.lists(st.integers(0, 2**70), min_size=1, max_size=40),
    st.lists(st.sampled_from([1, 2, 1000]), min_size=1, max_size=40),
)


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
    found = smallest_limit(sums, sums, n_partitions, at_least=largest_layer(sums, sums))
    assert found.value == found.lower_bound == dense_bottleneck(costs, n_partitions)
    assert cut_windows(reach_within(sums, sums, found.value), n_partitions) is not None
    if found.value > max(costs):
        assert cut_windows(reach_within(sums, sums, found.value - 1), n_partitions) is None


@settings(max_examples=100, deadline=None)
@given(COSTS, st.data())
def test_bottleneck_above_at_most_is_proven(costs: list[int], data: st.DataObject) -> None:
    """Asked for too little, there is no split, but a bound that says so and is not too large."""
    n_partitions = data.draw(st.integers(1, len(costs)))
    sums = list(accumulate(costs, initial=0))
    least = largest_layer(sums, sums)
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
    reach = reach_within(second, second, room.value + data.draw(st.integers(0, 5)))
    least = largest_layer(first, first)
    found = smallest_limit(first, first, n_partitions, at_least=least, reach=reach)
    within = reach_within(first, first, found.value)
    assert cut_windows(meet(reach, within), n_partitions) is not None
    if found.value > least:
        within = reach_within(first, first, found.value - 1)
        assert cut_windows(meet(reach, within), n_partitions) is None


def test_windows_hold_the_cuts_of_all_valid_splits() -> None:
    """A cut stands exactly where some split into partitions of at most 2 layers puts it."""
    assert cut_windows([2, 3, 4, 5, 5], 3) == ([0, 1, 3, 5], [0, 2, 4, 5])
    assert cut_windows([2, 3, 4, 5, 5], 2) is None
    assert cut_windows([2, 3, 4, 5, 5], 5) == ([0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5])
