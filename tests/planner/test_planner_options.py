"""Options of the planner: what one must not change, and what must not be lost."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import gpipebal as gb
from gpipebal.errors import BalanceError, InfeasibleError
from gpipebal.pipeline import with_recompute
from gpipebal.plan import Plan
from gpipebal.planner import at_quantile, recompute_layers
from gpipebal.profile import AloneShares, LayerProfile, StepTerms, TieProfile

MiB = 2**20


def costs(*forward: float, **more: Any) -> gb.Profile:
    """Make a profile of four micro-batches."""
    return gb.Profile.from_costs(list(forward), chunks=4, **more)


def several(*rows: int) -> gb.Profile:
    """A mini-batch of 64 rows that was measured at several sizes, the middle one first."""
    sizes = [
        gb.Profile.from_costs([1.0 * r] * 4, saved_bytes=[100 * r] * 4, rows=r, chunks=64 // r)
        for r in rows
    ]
    middle = len(sizes) // 2
    return replace(sizes[middle], other_sizes=tuple(s for s in sizes if s is not sizes[middle]))


def test_a_limit_that_limits_nothing_changes_nothing() -> None:
    """Devices that differ from the profile's in their memory alone are as fast side by side."""
    loss = LayerProfile("loss", "loss", 0.0, 0.0, 0.0)
    shares = AloneShares(2, 0.5, 0.5, 0.5, 0.5)
    step = StepTerms(gather_time=0.0, loss=loss, optimizer_time=0.0, side_by_side=shares)
    profile = replace(costs(1.0, 1.0), step=step)
    plain = gb.evaluate(profile, [1, 1], checkpoint="never")
    assert plain.step_time is not None
    assert plain.step_time < gb.evaluate(profile, [1, 1], devices=[1, 0.9]).step_time
    for same in ({"memory_limit": 10**15}, {"devices": [1, 1]}):
        plan = gb.evaluate(profile, [1, 1], checkpoint="never", **same)
        assert plan.step_time == plain.step_time


def test_interleaved_partitions_of_one_device_have_one_device() -> None:
    """Partitions j and j + n / 2 run on one device, which has one speed."""
    profile = costs(4.0, 4.0, 1.0, 1.0)
    asked: dict[str, Any] = {"schedule": "interleaved_1f1b", "checkpoint": "never"}
    with pytest.raises(BalanceError, match=r"one device is two: devices\[0\] and devices\[2\]"):
        gb.solve(profile, 4, devices=[1, 1, 4, 4], **asked)
    with pytest.raises(BalanceError, match="cannot change places"):
        gb.solve(profile, 4, devices=[1, 4, 1, 4], any_order=True, **asked)
    assert gb.solve(profile, 4, devices=[1, 4] * 2, **asked).n_devices == 2


@pytest.mark.timeout(60)
def test_top_plans_end_where_nothing_fits() -> None:
    """There are some 10**9 splits, and not one fits; with a byte less than one needs, or more."""
    profile = gb.Profile.from_costs([1.0] * 80, output_bytes=[100] * 79 + [0], chunks=16)
    asked: dict[str, Any] = {"checkpoint": "never"}
    for limit in (1000, 1799):
        with pytest.raises(InfeasibleError, match=r"(Fix: |; or )memory_limit=1800\."):
            gb.top_plans(profile, 3, 8, memory_limit=limit, **asked)
    plans = gb.top_plans(profile, 3, 8, memory_limit=1800, **asked)
    assert all(part.memory.total <= 1800 for plan in plans for part in plan.partitions)


@pytest.mark.timeout(60)
def test_many_different_devices_in_any_order_under_another_schedule() -> None:
    """The search does not go through all sets of devices."""
    profile = gb.Profile.from_costs([1.0] * 16, chunks=4)
    devices = [1 + k / 100 for k in range(16)]
    plan = gb.solve(
        profile, 16, schedule="1f1b", checkpoint="never", devices=devices, any_order=True
    )
    assert sorted(plan.devices) == list(range(16))


