"""benchmarks/memory: its tables say what its file holds, and its estimates are what runs."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from benchmark_files import assert_in_readme, folder_of, script_of, stored
from hypothesis import given
from hypothesis import strategies as st

from gpipebal.memory import partition_memory
from gpipebal.problem import Memory, to_balance
from gpipebal.profile import Profile

folder_of("memory")

from memory_benchmark import estimate, measure, tables  # noqa: E402
from memory_benchmark.balances import BALANCES, find_balances, least_total  # noqa: E402
from memory_benchmark.experiments import EXPERIMENTS, Experiment, reduced  # noqa: E402
from memory_benchmark.measure import count  # noqa: E402

#: Parameters of the experiments, as they were published, in the order of the tables.
PARAMETERS = (
    *(81_505_540, 319_024_120, 542_734_840, 1_055_832_376, 1_844_858_344),
    *(362_157_516, 2_213_834_176, 4_993_859_008, 7_802_903_600, 15_822_206_000),
)


@pytest.fixture(autouse=True, scope="module")
def _estimated_once() -> Iterator[None]:
    """Estimate a model once for all balances: they are what the estimate does not look at."""

    @functools.cache
    def estimated(experiment: Experiment, rates: str) -> Profile:
        return estimate.profile_of(experiment, rates)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "memory_benchmark.measure.profile_of",
            lambda one, rates: estimated(replace(one, name="any", balance=()), rates),
        )
        yield


def test_readme_says_what_the_stored_result_says() -> None:
    """The README's tables are those of results.json."""
    assert_in_readme("memory", tables.blocks(stored("memory")))


def test_stored_result_is_complete() -> None:
    """Every experiment is there, estimated at full size and counted at a reduced one."""
    record = stored("memory")
    keys = [experiment.key for experiment in EXPERIMENTS]
    assert list(record["full"]) == list(record["reduced"]) == keys
    for experiment, parameters in zip(EXPERIMENTS, PARAMETERS, strict=True):
        row = record["full"][experiment.key]
        assert row["parameters"] == parameters
        several = len(experiment.balance) > 1
        assert list(row["balances"]) == (list(BALANCES) if several else ["published"])
        for found in row["balances"].values():
            assert sum(found["balance"]) == row["n_layers"] == sum(experiment.balance)
            assert [sum(column) for column in zip(*found["parts"].values(), strict=True)] == (
                found["activations"]
            )
            model = tables.total(found, "model")
            assert model == experiment.per_parameter * 4 * parameters
        if experiment.published_model is not None:
            assert model / 2**30 == pytest.approx(experiment.published_model, abs=0.006)


def test_stored_balances_are_the_best_of_their_kind() -> None:
    """No other stored balance has a smaller sum, a smaller peak, or a shorter makespan and fits."""
    for row in stored("memory")["full"].values():
        balances = row["balances"]
        if len(balances) == 1:
            continue
        # What waits depends on the clock: balances are chosen without it.
        needs = {
            name: [
                model + sum(parts) - waiting
                for model, waiting, *parts in zip(
                    found["model"],
                    found["parts"]["waiting"],
                    *found["parts"].values(),
                    strict=True,
                )
            ]
            for name, found in balances.items()
        }
        fitting = [name for name in needs if max(needs[name]) <= estimate.MEMORY_LIMIT]
        # Its own figure leaves out the moment of the optimizer's step too.
        assert sum(needs["least total"]) <= min(map(sum, needs.values())) * 1.001
        assert max(needs["least peak"]) <= min(map(max, needs.values())) * 1.001
        assert "fastest" in fitting
        assert balances["fastest"]["makespan"] <= min(balances[n]["makespan"] for n in fitting)


def test_stored_estimates_agree_with_counts() -> None:
    """At reduced sizes no partition's estimate is off by more than what may wait explains."""
    for key, row in stored("memory")["reduced"].items():
        assert all(abs(error) < 0.03 for error in tables.errors(row)), key
        assert sum(row["balance"]) == sum(_by_key(key).balance)


