"""benchmarks/speed: its tables say what its file holds, and its predictions are the planner's."""

from __future__ import annotations

import json
import math
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
from gpipebal.problem import Link
from gpipebal.profile import LayerProfile, Profile, SkipProfile, StepTerms

folder_of("speed")

from benchmark_tools.shares import about_shares, shares_of_device  # noqa: E402
from speed_benchmark import measure, predict, shares, simulate, tables  # noqa: E402
from speed_benchmark.devices import MEMORY_LIMIT  # noqa: E402
from speed_benchmark.predict import Step, fastest_balance, host_seconds, step_seconds  # noqa: E402
from speed_benchmark.published import MODELS, Run, SpeedModel  # noqa: E402

AT_ONCE = Link(math.inf)

#: Speeds as torchgpipe's documentation rounds them; the first of each table is 1.
PUBLISHED = {
    "resnet101": ("0.853", "1.414", "2.774", "4.294"),
    "amoebanetd": ("1.539", "1.773", "1.004", "1.666", "2.709", "0.932", "2.621", "4.953"),
    "unet": ("0.858", "1.246", "2.352", "3.105"),
}
LAYERS = {"resnet101": 370, "amoebanetd": 24, "unet": 241}


def test_readme_says_what_the_stored_result_says() -> None:
    """The README's tables are those of results.json."""
    assert_in_readme("speed", tables.blocks(stored("speed")))


def test_published_runs_are_as_published() -> None:
    """Throughputs give the published speeds, and balances have all layers."""
    for model in MODELS:
        first, *others = model.runs
        speeds = tuple(f"{run.throughput / first.throughput:.3f}" for run in others)
        assert speeds == PUBLISHED[model.name]
        assert all(sum(run.balance) == LAYERS[model.name] for run in model.runs)


def test_stored_result_is_complete() -> None:
    """Every model is simulated in all settings and measured, and what is said to fit does."""
    record = stored("speed")
    names = {model.name for model in MODELS}
    assert set(record["simulated"]) == set(record["measured"]) == names
    for model in MODELS:
        found = record["simulated"][model.name]
        assert [row["name"] for row in found["published"]] == [run.name for run in model.runs]
        for name in ("equal", "largest", "fast"):
            assert [row["n"] for row in found[name]] == list(simulate.DEVICES)
        for row in (*found["equal"], *found["largest"], *found["plain"].values()):
            assert sum(row["balance"]) == LAYERS[model.name]
            # A host that all devices wait for makes nothing faster.
            assert row["seconds"]["host"] >= row["seconds"]["devices"] * (1 - 1e-9)
            assert row["seconds"]["launching"] <= row["seconds"]["host"]
        assert all(row["fits"] for row in found["largest"])
        assert all(row["batch"] == model.equal_batch for row in found["equal"])
        measured = record["measured"][model.name]
        assert set(measured["measured"]) == {"plain", "1", "2"}
        assert set(measured["predicted"]) == {"plain", "1", "2", "4", "8"}


_layers = st.lists(
    st.tuples(st.integers(0, 50), st.integers(0, 50), st.integers(0, 50)), min_size=2, max_size=6
)


@given(
    costs=_layers,
    chunks=st.integers(1, 5),
    checkpoint=st.sampled_from(["never", "except_last", "always"]),
)
def test_without_links_and_host_it_is_the_planners_step(
    costs: list[tuple[int, int, int]], chunks: int, checkpoint: Any
) -> None:
    """A link that takes no time leaves what `evaluate` predicts."""
    forward, backward, recompute = zip(*costs, strict=True)
    profile = Profile.from_costs(forward, backward, recompute=recompute, chunks=chunks)
    loss = LayerProfile("loss", "loss", 1.0, 2.0, 1.0)
    profile = replace(profile, step=StepTerms(0.5, loss, loss, (), 0.0))
    balance = (1, len(costs) - 1)
    found = step_seconds(profile, Step(1, chunks, balance, checkpoint), AT_ONCE, host=False)
    plan = evaluate(profile, balance, checkpoint=checkpoint)
    assert found == pytest.approx(plan.step_time, rel=1e-9)


