"""The tie-break: least squares, leftmost, by table and by price, on plateaus above all."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import accumulate

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import dense_least_squares

from gpipebal.problem import Problem, Rules
from gpipebal.solvers import split
from gpipebal.solvers.bisection import smallest_limit
from gpipebal.solvers.chain import (
    Limit,
    Windows,
    everywhere,
    meet,
    narrowed,
    reach_limit,
    reach_within,
)
from gpipebal.solvers.sets import evenness
from gpipebal.solvers.tiebreak import by_rows, choose, near_even
from gpipebal.solvers.tiebreak.choose import fewest_squares, sum_of_squares
from gpipebal.solvers.tiebreak.narrow import squares_in_windows

#: How to choose each of the three ways.
BY_TABLE = {"_FEW": 10**9}
BY_PRICE = {"_FEW": -1, "_RUNS": -1, "_TABLE_PASSES": -1}
BY_ROWS = {"_FEW": -1, "_RUNS": 10**9, "_TABLE_PASSES": 10**9}


def set_to(patch: pytest.MonkeyPatch, way: dict[str, int]) -> None:
    """Make the tie-break go a way, where numbers allow it."""
    for name, value in way.items():
        patch.setattr(choose, name, value)


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


@pytest.mark.parametrize("wide", [-1, 64])
@pytest.mark.parametrize("way", [BY_TABLE, BY_PRICE, BY_ROWS])
@settings(max_examples=200, deadline=None)
@given(two_costs(), st.floats(0, 1))
def test_fewest_squares_equals_table(
    way: dict[str, int], wide: int, case: tuple[list[int], list[int], int], slack: float
) -> None:
    """All ways find the least sum of squares under any limit, and its leftmost cuts."""
    squared, limited, n_partitions = case
    sums, others = (list(accumulate(costs, initial=0)) for costs in (squared, limited))
    least = smallest_limit(others, others, n_partitions, at_least=max(limited)).value
    limit = Limit(others, others, least + int(slack * max(limited)))
    with pytest.MonkeyPatch.context() as patch:
        set_to(patch, way)
        set_to(patch, {"_WIDE": wide, "_LAYERS": wide})
        bounds = fewest_squares(sums, [limit], n_partitions)
    expected = dense_least_squares(squared, reach_within(*limit), n_partitions)
    assert (sum_of_squares(sums, bounds), bounds) == expected


@pytest.mark.parametrize("heavy", [0, 211, 399])
@pytest.mark.parametrize("n_partitions", [2, 40, 200, 399])
def test_all_ways_agree_where_one_layer_dominates(heavy: int, n_partitions: int) -> None:
    """With cuts free to stand almost anywhere, all ways choose the same split."""
    costs = [(37 * layer * layer) % 11 for layer in range(400)]
    costs[heavy] = 10**6
    sums = list(accumulate(costs, initial=0))
    found = []
    for way in (BY_TABLE, BY_PRICE, BY_ROWS):
        with pytest.MonkeyPatch.context() as patch:
            set_to(patch, way)
            found.append(fewest_squares(sums, [], n_partitions))
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("n_partitions", [1, 2, 3, 7, 8, 15, 16])
@pytest.mark.parametrize("objective", ["makespan", "bottleneck"])
def test_equal_layers_give_the_longer_partitions_last(objective: str, n_partitions: int) -> None:
    """Among equal layers partitions differ by one at most, and leftmost cuts put short first."""
    problem = Problem([2] * 16, [4] * 16, [2] * 16, n_partitions, chunks=8)
    each, more = divmod(16, n_partitions)
    expected = [each] * (n_partitions - more) + [each + 1] * more
    assert split(problem, objective).balance == expected  # type: ignore[arg-type]


@settings(max_examples=100, deadline=None)
@given(
    st.sampled_from([1, 10**9, 2**40, 2**200, 1e300]),
    st.lists(st.sampled_from([0.001, 0.002, 0.003, 0.005, 1, 2]), min_size=5, max_size=5),
)
def test_a_rule_that_forbids_nothing_changes_no_tie(large: float, others: list[float]) -> None:
    """However much larger the first layer is: set methods decide with exact numbers too."""
    zeros = [0] * 6
    problem = Problem([large, *others], zeros, zeros, 3, 1, "never")
    ruled = replace(problem, rules=Rules(pin={0: 0}))
    by_sets, found = split(ruled, "bottleneck"), split(problem, "bottleneck")
    assert (by_sets.method, found.method) == ("set bisection", "bisection")
    assert by_sets.bounds == found.bounds


def test_very_many_splits_within_rounding_are_left_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then the tie is decided by rounded squares, and nothing else changes."""
    zeros = [0] * 6
    times = [10**9, 0.002, 0.001, 0.003, 0.001, 0.005]
    problem = Problem(times, zeros, zeros, 3, 1, "never", rules=Rules(pin={0: 0}))
    assert split(problem, "bottleneck").bounds == (0, 1, 4, 6)
    monkeypatch.setattr(evenness, "_MOST_RUNS", 1)
    late = split(problem, "bottleneck")
    assert (late.bounds, late.status) == ((0, 1, 2, 6), "optimal")


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