def test_stored_measurements_are_of_torchgpipes_balance() -> None:
    """What was measured at full size was so in torchgpipe's balance, and fits into its peaks."""
    record = stored("memory")
    for key, row in record["measured"].items():
        assert row["provenance"]["device"] in tables.blocks(record)["environment"]
        assert row["balance"] == list(_by_key(key).balance)
        assert max(row["counted"]) <= row["counted_total"] <= sum(row["counted"])
        if row["allocated"] is not None:
            assert row["counted_total"] <= row["allocated"] * 1.001 <= row["reserved"] * 1.001


@pytest.mark.parametrize(
    ("model", "balance"), [("amoebanetd", (9,)), ("unet", (65,))], ids=["amoebanetd", "unet"]
)
def test_estimate_is_the_count(model: str, balance: tuple[int, ...]) -> None:
    """With one partition nothing waits, and an estimate is the count to a thousandth."""
    row = count(_tiny(model, balance))
    assert row["estimated"] == pytest.approx(row["counted"], rel=1e-3)


def test_several_partitions_need_what_they_need_if_nothing_waits() -> None:
    """With several partitions no count is below the estimate in which nothing waits."""
    row = count(_tiny("unet", (30, 20, 15)))
    for least, counted in zip(row["least"], row["counted"], strict=True):
        assert counted >= least * (1 - tables.LEEWAY)


def test_clock_decides_between_two_bounds() -> None:
    """A count just inside the leeway of a bound lies between them, and beyond it does not."""
    row = {"least": [1000] * 4, "estimated": [2000] * 4, "counted": [985, 970, 2035, 2050]}
    assert tables.decided_by_clock(row) == [True, False, True, False]


def test_gradients_that_exist_count_from_the_beginning() -> None:
    """A step that begins with gradients needs them all the time, and adds to them."""
    profile = Profile.from_costs([1.0], parameter_bytes=[1000], saved_bytes=[10], chunks=2)
    layer = replace(profile.layers[0], backward_peak_bytes=1000, accumulating_peak_bytes=1500)
    profile = replace(profile, layers=(layer,))
    fresh, kept = (
        partition_memory(p, (0, 1), chunks=2, checkpoint="never")[0]
        for p in (profile, estimate.with_gradients(profile))
    )
    # Without gradients the most is in the second backward, when one graph is gone.
    assert (fresh.total, fresh.activations) == (1000 + 1000 + 10 + 1500, 10)
    assert (kept.total, kept.activations) == (1000 + 1000 + 20 + 1500, 20)


def test_gradients_that_exist_count_inside_a_partition_too() -> None:
    """Of a layer with others behind it, the backward that adds to gradients counts alone."""
    profile = Profile.from_costs([1.0, 1.0], parameter_bytes=[1000, 0], chunks=2)
    layer = replace(profile.layers[0], chained_peak_bytes=7, chained_accumulating_peak_bytes=5)
    profile = replace(profile, layers=(layer, profile.layers[1]))
    assert estimate.with_gradients(profile).layers[0].chained_peak_bytes == 5
    assert estimate.with_gradients(profile).layers[1].chained_peak_bytes is None


@given(
    peaks=st.integers(2, 6).flatmap(
        lambda n: st.lists(
            st.lists(st.integers(0, 9), min_size=n, max_size=n), min_size=n, max_size=n
        )
    ),
    n_partitions=st.integers(1, 4),
)
def test_least_total_is_that_of_all_balances(peaks: list[list[int]], n_partitions: int) -> None:
    """No split of a short chain has a smaller sum of peaks."""
    n_layers = len(peaks)
    n_partitions = min(n_partitions, n_layers)
    memory = Memory(lambda first, partition, mode: np.array(peaks[first][: n_layers - first]))
    found = least_total(memory, n_layers, n_partitions, "always")

    def need(bounds: tuple[int, ...]) -> int:
        return sum(peaks[a][b - a - 1] for a, b in pairwise(bounds))

    cuts = combinations(range(1, n_layers), n_partitions - 1)
    every = {tuple(to_balance((0, *cut, n_layers))): need((0, *cut, n_layers)) for cut in cuts}
    assert every[found] == min(every.values())


