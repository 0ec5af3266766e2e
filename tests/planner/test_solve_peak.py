"""The least peak memory, where what may wait for other partitions decides."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

import gpipebal as gb
from gpipebal.planner import solve
from gpipebal.planner.posing import Posed
from gpipebal.planner.search import best
from gpipebal.planner.search.solved import solved
from gpipebal.problem import Problem
from gpipebal.profile import SkipProfile
from gpipebal.solvers import Split


def _uneven(n_layers: int = 9) -> gb.Profile:
    """Make a chain of which partitions wait differently, by the order of the devices."""
    draw = random.Random(309)
    profile = gb.Profile.from_costs(
        [draw.randint(1, 5) for _ in range(n_layers)],
        saved_bytes=[draw.choice([0, 10]) for _ in range(n_layers)],
        output_bytes=[draw.choice([10, 100, 50]) for _ in range(n_layers)],
        chunks=4,
    )
    # How much may wait is known beforehand where no skip goes past others.
    far = SkipProfile("far", 0, n_layers - 1, (len(profile.storages),))
    return replace(profile, storages=(*profile.storages, 60), skips=(far,))


def test_less_freedom_never_has_the_lower_peak() -> None:
    """Where more is open, the plan that is found is no worse."""
    profile = _uneven()
    options: dict[str, Any] = {"objective": "peak_memory", "devices": [4, 1, 2, 0.5]}
    for checkpoint in ("never", "always"):
        given = solve(profile, 4, checkpoint=checkpoint, **options)
        free = solve(profile, 4, checkpoint=checkpoint, any_order=True, **options)
        auto = solve(profile, 4, checkpoint="auto", any_order=True, **options)
        assert auto.value <= free.value <= given.value


def test_open_modes_have_no_higher_peak_than_one_mode_of_which_all_ways_are_few() -> None:
    """All ways with one mode are looked at where they are few, also if modes are open."""
    profile = gb.Profile.from_costs(
        [3, 1, 4, 3, 4],
        saved_bytes=[50, 10, 10, 0, 10],
        output_bytes=[10, 50, 50, 50, 50],
        parameter_bytes=[0, 0, 100, 0, 0],
        chunks=5,
    )
    options: dict[str, Any] = {"objective": "peak_memory", "schedule": "1f1b"}
    fixed = solve(profile, 3, checkpoint="always", **options)
    assert solve(profile, 3, checkpoint="auto", **options).value <= fixed.value


@pytest.mark.parametrize("time_limit", [None, 60.0])
def test_a_time_limit_is_not_taken_many_times(
    time_limit: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The question is asked as it is, and once more with the most that can wait."""
    asked: list[float | None] = []

    def counted(posed: Posed, problem: Problem, time_limit: float | None) -> Split | None:
        asked.append(time_limit)
        return solved(posed, problem, time_limit)

    monkeypatch.setattr(best, "solved", counted)
    monkeypatch.setattr(best, "proven", lambda rows, plan, deadline, thorough: plan)
    plan = solve(
        _uneven(20),
        4,
        objective="peak_memory",
        checkpoint="never",
        schedule="1f1b",
        time_limit=time_limit,
    )
    assert plan.gap
    assert asked[0] == time_limit
    assert all(one is None if time_limit is None else 0 < one <= time_limit for one in asked)
    assert len(asked) == 2