def test_links_and_host_take_time() -> None:
    """A literal chain: two seconds over the link each way, or a host that launches everything."""
    profile = Profile.from_costs([1.0, 1.0], [1.0, 1.0], output_bytes=[200, 0], chunks=1)
    step = Step(1, 1, (1, 1), "never")
    assert step_seconds(profile, step, AT_ONCE, host=False) == pytest.approx(4.0)
    assert step_seconds(profile, step, Link(100.0, 0.0), host=False) == pytest.approx(8.0)
    assert step_seconds(profile, step, Link(1e30, 3.0), host=False) == pytest.approx(10.0)
    layers = tuple(
        replace(layer, forward_host_time=5.0, backward_host_time=7.0) for layer in profile.layers
    )
    hosted = replace(profile, layers=layers)
    assert step_seconds(hosted, step, AT_ONCE, host=False) == pytest.approx(4.0)
    # The host works for 24 seconds on what the devices could do in 4.
    assert step_seconds(hosted, step, AT_ONCE, host=True) >= 24.0
    assert host_seconds(hosted, step) == pytest.approx(24.0)
    assert host_seconds(profile, step) == 0.0


def test_optimizers_of_all_devices_step_at_the_same_time() -> None:
    """Two devices with half of the parameters each need half of the optimizer's time."""
    profile = Profile.from_costs([1.0, 1.0], [0.0, 0.0], parameter_bytes=[8, 8], chunks=1)
    profile = replace(profile, step=StepTerms(0.0, optimizer_time=6.0))
    assert step_seconds(profile, Step(1, 1, (2,), "never"), AT_ONCE, host=False) == 8.0
    assert step_seconds(profile, Step(1, 1, (1, 1), "never"), AT_ONCE, host=False) == 5.0


def test_cut_is_not_where_too_much_crosses_it() -> None:
    """The planner's balance avoids a large output, and a long skip connection."""
    profile = Profile.from_costs([1.0] * 4, output_bytes=[0, 1000, 0, 0], chunks=4)
    slow = Link(10.0, 0.0)
    assert fastest_balance(profile, 2, 1, 4) == (2, 2)
    assert fastest_balance(profile, 2, 1, 4, link=slow) in ((1, 3), (3, 1))
    skip = SkipProfile("s", 0, 2, (3,))
    past = replace(
        Profile.from_costs([1.0] * 4, output_bytes=[0, 0, 0, 0], chunks=4),
        skips=(skip,),
        storages=(0, 0, 0, 1000, 0, 0, 0, 0),
    )
    assert fastest_balance(past, 2, 1, 4, link=slow) == (3, 1)


def test_balance_keeps_the_limit() -> None:
    """With a limit of its memory the fastest balance is the fastest of those that fit."""
    profile = Profile.from_costs([1.0] * 4, parameter_bytes=[10, 10, 500, 500], chunks=2)
    assert fastest_balance(profile, 2, 1, 2) == (2, 2)
    assert fastest_balance(profile, 2, 1, 2, memory_limit=1500) == (3, 1)
    with pytest.raises(gb.GpipebalError):
        fastest_balance(profile, 2, 1, 2, memory_limit=900)


def test_largest_batch_is_the_last_that_fits() -> None:
    """One more micro-batch than the largest batch has would need too much memory."""
    gigabyte = 10**9
    profile = Profile.from_costs(
        [1.0, 1.0], saved_bytes=[gigabyte, gigabyte], output_bytes=[gigabyte] * 2, chunks=2
    )
    runs = (Run("a", 2, 2, (1, 1), 1.0),)
    model = replace(MODELS[0], runs=runs, equal_batch=4)
    largest = simulate._largest(model, profile, 2)
    step = Step(1, largest["chunks"], largest["balance"])
    assert 1 < step.chunks < simulate.MOST_CHUNKS
    assert predict.fits(profile, step, MEMORY_LIMIT) and largest["fits"]
    assert not predict.fits(profile, replace(step, chunks=step.chunks + 1), MEMORY_LIMIT)


def test_small_model_is_measured_beside_its_prediction() -> None:
    """A measurement has every way and every number of partitions, in seconds above zero."""
    model = _tiny(Run("a", 2, 2, (33, 32), 1.0))
    found = json.loads(json.dumps(measure.measure(model, rounds=1, timeout=0.0)))
    assert found["predicted"].keys() == {"plain", "1", "2", "4", "8"}
    assert all(seconds > 0 for seconds in found["predicted"].values())
    assert all(len(q) == 3 and min(q) > 0 for q in found["measured"].values())
    record = {"simulated": {}, "measured": {"unet": found}, "provenance": {}}
    assert "a tiny U-Net" in tables.blocks(record)["result"]


