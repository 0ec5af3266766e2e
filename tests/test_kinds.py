"""Arguments of another kind are refused with the way to the right one, before anything else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gpipebal as gb
from gpipebal.errors import KindError
from gpipebal.kinds import check_kind
from gpipebal.pipeline import measure_memory
from gpipebal.plots import (
    plot_balance,
    plot_chunks,
    plot_memory,
    plot_partitions,
    plot_profile,
    plot_run,
    plot_schedules,
    plot_timeline,
    plot_timelines,
)

MODEL = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
PROFILE = gb.Profile.from_costs([1.0, 2.0], chunks=2)
PLAN = gb.solve(PROFILE, 2)
TIMELINE = gb.simulate(PLAN)

#: Calls with a wrong argument, and the name of what is wrong.
WRONG: dict[str, Any] = {
    "profile of solve": lambda: gb.solve(MODEL, 2),  # type: ignore[arg-type]
    "profile of top_plans": lambda: gb.top_plans(PLAN, 2, 2),  # type: ignore[arg-type]
    "profile of select_method": lambda: gb.select_method(PLAN, 2),  # type: ignore[arg-type]
    "profile of evaluate": lambda: gb.evaluate(MODEL, [1, 1]),  # type: ignore[arg-type]
    "profile of solve_grid": lambda: gb.solve_grid(MODEL, 2),  # type: ignore[arg-type]
    "profile of compare_schedules": lambda: gb.compare_schedules(MODEL, 2),  # type: ignore[arg-type]
    "profile of compare_rules": lambda: gb.compare_rules(PLAN, PLAN),  # type: ignore[arg-type]
    "plan of compare_rules": lambda: gb.compare_rules(PROFILE, PROFILE),  # type: ignore[arg-type]
    "profile of match_profile": lambda: gb.match_profile(MODEL, MODEL),  # type: ignore[arg-type]
    "plan of simulate": lambda: gb.simulate(PROFILE),  # type: ignore[arg-type]
    "profile of plot_profile": lambda: plot_profile(PLAN),  # type: ignore[arg-type]
    "profile of plot_balance": lambda: plot_balance(PLAN, PLAN),  # type: ignore[arg-type]
    "plan of plot_balance": lambda: plot_balance(PROFILE, PROFILE),  # type: ignore[arg-type]
    "plan of plot_partitions": lambda: plot_partitions(PROFILE),  # type: ignore[arg-type]
    "timeline of plot_timeline": lambda: plot_timeline(PLAN),  # type: ignore[arg-type]
    "beside of plot_timeline": lambda: plot_timeline(TIMELINE, beside=PLAN),  # type: ignore[arg-type]
    "timelines of plot_timelines": lambda: plot_timelines([TIMELINE]),  # type: ignore[arg-type]
    "timelines['a'] of plot_timelines": lambda: plot_timelines({"a": PLAN}),  # type: ignore[dict-item]
    "tracks of plot_memory": lambda: plot_memory(PLAN),  # type: ignore[arg-type]
    "tracks[0] of plot_memory": lambda: plot_memory([PLAN]),  # type: ignore[list-item]
    "plans of plot_chunks": lambda: plot_chunks(PLAN),  # type: ignore[arg-type]
    "plans[1] of plot_chunks": lambda: plot_chunks([PLAN, PROFILE]),  # type: ignore[list-item]
    "table of plot_schedules": lambda: plot_schedules(PLAN),  # type: ignore[arg-type]
    "profile of plot_run": lambda: plot_run(PLAN, PLAN, TIMELINE),  # type: ignore[arg-type]
    "predicted of plot_run": lambda: plot_run(PROFILE, PLAN, PLAN),  # type: ignore[arg-type]
    "pipe of trace": lambda: gb.trace(MODEL).__enter__(),  # type: ignore[arg-type]
    "pipe of measure_memory": lambda: measure_memory(MODEL).__enter__(),  # type: ignore[arg-type]
    "plan of from_plan": lambda: gb.GPipe.from_plan(MODEL, PROFILE),  # type: ignore[arg-type]
    "path of Plan.load": lambda: gb.Plan.load(None),  # type: ignore[arg-type]
    "path of Plan.save": lambda: PLAN.save(3),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("what", WRONG)
def test_another_kind_is_refused(what: str) -> None:
    """Every verb names the argument that is of another kind, and gives a fix."""
    with pytest.raises(KindError) as raised:
        WRONG[what]()
    assert str(raised.value).startswith(f"{what.split(' of ')[0]} is no ")
    assert "\nFix: " in str(raised.value)


@pytest.mark.parametrize("kind", [gb.Profile, gb.Plan, gb.Timeline])
@pytest.mark.parametrize("given", [MODEL, PROFILE, PLAN])
def test_the_way_to_the_right_kind_works(given: object, kind: type) -> None:
    """From a model or an earlier noun, the fix is a line of Python that gives the right kind."""
    if isinstance(given, kind):
        check_kind("noun", given, kind)
        return
    with pytest.raises(KindError) as raised:
        check_kind("noun", given, kind)
    fix = str(raised.value).partition("\nFix: ")[2].rstrip(".")
    if given is PLAN and kind is gb.Profile:
        assert fix == "give the Profile that the Plan was made from"
        return
    names: dict[str, Any] = {"model": MODEL, "profile": PROFILE, "plan": PLAN, "partitions": 2}
    exec(fix, {**vars(gb), **names, "sample": torch.ones(2, 4), **_verbs()}, names)
    assert type(names["noun"]) is kind


def _verbs() -> dict[str, Any]:
    return {name: getattr(gb, name) for name in ("profile_model", "solve", "simulate")}


def test_the_path_of_a_file_is_loaded(tmp_path: Path) -> None:
    """Where a path was given instead of what the file holds, the fix loads it."""
    path = tmp_path / "p.json"
    PROFILE.save(path)
    for given in (path, str(path)):
        with pytest.raises(KindError) as raised:
            gb.solve(given, 2)  # type: ignore[arg-type]
        fix = str(raised.value).partition("\nFix: ")[2].rstrip(".")
        names: dict[str, Any] = {}
        exec(fix, {"Profile": gb.Profile}, names)
        assert names["profile"] == PROFILE