def test_layers_are_recomputed_at_the_rows_of_the_plan() -> None:
    """A plan of a grid has a share of the mini-batch, and may have smaller micro-batches."""
    profile = several(4, 8, 16)
    row = gb.solve_grid(profile, 4, checkpoint="never").row(2)
    assert row.plan is not None
    chosen = recompute_layers(profile, row.plan, memory_limit=10**9)
    assert (chosen.before.rows, chosen.before.chunks) == (row.plan.rows, row.plan.chunks)
    assert chosen.before.makespan == row.plan.makespan


def test_layers_are_recomputed_at_the_quantile_of_the_plan() -> None:
    """Other times than the plan's are refused; the fix that is named works."""
    profile = costs(1.0, 2.0, 3.0, saved_bytes=[100] * 3)
    shaky = [replace(layer, forward_spread=0.5) for layer in profile.layers]
    profile = replace(profile, layers=tuple(shaky))
    plan = gb.solve(profile, 2, checkpoint="never", quantile=0.9)
    with pytest.raises(BalanceError, match=r"at_quantile\(profile, quantile\)"):
        recompute_layers(profile, plan, memory_limit=10**6)
    chosen = recompute_layers(at_quantile(profile, 0.9), plan, memory_limit=10**6)
    assert chosen.before.makespan == plan.makespan


def test_the_loss_has_the_quantile_of_the_layers() -> None:
    """Its time over a micro-batch, and that over the mini-batch; what has no spread stays."""
    profile = costs(1.0, 1.0)
    first, second = (replace(one, forward_spread=0.5) for one in profile.layers)
    terms = StepTerms(gather_time=0.0, loss=first, whole_loss=second, optimizer_time=1.0)
    profile = replace(profile, layers=(first, second), step=terms)
    found = at_quantile(profile, 0.9)
    assert found.step.loss == found.layers[0] and found.step.whole_loss == found.layers[1]
    assert found.layers[0].forward_time > 1.0 and found.step.optimizer_time == 1.0


def test_times_are_taken_at_a_quantile_once() -> None:
    """Of a profile whose times are upper quantiles already; the median leads back."""
    sizes = several(4, 8, 16)
    layers = tuple(replace(layer, forward_spread=0.5) for layer in sizes.layers)
    profile = replace(sizes, layers=layers)
    upper = at_quantile(profile, 0.9)
    assert upper.layers != profile.layers
    assert (
        at_quantile(upper, 0.9) == upper == at_quantile(gb.Profile.from_dict(upper.to_dict()), 0.9)
    )
    assert gb.solve(upper, 2, quantile=0.9) == gb.solve(profile, 2, quantile=0.9)
    back = gb.solve(upper, 2, quantile=0.5)
    assert back.makespan == gb.solve(profile, 2).makespan and not back.notes
    for other in ({"quantile": "0.9"}, {"quantile": 2.0}):
        named = replace(profile, provenance=other)
        assert at_quantile(named, 0.9).layers == upper.layers


def test_a_grid_has_the_chunks_that_were_asked_for() -> None:
    """Nine rows in eight micro-batches are eight, of two rows and of one."""
    one = gb.Profile.from_costs([1.0, 1.0], rows=1, chunks=9)
    profile = replace(one, other_sizes=(gb.Profile.from_costs([2.0, 2.0], rows=2),))
    for chunks in (8, 5, 9):
        plan = gb.solve_grid(profile, 2, chunks=chunks).row(1).plan
        assert plan is not None and plan.chunks == chunks
        assert plan.makespan == gb.solve(profile, 2, chunks=chunks).makespan


def test_a_grid_where_nothing_fits_says_what_lacks_least() -> None:
    """The error is that of every infeasible request, and its advice works."""
    profile = costs(1.0, 1.0, 1.0, 1.0, parameter_bytes=[100] * 4)
    with pytest.raises(InfeasibleError, match="no number of replicas has a plan") as error:
        gb.solve_grid(profile, 4, checkpoint="never", memory_limit=50)
    assert error.value.shortage == 150 and error.value.partition is not None
    assert "memory_limit=200" in str(error.value).rpartition("Fix: ")[2]
    assert gb.solve_grid(profile, 4, checkpoint="never", memory_limit=200).best is not None