@pytest.mark.parametrize("rows", [False, True])
@pytest.mark.parametrize("shares", [0, 8])
@pytest.mark.parametrize("at_hand", [1, 1 << 15])
@settings(max_examples=300, deadline=None)
@given(heavy_costs(), st.booleans())
def test_windows_near_even_places_hold_the_best_split(
    rows: bool, shares: int, at_hand: int, case: tuple[list[int], int], tight: bool
) -> None:
    """Whatever is left out for being too uneven, the split that is best of all is not."""
    costs, n_partitions = case
    sums = list(accumulate(costs, initial=0))
    least = smallest_limit(sums, sums, n_partitions, at_least=0).value
    limit = Limit(sums, sums, least if tight else sums[-1])
    with pytest.MonkeyPatch.context() as patch:
        set_to(patch, {**BY_ROWS, "_WIDE": -1, "_LAYERS": -1})
        if not rows:
            patch.setattr(choose, "fits", lambda *_: False)
        patch.setattr(near_even, "_MOST_SHARES", shares)
        patch.setattr(by_rows, "_AT_HAND", at_hand)
        bounds = fewest_squares(sums, [limit], n_partitions)
    expected = dense_least_squares(costs, reach_within(*limit), n_partitions)
    assert (sum_of_squares(sums, bounds), bounds) == expected


@pytest.mark.parametrize("heavy", [0, 150, 299])
def test_windows_near_even_places_are_narrow(heavy: int) -> None:
    """Where one layer dominates a long chain, few places are left of those that are allowed."""
    costs = [1 + (37 * layer * layer) % 11 for layer in range(300)]
    costs[heavy] = 10**4
    sums = list(accumulate(costs, initial=0))
    windows = Windows([*range(8), 300], [0, *range(293, 301)])
    even = near_even.near_even(sums, [], windows)
    found = near_even.near_even_windows(sums, [], windows, even)
    places = sum(end - start for pair in found for start, end in zip(*pair, strict=True))
    assert 0 < places < 300


@pytest.mark.parametrize("shift", [0, 20, 40, 55])
@settings(max_examples=100, deadline=None)
@given(heavy_costs(), heavy_costs(), st.integers(0, 30), st.booleans())
def test_rows_find_the_best_split_close_to_the_largest_numbers(
    shift: int, case: tuple[list[int], int], other: tuple[list[int], int], slack: int, listed: bool
) -> None:
    """Numbers that only just fit are not mixed up, nor are those that do not; with two limits."""
    costs = [cost << shift for cost in case[0]]
    others = [other[0][k % len(other[0])] for k in range(len(costs))]
    sums, other_sums = (list(accumulate(each, initial=0)) for each in (costs, others))
    least = smallest_limit(sums, sums, case[1], at_least=0).value
    limit = Limit(sums, sums, least + (slack << shift) * 100)
    second = smallest_limit(other_sums, other_sums, case[1], at_least=0, limits=[limit]).value
    limits = [limit, Limit(other_sums, other_sums, second)]
    reach = meet(*[reach_within(*limit) for limit in limits])
    if listed:
        limits = [reach_limit(reach)]
    with pytest.MonkeyPatch.context() as patch:
        set_to(patch, BY_ROWS)
        bounds = fewest_squares(sums, limits, case[1])
    expected = dense_least_squares(costs, reach, case[1])
    assert (sum_of_squares(sums, bounds), bounds) == expected


@pytest.mark.parametrize("seed", range(20))
def test_places_that_lead_nowhere_are_not_taken(seed: int) -> None:
    """With windows wider than the known split is even, no partition may begin at some places."""
    rng = random.Random(seed)
    costs = [round(1e6 * rng.expovariate(1.0)) for _ in range(1000)]
    sums = list(accumulate(costs, initial=0))
    n_partitions = rng.choice([10, 25, 50])
    least = smallest_limit(sums, sums, n_partitions, at_least=0).value
    limits = [Limit(sums, sums, least)]
    found = narrowed(limits, everywhere(1000, n_partitions))
    assert found is not None
    even = near_even.near_even(sums, limits, found)
    by_row = by_rows.squares_by_rows(sums, limits, found, even, 10**9)
    assert by_row == squares_in_windows(sums, limits, found)


@pytest.mark.parametrize("loose", [1.0, 1.02, 1.1, 1.5])
@pytest.mark.parametrize("n_partitions", [20, 60, 110])
@pytest.mark.parametrize("shift", [0, 10])
def test_rows_and_table_agree_on_long_chains(shift: int, n_partitions: int, loose: float) -> None:
    """Places from which no even partition begins lead nowhere, however large the numbers are."""
    rng = random.Random(f"{n_partitions} {loose}")
    costs = [round(1e6 * rng.expovariate(1.0)) << shift for _ in range(900)]
    sums = list(accumulate(costs, initial=0))
    least = smallest_limit(sums, sums, n_partitions, at_least=0).value
    limit = Limit(sums, sums, int(least * loose))
    found = []
    for way in (BY_TABLE, BY_ROWS, {**BY_ROWS, "_WIDE": -1, "_LAYERS": -1}):
        with pytest.MonkeyPatch.context() as patch:
            set_to(patch, way)
            found.append(fewest_squares(sums, [limit], n_partitions))
    assert found[0] == found[1] == found[2]
