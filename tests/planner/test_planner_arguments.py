"""Questions put in other words: what a plan was made from, other numbers, other orders."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import gpipebal as gb
from gpipebal.errors import BalanceError
from gpipebal.planner import recompute_layers
from gpipebal.planner.search.lower_bounds import lower_bound_of
from gpipebal.problem import Device, Problem, Rules
from gpipebal.profile import LayerProfile, Profile, StepTerms
from gpipebal.schedule import gpipe_schedule
from gpipebal.side_by_side import set_side_by_side
from gpipebal.solvers import split
from gpipebal.timeline import outline


def with_loss(profile: Profile) -> Profile:
    """Add a loss over the gathered output, which needs much memory for a moment."""
    whole = LayerProfile(
        "loss",
        "loss",
        0.5,
        0.5,
        0.0,
        forward_peak_bytes=4000,
        backward_peak_bytes=4000,
        saved=profile.layers[-1].outputs,
    )
    return replace(profile, step=StepTerms(gather_time=0.1, whole_loss=whole, optimizer_time=0.0))


def peaks(plan: gb.Plan) -> list[int]:
    """List the peaks of all partitions."""
    return [part.memory.total for part in plan.partitions]


@pytest.mark.parametrize("chunks", [2, 4, 8])
def test_layers_are_recomputed_for_the_loss_that_the_plan_counts(chunks: int) -> None:
    """A profile of one size has the loss of its own mini-batch, whatever the plan's is."""
    profile = with_loss(
        Profile.from_costs(
            [1.0, 2.0, 3.0, 4.0],
            saved_bytes=[400, 900, 200, 600],
            output_bytes=[5, 5, 5, 100],
            rows=2,
            chunks=4,
        )
    )
    plan = gb.solve(profile, 2, chunks=chunks, checkpoint="never")
    before = recompute_layers(profile, plan, memory_limit=10**9).before
    assert (peaks(before), before.step_time) == (peaks(plan), plan.step_time)
    table = gb.compare_rules(profile, plan)
    assert table.rows[0].peak_bytes == max(peaks(plan))


def test_layers_are_recomputed_on_the_devices_of_the_plan() -> None:
    """An order of devices that was chosen is kept."""
    profile = Profile.from_costs(
        [1.0, 2.0, 3.0, 4.0], saved_bytes=[40, 90, 20, 60], output_bytes=[5] * 4, chunks=4
    )
    devices = [Device(slowness=1), Device(slowness=3)]
    orders = [devices, devices[::-1]]
    plans = [gb.solve(profile, 2, devices=d, any_order=True, checkpoint="never") for d in orders]
    assert {plan.devices for plan in plans} == {(0, 1), (1, 0)}
    for plan, given in zip(plans, orders, strict=True):
        limit = max(peaks(plan)) - 60
        chosen = recompute_layers(profile, plan, memory_limit=limit, devices=given)
        assert chosen.runs and chosen.plan.devices == chosen.before.devices == plan.devices
        assert max(peaks(chosen.plan)) <= limit
        # Limits are in the order of the devices, whatever kind of list they are.
        limits = [max(peaks(plan)) - 60 + k for k in range(2)]
        chosen, other = (
            recompute_layers(profile, plan, memory_limit=kind(limits), devices=given)
            for kind in (list, np.array)
        )
        assert chosen == other
        assert [part.memory_limit for part in other.plan.partitions] == [
            limits[k] for k in plan.devices
        ]


def test_times_of_a_device_are_those_of_one_size() -> None:
    """Nobody knows what another micro-batch takes on it: its profile would tell."""
    small = Profile.from_costs([1.0, 1.0, 2.0, 2.0], rows=2, chunks=4)
    large = Profile.from_costs([2.0, 2.0, 4.0, 4.0], rows=8, chunks=1)
    profile = replace(small, other_sizes=(large,))
    devices = [Device(**profile.layer_times)] * 2
    assert gb.solve(profile, 2, devices=devices).makespan == gb.solve(profile, 2).makespan
    for chunks in (1, [1, 4], "auto"):
        with pytest.raises(BalanceError, match=r"times of a device are those of other micro-ba"):
            gb.solve(profile, 2, devices=devices, chunks=chunks)  # type: ignore[arg-type]
    assert gb.solve(profile, 2, devices=[profile] * 2, chunks="auto").status == "optimal"