def test_advice_is_for_the_schedule() -> None:
    """Three partitions cannot be dealt out evenly to devices that have two each."""
    with pytest.raises(InfeasibleError) as error:
        gb.solve(costs(1.0, 1.0, 1.0, 1.0), 4, schedule="interleaved_1f1b", no_cut=[1])
    fix = str(error.value).rpartition("Fix: ")[2]
    assert "without no_cut" in fix and "partitions=3" not in fix


def test_rules_of_thumb_beside_a_quantile_of_devices() -> None:
    """The profiles of devices have their quantile too."""

    def shaky(profile: gb.Profile) -> gb.Profile:
        layers = [replace(layer, forward_spread=0.5) for layer in profile.layers]
        return replace(profile, layers=tuple(layers))

    profile, other = shaky(costs(1.0, 2.0, 3.0)), shaky(costs(2.0, 1.0, 1.0))
    plan = gb.solve(profile, 2, devices=[other, other], quantile=0.9)
    table = gb.compare_rules(profile, plan, devices=[other, other], quantile=0.9)
    assert table.rows[0].rule == "plan"


@pytest.mark.timeout(60)
def test_the_least_max_layers_is_found_in_few_steps() -> None:
    """Of a long chain; and where memory is what lacks, none is named."""
    profile = gb.Profile.from_costs([1.0] * 400, chunks=2)
    with pytest.raises(InfeasibleError, match="max_layers=100"):
        gb.solve(profile, 4, max_layers=12)
    heavy = gb.Profile.from_costs([1.0] * 300, saved_bytes=[10**9] * 300, chunks=8)
    with pytest.raises(InfeasibleError) as error:
        gb.solve(heavy, 30, max_layers=12, memory_limit=10**6)
    assert "max_layers=" not in str(error.value).rpartition("Fix: ")[2]


def test_numbers_are_taken_as_they_are_meant() -> None:
    """Pairs in either order, whole floats, and costs in any unit."""
    profile = costs(1.0, 1.0, 1.0, 1.0)
    assert gb.solve(profile, 2, rules=gb.Rules(keep_together=[(2, 1)])).balance in ([1, 3], [3, 1])
    assert gb.solve(profile, 2, rules=gb.Rules(max_layers=2.0)).balance == [2, 2]  # type: ignore[arg-type]
    assert gb.solve(profile, 2, rules=gb.Rules(pin={0: 0.0, 2: 0.0})).balance == [3, 1]  # type: ignore[dict-item]
    with pytest.raises(BalanceError, match=r"max_layers=2\.5"):
        gb.solve(profile, 2, rules=gb.Rules(max_layers=2.5))  # type: ignore[arg-type]
    plan = gb.solve(profile, 2, cost=lambda a, b, j: (b - a) * 1e30)
    assert plan.value == 2e30 and Plan.from_dict(plan.to_dict()) == plan
    assert len(gb.top_plans(profile, 2.0, 2)) == 2  # type: ignore[arg-type]
    assert gb.evaluate(profile, [2, 2], chunks=4.0).chunks == 4  # type: ignore[arg-type]


def test_the_method_that_is_asked_for_is_named() -> None:
    """`select_method` answers for a method that is given, and refuses one that does not apply."""
    profile = costs(1.0, 2.0)
    assert gb.select_method(profile, 2, method="integer program") == "integer program"
    with pytest.raises(BalanceError, match="method does not solve"):
        gb.select_method(profile, 2, method="dense table")
    for schedule in ("1f1b", "zb_h1"):
        plan = gb.solve(profile, 2, schedule=schedule, checkpoint="never")
        assert plan.method == gb.select_method(profile, 2, schedule=schedule, checkpoint="never")


def test_plans_say_what_they_take_for_granted() -> None:
    """Tied parameters on several devices, unequal micro-batches, and halves of backwards."""
    tied = replace(
        costs(1.0, 1.0, 1.0, 1.0, parameter_bytes=[10] * 4), ties=(TieProfile((0, 3), 10, 10),)
    )
    (note,) = [note for note in gb.solve(tied, 2).notes if "share" in note]
    assert note.startswith("Layers '0', '3' share parameters, in partitions 0, 1: ")
    assert not [n for n in gb.solve(tied, 2, shared_memory=True).notes if "share" in n]
    assert not [n for n in gb.solve(tied, 1).notes if "share" in n]
    uneven = replace(costs(1.0, 1.0, rows=4), mini_batch_rows=13)
    assert any("micro-batches of 4 and of 3 rows" in note for note in gb.solve(uneven, 2).notes)
    assert not gb.solve(costs(1.0, 1.0, rows=4), 2).notes
    halves = gb.solve(costs(1.0, 1.0), 2, schedule="zb_h1", checkpoint="never")
    assert any("half of the backward" in note for note in halves.notes)
    assert "model memory" in str(halves) and "peak memory" in str(gb.solve(costs(1.0, 1.0), 2))


