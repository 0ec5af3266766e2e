"""Objectives: one table, and nothing that takes an unknown one for another."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest

import gpipebal as gb
from gpipebal import objectives
from gpipebal.cli import main
from gpipebal.objectives import MINIMISED, OBJECTIVES, Quantity
from gpipebal.plan.text import explanation, format_value
from gpipebal.planner.execution import Way
from gpipebal.planner.plans import value_of
from gpipebal.planner.posing import Posed, pose
from gpipebal.planner.question import ask
from gpipebal.planner.sensitivity import sensitivity
from gpipebal.planner.thumb_comparison import compare_rules
from gpipebal.problem import Problem
from gpipebal.solvers import find, select_method
from gpipebal.solvers.dispatch import applicable
from gpipebal.solvers.integer_program import solve_integer_program

OTHER: Any = "energy"
PROFILE = gb.Profile.from_costs([1.0, 2.0, 3.0, 4.0], saved_bytes=[10] * 4, chunks=4)


def test_the_table_has_all_that_can_be_minimised() -> None:
    """Names for type checkers and names in the table are the same."""
    assert tuple(MINIMISED) == get_args(Quantity) == (*OBJECTIVES, "cost")


@pytest.mark.parametrize("name", OBJECTIVES)
def test_every_objective_is_usable_everywhere(
    name: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is solved, compared, told how decisive cuts are, saved, printed, and documented."""
    plan = gb.solve(PROFILE, 2, objective=name)
    assert (plan.objective, plan.status) == (name, "optimal") and plan.sensitivity
    assert f"{name} {format_value(plan, plan.value)}" in str(plan)
    assert MINIMISED[name].meaning in explanation(plan)
    assert gb.Plan.from_dict(plan.to_dict()) == plan
    rows = compare_rules(PROFILE, plan).rows
    assert all(row.above_plan is not None for row in rows if row.balance)
    with pytest.raises(SystemExit):
        main(["solve", "--help"])
    assert name in " ".join(capsys.readouterr().out.split())
    page = Path(__file__).parents[2] / "docs" / "guide" / "choosing.md"
    assert f"| `'{name}'" in page.read_text(encoding="utf-8")


PROBLEM = Problem([1, 2, 3], [1, 2, 3], [1, 2, 3], 2)
LIMITED = replace(PROBLEM, checkpoint="auto")
POSED: Posed = pose(replace(ask(PROFILE, 2, {}), objective=OTHER), None)
PLAN = gb.solve(PROFILE, 2)


@pytest.mark.parametrize(
    "use",
    [
        lambda: gb.solve(PROFILE, 2, objective=OTHER),
        lambda: find(PROBLEM, OTHER),
        lambda: select_method(LIMITED, OTHER),
        lambda: applicable(LIMITED, OTHER),
        lambda: solve_integer_program(LIMITED, OTHER),
        lambda: value_of(POSED, Way((0, 3, 4), ("never", "never"), (0, 1))),
        lambda: sensitivity(PROBLEM, Way((0, 2, 3), ["never"] * 2, (0, 1)), OTHER),
        lambda: compare_rules(PROFILE, _with_objective(PLAN)),
        lambda: format_value(_with_objective(PLAN), 1.0),
        lambda: explanation(_with_objective(PLAN)),
    ],
)
def test_an_objective_that_is_only_in_the_table_fails_where_it_is_unknown(
    use: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several places used to take it for the bottleneck or the makespan."""
    monkeypatch.setattr(objectives, "OBJECTIVES", (*OBJECTIVES, OTHER))
    with pytest.raises((AssertionError, KeyError), match=OTHER):
        use()


def _with_objective(plan: gb.Plan) -> gb.Plan:
    """Return a plan with an objective that a check would refuse."""
    other = replace(plan)
    object.__setattr__(other, "objective", OTHER)
    return other
