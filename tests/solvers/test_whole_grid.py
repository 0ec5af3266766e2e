"""Devices, links, memory, rules and modes in any combination, against brute force."""

from __future__ import annotations

from fractions import Fraction
from itertools import islice
from typing import Any

import pytest
from examples import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from solvers.whole_cases import whole_problems
from solvers.whole_oracle import Candidate, candidates

from gpipebal.errors import InfeasibleError
from gpipebal.problem import Problem
from gpipebal.solvers import METHODS, Split, iter_best_splits, select_method, split

#: Brute force over cuts, modes and orders takes as long as it takes where other work runs too.
pytestmark = pytest.mark.timeout(600)

SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large]


def value_of(candidate: Candidate, objective: str) -> Fraction:
    """Return what is minimised."""
    if objective == "peak_memory":
        return Fraction(candidate.peak)
    return getattr(candidate, objective)  # type: ignore[no-any-return]


def check_split(problem: Problem, found: Split, objective: str, best: list[Candidate]) -> None:
    """Assert that a split is among the best, and says the truth about itself."""
    least = value_of(best[0], objective)
    if found.method == "integer program":
        tolerance = 3e-6 * float(least)
        assert float(least) <= found.value <= float(least) + tolerance
        assert found.value - tolerance <= found.lower_bound <= float(least) * (1 + 1e-12)
    elif found.status == "feasible":
        # Only where a partition in the middle may show its last recompute.
        assert objective == "makespan" and (problem.checkpoint == "auto" or "always" in found.modes)
        assert found.lower_bound <= float(least) <= found.value
        return
    else:
        assert found.value == found.lower_bound == float(least)
    if objective != "peak_memory":
        again = getattr(problem, objective)(found.bounds, found.modes, found.order)
        assert again == found.value
    assert (
        any(
            (found.bounds, found.modes) == (one.bounds, one.modes)
            and _kinds(problem, found.order) == _kinds(problem, one.order)
            for one in best
        )
        or found.method == "integer program"
    )


def _kinds(problem: Problem, order: tuple[int, ...]) -> list[Any]:
    """Name the kinds of devices: equal ones may change places."""
    return [problem.devices[device] if problem.devices else None for device in order]


def best_of(problem: Problem, objective: str) -> list[Candidate]:
    """List all candidates with the least value; none if nothing is allowed."""
    found = list(candidates(problem))
    least = min((value_of(one, objective) for one in found), default=None)
    return [one for one in found if value_of(one, objective) == least]


@settings(max_examples=examples(400), deadline=None, suppress_health_check=SLOW)
@given(whole_problems(), st.sampled_from(["makespan", "bottleneck"]))
def test_split_equals_brute_force_over_everything(problem: Problem, objective: Any) -> None:
    """The value is that of trying all cuts, modes and orders, and simulating devices and links."""
    best = best_of(problem, objective)
    assert select_method(problem, objective) in METHODS
    if not best:
        with pytest.raises(InfeasibleError, match=r"(?s)\(expected .*\)\.\nFix: "):
            split(problem, objective)
        return
    found = split(problem, objective)
    assert found.method == select_method(problem, objective)
    check_split(problem, found, objective, best)


@settings(max_examples=examples(150), deadline=None, suppress_health_check=SLOW)
@given(whole_problems(always=False), st.sampled_from(["set bisection", "set sweep", "box search"]))
def test_general_methods_agree_with_brute_force(problem: Problem, method: str) -> None:
    """Methods that are asked for by name, though faster ones apply, give the same value."""
    objective: Any = "bottleneck" if method == "set bisection" else "makespan"
    best = best_of(problem, objective)
    if not best:
        return
    try:
        found = split(problem, objective, method)
    except ValueError as error:
        assert "method does not solve this problem" in str(error)
        return
    check_split(problem, found, objective, best)


@settings(max_examples=examples(100), deadline=None, suppress_health_check=SLOW)
@given(whole_problems())
def test_box_search_bounds_what_recomputes_all(problem: Problem) -> None:
    """With every micro-batch recomputed somewhere, box search finds the best, or a true bound."""
    best = best_of(problem, "makespan")
    if not best or not {"auto", "always"} & {problem.checkpoint, *problem.checkpoint}:
        return
    try:
        found = split(problem, "makespan", "box search")
    except ValueError as error:
        assert "method does not solve this problem" in str(error)
        return
    check_split(problem, found, "makespan", best)


@settings(max_examples=examples(60), deadline=None, suppress_health_check=SLOW)
@given(whole_problems(largest=5), st.sampled_from(["makespan", "bottleneck"]))
def test_integer_program_agrees_with_brute_force(problem: Problem, objective: Any) -> None:
    """HiGHS finds the least value within its tolerance, and its bound holds."""
    best = best_of(problem, objective)
    if not best:
        return
    check_split(problem, split(problem, objective, "integer program"), objective, best)


@settings(max_examples=examples(150), deadline=None, suppress_health_check=SLOW)
@given(whole_problems(always=False, floats=False))
def test_ties_are_broken_as_without_limits(problem: Problem) -> None:
    """Where the rule holds, it is: value, bottleneck, sum of squares, leftmost cuts."""
    for objective in ("makespan", "bottleneck"):
        best = best_of(problem, objective)
        if not best or select_method(problem, objective) not in ("set bisection", "set sweep"):
            continue
        expected = min(best, key=lambda one: (one.bottleneck, one.squares, one.bounds))
        found = split(problem, objective)
        assert problem.bottleneck(found.bounds, found.modes, found.order) == expected.bottleneck
        assert found.bounds == expected.bounds


@settings(max_examples=examples(100), deadline=None, suppress_health_check=SLOW)
@given(whole_problems())
def test_peak_memory_equals_brute_force(problem: Problem) -> None:
    """The least peak is that of trying all cuts and modes."""
    if problem.memory is None:
        with pytest.raises(ValueError, match="peak memory of partitions is not known"):
            split(problem, "peak_memory")
        return
    best = best_of(problem, "peak_memory")
    if best:
        check_split(problem, split(problem, "peak_memory"), "peak_memory", best)


@settings(max_examples=examples(80), deadline=None, suppress_health_check=SLOW)
@given(whole_problems(always=False, largest=5), st.integers(1, 6))
def test_best_splits_equal_the_head_of_all(problem: Problem, k: int) -> None:
    """The k best splits have the k least values, and no bounds twice."""
    for objective in ("makespan", "bottleneck"):
        least: dict[tuple[int, ...], Fraction] = {}
        for one in candidates(problem):
            value = value_of(one, objective)
            least[one.bounds] = min(least.get(one.bounds, value), value)
        if not least:
            continue
        found = list(islice(iter_best_splits(problem, objective), k))  # type: ignore[arg-type]
        assert [one.value for one in found] == [float(v) for v in sorted(least.values())[:k]]
        assert len({one.bounds for one in found}) == len(found) == min(k, len(least))
        assert all(one.value == float(least[one.bounds]) for one in found)
