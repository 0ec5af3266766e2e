"""Arguments of another kind are refused with the way to the right one, before anything else."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

import gpipebal as gb
from gpipebal.argument_kinds import check_kind
from gpipebal.errors import KindError
from gpipebal.memory import partition_memory
from gpipebal.pipeline import measure_memory
from gpipebal.planner import at_quantile
from gpipebal.plots import (
    partition_colours,
    plot_balance,
    plot_chunks,
    plot_memory,
    plot_partitions,
    plot_profile,
    plot_run,
    plot_schedules,
    plot_timeline,
    plot_timelines,
    save_figure,
)
from gpipebal.problem import Problem, links_of, to_bounds
from gpipebal.schedule import (
    gpipe_schedule,
    make_schedule,
    read_torch_csv,
    with_recomputes,
    write_torch_csv,
)
from gpipebal.side_by_side import set_side_by_side
from gpipebal.simulator import Durations, durations_of, held_of, memory_over_time, place
from gpipebal.solvers import explain_infeasible, iter_best_splits, select_method, split
from gpipebal.tables import profile_table
from gpipebal.timeline import outline

MODEL = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
PROFILE = gb.Profile.from_costs([1.0, 2.0], chunks=2)
PLAN = gb.solve(PROFILE, 2)
TIMELINE = gb.simulate(PLAN)
PIPE = gb.GPipe(MODEL, [1, 1], devices=["cpu", "cpu"])
TIMES = Durations((1.0,), (1.0,), (1.0,))

TRACKS = memory_over_time(TIMELINE, held_of(PROFILE, PLAN))

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
    "profile of held_of": lambda: held_of(PLAN, PLAN),  # type: ignore[arg-type]
    "plan of held_of": lambda: held_of(PROFILE, 3),  # type: ignore[arg-type]
    "timeline of memory_over_time": lambda: memory_over_time(PLAN, []),  # type: ignore[arg-type]
    "sizes of memory_over_time": lambda: memory_over_time(TIMELINE, 3),  # type: ignore[arg-type]
    "sizes[0] of memory_over_time": lambda: memory_over_time(TIMELINE, [1, 2]),  # type: ignore[list-item]
    "profile of partition_memory": lambda: partition_memory(
        PLAN,  # type: ignore[arg-type]
        (0, 1),
        chunks=1,
        checkpoint="never",
    ),
    "profile of durations_of": lambda: durations_of(PLAN, (0, 1)),  # type: ignore[arg-type]
    "schedule of place": lambda: place(PLAN, TIMES),  # type: ignore[arg-type]
    "durations of place": lambda: place(gpipe_schedule(1, 1), PLAN),  # type: ignore[arg-type]
    "forward of Durations": lambda: Durations(3, 4, 5),  # type: ignore[arg-type]
    "timeline of outline": lambda: outline(PLAN),  # type: ignore[arg-type]
    "schedule of with_recomputes": lambda: with_recomputes(PLAN, "never"),  # type: ignore[arg-type]
    "schedule of write_torch_csv": lambda: write_torch_csv("gpipe"),  # type: ignore[arg-type]
    "path of read_torch_csv": lambda: read_torch_csv(3),  # type: ignore[arg-type]
    "profile of at_quantile": lambda: at_quantile(PLAN, 0.9),  # type: ignore[arg-type]
    "profile of links_of": lambda: links_of(PLAN, gb.Link(1.0)),  # type: ignore[arg-type]
    "link of links_of": lambda: links_of(PROFILE, 1.0),  # type: ignore[arg-type]
    "balance of to_bounds": lambda: to_bounds(3),  # type: ignore[arg-type]
    "profile of profile_table": lambda: profile_table(PLAN),  # type: ignore[arg-type]
    "n_layers of profile_table": lambda: profile_table(PROFILE, "x"),  # type: ignore[arg-type]
    "nouns of set_side_by_side": lambda: set_side_by_side([PLAN]),  # type: ignore[arg-type]
    "nouns['a'] of set_side_by_side": lambda: set_side_by_side({"a": 3}),  # type: ignore[dict-item]
    "schedules of compare_schedules": lambda: gb.compare_schedules(PROFILE, 1, schedules=3),  # type: ignore[arg-type]
    "keywords of verify": lambda: gb.verify(MODEL, PIPE, torch.ones(2, 4), keywords=3),  # type: ignore[arg-type]
    "loss_fn of verify": lambda: gb.verify(MODEL, PIPE, torch.ones(2, 4), loss_fn=3),  # type: ignore[arg-type]
    "devices of GPipe": lambda: gb.GPipe(MODEL, [1, 1], devices=1.5),  # type: ignore[arg-type]
    "devices of GPipe, one number": lambda: gb.GPipe(MODEL, [1, 1], devices=torch.tensor(0)),  # type: ignore[arg-type]
    "step of Profile": lambda: replace(PROFILE, step=3),  # type: ignore[arg-type]
    "layers of Profile": lambda: gb.Profile(3),  # type: ignore[arg-type]
    "chunks of input_bytes": lambda: PROFILE.input_bytes("x"),  # type: ignore[arg-type]
    "partitions of Plan": lambda: replace(PLAN, partitions=3),
    "partitions[1] of Plan": lambda: replace(PLAN, partitions=[*PLAN.partitions[:1], 3]),
    "lower_bound of with_bound": lambda: PLAN.with_bound("x"),  # type: ignore[arg-type]
    "partition of micro_batch_time": lambda: PLAN.micro_batch_time("x"),  # type: ignore[arg-type]
    "partition of busy_time": lambda: TIMELINE.busy_time(None),  # type: ignore[arg-type]
    "width of text_gantt": lambda: TIMELINE.text_gantt("x"),  # type: ignore[arg-type]
    "beside of Timeline.save": lambda: TIMELINE.save("t.json", beside=PLAN),  # type: ignore[arg-type]
    "memory[0] of Timeline.save": lambda: TIMELINE.save("t.json", memory=[3]),  # type: ignore[list-item]
    "events of Timeline": lambda: gb.Timeline(3, 1),  # type: ignore[arg-type]
    "events[0] of Timeline": lambda: gb.Timeline(["x"], 1),  # type: ignore[list-item]
    "events[0] of Timeline, a tuple": lambda: gb.Timeline([(0, "F", 0, 0.0, 1.0)], 1),  # type: ignore[list-item]
    "provenance of Timeline": lambda: gb.Timeline((), 1, provenance=3),  # type: ignore[arg-type]
    "measured of plot_run": lambda: plot_run(PROFILE, PLAN, TIMELINE, 3),  # type: ignore[arg-type]
    "n_partitions of partition_colours": lambda: partition_colours("x"),  # type: ignore[arg-type]
    "path of save_figure": lambda: save_figure(plot_profile(PROFILE), 3),  # type: ignore[arg-type]
    "problem of split": lambda: split([1, 2]),  # type: ignore[arg-type]
    "problem of iter_best_splits": lambda: list(iter_best_splits([1])),  # type: ignore[arg-type]
    "problem of select_method": lambda: select_method(PROFILE),  # type: ignore[arg-type]
    "path of Plan.load": lambda: gb.Plan.load(None),  # type: ignore[arg-type]
    "path of Plan.save": lambda: PLAN.save(3),  # type: ignore[arg-type]
}


#: Every function that draws on axes, with what it draws.
DRAWN: dict[str, Any] = {
    "plot_profile": lambda ax: plot_profile(PROFILE, ax=ax),
    "plot_balance": lambda ax: plot_balance(PROFILE, PLAN, ax=ax),
    "plot_partitions": lambda ax: plot_partitions(PLAN, ax=ax),
    "plot_timeline": lambda ax: plot_timeline(TIMELINE, ax=ax),
    "plot_timelines": lambda ax: plot_timelines({"a": TIMELINE}, ax=ax),
    "plot_memory": lambda ax: plot_memory(
        memory_over_time(TIMELINE, held_of(PROFILE, PLAN)), ax=ax
    ),
    "plot_chunks": lambda ax: plot_chunks([PLAN], ax=ax),
    "plot_schedules": lambda ax: plot_schedules(gb.compare_schedules(PROFILE, 1), ax=ax),
}


@pytest.mark.parametrize("name", DRAWN)
@pytest.mark.parametrize("ax", ["x", 3, [], PLAN])
def test_what_is_no_axes_is_refused(name: str, ax: object) -> None:
    """With one error, before anything is drawn."""
    with pytest.raises(KindError, match=r"ax is not an Axes: .*\nFix: ax="):
        DRAWN[name](ax)


def test_what_does_not_exist_is_refused() -> None:
    """A partition, a storage, a split that the noun does not have."""
    for call in (
        lambda: PLAN.micro_batch_time(2),
        lambda: TIMELINE.busy_time(2),
        lambda: PROFILE.bytes_of([99]),
        lambda: durations_of(PROFILE, (0, 1)),
        lambda: held_of(PROFILE, (0, 5)),
        lambda: durations_of(PROFILE, (0, 1, 2), devices=[]),
    ):
        with pytest.raises(gb.GpipebalError, match=r"\(expected .*\nFix: "):
            call()
    assert TIMELINE.busy_time(-1) == TIMELINE.busy_time(1)


@pytest.mark.parametrize("what", WRONG)
def test_another_kind_is_refused(what: str) -> None:
    """Every verb names the argument that is of another kind, and gives a fix."""
    with pytest.raises(KindError) as raised:
        WRONG[what]()
    assert str(raised.value).startswith(f"{what.split(' of ')[0]} is not a")
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


#: Values whose comparisons, conversions or iterations raise.
ODD: dict[str, Any] = {
    "an array": np.array([2, 2]),
    "an array of texts": np.array(["never", "never"]),
    "an array of one number": np.array(2),
    "a masked array": np.ma.array([2, 2], mask=[False, True]),
    "a dtype": np.float32,
    "a time span": np.timedelta64(5, "s"),
    "nothing of pandas": pd.NA,
    "a table": pd.DataFrame({"a": [2, 2]}),
    "a tensor": torch.tensor([2.0, 2.0]),
    "a tensor of one number": torch.tensor(2),
    "a tensor without values": torch.empty(2, device="meta"),
    "a sparse tensor": torch.eye(2).to_sparse(),
    "a large number": 10**400,
    "a large negative number": -(10**400),
    "a large fraction": Fraction(10**400),
    "a small fraction": Fraction(1, 10**400),
}

#: Calls with a value of any kind.
CALLS: dict[str, Any] = {
    **{
        f"{name} of solve": lambda it, name=name: gb.solve(PROFILE, 2, **{name: it})
        for name in (
            *("chunks", "checkpoint", "schedule", "objective", "devices", "any_order", "reserve"),
            *("memory_limit", "link", "pin", "keep_together", "no_cut", "max_layers", "min_layers"),
            *("quantile", "method", "time_limit", "loss_inside", "cost"),
        )
    },
    "devices of solve, one each": lambda it: gb.solve(PROFILE, 2, devices=[1, it]),
    "memory_limit of solve, one each": lambda it: gb.solve(PROFILE, 2, memory_limit=[9**9, it]),
    "cost of solve, what it returns": lambda it: gb.solve(PROFILE, 2, cost=lambda *run: it),
    "objective of solve_grid": lambda it: gb.solve_grid(PROFILE, 2, objective=it),
    "chunks of solve_grid": lambda it: gb.solve_grid(PROFILE, 2, chunks=it),
    "min_layers of solve_grid": lambda it: gb.solve_grid(PROFILE, 2, min_layers=it),
    "balance of evaluate": lambda it: gb.evaluate(PROFILE, it),
    "patience of compare_rules": lambda it: gb.compare_rules(PROFILE, PLAN, patience=it),
    "latency of compare_schedules": lambda it: gb.compare_schedules(PROFILE, 1, latency=it),
    "checkpoint of compare_schedules": lambda it: gb.compare_schedules(PROFILE, 1, checkpoint=it),
    "costs of balance_cost": lambda it: gb.balance_cost(it, 1),
    "pause of simulate": lambda it: gb.simulate(PLAN, pause=it),
    "slowness of Device": gb.Device,
    "latency of Link": lambda it: gb.solve(PROFILE, 2, link=gb.Link(1e9, it)),
    "no_cut of Rules": lambda it: gb.Rules(no_cut=it),
    "keep_together of Rules": lambda it: gb.Rules(keep_together=[it]),
    "pin of Rules": lambda it: gb.Rules(pin=it),
    "memory of PartitionPlan": lambda it: replace(
        PLAN, partitions=[replace(part, memory=it) for part in PLAN.partitions]
    ),
    "costs of Problem": lambda it: Problem.from_costs(it, 1),
    "checkpoint of Problem": lambda it: Problem([1], [1], [1], 1, checkpoint=it),
    "bounds of a makespan": lambda it: Problem([1], [1], [1], 1).makespan(it),
    "method of split": lambda it: split(Problem.from_costs([1], 1), method=it),
    "problem of explain_infeasible": explain_infeasible,
    "forward of from_costs": gb.Profile.from_costs,
    "forward of from_costs, one each": lambda it: gb.Profile.from_costs([1, it]),
    "rows of from_costs": lambda it: gb.Profile.from_costs([1], rows=it),
    "name of a layer": lambda it: replace(
        PROFILE, layers=[replace(layer, name=it) for layer in PROFILE.layers]
    ).to_dict(),
    "loss of a step": lambda it: replace(PROFILE, step=replace(PROFILE.step, loss=it)),
    "turns of a step": lambda it: replace(PROFILE, step=replace(PROFILE.step, turns=it)),
    "source of Timeline": lambda it: gb.Timeline((), 1, source=it),
    "by of plot_profile": lambda it: plot_profile(PROFILE, by=it),
    "bandwidth of DeviceRates": lambda it: gb.DeviceRates("mine", {"float32": 1e12}, it),
    "device_type of DeviceRates": lambda it: gb.DeviceRates(
        "mine", {"float32": 1e12}, 1e11, device_type=it
    ),
    "lower_bound of a plan": lambda it: PLAN.with_bound(it).to_dict(),
    "balance of GPipe": lambda it: gb.GPipe(MODEL, it),
    "chunks of GPipe": lambda it: gb.GPipe(MODEL, [1, 1], chunks=it),
    "checkpoint of GPipe": lambda it: gb.GPipe(MODEL, [1, 1], checkpoint=it),
    "timeout of GPipe": lambda it: gb.GPipe(MODEL, [1, 1], timeout=it),
    "devices of GPipe": lambda it: gb.GPipe(MODEL, [1, 1], devices=[it, it]),
    "reduction of step": lambda it: PIPE.step(torch.ones(2, 4), loss_fn=torch.sum, reduction=it),
    "keywords of step": lambda it: PIPE.step(torch.ones(2, 4), loss_fn=torch.sum, keywords=it),
}


@pytest.mark.parametrize("kind", [set, dict.fromkeys])
def test_what_has_no_order_is_no_balance_and_no_list_of_devices(kind: Any) -> None:
    """Though it can be gone through."""
    for call in (
        lambda it: gb.GPipe(nn.Sequential(*MODEL, nn.ReLU()), it),
        lambda it: gb.evaluate(PROFILE, it),
        lambda it: gb.balance_cost(it, 1),
        lambda it: gb.solve(PROFILE, 2, devices=it),
    ):
        with pytest.raises(gb.GpipebalError, match=r"not a list.*\nFix: "):
            call(kind([1, 2]))


@pytest.mark.parametrize("what", CALLS)
@pytest.mark.parametrize("odd", ODD)
def test_a_value_of_any_kind_is_taken_or_refused(what: str, odd: str) -> None:
    """With one error of our own, however the value behaves."""
    try:
        CALLS[what](ODD[odd])
    except gb.GpipebalError as error:
        assert "\nFix: " in str(error)


#: Calls with a noun in the place of another argument.
SWAPPED: dict[str, Any] = {
    "schedule of simulate": lambda it: gb.simulate(PLAN, it),
    "pause of simulate": lambda it: gb.simulate(PLAN, pause=it),
    "schedule of solve": lambda it: gb.solve(PROFILE, 2, schedule=it),
    "checkpoint of solve": lambda it: gb.solve(PROFILE, 2, checkpoint=it),
    "objective of solve": lambda it: gb.solve(PROFILE, 2, objective=it),
    "memory_limit of solve": lambda it: gb.solve(PROFILE, 2, memory_limit=it),
    "reserve of solve": lambda it: gb.solve(PROFILE, 2, reserve=it),
    "no_cut of solve": lambda it: gb.solve(PROFILE, 2, no_cut=it),
    "quantile of solve": lambda it: gb.solve(PROFILE, 2, quantile=it),
    "method of solve": lambda it: gb.solve(PROFILE, 2, method=it),
    "time_limit of solve": lambda it: gb.solve(PROFILE, 2, time_limit=it),
    "schedule of evaluate": lambda it: gb.evaluate(PROFILE, [1, 1], schedule=it),
    "schedules of compare_schedules": lambda it: gb.compare_schedules(PROFILE, 2, schedules=[it]),
    "latency of compare_schedules": lambda it: gb.compare_schedules(
        PROFILE, 2, bandwidth=1.0, latency=it
    ),
    "bandwidth of Link": lambda it: gb.Link(it),
    "overlaps of Link": lambda it: gb.Link(1.0, overlaps=it),
    "slowness of Device": lambda it: gb.Device(it),
    "keep_together of Rules": lambda it: gb.Rules(keep_together=it),
    "schedule of make_schedule": lambda it: make_schedule(it, 2, 2),
    "timeout of GPipe": lambda it: gb.GPipe(MODEL, [1, 1], timeout=it),
    "keyword_dims of GPipe": lambda it: gb.GPipe(MODEL, [1, 1], keyword_dims=it),
    "in_dims of profile_model": lambda it: gb.profile_model(MODEL, torch.ones(2, 4), in_dims=it),
    "timeout of profile_model": lambda it: gb.profile_model(MODEL, torch.ones(2, 4), timeout=it),
    "method of profile_model": lambda it: gb.profile_model(MODEL, torch.ones(2, 4), method=it),
    "rtol of verify": lambda it: gb.verify(MODEL, PIPE, torch.ones(2, 4), rtol=it),
}


@pytest.mark.parametrize("what", SWAPPED)
def test_a_noun_in_the_wrong_place_is_not_written_whole(what: str) -> None:
    """The error stays as short as for any other value."""
    noun = gb.Profile.from_costs([1.0])
    assert len(repr(noun)) > 1_000
    with pytest.raises(gb.GpipebalError, match=what.split(" of ")[0][:8]) as raised:
        SWAPPED[what](noun)
    assert len(str(raised.value)) < 600
    assert "\nFix: " in str(raised.value)
