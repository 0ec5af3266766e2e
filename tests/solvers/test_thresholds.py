"""The sum of two maxima: values, all optimal pairs, bounds."""

from __future__ import annotations

from itertools import accumulate
from operator import add

from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import dense_sum_of_maxima

from gpipebal.solvers.chain import everywhere, meet, narrowed, reach_limit, reach_within
from gpipebal.solvers.filling.thresholds import smallest_sum


@st.composite
def two_costs(draw: st.DrawFn) -> tuple[list[int], list[int], int]:
    """Draw two costs per layer, and a number of partitions."""
    n_layers = draw(st.integers(1, 10))
    largest = draw(st.sampled_from([1, 3, 50, 2**60]))
    costs = st.lists(st.integers(0, largest), min_size=n_layers, max_size=n_layers)
    return draw(costs), draw(costs), draw(st.integers(1, n_layers))


@settings(max_examples=120, deadline=None)
@given(two_costs())
def test_smallest_sum_equals_table(case: tuple[list[int], list[int], int]) -> None:
    """The value, and every pair of maxima that attains it, are those of trying every limit."""
    first, second, n_partitions = case
    sums = [list(accumulate(costs, initial=0)) for costs in (first, second)]
    found = smallest_sum(*sums, n_partitions, both=list(map(add, *sums)))
    least, pairs = dense_sum_of_maxima(first, second, n_partitions)
    assert found.total == found.lower_bound == least
    assert len(found.pairs) == len(set(found.pairs))
    assert set(found.pairs) == pairs


@settings(max_examples=60, deadline=None)
@given(two_costs(), st.integers(-3, 3))
def test_smallest_sum_gives_up_only_with_a_proof(
    case: tuple[list[int], list[int], int], offset: int
) -> None:
    """Without a pair, the bound exceeds what was asked for, and not what is possible."""
    first, second, n_partitions = case
    sums = [list(accumulate(costs, initial=0)) for costs in (first, second)]
    least, pairs = dense_sum_of_maxima(first, second, n_partitions)
    found = smallest_sum(*sums, n_partitions, both=list(map(add, *sums)), at_most=least + offset)
    if found.pairs:
        assert (found.total, set(found.pairs)) == (least, pairs)
    else:
        assert least + offset < found.lower_bound <= least


def test_smallest_sum_is_certified_where_costs_pull_apart() -> None:
    """On a longer chain, no limit of the first cost leaves room for a smaller sum."""
    first = [(17 * layer * layer) % 101 for layer in range(80)]
    second = [(29 * layer * layer + 7) % 97 for layer in range(80)]
    one, two = (list(accumulate(costs, initial=0)) for costs in (first, second))
    found = smallest_sum(one, two, 6, both=list(map(add, one, two)))
    assert found.total == found.lower_bound
    for limit in range(max(first), found.total - max(second)):
        within = reach_within(one, one, limit)
        rest = found.total - 1 - limit
        reach = meet(within, reach_within(two, two, rest))
        assert narrowed([reach_limit(reach)], everywhere(80, 6)) is None
