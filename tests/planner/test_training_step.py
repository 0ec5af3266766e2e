"""The timeline of a training step, as a profile predicts it, and what is set beside it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

import gpipebal as gb
from gpipebal.cli import main
from gpipebal.errors import BalanceError, KindError
from gpipebal.planner import recompute_layers, training_step
from gpipebal.problem import Link
from gpipebal.profile import AloneShares, LayerProfile, StepTerms, TurnTimes
from gpipebal.side_by_side import set_side_by_side


def profiled(**more: object) -> gb.Profile:
    """A chain whose layers take less in a step than by themselves, with a loss and an optimizer."""
    step = StepTerms(
        gather_time=0.5,
        whole_loss=LayerProfile("loss", "loss", 1.0, 1.0, 0.0),
        optimizer_time=3.0,
        overhead_time=0.25,
        side_by_side=AloneShares(2, 0.5, 0.5, 0.5, 0.5),
        turns=TurnTimes(0.5, 0.5, 0.5, 0.5, 1.0, 1.0, 1.0),
    )
    profile = gb.Profile.from_costs(
        [1.0, 2.0, 3.0, 2.0], saved_bytes=[10, 9, 8, 7], output_bytes=[4] * 4, chunks=4, **more
    )
    return replace(profile, step=step)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("checkpoint", ["never", "except_last", "always"])
def test_the_step_is_what_the_plan_says(schedule: str, checkpoint: str) -> None:
    """Its makespan, the optimizer, and what a step has beside are the plan's training step."""
    profile = profiled()
    plan = gb.solve(profile, 2, schedule=schedule, checkpoint=checkpoint)
    timeline = training_step(profile, plan)
    assert plan.step_time is not None
    beside = 3.0 + (0.25 if schedule == "gpipe" else 0.0)
    assert timeline.makespan + beside == pytest.approx(plan.step_time)
    assert timeline.makespan != pytest.approx(gb.simulate(plan).makespan)


def test_the_step_of_a_plan_with_runs_and_other_chunks() -> None:
    """Layers that are recomputed by themselves count, and the plan's micro-batches."""
    profile = profiled()
    chosen = recompute_layers(profile, gb.solve(profile, 2, checkpoint="never"), memory_limit=80)
    assert chosen.plan.runs
    timeline = training_step(profile, chosen.plan)
    assert timeline.makespan + 3.25 == pytest.approx(chosen.plan.step_time)
    more = gb.solve(profile, 2, chunks=8)
    assert training_step(profile, more).chunks == 8
    assert training_step(profile, more).makespan + 3.25 == pytest.approx(more.step_time)


def test_plans_of_other_costs_are_refused() -> None:
    """Another model, other times, other devices, links: one error that says the fix."""
    profile = profiled()
    plan = gb.solve(profile, 2)
    other = gb.Profile.from_costs([1.0, 2.0, 3.0, 2.5], chunks=4)
    renamed = gb.Profile.from_costs([1.0, 2.0, 3.0, 2.0], names=list("abcd"), chunks=4)
    # Times of the same length, but of devices that do not press on each other.
    itself = gb.Device(**profile.layer_times)
    for wrong, text in (
        (gb.solve(gb.Profile.from_costs([1.0] * 3), 2), "it has 3 layers"),
        (gb.solve(renamed, 2), "its layer 0 is 'a'"),
        (gb.solve(other, 2), "partition 1 has a forward time"),
        (gb.solve(profile, 2, devices=[2, 1]), "partition 0 has a forward time"),
        (gb.solve(profile, 2, devices=[profile, profile]), "its training step takes"),
        (gb.solve(profile, 2, devices=[itself, itself]), "its training step takes"),
        (gb.solve(profile, 2, link=Link(8.0)), "partition 0 has a transfer time"),
        (gb.solve(profile, 1, link=Link(8.0)), "its training step takes"),
    ):
        with pytest.raises(BalanceError, match=rf"{text}[^$]*Fix: (give )?the profile that"):
            training_step(profile, wrong)
    alike = gb.solve(profile, 2, devices=[1, gb.Device(memory_limit=10**9)])
    assert training_step(profile, alike) == training_step(profile, plan)
    for arguments in ((profile, [2, 2]), (plan, plan), (None, plan)):
        with pytest.raises(KindError):
            training_step(*arguments)  # type: ignore[arg-type]  # what is wrong


