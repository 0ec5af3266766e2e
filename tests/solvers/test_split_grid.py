"""All objectives and modes on all named chains and on drawn ones, against brute force."""

from __future__ import annotations

from typing import Any

import pytest
from examples import examples
from hypothesis import example, given, settings
from hypothesis import strategies as st
from oracles import brute_force, rank
from solvers.cases import CHAINS, Chain

from gpipebal.problem import Problem
from gpipebal.solvers import select_method, split

MODES = ("never", "except_last", "always")
#: The objectives that need nothing but times.
OBJECTIVES = ("makespan", "bottleneck")
GRID = [
    (objective, checkpoint, chunks)
    for objective in OBJECTIVES
    for checkpoint in MODES
    for chunks in (1, 2, 8)
]


def check(problem: Problem, objective: Any) -> None:
    """Assert that a split is the one that brute force finds, and says the truth about itself."""
    value, bounds = brute_force(problem, objective)
    best = split(problem, objective)
    assert best.bounds == bounds
    assert best.value == float(value)
    assert best.value == getattr(problem, objective)(bounds)
    assert best.lower_bound == best.value
    assert best.status == "optimal"
    assert best.gap == 0
    assert best.method == select_method(problem, objective)
    assert sum(best.balance) == problem.n_layers
    assert len(best.balance) == problem.n_partitions
    assert min(best.balance) >= 1


@pytest.mark.parametrize("name", CHAINS)
@pytest.mark.parametrize(("objective", "checkpoint", "chunks"), GRID)
def test_split_equals_brute_force(objective: str, checkpoint: Any, chunks: int, name: str) -> None:
    """Value, bound and tie-break are those of trying all splits and simulating each."""
    forward, backward, recompute, n_partitions = CHAINS[name]
    problem = Problem(forward, backward, recompute, n_partitions, chunks, checkpoint)
    check(problem, objective)


def _layers(n_layers: int) -> st.SearchStrategy[list[float]]:
    """Draw times: many ties, many zeros, floats, or one that dominates."""

    def sized(times: st.SearchStrategy[Any]) -> st.SearchStrategy[list[float]]:
        return st.lists(times, min_size=n_layers, max_size=n_layers)

    return st.one_of(
        sized(st.integers(0, 2)),
        sized(st.integers(0, 30)),
        sized(st.sampled_from([0, 0, 1, 40])),
        sized(st.floats(0, 1, allow_subnormal=False)),
    )


@st.composite
def problems(draw: st.DrawFn, checkpoints: tuple[str, ...] = MODES) -> Problem:
    """Draw a problem small enough for brute force."""
    n_layers = draw(st.integers(1, 7))
    return Problem(
        draw(_layers(n_layers)),
        draw(_layers(n_layers)),
        draw(_layers(n_layers)),
        n_partitions=draw(st.integers(1, n_layers)),
        chunks=draw(st.integers(1, 6)),
        checkpoint=draw(st.sampled_from(checkpoints)),  # type: ignore[arg-type]
    )


def _example(chain: Chain) -> Problem:
    """Make the problem of a chain whose first path decides."""
    return Problem(*chain, chunks=2, checkpoint="always")


@settings(max_examples=examples(400), deadline=None)
@example(_example(CHAINS["long recompute, short tail"]), "makespan")
@example(_example(CHAINS["middle path decides"]), "makespan")
@given(problems(), st.sampled_from(OBJECTIVES))
def test_split_equals_brute_force_on_drawn_chains(problem: Problem, objective: str) -> None:
    """Value, bound and tie-break are exact on any chain, in any mode."""
    check(problem, objective)


@settings(max_examples=examples(250), deadline=None)
@given(problems(("always",)))
def test_split_equals_brute_force_with_recompute_throughout(problem: Problem) -> None:
    """Value, bound and tie-break are exact in the mode whose makespan has most terms."""
    check(problem, "makespan")


@settings(max_examples=examples(80), deadline=None)
@given(problems(), st.sampled_from([3, 2.0**-30, 2.0**30]))
def test_scaling_all_times_scales_the_value(problem: Problem, factor: float) -> None:
    """Another unit of time changes the value by the same factor, and no cut."""
    scaled = Problem(
        *([factor * time for time in times] for times in _times(problem)),
        problem.n_partitions,
        problem.chunks,
        problem.checkpoint,
    )
    # Multiplying floats by 3 rounds, so only powers of two are compared there.
    if factor == 3 and any(isinstance(time, float) for times in _times(problem) for time in times):
        return
    for objective in OBJECTIVES:
        before, after = split(problem, objective), split(scaled, objective)
        assert after.bounds == before.bounds
        assert after.value == pytest.approx(factor * before.value, rel=1e-15)


@settings(max_examples=examples(80), deadline=None)
@given(problems())
def test_reversing_the_chain_keeps_the_value(problem: Problem) -> None:
    """The bottleneck, and all makespans but that of 'always', do not care for direction."""
    mirrored = Problem(
        *(times[::-1] for times in _times(problem)),
        problem.n_partitions,
        problem.chunks,
        problem.checkpoint,
    )
    assert split(mirrored, "bottleneck").value == split(problem, "bottleneck").value
    if problem.checkpoint != "always":
        assert split(mirrored, "makespan").value == split(problem, "makespan").value


@settings(max_examples=examples(80), deadline=None)
@given(problems(("never", "except_last")))
def test_one_partition_more_never_hurts(problem: Problem) -> None:
    """With another device, neither bottleneck nor makespan gets longer."""
    if problem.n_partitions == problem.n_layers:
        return
    more = Problem(*_times(problem), problem.n_partitions + 1, problem.chunks, problem.checkpoint)
    for objective in OBJECTIVES:
        assert split(more, objective).value <= split(problem, objective).value


@settings(max_examples=examples(80), deadline=None)
@given(problems(), st.integers(0, 7))
def test_a_layer_that_costs_nothing_keeps_the_bottleneck(problem: Problem, place: int) -> None:
    """A layer without any time, wherever it stands, changes no bottleneck."""
    longer = Problem(
        *((*times[:place], 0, *times[place:]) for times in _times(problem)),
        problem.n_partitions,
        problem.chunks,
        problem.checkpoint,
    )
    assert split(longer, "bottleneck").value == split(problem, "bottleneck").value


@settings(max_examples=examples(80), deadline=None)
@given(problems(("never", "except_last")), st.integers(0, 6))
def test_splitting_a_layer_never_hurts(problem: Problem, layer: int) -> None:
    """One more place to cut makes neither bottleneck nor makespan longer."""
    layer %= problem.n_layers
    finer = Problem(
        *(
            (*times[:layer], times[layer] / 2, times[layer] / 2, *times[layer + 1 :])
            for times in _times(problem)
        ),
        problem.n_partitions,
        problem.chunks,
        problem.checkpoint,
    )
    for objective in OBJECTIVES:
        assert split(finer, objective).value <= split(problem, objective).value


def _times(problem: Problem) -> tuple[Any, Any, Any]:
    """Return the three columns of times."""
    return problem.forward, problem.backward, problem.recompute


def test_rank_orders_by_makespan_before_bottleneck() -> None:
    """The oracle itself: the same split has one rank per objective."""
    problem = Problem([1, 2], [2, 4], [1, 2], 2, chunks=2)
    assert rank(problem, "makespan", (0, 1, 2)) == (3 + 2 + 6 + 6, 8, 4**2 + 8**2, (0, 1, 2))
    assert rank(problem, "bottleneck", (0, 1, 2)) == (8, 8, 80, (0, 1, 2))
