"""The table for any cost, against brute force and against the solvers that know more."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import all_bounds

from gpipebal.errors import BalanceError, InfeasibleError
from gpipebal.problem import Problem, Rules
from gpipebal.solvers import split, split_any_cost


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_any_cost_equals_brute_force(data: st.DataObject) -> None:
    """The value is that of trying all splits, for costs without any structure."""
    n_layers = data.draw(st.integers(1, 7))
    n_partitions = data.draw(st.integers(1, n_layers))
    costs = st.one_of(st.integers(-5, 5), st.none())
    table = {
        (start, end, j): data.draw(costs)
        for j in range(n_partitions)
        for start in range(n_layers)
        for end in range(start + 1, n_layers + 1)
    }
    values = {}
    for bounds in all_bounds(n_layers, n_partitions):
        own = [table[start, end, j] for j, (start, end) in enumerate(pairwise(bounds))]
        if None not in own:
            values[bounds] = max(own)  # type: ignore[type-var]

    def cost(first: int, end: int, partition: int) -> int | None:
        return table[first, end, partition]

    if values:
        value, bounds = split_any_cost(cost, n_layers, n_partitions)
        assert value == values[bounds] == min(values.values())
    else:
        with pytest.raises(InfeasibleError, match="no split is allowed"):
            split_any_cost(cost, n_layers, n_partitions)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=30), st.data())
def test_table_agrees_with_bisection(costs: list[int], data: st.DataObject) -> None:
    """For plain sums the table and the bisection give the same bottleneck."""
    problem = Problem.from_costs(costs, data.draw(st.integers(1, len(costs))))
    sums = problem.load_sums
    value, bounds = split_any_cost(
        lambda first, end, _: sums[end] - sums[first], len(costs), problem.n_partitions
    )
    assert value == split(problem, "bottleneck").value == problem.bottleneck(bounds)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"n_partitions": 4}, r"fewer layers than partitions: n_partitions=4"),
        ({"cost": lambda first, end, partition: math.nan}, r"not a number: cost\(1, 3, 1\)=nan"),
        ({"rules": Rules(max_layers=0)}, r"max_layers is too small: max_layers=0"),
        ({"rules": Rules(max_layers="3")}, r"max_layers is too small: max_layers='3'"),
        ({"rules": Rules(min_layers=1.5)}, r"min_layers is too small: min_layers=1.5"),
    ],
)
def test_table_refuses_what_makes_no_sense(change: dict[str, object], message: str) -> None:
    """Counts and costs that are none are refused with their value."""
    arguments: dict[str, object] = {
        "cost": lambda first, end, partition: 1,
        "n_layers": 3,
        "n_partitions": 2,
    }
    with pytest.raises(BalanceError, match=message):
        split_any_cost(**{**arguments, **change})  # type: ignore[arg-type]


def test_rules_are_kept() -> None:
    """No partition is longer than allowed, or begins where it may not, whatever it costs."""
    asked = []

    def cost(first: int, end: int, partition: int) -> int:
        asked.append((first, end, partition))
        return first

    value, bounds = split_any_cost(cost, 6, 3, rules=Rules(max_layers=2))
    assert (value, bounds) == (4, (0, 2, 4, 6))
    assert max(end - first for first, end, _ in asked) == 2
    value, bounds = split_any_cost(cost, 6, 3, rules=Rules(no_cut=[2], pin={3: 1}))
    assert (value, bounds) == (4, (0, 1, 4, 6))


def test_rules_that_leave_no_split_are_named_beside_the_cost() -> None:
    """The cost, which then was not even asked for, is not said to forbid anything."""
    with pytest.raises(InfeasibleError, match="every one breaks a rule, or has a partition whose"):
        split_any_cost(lambda first, end, partition: 1, 6, 2, rules=Rules(max_layers=2))
