"""benchmarks/prediction: its tables say what its file holds, and its figures are what they say."""

from __future__ import annotations

import argparse
import copy
import json
import sys
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmark_files import assert_in_readme, folder_of, script_of, stored
from hypothesis import given
from hypothesis import strategies as st

import gpipebal as gb
from gpipebal.planner import evaluate
from gpipebal.profile import AloneShares, LayerProfile, Profile, StepTerms
from gpipebal.schedule import make_schedule
from gpipebal.simulator import Durations, place
from gpipebal.timeline import Event, Timeline

FOLDER = folder_of("prediction")

from prediction_benchmark import (  # noqa: E402
    cuda_tables,
    figures,
    floor,
    measure,
    merging,
    models,
    parts,
    repeats,
    settings,
    steps,
    tables,
)

RESULTS = FOLDER / "results.json"
RESULTS_ON_CUDA = FOLDER / "results-cuda.json"
TINY = [models.tiny(model) for model in models.MODELS]
CALL = settings.Setting("loss(pipe(x))", 4, "except_last")


def test_readme_says_what_the_stored_result_says() -> None:
    """The README's tables are those of results.json."""
    assert_in_readme("prediction", tables.blocks(stored("prediction")))


def test_readme_says_what_was_measured_on_cuda() -> None:
    """The README's tables about CUDA are those of results-cuda.json."""
    blocks = cuda_tables.blocks(stored("prediction", RESULTS_ON_CUDA.name))
    assert_in_readme("prediction", blocks, RESULTS_ON_CUDA.name)


def test_stored_result_on_cuda_has_what_its_tables_say() -> None:
    """It is of full size on CUDA; the allocator was asked of every model in every setting."""
    record = stored("prediction", RESULTS_ON_CUDA.name)
    assert (record["format"], record["version"]) == (figures.FORMAT, figures.VERSION)
    assert not record["provenance"]["quick"]
    assert all(device.startswith("cuda") for device in record["provenance"]["devices"])
    larger = {model.name: models.larger(model).about for model in models.MODELS}
    assert {name: about["about"] for name, about in record["models"].items()}.items() <= (
        larger.items()
    )
    for name in record["models"]:
        groups = figures.within([row for row in record["rows"] if row["model"] == name])
        assert [len(group) >= 5 for group in groups] == [True] * len(settings.SETTINGS)
    found = [
        (row["model"], settings.Setting(row["way"], row["chunks"], row["checkpoint"]))
        for row in record["allocator"]["rows"]
    ]
    assert found == [(name, setting) for name in larger for setting in settings.SETTINGS]
    assert all(type(row["keeps_output"]) is bool for row in record["allocator"]["rows"])


def test_stored_result_is_complete() -> None:
    """The stored result has every model and setting at full size, with five balances or more."""
    record = stored("prediction")
    assert (record["format"], record["version"]) == (figures.FORMAT, figures.VERSION)
    assert not record["provenance"]["quick"]
    assert len(record["models"]) >= 8
    assert {name: about["about"] for name, about in record["models"].items()} == {
        model.name: model.about for model in models.MODELS
    }
    groups = figures.within(record["rows"])
    found = {
        (group[0]["model"], group[0]["way"], group[0]["chunks"], group[0]["checkpoint"])
        for group in groups
    }
    assert found == {
        (model.name, setting.way, setting.chunks, setting.checkpoint)
        for model in models.MODELS
        for setting in settings.SETTINGS
    }
    assert all(len(group) >= 5 for group in groups)
    for group in groups:
        assert [row["source"] for row in group].count("planner") == 1
    for row in record["rows"]:
        assert row["seconds"]["q1"] <= row["seconds"]["median"] <= row["seconds"]["q3"]
        assert all(seconds > 0 for seconds in row["predicted"].values())
        assert len(row["memory"]["counted"]) == settings.N_PARTITIONS


