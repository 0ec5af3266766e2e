"""From a profile to a plan: solve, predicted memory, and the balance functions."""

from __future__ import annotations

import logging
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import gpipebal as gb
from gpipebal.errors import BalanceError, GpipebalError, UnsupportedPlanError
from gpipebal.planner import equal_split, evaluate
from gpipebal.profile import LayerProfile, StepTerms
from gpipebal.schedule import CHECKPOINT_MODES, CheckpointMode

times = st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), min_size=2, max_size=12)


@settings(max_examples=60, deadline=None)
@given(
    costs=times,
    partitions=st.integers(1, 5),
    chunks=st.integers(1, 6),
    checkpoint=st.sampled_from(CHECKPOINT_MODES),
)
def test_a_plan_keeps_what_it_says(
    costs: list[tuple[int, int]], partitions: int, chunks: int, checkpoint: CheckpointMode
) -> None:
    """Predicted makespan, simulated timeline and certificate agree; no layer is lost."""
    partitions = min(partitions, len(costs))
    profile = gb.Profile.from_costs([float(f) for f, _ in costs], [float(b) for _, b in costs])
    plan = gb.solve(profile, partitions, chunks=chunks, checkpoint=checkpoint)
    assert sum(plan.balance) == len(costs) and min(plan.balance) > 0
    assert tuple(n for part in plan.partitions for n in part.layers) == profile.names
    assert plan.value == plan.makespan == plan.lower_bound
    assert (plan.status, plan.gap) == ("optimal", 0.0)
    assert plan.equal_split_value is not None and plan.value <= plan.equal_split_value
    timeline = gb.simulate(plan)
    assert timeline.makespan == pytest.approx(plan.makespan, rel=1e-12)
    assert plan.bubble_fraction == pytest.approx(timeline.bubble_fraction, abs=1e-12)


@given(
    costs=st.lists(st.integers(0, 9), min_size=1, max_size=12),
    partitions=st.integers(1, 5),
)
def test_a_plan_has_the_balance_that_the_function_gives(costs: list[int], partitions: int) -> None:
    """Both are optimal and break ties alike, and a list equals a list."""
    partitions = min(partitions, len(costs))
    plan = gb.solve(gb.Profile.from_costs(costs), partitions, objective="bottleneck")
    balance = gb.balance_cost(costs, partitions)
    assert plan.balance == balance and plan.status == "optimal"
    assert gb.evaluate(gb.Profile.from_costs(costs), balance).balance == balance


def test_step_time_is_known_when_all_terms_are() -> None:
    """Forward, gather, loss, backward and optimizer add up; without one of them it is unknown."""
    profile = gb.Profile.from_costs([1.0, 1.0], [2.0, 2.0], chunks=2)
    assert gb.solve(profile, 2).step_time is None
    loss = LayerProfile("loss", "loss", 0.125, 0.125, 0.125)
    profile = replace(profile, step=StepTerms(0.5, whole_loss=loss, optimizer_time=0.125))
    plan = gb.solve(profile, 2, checkpoint="never")
    assert plan.makespan == 3 + 6
    assert plan.step_time == 3 + 0.75 + 6 + 0.125


def test_objectives_differ() -> None:
    """The bottleneck's optimum and the makespan's are asked for by name."""
    profile = gb.Profile.from_costs([5, 1, 1, 1], [1, 1, 1, 5])
    bottleneck = gb.solve(profile, 2, objective="bottleneck", checkpoint="never", chunks=8)
    makespan = gb.solve(profile, 2, objective="makespan", checkpoint="never", chunks=8)
    assert bottleneck.bottleneck <= makespan.bottleneck
    assert makespan.makespan <= bottleneck.makespan
    assert bottleneck.value == bottleneck.bottleneck == 8


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"partitions": 3}, "more partitions than layers|partitions"),
        ({"partitions": 0}, "partitions"),
        ({"partitions": 1, "chunks": 0}, "chunks"),
        ({"partitions": 1, "checkpoint": "some"}, "checkpoint"),
        ({"partitions": 1, "objective": "speed"}, "objective"),
        ({"partitions": 1, "method": "magic"}, "method"),
    ],
)
def test_impossible_requests(options: dict[str, object], message: str) -> None:
    """An impossible request is a GpipebalError that names the argument and says the fix."""
    with pytest.raises(GpipebalError, match=message) as caught:
        gb.solve(gb.Profile.from_costs([1.0, 1.0]), **options)  # type: ignore[arg-type]
    assert "Fix: " in str(caught.value)