def test_balances_are_splits_of_the_chain() -> None:
    """Each balance has all layers and no empty partition; one partition leaves no choice."""
    profile = Profile.from_costs(
        [3.0, 1.0, 1.0, 1.0], saved_bytes=[5, 5, 5, 5], output_bytes=[9, 1, 9, 1], chunks=4
    )
    found = find_balances(profile, (2, 2), "except_last", 1000)
    assert list(found) == list(BALANCES)
    assert all(sum(balance) == 4 and min(balance) > 0 for balance in found.values())
    assert found["fastest"] == (1, 3)
    assert find_balances(profile, (4,), "except_last", 1000) == {"published": (4,)}


def test_reduced_experiments_keep_the_layers() -> None:
    """A reduced experiment has as many layers in the same balance, and is small."""
    for experiment in EXPERIMENTS:
        small = reduced(experiment)
        assert small.size[0] == experiment.size[0] and small.balance == experiment.balance
        assert small.is_plain == experiment.is_plain
        assert small.rows % small.chunks == 0 and small.size[1] <= 32


def test_goal_is_reached_or_not_by_the_bytes() -> None:
    """A sum just at the goal reaches it, and a byte more does not."""
    record = stored("memory")
    key = "amoebanetd pipeline-2"
    record["full"] = {key: record["full"][key]}
    goal = int(tables.GOALS[key] * 2**30)
    for over, words in ((0, {"yes"}), (2, {"NO"})):
        for found in record["full"][key]["balances"].values():
            found["activations"] = [goal - 5, 5 + over]
        model = sum(record["full"][key]["balances"]["published"]["model"])
        record["measured"] = {key: {"reserved": model + goal + over}}
        unmeasured = tables.goals({**record, "measured": {}}).splitlines()[1].split()
        assert unmeasured[3] == "-" and set(unmeasured[5::2]) == words
        line = tables.goals(record).splitlines()[1].split()
        assert len(line[4::2]) == 1 + len(BALANCES) and set(line[4::2]) == words


def test_one_experiment_is_put_beside_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Experiments made one by one are stored in the order of the tables; the old ones stay."""
    make = script_of("memory")
    monkeypatch.setattr(make, "estimate", lambda experiment: {"about": experiment.key})
    monkeypatch.setattr(make, "count", lambda experiment: {})
    path = tmp_path / "results.json"
    for key in ("unet naive-1", "amoebanetd pipeline-2"):
        make.make(path, make.parse(["--only", key]).only)
    record = json.loads(path.read_text(encoding="utf-8"))
    assert list(record["full"]) == ["amoebanetd pipeline-2", "unet naive-1"]
    assert record["full"]["unet naive-1"] == {"about": "unet naive-1"}
    assert record["provenance"]["rates"]["memory_limit"] == estimate.MEMORY_LIMIT


@pytest.mark.parametrize(
    ("name", "model", "balance"),
    [
        ("pipeline-1", "amoebanetd", (9,)),
        ("pipeline-2", "amoebanetd", (5, 4)),
        ("naive-1", "unet", (65,)),
        ("pipeline-1", "unet", (65,)),
    ],
)
def test_a_step_of_two_rows_leaves_what_a_step_leaves(
    name: str, model: str, balance: tuple[int, ...]
) -> None:
    """The peak measured behind a short step is that of the second of two steps of all rows."""
    experiment = replace(_tiny(model, balance), name=name)
    if experiment.is_plain:
        experiment = replace(experiment, chunks=1)
    row = measure.measure(experiment, torch.device("cpu"))
    counted = count(experiment)["counted"]
    # What waits for a neighbour depends on the clock.
    assert row["counted"] == (counted if len(balance) == 1 else pytest.approx(counted, rel=0.05))
    assert max(counted) <= row["counted_total"] <= sum(row["counted"])
    assert (row["allocated"], row["reserved"], row["free"]) == (None, None, None)
    assert row["provenance"]["device"] == "cpu" and row["provenance"]["torch"] == torch.__version__


def test_every_experiment_has_its_turn_to_be_measured() -> None:
    """The order of measuring has each experiment once."""
    assert sorted(measure.ORDER) == sorted(experiment.key for experiment in EXPERIMENTS)


def test_experiments_that_fit_are_measured_and_stored_one_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Those too large are left out, one that fails stops no other, and each is stored at once."""
    make = script_of("memory")
    path = tmp_path / "measured.json"
    stored_before: list[list[str]] = []

    def measured(experiment: Experiment, _: torch.device) -> dict[str, Any]:
        stored_before.append(list(json.loads(path.read_text(encoding="utf-8"))["measured"]))
        if experiment.key == "unet naive-1":
            raise ValueError("broken")
        return _row(experiment)

    monkeypatch.setattr(make, "measure", measured)
    needs = {key: tables.on_one_device(stored("memory"), key) for key in measure.ORDER}
    assert all(needs.values())
    # As much as pipeline-1 of U-Net needs, to the byte.
    room = sum(needs["unet pipeline-1"] or ())
    monkeypatch.setattr(make, "free_bytes", lambda device: room)
    assert make.make_measured(path, None, torch.device("cpu")) == []
    fitting = [key for key in measure.ORDER if sum(needs[key] or ()) <= room]
    assert fitting[0] == "unet pipeline-1" and "unet naive-1" not in fitting
    assert [len(keys) for keys in stored_before] == list(range(len(fitting)))
    assert "does not fit, 21.1 of 18.3 GiB needed: unet naive-1" in capsys.readouterr().err

    monkeypatch.setattr(make, "free_bytes", lambda device: None)
    only = make.parse(["--measure", "--only", "unet naive-1", "--only", "unet pipeline-8"]).only
    assert make.make_measured(path, only, torch.device("cpu")) == ["unet naive-1"]
    record = json.loads(path.read_text(encoding="utf-8"))
    assert list(record["measured"]) == [
        e.key for e in EXPERIMENTS if e.key in (*fitting, "unet pipeline-8")
    ]
    assert record["full"] == {} and record["version"] == tables.VERSION
    assert "off by" in tables.blocks(record)["result"]


