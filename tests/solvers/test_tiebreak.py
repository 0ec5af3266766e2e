"""The tie-break: least squares, leftmost, by table and by price, on plateaus above all."""

from __future__ import annotations

from itertools import accumulate

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import dense_least_squares

from gpipebal.problem import Problem
from gpipebal.solvers import split, tiebreak
from gpipebal.solvers.bisection import smallest_limit
from gpipebal.solvers.chain import Limit, reach_within
from gpipebal.solvers.near_even import near_even_windows
from gpipebal.solvers.tiebreak import fewest_squares, sum_of_squares

#: How many table entries per layer are too many: never, always.
BY_TABLE, BY_PRICE = 10**9, -1


@st.composite
def two_costs(draw: st.DrawFn) -> tuple[list[int], list[int], int]:
    """Draw what is squared, what is limited, and a number of partitions."""
    n_layers = draw(st.integers(1, 14))

    def costs() -> list[int]:
        largest = draw(st.sampled_from([1, 3, 100, 2**60]))
        return draw(st.lists(st.integers(0, largest), min_size=n_layers, max_size=n_layers))

    squared = costs()
    return (
        squared,
        draw(st.one_of(st.just(squared), st.just(costs()))),
        draw(st.integers(1, n_layers)),
    )


@pytest.mark.parametrize("passes", [BY_TABLE, BY_PRICE])
@settings(max_examples=200, deadline=None)
@given(two_costs(), st.floats(0, 1))
def test_fewest_squares_equals_table(
    passes: int, case: tuple[list[int], list[int], int], slack: float
) -> None:
    """Both ways find the least sum of squares under any limit, and its leftmost cuts."""
    squared, limited, n_partitions = case
    sums, others = (list(accumulate(costs, initial=0)) for costs in (squared, limited))
    least = smallest_limit(others, others, n_partitions, at_least=max(limited)).value
    limit = Limit(others, others, least + int(slack * max(limited)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiebreak, "_TABLE_PASSES", passes)
        bounds = fewest_squares(sums, [limit], n_partitions)
    expected = dense_least_squares(squared, reach_within(*limit), n_partitions)
    assert (sum_of_squares(sums, bounds), bounds) == expected


@pytest.mark.parametrize("heavy", [0, 211, 399])
@pytest.mark.parametrize("n_partitions", [2, 40, 200, 399])
def test_table_and_prices_agree_where_one_layer_dominates(heavy: int, n_partitions: int) -> None:
    """With cuts free to stand almost anywhere, both ways choose the same split."""
    costs = [(37 * layer * layer) % 11 for layer in range(400)]
    costs[heavy] = 10**6
    sums = list(accumulate(costs, initial=0))
    found = []
    for passes in (BY_TABLE, BY_PRICE):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tiebreak, "_TABLE_PASSES", passes)
            found.append(fewest_squares(sums, [], n_partitions))
    assert found[0] == found[1]


@pytest.mark.parametrize("n_partitions", [1, 2, 3, 7, 8, 15, 16])
@pytest.mark.parametrize("objective", ["makespan", "bottleneck"])
def test_equal_layers_give_the_longer_partitions_last(objective: str, n_partitions: int) -> None:
    """Among equal layers partitions differ by one at most, and leftmost cuts put short first."""
    problem = Problem([2] * 16, [4] * 16, [2] * 16, n_partitions, chunks=8)
    each, more = divmod(16, n_partitions)
    expected = (each,) * (n_partitions - more) + (each + 1,) * more
    assert split(problem, objective).balance == expected  # type: ignore[arg-type]


def test_one_chunk_leaves_everything_to_the_tie_break() -> None:
    """With one chunk every split has the same makespan, and the most even one is chosen."""
    problem = Problem([5, 1, 1, 1, 4, 4], [0] * 6, [0] * 6, 3, chunks=1)
    assert split(problem, "makespan").bounds == split(problem, "bottleneck").bounds


def test_makespan_prefers_the_smaller_bottleneck_among_optimal_pairs() -> None:
    """Where several pairs of maxima are optimal, the split with the best bottleneck is taken."""
    problem = Problem([5, 3, 1, 5, 5], [5, 2, 5, 5, 1], [0] * 5, 2, chunks=4, checkpoint="never")
    # Largest forward 11 and backward 11, or 10 and 12.
    assert problem.makespan((0, 2, 5)) == problem.makespan((0, 3, 5)) == 103
    assert problem.bottleneck((0, 2, 5)) == 22
    assert problem.bottleneck((0, 3, 5)) == 21
    assert split(problem, "makespan").bounds == (0, 3, 5)


@st.composite
def heavy_costs(draw: st.DrawFn) -> tuple[list[int], int]:
    """Draw light layers with up to four heavy ones among them, and a number of partitions."""
    costs = draw(st.lists(st.integers(0, draw(st.sampled_from([1, 9, 1000]))), max_size=60))
    for _ in range(draw(st.integers(0 if costs else 1, 4))):
        place = draw(st.integers(0, len(costs)))
        costs.insert(place, draw(st.integers(1, 5000)))
    return costs, draw(st.integers(1, len(costs)))


@settings(max_examples=300, deadline=None)
@given(heavy_costs(), st.booleans())
def test_windows_near_even_places_hold_the_best_split(
    case: tuple[list[int], int], tight: bool
) -> None:
    """Whatever is left out for being too uneven, the split that is best of all is not."""
    costs, n_partitions = case
    sums = list(accumulate(costs, initial=0))
    least = smallest_limit(sums, sums, n_partitions, at_least=0).value
    limit = Limit(sums, sums, least if tight else sums[-1])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiebreak, "_WIDE", -1)
        patch.setattr(tiebreak, "_TABLE_PASSES", BY_TABLE)
        bounds = fewest_squares(sums, [limit], n_partitions)
    expected = dense_least_squares(costs, reach_within(*limit), n_partitions)
    assert (sum_of_squares(sums, bounds), bounds) == expected


@pytest.mark.parametrize("heavy", [0, 150, 299])
def test_windows_near_even_places_are_narrow(heavy: int) -> None:
    """Where one layer dominates a long chain, few places are left of those that are allowed."""
    costs = [1 + (37 * layer * layer) % 11 for layer in range(300)]
    costs[heavy] = 10**4
    sums = list(accumulate(costs, initial=0))
    everywhere = [*range(8), 300], [0, *range(293, 301)]
    found = near_even_windows(sums, [], *everywhere)
    places = sum(end - start for pair in found for start, end in zip(*pair, strict=True))
    assert 0 < places < 300