def test_what_cannot_be_solved_can_be_evaluated() -> None:
    """Solving under an unknown schedule is refused; a mode per partition is not."""
    profile = gb.Profile.from_costs([1.0, 1.0])
    with pytest.raises(UnsupportedPlanError, match="schedule='zigzag'"):
        gb.solve(profile, 1, schedule="zigzag")
    plan = gb.solve(profile, 2, checkpoint=["always", "never"])
    assert plan.modes == ("always", "never")
    given_plan = evaluate(profile, plan.balance, checkpoint=plan.modes)
    assert given_plan.makespan == plan.makespan == plan.lower_bound


@given(n_layers=st.integers(1, 100), n_partitions=st.integers(1, 20))
def test_equal_split_is_equal(n_layers: int, n_partitions: int) -> None:
    """Partitions of an equal split differ by at most one layer."""
    if n_partitions > n_layers:
        return
    bounds = equal_split(n_layers, n_partitions)
    sizes = [end - start for start, end in pairwise(bounds)]
    assert bounds[0] == 0 and bounds[-1] == n_layers and max(sizes) - min(sizes) <= 1


class Stretch(nn.Module):
    """Cost as much time as asked for, by repeating a multiplication."""

    def __init__(self, repeats: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(64))
        self.repeats = repeats

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.repeats):
            x = x @ self.weight
        return x


def test_balance_by_time_finds_the_heavy_layers() -> None:
    """Layers of very different work are balanced by their work, not by their number."""
    model = nn.Sequential(*(Stretch(n) for n in (1, 1, 1, 1, 1, 80)))
    assert gb.balance_by_time(model, torch.ones(64, 64), 2) == [5, 1]


def test_balance_by_size_follows_bytes() -> None:
    """Layer memories of 6, 5, 4, 3, 2, 1 in two partitions are [2, 4]."""
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6)))
    for k, size in enumerate((6, 5, 4, 3, 2, 1)):
        model[k].register_parameter("more", nn.Parameter(torch.zeros(size * 100_000)))
    assert gb.balance_by_size(model, torch.ones(2, 64), 2) == [2, 4]
    # With weight on the activations alone every layer is the same.
    assert gb.balance_by_size(model, torch.ones(2, 64), 2, param_scale=0.0) == [3, 3]


@pytest.mark.parametrize("scale", [-1.0, float("nan"), float("inf"), "two", True])
def test_a_scale_of_parameters_is_a_factor(scale: Any) -> None:
    """What is none is refused before anything is measured."""
    with pytest.raises(BalanceError, match="param_scale is not a factor") as raised:
        gb.balance_by_size(nn.Sequential(nn.ReLU()), torch.ones(2, 2), 1, param_scale=scale)
    assert "\nFix: param_scale=2.0" in str(raised.value)


def test_balance_cost() -> None:
    """The largest sum is as small as possible, and no part is empty."""
    assert gb.balance_cost([1, 2, 3, 4], 2) == [3, 1]
    assert gb.balance_cost([0, 0, 0], 3) == [1, 1, 1]


def test_default_number_of_partitions(caplog: pytest.LogCaptureFixture) -> None:
    """Without CUDA devices the default is two partitions, and the log says so."""
    if torch.cuda.is_available():
        pytest.skip("this machine has CUDA devices")
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    with caplog.at_level(logging.WARNING, "gpipebal"):
        balance = gb.balance_by_time(model, torch.ones(2, 4), timeout=0)
    assert len(balance) == 2
    assert "balancing for 2 partitions on the CPU" in caplog.text


def test_too_many_partitions_are_noticed_before_measuring() -> None:
    """More partitions than layers is an error at once."""
    model = nn.Sequential(nn.Linear(4, 4))
    with pytest.raises(ValueError, match="partitions"):
        gb.balance_by_time(model, "not even a sample", 2)
    with pytest.raises(ValueError, match="param_scale"):
        gb.balance_by_size(model, torch.ones(2, 4), 1, param_scale=-1)


@pytest.mark.parametrize(
    ("partitions", "message"),
    [
        (9, r"partitions=9 \(expected 1 <= partitions <= 3, .*\).\nFix: partitions=3, or "),
        (0, r"partitions is too small: partitions=0 .*\nFix: partitions=1, or more"),
        (1.5, r"partitions is not a whole number: partitions=1.5 .*\nFix: partitions=1"),
    ],
)
def test_partitions_are_refused_under_the_name_that_was_given(
    partitions: Any, message: str
) -> None:
    """The error and its fix speak of the argument of the function that was called."""
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    calls = (
        lambda: gb.balance_by_time(model, torch.ones(4, 4), partitions),
        lambda: gb.balance_by_size(model, torch.ones(4, 4), partitions),
        lambda: gb.balance_cost([1.0, 2.0, 3.0], partitions),
    )
    for call in calls:
        with pytest.raises(BalanceError, match=message) as refused:
            call()
        assert "n_partitions" not in str(refused.value)