def test_tables_say_what_was_measured() -> None:
    """Each experiment has a line, and one by partition where there are several."""
    keys = ["amoebanetd pipeline-2", "unet pipeline-1"]
    record = {**stored("memory"), "measured": {key: _row(_by_key(key)) for key in keys}}
    lines = tables.blocks(record)["result"].partition("### Measured on one device")[2].splitlines()
    assert "3 partitions counted at full size on A device: estimates off by 0.0%" in lines
    (pipeline_2,) = [line for line in lines if line.startswith(keys[0]) and "9.46" in line]
    assert pipeline_2.split()[2:] == ["7.95", "7.95", "0.0%", "7.00", "8.00", "9.00", "9.46"]
    # By partition only where there are several: of one, the line above says it all.
    assert [sum(line.startswith(key) for line in lines) for key in keys] == [2, 1]
    environment = tables.blocks(record)["environment"]
    assert "measured on A device, 80.00 GiB, CUDA 13, cuDNN 9" in environment
    assert environment.count("measured on") == 1 and ", ".join(keys) in environment
    nothing = {**record, "full": {}, "measured": {}}
    assert "nothing measured" in tables.blocks(nothing)["result"]


def _row(experiment: Experiment) -> dict[str, Any]:
    """Make up what was measured: what was estimated."""
    about = {"cpu": "x", "cores": 1, "system": "Linux", "date": "2026-01-01", "python": "3"}
    about |= {"torch": "2", "gpipebal": "1", "settings": {}, "device": "A device"}
    return {
        "provenance": {**about, "device_bytes": 80 * 2**30, "cuda": "13", "cudnn": 9},
        "free": 79 * 2**30,
        "balance": list(experiment.balance),
        "counted": tables.on_one_device(stored("memory"), experiment.key),
        "counted_total": 7 * 2**30,
        "allocated": 8 * 2**30,
        "reserved": 9 * 2**30,
        "seconds": 1.0,
    }


def _tiny(model: str, balance: tuple[int, ...]) -> Experiment:
    size = (3, 8) if model == "amoebanetd" else (1, 2)
    return Experiment("pipeline", model, size, 4, 64, 4, balance)


def _by_key(key: str) -> Experiment:
    return next(experiment for experiment in EXPERIMENTS if experiment.key == key)
