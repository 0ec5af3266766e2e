"""What a split costs: formulas against simulation, exact arithmetic, errors that teach."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import event_makespan, rank

from gpipebal.errors import BalanceError, GpipebalError
from gpipebal.problem import Problem, to_balance, to_bounds

MODES = ("never", "except_last", "always")
TIMES = st.one_of(st.integers(0, 9), st.floats(0, 1e3, allow_subnormal=False))


@st.composite
def problems_and_bounds(draw: st.DrawFn) -> tuple[Problem, tuple[int, ...]]:
    """Draw a problem of up to 7 layers, and a split of it."""
    n_layers = draw(st.integers(1, 7))
    times = st.lists(TIMES, min_size=n_layers, max_size=n_layers)
    places = st.sets(st.integers(1, n_layers - 1)) if n_layers > 1 else st.just(set())
    bounds = (0, *sorted(draw(places)), n_layers)
    problem = Problem(
        draw(times),
        draw(times),
        draw(times),
        n_partitions=len(bounds) - 1,
        chunks=draw(st.integers(1, 6)),
        checkpoint=draw(st.sampled_from(MODES)),
    )
    return problem, bounds


@settings(max_examples=300, deadline=None)
@given(problems_and_bounds())
def test_makespan_equals_event_simulation(case: tuple[Problem, tuple[int, ...]]) -> None:
    """The makespan of every mode equals, exactly, that of simulating every action."""
    problem, bounds = case
    value, bottleneck, _, _ = rank(problem, "makespan", bounds)
    assert Fraction(problem.exact_makespan(bounds), problem.scale) == value
    assert Fraction(problem.exact_bottleneck(bounds), problem.scale) == bottleneck
    assert problem.makespan(bounds) == float(value)
    assert problem.bottleneck(bounds) == float(bottleneck)


@pytest.mark.parametrize(
    ("checkpoint", "chunks", "makespan", "bottleneck"),
    [
        ("never", 4, 7 + 3 * 4 + 14 + 3 * 8, 12),
        ("except_last", 4, 7 + 3 * 4 + 14 + 3 * 12, 16),
        ("always", 4, 7 + 3 * 4 + 3 + 14 + 3 * 12, 16),
        ("never", 1, 21, 12),
        ("except_last", 1, 21, 12),
        ("always", 1, 7 + 3 + 14, 16),
    ],
)
def test_makespan_by_hand(checkpoint: Any, chunks: int, makespan: int, bottleneck: int) -> None:
    """Partitions of 4 + 8 and 3 + 6 cost what the table of formulas says."""
    problem = Problem([1, 3, 3], [2, 6, 6], [1, 3, 3], 2, chunks, checkpoint)
    assert problem.makespan((0, 2, 3)) == makespan
    assert problem.bottleneck((0, 2, 3)) == bottleneck


def test_makespan_always_may_be_decided_by_an_earlier_partition() -> None:
    """Where the first partition recomputes for longer than all others work, its path decides."""
    problem = Problem([5, 1], [5, 1], [9, 1], 2, chunks=2, checkpoint="always")
    last_path = 6 + 5 + 1 + 6 + 14
    first_path = 5 + 5 + 9 + 5 + 14
    assert problem.makespan((0, 1, 2)) == first_path > last_path


def test_makespan_of_one_partition_is_serial() -> None:
    """One partition does everything one after the other."""
    problem = Problem([1, 2], [3, 4], [1, 2], 1, chunks=3)
    assert problem.makespan((0, 2)) == 3 * (3 + 7) + 2 * 3
    assert event_makespan([Fraction(3)], [Fraction(7)], [Fraction(3)], 3, "except_last") == 36


def test_sums_of_floats_are_exact() -> None:
    """Splits that cost the same as real numbers compare equal, whatever the order of adding."""
    times = [0.1, 0.2, 0.3, 0.3, 0.2, 0.1]
    problem = Problem.from_costs(times, 2)
    assert times[0] + times[1] + times[2] != times[3] + times[4] + times[5]
    assert problem.exact_bottleneck((0, 3, 6)) * 2 == problem.load_sums[-1]
    assert problem.load_sums[-1] == sum(map(Fraction, times)) * problem.scale


def test_scale_is_one_power_of_two() -> None:
    """All times are multiplied by the smallest power of two that makes them integers."""
    problem = Problem([0.75, 3], [2.0**-60, 0], [5e-324, 1e300], 1)
    assert problem.scale == 2**1074
    assert Problem([0.75], [0.5], [1], 1).scale == 4
    assert Problem([3], [4], [5], 1).scale == 1


def test_ints_stay_ints() -> None:
    """Times that are all ints give ints, however large."""
    problem = Problem([10**400, 1], [1, 1], [0, 0], 2, checkpoint="never")
    assert problem.makespan((0, 1, 2)) == 10**400 + 3
    assert isinstance(Problem([1, 2], [1, 2], [0, 0], 2).bottleneck((0, 1, 2)), int)
    assert isinstance(Problem([1, 2.0], [1, 2], [0, 0], 2).bottleneck((0, 1, 2)), float)


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.float32, np.float64])
def test_arrays_are_taken(dtype: type) -> None:
    """Arrays of numbers are as good as lists, and become plain numbers."""
    times = np.array([1, 2, 3], dtype=dtype)
    problem = Problem(times, times, times, np.int64(2))
    assert problem == Problem([1, 2, 3], [1, 2, 3], [1, 2, 3], 2)
    assert {type(time) for time in problem.forward} <= {int, float}
    assert type(problem.n_partitions) is int


@pytest.mark.parametrize(
    ("checkpoint", "chunks", "recompute"),
    [("never", 4, 0), ("except_last", 1, 0), ("except_last", 2, 5), ("always", 1, 5)],
)
def test_recompute_counts_where_something_is_recomputed(
    checkpoint: Any, chunks: int, recompute: int
) -> None:
    """Recompute times count unless no micro-batch that exists is recomputed."""
    problem = Problem([1, 1], [2, 2], [5, 5], 2, chunks, checkpoint)
    assert problem.has_recomputes == bool(recompute)
    parts = problem.costs.parts((0, 1, 2))
    assert [max(part.recompute, part.last_recompute) for part in parts] == [recompute] * 2


def test_balance_and_bounds_are_inverse() -> None:
    """Bounds are the running sums of a balance, and a balance the differences of bounds."""
    assert to_bounds([2, 1, 3]) == (0, 2, 3, 6)
    assert to_balance((0, 2, 3, 6)) == [2, 1, 3]


def _problem(**changes: Any) -> Problem:
    """Make a small problem with some arguments changed."""
    arguments: dict[str, Any] = {
        "forward": [1, 2, 3],
        "backward": [2, 4, 6],
        "recompute": [1, 2, 3],
        "n_partitions": 2,
    }
    return Problem(**{**arguments, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"forward": [], "backward": [], "recompute": []},
            r"chain has no layers: len\(forward\)=0 \(expected 1 or more\)\.\nFix: ",
        ),
        (
            {"backward": [1, 2]},
            r"backward and forward differ in length: len\(backward\)=2 "
            r"\(expected len\(forward\)=3\)\.\nFix: give 3 backward times",
        ),
        ({"recompute": [1] * 4}, r"recompute and forward differ in length: len\(recompute\)=4"),
        (
            {"forward": [1, -2, 3]},
            r"forward time of layer 1 is not a time: forward\[1\]=-2 "
            r"\(expected a finite number, 0 or more\)\.\nFix: ",
        ),
        ({"backward": [1, 2, float("nan")]}, r"backward time of layer 2 .* backward\[2\]=nan"),
        ({"recompute": [float("inf"), 2, 3]}, r"recompute time of layer 0 .*=inf"),
        ({"forward": [1, True, 3]}, r"forward\[1\]=True"),
        ({"forward": [1, "2", 3]}, r"forward\[1\]='2'"),
        ({"forward": [1, None, 3]}, r"forward\[1\]=None"),
        ({"forward": [1, 2j, 3]}, r"forward\[1\]=2j"),
        ({"forward": iter([1, -2, 3])}, r"forward\[1\]=-2"),
        ({"n_partitions": 0}, r"n_partitions is too small: n_partitions=0 \(expected 1"),
        ({"n_partitions": True}, r"n_partitions is not a whole number: n_partitions=True"),
        ({"chunks": 0}, r"chunks is too small: chunks=0 .*\.\nFix: chunks=1"),
        ({"chunks": -1}, r"chunks is too small: chunks=-1"),
        ({"chunks": 1.5}, r"chunks is not a whole number: chunks=1\.5"),
        (
            {"n_partitions": 4},
            r"fewer layers than partitions: n_partitions=4 \(expected 1 <= n_partitions <= 3",
        ),
        (
            {"checkpoint": "sometimes"},
            r"checkpoint mode does not exist: checkpoint='sometimes' "
            r"\(expected one of 'always', 'except_last', 'never'\)",
        ),
        ({"forward": [1e308, 1e308, 1.0]}, r"times are too large to be added: .*=1e\+308"),
    ],
)
def test_bad_problem_says_what_is_wrong(changes: dict[str, Any], message: str) -> None:
    """Whatever makes no sense is refused with its name, its value and the rule that it breaks."""
    with pytest.raises(BalanceError, match=f"(?s){message}") as raised:
        _problem(**changes)
    assert isinstance(raised.value, GpipebalError | ValueError)
    assert "\nFix: " in str(raised.value)


def test_suggested_number_of_partitions_works() -> None:
    """The number of partitions that the error suggests is accepted."""
    with pytest.raises(BalanceError, match="Fix: n_partitions=3") as raised:
        _problem(n_partitions=7)
    suggested = re.search(r"Fix: n_partitions=(\d+)", str(raised.value))
    assert suggested is not None
    assert _problem(n_partitions=int(suggested[1])).bottleneck((0, 1, 2, 3)) == 9


@pytest.mark.parametrize(
    "bounds", [(), (0, 3), (0, 1, 2), (1, 2, 3), (0, 0, 3), (0, 3, 3), (0, 4, 3), (0, 1, 2, 3)]
)
def test_bad_bounds_are_refused_and_the_fix_works(bounds: tuple[int, ...]) -> None:
    """Bounds that do not split the chain are refused, with some that do."""
    problem = _problem()
    for method in (problem.bottleneck, problem.makespan):
        with pytest.raises(BalanceError, match="bounds do not split the chain") as raised:
            method(bounds)
        suggested = re.search(r"Fix: such as bounds=\(([\d, ]+)\)", str(raised.value))
        assert suggested is not None
        method([int(bound) for bound in suggested[1].split(",")])


def test_problem_is_immutable_and_comparable() -> None:
    """A problem is a value: frozen, hashable, equal to one with the same times."""
    assert _problem() == _problem(forward=(1, 2, 3))
    assert hash(_problem()) == hash(_problem())
    with pytest.raises(AttributeError, match="chunks"):
        _problem().chunks = 2  # type: ignore[misc]