def test_runs_on_shares_stand_beside_their_predictions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every run that is measured is predicted too, in torchgpipe's balance and in the planner's."""
    monkeypatch.setattr(shares, "CHUNKS", {"unet": {"plain": 1, "two": 2}})
    runs = (
        Run("plain", 4, 1, (65,), 3.0, checkpoint="never"),
        Run("two", 64, 32, (60, 5), 4.5),
        Run("not measured", 64, 32, (33, 32), 1.0),
    )
    model = _tiny(*runs)
    real = shares.fastest_balance

    def fastest(*arguments: Any, **options: Any) -> tuple[int, ...]:
        assert sum(real(*arguments, **options)) == 65
        return 33, 32  # whatever the clock says

    monkeypatch.setattr(shares, "fastest_balance", fastest)
    found = json.loads(json.dumps(shares.measure_shares(model, rounds=1, timeout=0.0)))
    assert [(run["name"], run["batch"], run["chunks"]) for run in found["runs"]] == [
        ("plain", 4, 1),
        ("two", 4, 2),
        ("two", 4, 2),
    ]
    assert [run["whose"] for run in found["runs"]] == ["torchgpipe's"] * 2 + ["planner's"]
    assert [run["balance"] for run in found["runs"][1:]] == [[60, 5], [33, 32]]
    assert (found["turns"], found["rounds"]) == (1, 1)
    for run in found["runs"]:
        assert sum(run["balance"]) == 65
        assert min([*run["predicted"].values(), *run["seconds"]]) > 0
    monkeypatch.setattr(tables, "MODELS", (model,))
    record = {"simulated": {}, "measured": {}, "shares": {"unet": found}, "provenance": {}}
    written = tables.blocks(record)["result"]
    assert "a tiny U-Net" in written and "1.500" in written and "not measured" not in written


@pytest.mark.cuda
def test_a_pipeline_runs_on_shares_of_a_device() -> None:
    """Two shares have half of the multiprocessors each at most, and a partition each."""
    pytest.importorskip("cuda.bindings")
    about = about_shares(2)
    assert 2 * about["multiprocessors_of_a_share"] <= about["multiprocessors"]
    places = shares_of_device(2)
    layers = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)).cuda()
    inputs = torch.ones(4, 8, device="cuda")
    expected = layers(inputs)
    pipe = gb.GPipe(layers, [1, 1], devices=places, chunks=2)
    torch.testing.assert_close(pipe(inputs), expected)


def test_command_line_refuses_what_is_impossible() -> None:
    """One thing is measured at a time, in one round or more."""
    make = script_of("speed")
    arguments = make.parse(["--measure", "--rounds", "2"])
    assert (arguments.measure, arguments.rounds) == (True, 2)
    for words in (
        ["--shares", "--measure"],
        ["--rounds", "0"],
        ["--shares", "--rounds", "-1"],
        ["--model", "unet"],
    ):
        with pytest.raises(SystemExit):
            make.parse(words)


def test_models_on_shares_are_stored_one_by_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A model is stored before the next one is measured, and the environment tells its turns."""
    make = script_of("speed")
    record = stored("speed")
    out = tmp_path / "results.json"
    seen: list[list[int]] = []

    def measured(model: SpeedModel, rounds: int, **_: Any) -> Any:
        if out.exists():
            parted = json.loads(out.read_text(encoding="utf-8"))["shares"]
            seen.append([found["turns"] for found in parted.values()])
        return {**record["shares"][model.name], "turns": rounds}

    monkeypatch.setattr(make, "MODELS", MODELS[:2])
    monkeypatch.setattr(make, "measure_shares", measured)
    monkeypatch.setattr(make, "about_shares", lambda n: record["provenance"]["shares"])
    make.add_shares(record, make.MODELS, 7, out)
    assert seen == [[7, 2]]
    assert "does not count: 7\n" in tables.blocks(record)["environment"]
    record["shares"]["amoebanetd"]["turns"] = 1
    assert "count: 7 of resnet101, 1 of amoebanetd\n" in tables.blocks(record)["environment"]
    # One model of another device would stand under the name of the others'.
    another = {**record["provenance"]["shares"], "device_name": "another device"}
    monkeypatch.setattr(make, "about_shares", lambda n: another)
    with pytest.raises(SystemExit, match="NVIDIA H100 80GB HBM3, and this is another device"):
        make.add_shares(record, make.MODELS[:1], 7, out)


def _tiny(*runs: Run) -> SpeedModel:
    return SpeedModel(
        "unet",
        "a tiny U-Net",
        lambda small: gb.models.unet(1, 2),
        torch.nn.functional.binary_cross_entropy_with_logits,
        image_size=64,
        runs=runs,
        equal_batch=4,
        small_about="a tiny U-Net",
        small_image_size=64,
        small_rows=1,
    )
