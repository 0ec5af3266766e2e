"""What a plan says of cuts that are moved by one layer."""

from __future__ import annotations

import pytest

import gpipebal as gb
from gpipebal.planner import solve
from gpipebal.problem import Link


@pytest.mark.parametrize("size", [200, 1000, 2500, 10**9])
def test_cuts_that_cost_far_more_than_the_best_are_priced_right(size: int) -> None:
    """A cut at a huge tensor has its own price, whatever numbers the plan itself needs."""
    link = Link(bandwidth=10.0)
    profile = gb.Profile.from_costs([0.1] * 4, output_bytes=[1, size, 1, 1], chunks=4)
    plan = solve(profile, 2, checkpoint="always", link=link)
    assert plan.balance == [3, 1]
    ((left, _),) = plan.sensitivity
    moved = gb.evaluate(profile, [2, 2], checkpoint="always", link=link)
    assert left == pytest.approx(moved.makespan - plan.makespan, rel=1e-12)