def test_every_mode_and_number_of_micro_batches_is_tried() -> None:
    """Of the pipeline as a function every mode is tried with every number of micro-batches."""
    tried = {(s.chunks, s.checkpoint) for s in settings.SETTINGS if s.way == "loss(pipe(x))"}
    for chunks in settings.CHUNKS:
        modes = {mode for m, mode in tried if m == chunks}
        # The one micro-batch is the last one, so that except_last is never.
        assert modes == {"never", "always"} | ({"except_last"} if chunks > 1 else set())
    assert {s.way for s in settings.SETTINGS} == {"loss(pipe(x))", "step gpipe", "step 1f1b"}


@pytest.mark.parametrize("model", TINY, ids=lambda model: model.name)
def test_models_are_the_same_every_time_and_can_be_parted(model: models.Model) -> None:
    """Each call makes the same parameters and data, enough layers, and rows for all chunks."""
    first, second = model.make(), model.make()
    assert len(first) > 5
    for one, other in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(one, other)
    for one, other in zip(model.make_batch(), model.make_batch(), strict=True):
        assert torch.equal(one, other)
    assert all(model.rows % chunks == 0 for chunks in settings.CHUNKS)


@pytest.mark.parametrize("model", TINY, ids=lambda model: model.name)
def test_steps_train_the_model(model: models.Model) -> None:
    """A step in any way changes the parameters; without dropout and BatchNorm all do so alike."""
    ways = [CALL, *(settings.Setting(way, 4, "always") for way in ("step gpipe", "step 1f1b"))]
    found = []
    for setting in ways:
        layers = model.make()
        before = [parameter.detach().clone() for parameter in layers.parameters()]
        n_layers = len(layers)
        run = steps.Steps(
            model, layers, model.make_batch(), [n_layers // 2, n_layers - n_layers // 2], setting
        )
        try:
            assert run.seconds() > 0
            seconds, timeline = run.traced()
            assert 0 < timeline.makespan <= seconds
            peaks = run.peaks()
            assert len(peaks) == 2 and min(peaks) > 0
        finally:
            run.close()
        after = [parameter.detach() for parameter in layers.parameters()]
        assert any(not torch.equal(*pair) for pair in zip(before, after, strict=True))
        found.append(after)
    if model.name != "dropout":
        for other in found[1:]:
            for one, two in zip(found[0], other, strict=True):
                torch.testing.assert_close(one, two, rtol=1e-3, atol=1e-4)


def test_caller_of_the_allocators_step_keeps_the_output() -> None:
    """What the pipeline returned is there during the backward, as a prediction counts it."""
    model, found = TINY[0], list[Any]()

    def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        kept = weakref.ref(output)
        loss = output.sum()  # a graph that holds no output
        if loss.requires_grad:
            loss.register_hook(lambda _: found.append(kept() is not None))
        return loss

    model = replace(model, loss_fn=loss_fn)
    layers = model.make()
    before = [parameter.detach().clone() for parameter in layers.parameters()]
    pipe = gb.GPipe(layers, [len(layers)], chunks=4)
    optimizer = model.optimizer(list(pipe.parameters()))
    try:
        steps.run_step(pipe, model, optimizer, model.make_batch(), CALL)
        assert found == [True]
        inside = replace(CALL, way="step gpipe")
        steps.run_step(pipe, model, optimizer, model.make_batch(), inside)
        assert len(found) > 1
    finally:
        pipe.close()
    pairs = zip(before, layers.parameters(), strict=True)
    assert any(not torch.equal(*pair) for pair in pairs)


_seconds = st.integers(0, 1000).map(lambda units: units / 64)
_layers = st.lists(
    st.builds(
        LayerProfile,
        name=st.just("layer"),
        kind=st.just("Layer"),
        forward_time=_seconds,
        backward_time=_seconds,
        recompute_time=_seconds,
        no_grad_forward_time=st.none() | _seconds,
    ),
    min_size=2,
    max_size=6,
)
_settings = st.builds(
    settings.Setting,
    way=st.sampled_from(["loss(pipe(x))", "step gpipe", "step 1f1b"]),
    chunks=st.integers(1, 5),
    checkpoint=st.sampled_from(["never", "except_last", "always"]),
)


_shares = st.none() | st.builds(
    AloneShares, st.just(2), *[st.floats(0.25, 1.0, exclude_min=True) for _ in range(4)]
)


@given(
    layers=_layers,
    loss=_layers,
    setting=_settings,
    cut=st.integers(1, 5),
    pause=_seconds,
    shares=_shares,
)
def test_predicted_timeline_is_the_planners(
    layers: list[LayerProfile],
    loss: list[LayerProfile],
    setting: settings.Setting,
    cut: int,
    pause: float,
    shares: AloneShares | None,
) -> None:
    """The predicted timeline takes the planner's step without its optimizer."""
    profile = _profile(layers, loss[0], setting.chunks, pause, shares)
    end = min(cut, len(layers) - 1)
    plan = measure.predict(profile, [end, len(layers) - end], setting)
    placed = parts.predicted_timeline(profile, plan).makespan
    assert plan.step_time == pytest.approx(placed + 0.5, rel=1e-12)


@given(layers=_layers, setting=_settings, longer=st.integers(1, 4), beside=_seconds, shares=_shares)
def test_parts_add_up_to_what_a_step_takes_longer(
    layers: list[LayerProfile],
    setting: settings.Setting,
    longer: int,
    beside: float,
    shares: AloneShares | None,
) -> None:
    """The parts add up; if all takes longer in the same way, no time is between the cells."""
    profile = _profile(layers, layers[0], setting.chunks, 1.0, shares)
    plan = measure.predict(profile, [1, len(layers) - 1], setting)
    assert plan.step_time is not None
    predicted = parts.predicted_timeline(profile, plan)
    events = [
        event._replace(start=longer * event.start, end=longer * event.end)
        for event in predicted.events
    ]
    timeline = Timeline(events, 2, "measured")
    seconds = timeline.makespan + 0.5 + beside
    found = parts.explain(profile, plan, setting, seconds, timeline)
    assert sum(found.values()) == pytest.approx(seconds - plan.step_time, abs=1e-6)
    pause = 0.0 if setting.loss_inside else plan.pause_time
    assert found["pause"] == pytest.approx((longer - 1) * pause, abs=1e-6)
    assert found["around"] == pytest.approx(beside, abs=1e-6)
    if shares is None or longer == 1:
        assert found["gaps"] == pytest.approx(0, abs=1e-6)


def test_waits_and_a_longer_pause_have_a_part_each() -> None:
    """A wait between two cells is a gap; what lies between the phases is the pause."""
    profile = _profile([_layer(1.0), _layer(1.0)], _layer(0.0), 1, 1.0)
    setting = settings.Setting("loss(pipe(x))", 1, "never")
    plan = measure.predict(profile, [1, 1], setting)
    assert plan.step_time == pytest.approx(1 + 1 + 1 + 2 + 2 + 0.5)
    # 0F0 ..1F0 .... 1B0 0B0: a wait of a quarter, and a pause of 1.5.
    events = (
        Event(0, "F", 0, 0.0, 1.0),
        Event(1, "F", 0, 1.25, 2.25),
        Event(1, "B", 0, 3.75, 5.75),
        Event(0, "B", 0, 5.75, 7.75),
    )
    found = parts.explain(profile, plan, setting, 8.5, Timeline(events, 2, "measured"))
    assert found == pytest.approx({"cells": 0.0, "pause": 0.5, "gaps": 0.25, "around": 0.25})


def test_forward_that_is_recomputed_later_is_another_kind_of_cell() -> None:
    """Forwards with and without a graph are told apart, by partition."""
    order = make_schedule("gpipe", 1, 2, "except_last")
    durations = Durations((2.0,), (3.0,), (4.0,), no_grad_forward=(1.0,))
    assert parts.cell_times(place(order, durations), order) == {
        ("no_grad_forward", 0): [1.0],
        ("forward", 0): [2.0],
        ("recompute", 0): [3.0],
        ("backward", 0): [4.0, 4.0],
    }


def test_profile_of_other_rows_predicts_a_setting() -> None:
    """A profile at other rows than the setting's is brought to them."""
    whole = Profile.from_costs([4.0, 4.0], [8.0, 8.0], rows=16, chunks=1)
    whole = replace(whole, step=StepTerms(0.0, _layer(0.0), _layer(0.0), (), 0.0))
    plan = measure.predict(whole, [1, 1], settings.Setting("loss(pipe(x))", 4, "never"))
    assert plan.rows == 4
    assert plan.makespan == pytest.approx(evaluate(whole, [1, 1]).makespan * 5 / 8)


@given(layers=_layers.filter(lambda layers: len(layers) > 2), chunks=st.sampled_from([1, 4, 8]))
def test_balances_differ_and_the_planners_is_among_them(
    layers: list[LayerProfile], chunks: int
) -> None:
    """Balances are splits of the chain, five if there are so many, the planner's first."""
    profile = replace(
        _profile(layers, _layer(1.0), chunks, 0.0), rows=2, mini_batch_rows=2 * chunks
    )
    setting = settings.Setting("loss(pipe(x))", chunks, "always")
    found = settings.choose_balances(profile, setting)
    assert len(found) == min(5, len(layers) - 1)
    assert all(min(balance) > 0 and sum(balance) == len(layers) for balance in found)
    best = tuple(gb.solve(profile, 2, chunks=chunks, checkpoint="always").balance)
    assert next(iter(found.items())) == (best, "planner")


def test_one_long_layer_does_not_take_all_balances() -> None:
    """Where one layer takes nearly all the time there are still five balances."""
    profile = Profile.from_costs([1.0, 1.0, 1.0, 1e6, 1.0, 1.0, 1.0], chunks=4)
    assert len(settings.choose_balances(profile, CALL)) == 5


def test_model_is_measured_in_all_settings() -> None:
    """A record has every plan of a model, with all figures that the tables need."""
    model = TINY[0]
    subject = measure.Subject(model, model.make())
    subject.start = measure.take_profiles(subject, settings.CHUNKS, 0.0, other_rows=True)
    chosen = [settings.SETTINGS[0], CALL, settings.Setting("step 1f1b", 8, "always")]
    lines: list[str] = []
    rows = measure.measure_model(
        subject, rounds=1, steps=1, timeout=0.0, settings=chosen, told=lines.append
    )
    assert lines == [f"mlp: round 1 of 1, {len(rows)} plans"]
    assert len(figures.within(rows)) == 3
    record = {**_record(), "rows": rows, "models": {"mlp": measure.about(subject)}}
    again = json.loads(json.dumps(record))
    profiles = again["models"]["mlp"]["profiles"]
    assert profiles["start"].keys() == {"1", "4", "8"} and len(profiles["rounds"]) == 1
    for row in rows:
        assert row["cells"].keys() >= {"backward"}
        assert sum(row["parts"].values()) != 0
    text = tables.blocks(again)["result"]
    assert "convolutions" not in text and "### Farthest off" in text


@pytest.mark.slow
def test_all_models_are_measured_quickly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The script measures every model with tiny layers, and its tables have a line for each."""
    make = script_of("prediction")
    monkeypatch.setattr(settings, "N_BALANCES", 2)  # more are measured in the same way
    arguments = make.parse(["--quick", "--rounds", "1", "--out", str(tmp_path / "quick.json")])
    record = make.measure(arguments)
    text = tables.blocks(record)["result"]
    assert all(model.name in text for model in models.MODELS)
    assert record["provenance"]["quick"]


def test_trial_is_not_stored_as_a_result(capsys: pytest.CaptureFixture[str]) -> None:
    """Tiny layers, or a part of the models, need another file; a whole run does not."""
    make = script_of("prediction")
    on_cuda = ["--out", str(RESULTS_ON_CUDA)]
    for words in (["--quick"], ["--model", "mlp"]):
        with pytest.raises(SystemExit):
            make.parse([*words, *on_cuda])
        with pytest.raises(SystemExit):
            make.parse(words)
        assert "--out" in capsys.readouterr().err
        assert isinstance(make.parse([*words, "--out", "other.json"]), argparse.Namespace)
    assert make.parse([]).out.resolve() == RESULTS.resolve()
    with pytest.raises(SystemExit):
        make.parse(["--rounds", "0"])


def test_bars_have_the_figures_of_the_rows() -> None:
    """Every bar has the value that the plans give, where it comes from, and its verdict."""
    found = {bar.name.strip(): bar for bar in figures.bars(_record())}
    pairs = [(0.875, 0.99), (0.88, 0.79), (1.2, 1.19), (2.0, 1.99), (2.5, 2.49)]
    first_quartile = sum(abs(predicted / q1 - 1) for predicted, q1 in pairs) / 5
    values = {name: (bar.value, bar.reached) for name, bar in found.items()}
    assert values == {
        "step time, mean absolute error": (pytest.approx(0.045), True),
        "mean of a perfect prediction": (pytest.approx(0.1 / 3.9 / 5), None),
        "step time, farthest off": (pytest.approx(0.125), False),
        "farthest of a perfect prediction": (pytest.approx(0.1 / 3.9), None),
        "mean, by a profile of some minutes before": (pytest.approx(0.0), None),
        "mean, of steps at the first quartile": (pytest.approx(first_quartile), None),
        "peak memory, mean absolute error": (pytest.approx(0.006), True),
        "peak memory, farthest under": (pytest.approx(-0.02), False),
        "peak memory, farthest over": (pytest.approx(0.03), None),
        "rank correlation, lowest of a model": (pytest.approx(0.9), False),
        "rank of a perfect prediction": (pytest.approx(1.0), None),
        "chosen plan over best measured, worst model": (pytest.approx(0.25), False),
        "plan chosen by half of the steps": (pytest.approx(0.0), None),
        "chosen plan over best of a half, in the other": (pytest.approx(0.25), None),
        "planner's balance over best measured, mean": (pytest.approx(0.25), None),
        "planner's balance over best measured, worst": (pytest.approx(0.25), None),
    }
    worst = found["step time, farthest off"].where
    assert worst == "mlp, loss(pipe(x)), chunks=4, never, [2, 4]"


def test_halves_are_the_even_and_the_odd_turns() -> None:
    """Their medians say what a perfect prediction is off by; one turn, or none, says nothing."""
    row = {"turns": [[1.0, 3.0], [4.0], [2.0], [6.0]]}
    assert floor.halves(row) == (2.0, 5.0)
    assert floor.unavoidable(row) == pytest.approx(3 / 7)
    for turns in ({"turns": []}, {"turns": [[1.0, 2.0]]}):
        assert floor.halves(turns) is None and floor.unavoidable(turns) is None
        assert floor.best_rank([turns]) is None
        assert floor.regret_between_halves([turns]) is None
        assert floor.regret_in_halves(turns, [turns]) is None


def test_the_floor_of_ranks_and_choices_by_hand() -> None:
    """Four plans in two halves that disagree about the first two."""
    pairs = [(1.0, 1.2), (1.1, 1.0), (2.0, 2.0), (3.0, 3.0)]
    rows = [{"turns": [[first], [second]]} for first, second in pairs]
    # One change of neighbours among four: r = 0.8, and of the whole with the truth more.
    assert floor.best_rank(rows) == pytest.approx((2 * 0.8 / 1.8) ** 0.5)
    assert floor.regret_between_halves(rows) == pytest.approx((0.2 + 0.1) / 2)
    # The best of the first half in the second, and the other way.
    assert floor.regret_in_halves(rows[0], rows) == pytest.approx((0.0 + (1 / 1.1 - 1)) / 2)
    assert floor.regret_in_halves(rows[2], rows) > 0.5


def test_repeated_profiles_are_taken_in_turns() -> None:
    """Every model has its times by turn and partition, and the work beside them."""
    lines: list[str] = []
    subjects = [measure.Subject(model, model.make()) for model in TINY[:2]]
    found = repeats.measure_repeats(subjects, 2, 0.0, work_seconds=0.0, told=lines.append)
    assert lines == ["repeats: turn 1 of 2", "repeats: turn 2 of 2"]
    assert list(found) == [model.name for model in TINY[:2]]
    for subject in subjects:
        about = found[subject.model.name]
        assert sum(about["balance"]) == len(subject.layers)
        assert len(about["partitions"]) == settings.N_PARTITIONS
        for partition in about["partitions"]:
            assert {kind: len(times) for kind, times in partition.items()} == dict.fromkeys(
                repeats.KINDS, 2
            )
        assert set(about["work"]) == set(repeats.WORK)
        assert all(seconds > 0 for times in about["work"].values() for seconds in times)
    record = {**_record(), "repeats": {"provenance": {}, "models": found}}
    names = {bar.name.strip() for bar in figures.bars(record)}
    assert "repeated profiles, farthest from their median" in names
    assert "matrix product in the same turns" in names
    assert "### 2 profiles of each model" in tables.blocks(record)["result"]


def test_memory_is_counted_anew_without_times() -> None:
    """All plans have new figures of memory, and everything else as it was."""
    subject = measure.Subject(TINY[0], TINY[0].make())
    rows = [
        {
            "model": subject.model.name,
            "way": way,
            "chunks": chunks,
            "checkpoint": "never",
            "balance": [1, len(subject.layers) - 1],
            "seconds": {"median": 1.0},
            "memory": {"predicted": [0, 0], "counted": [0, 0]},
        }
        for way, chunks in (("loss(pipe(x))", 1), ("step 1f1b", 4))
    ]
    found = measure.measure_memory_of(subject, rows, 0.0)
    assert [{**row, "memory": None} for row in found] == [{**row, "memory": None} for row in rows]
    for row in found:
        assert row["memory"]["predicted"] == pytest.approx(row["memory"]["counted"], rel=0.1)
    about = {"date": "2026-01-01", "gpipebal": "0.1.0"}
    record = {**stored("prediction"), "memory": {"provenance": about}}
    assert "memory: anew, 2026-01-01" in tables.blocks(record)["environment"]


def test_how_far_repeats_are_apart_by_hand() -> None:
    """The farthest of a partition's sums counts, and that of the work beside them."""
    times = {"forward": [1.0, 1.0, 1.0], "backward": [1.0, 1.1, 0.9], "recompute": [9.0] * 3}
    about = {
        "balance": [1, 1],
        "partitions": [times, {**times, "backward": [1.0, 1.0, 1.2]}],
        "work": {"sums": [1.0, 1.0, 1.5]},
    }
    record = {**_record(), "repeats": {"provenance": {}, "models": {"mlp": about}}}
    found = {bar.name.strip(): bar for bar in figures.bars(record)}
    bar = found["repeated profiles, farthest from their median"]
    assert (bar.value, bar.where) == (pytest.approx(0.1), "mlp, partition 1")
    assert bar.reached is False
    assert found["sums in the same turns"].value == pytest.approx(0.5)


def test_ranks_and_regrets_are_of_settings_with_several_micro_batches() -> None:
    """One micro-batch is in no figure within a setting, but in those of the whole model."""
    rows = _record()["rows"]
    alone = copy.deepcopy(rows[:2])
    for row in alone:
        row["chunks"] = 1
    assert figures.ranks_within([*rows, *alone]) == [pytest.approx(0.9)]
    assert len(figures.regrets_within([*rows, *alone])) == 1
    assert figures.rank(rows[:1]) is None
    assert figures.regret(rows[2:]) == pytest.approx(0.0)


def test_share_under_counts_beyond_the_limit_only() -> None:
    """Of four errors one is under by more than a hundredth."""
    assert figures.share_under([0.5, -0.005, -0.01, -0.02]) == 0.25


def test_drift_compares_the_same_profile_at_two_moments() -> None:
    """Layers that take a tenth longer at the end have drifted by a tenth."""
    model = _record()["models"]["mlp"]
    assert figures.drift(model) == pytest.approx(0.1)
    model["profiles"]["end"] = {}
    assert figures.drift(model) is None


def test_disagreement_is_the_worst_of_the_rounds() -> None:
    """Of three rounds one is two tenths off the median; without rounds there is nothing to say."""
    model = _record()["models"]["mlp"]
    assert figures.disagreement(model) == pytest.approx(0.2)
    model["profiles"]["rounds"] = []
    assert figures.disagreement(model) is None


def test_models_of_other_runs_are_added() -> None:
    """A model that only one run has is taken over; the order is given; settings must agree."""
    old, new = _record(), _record()
    new["models"] = {"u-net": new["models"]["mlp"]}
    new["rows"] = [{**row, "model": "u-net"} for row in new["rows"]]
    merged = merging.merge(old, new, ["u-net", "mlp"])
    assert list(merged["models"]) == ["u-net", "mlp"]
    assert [row["model"] for row in merged["rows"]] == ["u-net"] * 5 + ["mlp"] * 5
    assert (merged["provenance"]["minutes"], merged["provenance"]["runs"]) == (20.0, 2)
    new["provenance"]["rounds"] = 5
    with pytest.raises(ValueError, match="rounds"):
        merging.merge(old, new, ["u-net", "mlp"])


def test_of_several_runs_the_one_whose_steps_agree_is_chosen() -> None:
    """By the floor alone: worse predictions are no reason to keep the other run."""
    old, new = _record(), _record()
    new["models"]["mlp"]["about"] = "the newer run"
    for record, apart in ((old, 1.0), (new, 2.0)):
        for row in record["rows"]:
            row["turns"] = [[10.0], [10.0 + apart]]
    for row in new["rows"]:
        row["predicted"] = {by: time / 2 for by, time in row["predicted"].items()}
    for first, second in ((old, new), (new, old)):
        merged = merging.merge(first, second, ["mlp"])
        assert merged["models"]["mlp"]["about"] == old["models"]["mlp"]["about"]
        assert merged["rows"] == old["rows"]
        assert (merged["provenance"]["runs"], merged["provenance"]["steadiest"]) == (2, True)
    for row in old["rows"]:
        row["turns"] = [[10.0], [13.0]]
    assert merging.merge(old, new, ["mlp"])["rows"] == new["rows"]
    assert "lowest floor" in tables.blocks(merged)["environment"]
    assert merging.dates_of(merged) == merging.dates_of(old)
    new["provenance"]["date"] = "2099-01-01"
    later = merging.merge(old, new, ["mlp"])
    assert merging.dates_of(later) == {"mlp": "2099-01-01"}
    kept = merging.merge({**old, "repeats": {"what": "was measured"}}, new, ["mlp"])
    assert kept["repeats"] == {"what": "was measured"}


def test_result_file_is_that_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without CUDA the allocator cannot be asked; each kind of machine has a file of its own."""
    make = script_of("prediction")
    assert make.parse([]).out.name == RESULTS.name
    with pytest.raises(SystemExit):
        make.parse(["--allocator"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert make.parse([]).out.name == RESULTS_ON_CUDA.name
    assert make.parse(["--allocator"]).allocator


def test_answers_to_the_script_are_stored_beside_the_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """--allocator adds its answers and keeps the times; measuring the times keeps the answers."""
    make, out = script_of("prediction"), tmp_path / "result.json"
    out.write_text(json.dumps(_record()))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a device")
    monkeypatch.setattr(make, "measure_allocator", lambda model: _answer((model.name, 100))["rows"])
    words = ["make.py", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", [*words, "--allocator", "--model", "u-net"])
    make.main()
    record = json.loads(out.read_text())
    assert [row["model"] for row in record["allocator"]["rows"]] == ["u-net"] * 2
    assert record["rows"] == _record()["rows"]
    monkeypatch.setattr(make, "measure", lambda _: _record())
    monkeypatch.setattr(sys, "argv", words)
    make.main()
    assert json.loads(out.read_text()) == record


def test_tables_about_cuda_put_peaks_over_the_allocators() -> None:
    """What was predicted and counted is compared with what was allocated, model by model."""
    record = _record()
    record["provenance"]["cuda"] = "13.0"
    alone = copy.deepcopy(record["rows"][0])
    record["rows"].append({**alone, "chunks": 1})
    record["allocator"] = _answer(("mlp", 100), ("u-net", 200))
    found = cuda_tables.blocks(record)
    lines = [line.split() for line in found["cuda"].splitlines()]
    (mlp,) = [line for line in lines if line[:3] == ["loss(pipe(x))", "mlp", "1"]]
    # 110 predicted and 90 counted, where 100 were allocated.
    assert mlp[4:7] == ["10.0%", "+10.0%", "+10.0%"] and mlp[-1] == "-10.0%"
    assert "without uneven, convolutions" in found["cuda-environment"]


def test_cells_are_compared_by_kind() -> None:
    """Partitions are added up before measured is put over predicted; absent kinds have no ratio."""
    assert figures.cell_ratios(_record()["rows"]) == {"forward": pytest.approx(1.5)}


def test_environment_says_where_and_bars_what_is_missed() -> None:
    """The two blocks of the README come from the record alone."""
    blocks = tables.blocks(_record())
    assert list(blocks) == ["result", "environment"]
    assert "a processor" in blocks["environment"] and "NOT REACHED" in blocks["result"]


def _answer(*asked: tuple[str, int]) -> dict[str, Any]:
    """Return what an allocator says of models: two settings each, a tenth more was predicted."""
    about = {"device_name": "a device", "cuda": "13.0", "torch": "2.11.0", "settings": {}}
    return {
        "provenance": {**about, "date": "2024-01-01", "runs": 1},
        "rows": [
            {
                "model": name,
                "way": way,
                "chunks": 4,
                "checkpoint": "never",
                "keeps_output": True,
                "predicted": round(1.1 * allocated),
                "allocated": allocated,
                "counted": round(0.9 * allocated),
            }
            for name, allocated in asked
            for way in ("loss(pipe(x))", "step gpipe")
        ],
    }


def _layer(seconds: float) -> LayerProfile:
    return LayerProfile("layer", "Layer", seconds, 2 * seconds, seconds)


def _profile(
    layers: list[LayerProfile],
    loss: LayerProfile,
    chunks: int,
    pause: float,
    shares: AloneShares | None = None,
) -> Profile:
    """Make a profile of these layers, an optimizer of half a second, and a pause."""
    whole = LayerProfile("loss", "loss", pause / 2, pause / 2, pause / 2)
    return Profile(
        layers=tuple(layers),
        rows=1,
        mini_batch_rows=chunks,
        chunks=chunks,
        step=StepTerms(0.0, replace(loss, name="loss"), whole, (), 0.5, side_by_side=shares),
    )


def _record() -> dict[str, Any]:
    """Return a small result: one model, one setting, five plans, round numbers."""

    def row(
        end: int, predicted: float, measured: float, memory: tuple[int, int], source: str
    ) -> dict[str, Any]:
        return {
            "model": "mlp",
            "way": "loss(pipe(x))",
            "chunks": 4,
            "checkpoint": "never",
            "balance": [end, 6 - end],
            "source": source,
            "predicted": {
                "start": measured,
                "same minutes": predicted,
                "one profile": predicted,
            },
            "seconds": {"median": measured, "q1": measured - 0.01, "q3": measured + 0.01},
            "turns": [[measured], [measured - (0.1 if measured == 2.0 else 0.0)]],
            "parts": {"cells": 0.1, "pause": 0.05, "gaps": 0.0, "around": 0.0},
            "traced": measured,
            "cells": {"forward": [[0.1, 0.2], [0.1, 0.1]], "recompute": [None, [0.0, 0.1]]},
            "memory": {"predicted": list(memory), "counted": [100, 100]},
        }

    totals = {"forward": 1.0, "backward": 2.0}
    later = {"forward": 1.1, "backward": 2.2}
    return {
        "format": figures.FORMAT,
        "version": figures.VERSION,
        "provenance": {
            "date": "2024-01-01",
            "devices": ["cpu", "cpu"],
            "device_name": "a processor",
            "cores": 2,
            "system": "Linux x86_64",
            "python": "3.11.7",
            "torch": "2.13.0",
            "gpipebal": "0.1.0",
            "settings": {},
            "rounds": 3,
            "runs": 1,
            "quick": False,
            "minutes": 10.0,
            "other_load": 0.004,
        },
        "models": {
            "mlp": {
                "about": "a chain",
                "profiles": {
                    "start": {"4": totals},
                    "rounds": [{"4": totals}, {"4": totals}, {"4": {**totals, "forward": 1.6}}],
                    "end": {"4": later},
                },
            }
        },
        "rows": [
            # Best predicted, but the second best is measured to be so.
            row(2, 0.875, 1.0, (103, 100), "planner"),
            row(3, 0.8 * 1.1, 0.8, (100, 98), "equal split"),
            row(1, 1.2, 1.2, (101, 100), "25%"),
            row(4, 2.0, 2.0, (100, 100), "75%"),
            row(5, 2.5, 2.5, (100, 100), "40%"),
        ],
    }
