"""The front of the solvers: what can be asked for, and what comes back."""

from __future__ import annotations

from typing import Any

import pytest

from gpipebal.errors import BalanceError
from gpipebal.problem import Problem
from gpipebal.solvers import METHODS, Split, select_method, split

CHAIN = ([1, 2, 3, 4], [2, 4, 6, 8], [1, 2, 3, 4])


@pytest.mark.parametrize(
    ("objective", "checkpoint", "chunks", "method"),
    [
        ("bottleneck", "never", 4, "bisection"),
        ("bottleneck", "always", 4, "bisection"),
        ("makespan", "never", 4, "two-threshold sweep"),
        ("makespan", "except_last", 4, "two-threshold sweep"),
        ("makespan", "always", 4, "pareto program"),
        ("makespan", "except_last", 1, "bisection"),
        ("makespan", "always", 1, "bisection"),
    ],
)
def test_select_method_names_what_split_runs(
    objective: Any, checkpoint: Any, chunks: int, method: str
) -> None:
    """The algorithm is known beforehand, may be asked for by name, and is reported."""
    problem = Problem(*CHAIN, 2, chunks, checkpoint)
    assert select_method(problem, objective) == method
    assert method in METHODS
    assert split(problem, objective) == split(problem, objective, method)
    assert split(problem, objective).method == method


def test_split_refuses_unknown_objective() -> None:
    """An objective that does not exist is refused with those that do."""
    problem = Problem(*CHAIN, 2)
    message = (
        r"objective does not exist: objective='speed' "
        r"\(expected one of 'makespan', 'bottleneck', 'peak_memory'\)\.\nFix: objective='makespan'"
    )
    for ask in (split, select_method):
        with pytest.raises(BalanceError, match=message):
            ask(problem, "speed")  # type: ignore[operator]


@pytest.mark.parametrize("method", ["magic", "pareto program", ""])
def test_split_refuses_methods_that_do_not_apply(method: str) -> None:
    """A method that is unknown, or is for other problems, is refused with the one that fits."""
    problem = Problem(*CHAIN, 2, chunks=4)
    message = (
        rf"method does not solve this problem: method='{method}' "
        r"\(expected 'auto' or 'two-threshold sweep' or .* for objective='makespan', "
        r"checkpoint='except_last'; all methods: 'auto', .*\)\.\nFix: method='auto'"
    )
    with pytest.raises(BalanceError, match=message):
        split(problem, "makespan", method)
    assert split(problem, "makespan", "auto").balance == [3, 1]


def test_gap_is_a_fraction_of_the_value() -> None:
    """The gap relates what is not proven to the value, and is 0 where there is no time at all."""
    assert Split((0, 1), 8.0, 6.0, "some").gap == 0.25
    assert Split((0, 1), 0, 0, "some").gap == 0.0
    assert Split((0, 2, 5), 8, 8, "some").balance == [2, 3]


def test_makespan_and_bottleneck_differ() -> None:
    """The best split for the bottleneck is not the best for the makespan."""
    problem = Problem([6, 1, 1, 1, 1, 1], [1, 1, 1, 1, 4, 6], [0] * 6, 2, 10, "never")
    fast, even = split(problem, "makespan"), split(problem, "bottleneck")
    assert fast.bounds != even.bounds
    assert problem.makespan(fast.bounds) < problem.makespan(even.bounds)
    assert problem.bottleneck(fast.bounds) > problem.bottleneck(even.bounds)