def test_a_profile_beside_plans_and_timelines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Plans then stand for training steps, in Python and on the command line."""
    profile = profiled()
    plan = gb.solve(profile, 2, checkpoint="never")
    step = training_step(profile, plan)
    measured = replace(step, source="measured")
    found = set_side_by_side({"plan": plan, "run": measured}, profile)
    assert found.rows[0].makespan == found.rows[1].makespan == step.makespan
    assert [cell.first for cell in found.cells] == [cell.last for cell in found.cells]
    assert "the profile predicts" in str(found) and "name it too" not in str(found)
    without = set_side_by_side({"plan": plan, "run": measured})
    assert without.rows[0].makespan > step.makespan and "name it too" in str(without)

    monkeypatch.chdir(tmp_path)
    profile.save("profile.json")
    plan.save("plan.json")
    measured.save("timeline.json")
    assert main(["compare", "profile.json", "plan.json", "timeline.json", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    rows = record["rows"]
    assert record["by_profile"] and not record["why_no_cells"]
    assert [row["name"] for row in rows] == ["plan", "timeline"]
    assert rows[0]["makespan"] == pytest.approx(rows[1]["makespan"])
    gb.solve(gb.Profile.from_costs([1.0] * 4), 2).save("other.json")
    assert main(["compare", "other.json", "profile.json", "timeline.json"]) != 0
    said = capsys.readouterr().err
    assert "was not made from" in said and "leave the profile out, or that plan" in said
    gb.Profile.from_costs([1.0] * 5).save("five.json")
    for files, text in (
        (["five.json", "plan.json", "timeline.json"], "the profile: 5"),
        (["profile.json", "timeline.json", "timeline.json"], "a profile is used with a plan"),
    ):
        assert main(["compare", *files]) != 0
        assert text in capsys.readouterr().err


def test_a_profile_changes_no_plan_beside_its_own_simulation() -> None:
    """Both are of the layers' own times; beside a measurement the plan is of a training step."""
    profile = profiled()
    plan = gb.solve(profile, 2, checkpoint="never")
    own, step = gb.simulate(plan), training_step(profile, plan)
    assert own.makespan != step.makespan
    found = set_side_by_side({"plan": plan, "own": own}, profile)
    assert [row.makespan for row in found.rows] == [own.makespan] * 2
    assert "as the simulated timelines are" in str(found) and "name it too" not in str(found)
    nouns = {"plan": plan, "own": own, "run": replace(step, source="measured")}
    found = set_side_by_side(nouns, profile)
    assert [row.makespan for row in found.rows] == [step.makespan, own.makespan, step.makespan]
    assert "Simulated timelines are of the layers' own times" in str(found)
    found = set_side_by_side({"plan": plan, "step": step}, profile)
    assert [row.makespan for row in found.rows] == [step.makespan] * 2


def test_a_step_below_its_makespan_says_why() -> None:
    """Only there: elsewhere the sentence would explain nothing."""
    why = "adds up times of layers by themselves"
    below = gb.solve(profiled(), 2, chunks=32, checkpoint="never")
    assert below.step_time is not None and below.step_time < below.makespan
    assert why in str(below) and why in below.explain()
    above = gb.solve(replace(profiled(), step=StepTerms(0.5, optimizer_time=99.0)), 2)
    assert why not in str(above) and why not in above.explain()
    as_shown = replace(below, step_time=below.makespan * 0.999999)
    assert why not in str(as_shown) and why not in as_shown.explain()