def test_rules_take_whole_numbers_of_any_kind() -> None:
    """Numpy's are no other layers."""
    costs = [1.0] * 40
    whole = Rules(no_cut=[10], keep_together=[(20, 22)], pin={30: 1}, max_layers=30)
    other = Rules(
        no_cut=np.array([10]),
        keep_together=np.array([[20, 22]]),
        pin={np.int64(30): np.int64(1)},  # type: ignore[dict-item]
        max_layers=np.int64(30),  # type: ignore[arg-type]
    )
    assert whole == other
    problems = [replace(Problem.from_costs(costs, 2), rules=rules) for rules in (whole, other)]
    assert split(problems[0]) == split(problems[1])
    for wrong in ([1, "1"], [[1]], [None]):
        with pytest.raises(BalanceError, match="no_cut has the wrong form"):
            Rules(no_cut=wrong)  # type: ignore[arg-type]


def test_very_many_partitions_are_searched_without_deep_calls() -> None:
    """As many splits as there are layers to spare, over more partitions than calls can nest."""
    random = np.random.default_rng(4)
    profile = Profile.from_costs(random.uniform(1, 2, 1101).tolist(), chunks=3)
    plan = gb.solve(profile, 1100, schedule="1f1b", checkpoint="never", time_limit=20)
    assert plan.n_partitions == 1100 and plan.lower_bound <= plan.value


def test_out_of_time_what_can_be_seen_at_once_is_the_bound() -> None:
    """Fourteen kinds of devices in any order are too many to solve in no time."""
    random = np.random.default_rng(0)
    profile = Profile.from_costs(random.uniform(1, 10, 30).tolist(), chunks=8)
    devices = [Device(slowness=float(x)) for x in random.uniform(1, 4, 14)]
    plan = gb.solve(profile, 14, devices=devices, any_order=True, time_limit=0.2)
    problem = Problem(
        **profile.layer_times, n_partitions=14, chunks=8, devices=devices, any_order=True
    )
    assert plan.lower_bound >= lower_bound_of(problem) > 0
    plans = gb.top_plans(profile, 2, 14, devices=devices, any_order=True, time_limit=0.2)
    assert 0 < plans[0].lower_bound <= plans[0].value


def test_a_schedule_of_its_own_says_its_own_micro_batches() -> None:
    """And not those of the plan whose times it is placed with."""
    plan = gb.solve(Profile.from_costs([1.0] * 4, chunks=4), 2, checkpoint="never")
    timeline = gb.simulate(plan, gpipe_schedule(2, 8, "never"), pause=np.float32(0.5))
    assert timeline.chunks == timeline.provenance["chunks"] == 8
    assert timeline.provenance["pause"] == 0.5 and type(timeline.provenance["pause"]) is float


def test_interleaving_nothing_is_refused() -> None:
    """One partition on each device is another schedule."""
    profile = Profile.from_costs([1.0] * 8, chunks=4)
    for each in (1, []):
        with pytest.raises(BalanceError, match="partitions leave nothing to interleave"):
            gb.compare_schedules(
                profile, 2, schedules=["interleaved_1f1b"], partitions_per_device=each
            )


@pytest.mark.parametrize("quantile", [np.float32(0.75), Fraction(3, 4), np.float64(0.75)])
def test_quantiles_and_modes_of_any_kind(quantile: Any) -> None:
    """Numbers and lists may be numpy's."""
    profile = Profile.from_costs([1.0, 2.0, 3.0], chunks=4)
    plan = gb.solve(profile, 2, quantile=quantile, checkpoint=np.array(["never", "always"]))
    assert plan == gb.solve(profile, 2, quantile=0.75, checkpoint=["never", "always"])
    given = gb.evaluate(profile, [2, 1], checkpoint=np.array(["never", "always"]))
    assert given == gb.evaluate(profile, [2, 1], checkpoint=["never", "always"])
    for mode in ("auto", None):  # 'auto' leaves the modes open, which a solver chooses
        with pytest.raises(BalanceError, match=r"mode does not exist: .*, 'never'\)\.\nFix"):
            gb.evaluate(profile, [2, 1], checkpoint=mode)  # type: ignore[arg-type]