@pytest.mark.parametrize("shared_memory", [None, True])
def test_plans_for_other_processes_say_that_ties_are_copied(shared_memory: bool | None) -> None:
    """Where every device has a process, one memory does not make shared parameters one."""
    profile = costs(1.0, 1.0, 1.0, 1.0, parameter_bytes=[10] * 4)

    def note_on(*layers: int, schedule: str, n_partitions: int) -> str:
        tied = replace(profile, ties=(TieProfile(layers, 10, 10),))
        plan = gb.solve(
            tied,
            n_partitions,
            schedule=schedule,
            checkpoint="never",
            shared_memory=shared_memory,
        )
        return "".join(note for note in plan.notes if "share" in note)

    note = note_on(0, 2, schedule="zb_h1", n_partitions=2)
    assert "in partitions 0, 1: keep the layers" in note and "copy" in note
    # One partition would have all layers.
    assert "in partitions 0, 1: untie them" in note_on(0, 3, schedule="zb_h1", n_partitions=2)
    assert "in partitions 0, 3:" in note_on(0, 3, schedule="interleaved_1f1b", n_partitions=4)
    # Partitions 0 and 2 are in one process.
    assert not note_on(0, 2, schedule="interleaved_1f1b", n_partitions=4)


def test_a_plan_with_runs_is_kept_and_run() -> None:
    """The runs are in its file, in its text, and in the pipeline that is made from it."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(6, 6) for _ in range(4)])
    profile = gb.Profile.from_costs(
        [1.0] * 4, saved_bytes=[100 * MiB] * 4, output_bytes=[10 * MiB] * 4, chunks=4
    )
    chosen = recompute_layers(
        profile, gb.solve(profile, 2, checkpoint="never"), memory_limit="500 MiB"
    )
    plan = Plan.from_dict(chosen.plan.to_dict())
    assert plan == chosen.plan and plan.runs == chosen.runs != ()
    assert all(isinstance(run, range) for run in plan.runs)
    text = plan.explain()
    assert "Recomputed by themselves inside of partitions" in text
    assert "Nothing is recomputed" not in text
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of threads
        pipe = gb.GPipe.from_plan(model, plan)
        again = gb.GPipe.from_plan(with_recompute(model, plan.runs), plan)
    for made in (pipe, again):
        places = [layer for part in made.partitions for layer in part]
        found = [k for k, one in enumerate(places) if type(one).__name__ == "Recomputed"]
        assert found == [k for run in plan.runs for k in run]
    x = torch.randn(8, 6)
    torch.testing.assert_close(pipe(x), model(x))
    with pytest.raises(BalanceError, match="recomputes other layers than the plan"):
        gb.GPipe.from_plan(with_recompute(model, [[0, 1]]), plan)
    for bad in ((range(1, 1),), (range(1, 3),), (range(0, 1), range(0, 1)), (range(3, 5),)):
        with pytest.raises(gb.GpipebalError, match="runs"):
            replace(plan, runs=bad)


@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_limits_that_forbid_nothing_change_nothing(checkpoint: gb.CheckpointMode) -> None:
    """A plan is the same with the loosest limits on layers as with none, ties too."""
    profile = gb.Profile.from_costs([1.0, 1.0, 2.0, 1.0, 1.0, 2.0], chunks=3)
    bare = gb.solve(profile, 3, checkpoint=checkpoint)
    for options in ({"min_layers": 1, "max_layers": 6}, {"rules": gb.Rules()}):
        loose = gb.solve(profile, 3, checkpoint=checkpoint, **options)
        assert loose == bare and loose.method == bare.method
