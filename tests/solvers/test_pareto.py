"""The Pareto program on its own, from bad bounds, so that every step of it has work to do."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import brute_force
from solvers.cases import CHAINS

from gpipebal.problem import Problem
from gpipebal.solvers.filling.always import solve_makespan_always
from gpipebal.solvers.filling.paths import solve_all_paths


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    """Draw a chain in which recompute is large, so that any path may decide."""
    n_layers = draw(st.integers(2, 7))

    def times(largest: int) -> Any:
        return draw(st.lists(st.integers(0, largest), min_size=n_layers, max_size=n_layers))

    return Problem(
        times(3),
        times(3),
        times(12),
        n_partitions=draw(st.integers(2, n_layers)),
        chunks=draw(st.integers(2, 4)),
        checkpoint="always",
    )


@settings(max_examples=250, deadline=None)
@given(problems(), st.data())
def test_solve_all_paths_needs_no_good_start(problem: Problem, data: st.DataObject) -> None:
    """Whatever split is known, and without a lower bound, the result is that of brute force."""
    cuts = st.sets(
        st.integers(1, problem.n_layers - 1),
        min_size=problem.n_partitions - 1,
        max_size=problem.n_partitions - 1,
    )
    known = (0, *sorted(data.draw(cuts)), problem.n_layers)
    value, bounds = brute_force(problem, "makespan")
    found = solve_all_paths(problem, 0, known)
    assert found.bounds == bounds
    assert Fraction(found.value, problem.scale) == value
    assert found.lower_bound == found.value


@pytest.mark.parametrize("chunks", [2, 3, 8])
@pytest.mark.parametrize("name", [name for name, chain in CHAINS.items() if chain[3] > 1])
def test_sweep_and_program_agree(name: str, chunks: int) -> None:
    """What the sweep finds with its shortcuts is what the program finds without them."""
    forward, backward, recompute, n_partitions = CHAINS[name]
    problem = Problem(forward, backward, recompute, n_partitions, chunks, "always")
    leftmost = (*range(n_partitions), problem.n_layers)
    assert solve_makespan_always(problem) == solve_all_paths(problem, 0, leftmost)


@pytest.mark.parametrize(("chunks", "n_partitions"), [(2, 4), (2, 8), (3, 6), (8, 8)])
def test_sweep_and_program_agree_on_a_longer_chain(chunks: int, n_partitions: int) -> None:
    """They agree on 40 layers too, where brute force is out of reach."""
    forward = [1 + (17 * layer * layer) % 13 for layer in range(40)]
    backward = [1 + (29 * layer * layer + 7) % 23 for layer in range(40)]
    recompute = [(31 * layer * layer + 3) % 19 for layer in range(40)]
    problem = Problem(forward, backward, recompute, n_partitions, chunks, "always")
    even = tuple(40 * j // n_partitions for j in range(n_partitions + 1))
    assert solve_makespan_always(problem) == solve_all_paths(problem, 0, even)