def test_cells_are_set_side_by_side_only_if_they_are_the_same() -> None:
    """Not those of other micro-batches, of other layers, or of several in one."""
    profile = Profile.from_costs([1.0] * 4, chunks=4)
    plan = gb.solve(profile, 2, checkpoint="never")
    measured = replace(gb.simulate(plan), source="measured")
    same = set_side_by_side({"plan": plan, "run": measured})
    assert same.cells and not same.why_no_cells and "not compared" not in str(same)
    more = gb.solve(Profile.from_costs([0.5] * 4, chunks=8), 2, checkpoint="never")
    for other, why in (
        (outline(gb.simulate(plan)), "a timeline without detail does not tell micro-batches"),
        (more, "8 micro-batches were predicted, 4 measured"),
        (gb.evaluate(profile, [1, 3], checkpoint="never"), r"balance [1,3] was predicted"),
        (gb.solve(profile, 4, checkpoint="never"), "4 partitions were predicted, 2 measured"),
    ):
        found = set_side_by_side({"other": other, "run": measured})
        assert not found.cells and why in str(found)


def test_cells_with_a_loss_are_not_compared_with_others() -> None:
    """A step has the loss in its last partition; a plan for the caller's loss has not."""
    torch.manual_seed(0)
    model, sample = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), torch.ones(4, 2)
    profile = Profile.from_costs([1.0] * 2, chunks=2)
    plans = {inside: gb.solve(profile, 2, loss_inside=inside) for inside in (False, True)}
    pipe = gb.GPipe(model, [1, 1], chunks=2)
    with gb.trace(pipe) as recorder:
        pipe.step(sample, target=sample, loss_fn=nn.functional.mse_loss)
        pipe(sample).sum().backward()
    for timeline, inside in zip(recorder.timelines, (True, False), strict=True):
        assert timeline.provenance["loss_inside"] is inside
        same = set_side_by_side({"plan": plans[inside], "run": timeline})
        assert same.cells and not same.why_no_cells
        other = set_side_by_side({"plan": plans[not inside], "run": timeline})
        assert not other.cells and "the loss is" in other.why_no_cells


def test_peaks_of_schedules_that_only_torch_runs_are_not_known() -> None:
    """What the model itself takes is not a peak, and stands beside none."""
    profile = Profile.from_costs(
        [1.0] * 4, parameter_bytes=[10] * 4, saved_bytes=[99] * 4, chunks=4
    )
    plans = {
        name: gb.solve(profile, 2, schedule=name, checkpoint="never") for name in ("1f1b", "zb_h1")
    }
    rows = {row.name: row.peak_bytes for row in set_side_by_side(plans).rows}
    assert rows["1f1b"] == max(peaks(plans["1f1b"])) and rows["zb_h1"] is None
    known, unknown = plans.values()
    assert "at its peak" in known.explain() and "is not predicted" in unknown.explain()
    assert "peak memory" in known._repr_html_() and "model memory" in unknown._repr_html_()
    table = gb.compare_rules(profile, unknown)
    assert [row.peak_bytes for row in table.rows if row.balance] == [None] * len(
        [row for row in table.rows if row.balance]
    )


def test_interleaved_partitions_are_dealt_out_to_devices() -> None:
    """Partition 2 of 4 is back on the first of two devices."""
    profile = Profile.from_costs([1.0] * 8, chunks=4)
    plan = gb.solve(profile, 4, schedule="interleaved_1f1b", checkpoint="never")
    assert plan.devices == gb.simulate(plan).placement == (0, 1, 0, 1)
    assert plan.places == (0, 1, 2, 3)
    assert plan.to_frame()["device"].tolist() == [0, 1, 0, 1]
    assert all(a < b for a, b in pairwise(plan.places)) and "another order" not in plan.explain()
