"""benchmarks/solver: its tables say what its file holds, and its figures are what they say."""

from __future__ import annotations

import signal
import time
from typing import Any

import pytest
from benchmark_files import assert_in_readme, folder_of, script_of, stored

import gpipebal as gb
from gpipebal.problem import to_balance
from gpipebal.solvers import split

FOLDER = folder_of("solver")

from solver_benchmark import (  # noqa: E402
    chains,
    figures,
    measure,
    peers,
    plans,
    tables,
    two_devices,
)

PROFILES = FOLDER.parent.parent / "profiles"


def test_readme_says_what_the_stored_result_says() -> None:
    """The README's tables are those of results.json."""
    assert_in_readme("solver", tables.blocks(stored("solver")))
    measured = two_devices.blocks(stored("solver", "measured.json"))
    assert_in_readme("solver", measured, "measured.json")


def test_stored_result_is_complete() -> None:
    """The stored result has every kind of chain, every size and every part, at full size."""
    record = stored("solver")
    assert (record["format"], record["version"]) == (figures.FORMAT, figures.VERSION)
    assert not record["provenance"]["quick"]
    cells = {(row["kind"], row["n_layers"], row["n_partitions"]) for row in record["times"]}
    assert cells == {(kind, *size) for kind in chains.KINDS for size in chains.SIZES}
    assert {"gaps", "joint", "plans", "searches"} <= record.keys()
    assert record["peers"] == list(peers.NAMES)
    assert max(row["bottleneck"]["gap"] for row in record["times"]) == 0


def test_stored_plans_are_what_the_planner_says() -> None:
    """What stored profiles gain is not a measurement: it is the same today, for one of them."""
    known = figures.pick(stored("solver")["plans"], n_layers=24)
    name = known[0]["profile"]
    before = figures.pick(known, profile=name)
    again = plans.plans(PROFILES, f"{name}.json")
    assert len(before) == len(again) == len(plans.PARTITIONS)
    for then, now in zip(before, again, strict=True):
        assert now["makespan"] == pytest.approx(then["makespan"], rel=1e-9)
        for rule, above in then["above"].items():
            assert now["above"][rule] == pytest.approx(above, abs=1e-9), rule


@pytest.mark.parametrize("kind", chains.KINDS)
def test_chains_are_drawn_from_their_seed(kind: str) -> None:
    """The same seed gives the same chain, of whole numbers above 0."""
    chain = chains.draw(kind, 100, 3)
    assert chain == chains.draw(kind, 100, 3)
    assert len(chain.forward) == len(chain.backward) == 100
    assert all(type(time) is int and time > 0 for column in chain for time in column)
    assert chain.both[5] == chain.forward[5] + chain.backward[5]


def test_times_have_a_row_each_and_slow_rules_are_left_out() -> None:
    """A rule that was too slow once is not tried on longer chains, and its row says so."""
    calls = []

    def slow(costs: Any, n: int) -> list[int]:
        calls.append(len(costs))
        raise peers.TooSlowError  # as `limited` does

    def exact(costs: Any, n: int) -> list[int]:
        return split(gb.problem.Problem.from_costs(costs, n), "bottleneck").balance

    rows = measure.time_all(
        [(20, 4), (40, 4), (40, 2)],
        ["exponential"],
        {"slow": slow, "exact": exact},
        rounds=1,
        limit=60.0,
        told=lambda line: None,
    )
    assert [row["peers"]["slow"]["tried"] for row in rows] == [True, False, True]
    assert calls == [20, 40]
    assert all(row["peers"]["slow"]["seconds"] is None for row in rows)
    assert all(row["peers"]["exact"]["excess"] == 0 for row in rows)
    assert all(row["bottleneck"]["seconds"] > 0 for row in rows)


def test_what_runs_too_long_is_stopped() -> None:
    """What never ends is ended, and the clock is as it was."""
    with pytest.raises(peers.TooSlowError), peers.limited(0.01):
        while True:
            time.monotonic()
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_a_balance_that_is_none_has_no_bottleneck() -> None:
    """An empty partition, or a layer too many, is not an answer."""
    assert measure.bottleneck_of([1, 2, 3], [2, 1]) == 3
    assert measure.bottleneck_of([1, 2, 3], [3, 0]) is None
    assert measure.bottleneck_of([1, 2, 3], [2, 2]) is None


def test_gaps_count_answers() -> None:
    """An optimal rule is never above the optimum; one that gives no balance has no answer."""

    def exact(costs: Any, n: int) -> list[int]:
        problem = gb.problem.Problem.from_costs(costs, n)
        return to_balance(split(problem, "bottleneck").bounds)

    rows = measure.gaps({"exact": exact}, {"exact": 2}, [(12, 3)])
    assert [row["exact"] for row in rows] == [
        {"draws": 2, "no_answer": 0, "mean": 0.0, "worst": 0.0, "optimal": 2}
    ] * len(chains.RANDOM)


def test_growth_is_a_power_law() -> None:
    """Times that grow with the square of N have the exponent 2, and one size tells nothing."""
    assert figures.exponent([(n, 3e-6 * n**2) for n in (1e3, 1e4, 1e5)]) == pytest.approx(2.0)
    assert figures.exponent([(10, 1.0)]) is None


def test_bars_are_worst_cases() -> None:
    """A bar is missed if any chain misses it, and says where."""
    record = stored("solver")
    for row in record["times"]:
        row["bottleneck"]["seconds"] = 1e-6
    found = {bar.name: bar for bar in figures.bars(record)}
    assert found["bottleneck, 10,000 / 512, drawn"].reached
    (slow,) = figures.pick(record["times"], kind="lognormal", n_layers=10_000, n_partitions=512)
    slow["bottleneck"]["seconds"] = 1.0
    bar = {bar.name: bar for bar in figures.bars(record)}["bottleneck, 10,000 / 512, drawn"]
    assert bar.reached is False and bar.where == "lognormal, 10,000 / 512"


def test_command_line_keeps_trials_out_of_the_result(capsys: pytest.CaptureFixture[str]) -> None:
    """A quick run is not written over the stored result by accident."""
    make = script_of("solver")
    with pytest.raises(SystemExit):
        make.parse(["--quick"])
    assert "give another file as --out" in capsys.readouterr().err
    assert make.parse(["--quick", "--out", "other.json"]).quick
    assert make.parse([]).out == make.RESULTS


def test_models_that_are_run_are_those_whose_profiles_are_of_a_cpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No estimate, and none of a CUDA device; each with a loss of its own mini-batch."""
    monkeypatch.setattr(two_devices, "profile_model", lambda *_, **__: None)
    found = {model.name: model for model in two_devices.models(PROFILES, None)}
    assert sorted(found) == sorted(path.stem for path in PROFILES.glob("*-cpu.json"))
    model = found["prediction-recurrent-rows8-cpu"]
    subject = model.subject
    loss = subject.loss_fn(model.net(subject.sample), subject.target)
    loss.backward()
    subject.optimizer(model.net.parameters()).step()
    assert loss.isfinite()
