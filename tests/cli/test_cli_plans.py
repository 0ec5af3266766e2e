"""The commands that need no model: what ``solve``, ``simulate`` and ``compare`` make of files."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cli.test_cli import _python

from gpipebal.cli import main
from gpipebal.plan import Plan
from gpipebal.planner import evaluate, recompute_layers, solve
from gpipebal.problem import Link
from gpipebal.profile import Profile
from gpipebal.schedule_comparison import compare_schedules
from gpipebal.simulator import simulate
from gpipebal.timeline import Event, Timeline

PROFILE = Profile.from_costs([1.0, 2.0, 3.0, 2.5, 1.0, 1.0], rows=2, chunks=4)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Write a profile, two plans and a measured timeline."""
    PROFILE.save(tmp_path / "profile.json")
    plan = solve(PROFILE, 2)
    plan.save(tmp_path / "plan.json")
    evaluate(PROFILE, [1, 5]).save(tmp_path / "other.json")
    events = [
        event._replace(start=2 * event.start, end=2 * event.end) for event in simulate(plan).events
    ]
    Timeline(tuple(Event(*e) for e in events), 2, "measured").save(tmp_path / "measured.json")
    return tmp_path


def _said(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert main(words) == 0
    return capsys.readouterr().out


def test_solve_writes_what_it_prints(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The plan that is printed is the best one of the profile, and the file holds it."""
    path = folder / "new.json"
    words = ["solve", str(folder / "profile.json"), "-n", "3", "--chunks", "8", "-o", str(path)]
    plan = solve(PROFILE, 3, chunks=8)
    assert _said(words, capsys) == f"{plan}\nWritten to {path}\n"
    assert Plan.load(path) == plan


def test_solve_takes_a_balance(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A balance that is given is evaluated, with brackets or without."""
    plan = evaluate(PROFILE, [1, 5], checkpoint="never")
    for balance in ("1,5", "[1, 5]"):
        words = ["solve", str(folder / "profile.json"), "--balance", balance]
        assert _said([*words, "--checkpoint", "never"], capsys) == f"{plan}\n"


@pytest.mark.parametrize(
    ("words", "options"),
    [
        (["--chunks", "auto"], {"chunks": "auto"}),
        (["--chunks", "2,4,8"], {"chunks": [2, 4, 8]}),
        (["--checkpoint", "auto", "--memory-limit", "6KiB"], {}),
        (["--checkpoint", "always,never"], {"checkpoint": ["always", "never"]}),
        (["--memory-limit", "6 KiB,1 MiB"], {"memory_limit": ["6 KiB", "1 MiB"]}),
        (["--memory-limit", "1MiB", "--reserve", "1KiB"], {"reserve": "1KiB"}),
        (["--speeds", "1,2", "--any-order"], {"devices": [1.0, 2.0], "any_order": True}),
        (["--bandwidth", "1kB/s"], {"link": Link(1000.0)}),
        (["--latency", "0.5", "--no-overlap"], {"link": Link(math.inf, 0.5, overlaps=False)}),
        (["--bandwidth", "1e3", "--latency", "1"], {"link": Link(1000.0, 1.0)}),
        (["--pin", "1=1", "--pin", "0=0"], {"pin": {1: 1, 0: 0}}),
        (["--keep-together", "0,2", "--no-cut", "4"], {"keep_together": [(0, 2)], "no_cut": [4]}),
        (["--max-layers", "4", "--time-limit", "9"], {"max_layers": 4, "time_limit": 9.0}),
        (["--min-layers", "2"], {"min_layers": 2}),
        (["--objective", "peak_memory"], {"objective": "peak_memory"}),
        (["--method", "bisection", "--objective", "bottleneck"], {"objective": "bottleneck"}),
        (["--schedule", "1f1b", "--checkpoint", "never"], {"schedule": "1f1b"}),
        (["--loss-inside", "--quantile", "0.9"], {"loss_inside": True, "quantile": 0.9}),
    ],
    ids=lambda item: " ".join(item) if isinstance(item, list) else "",
)
def test_words_are_arguments_of_solve(
    words: list[str], options: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every word of the command sets the argument of solve that it names."""
    if "--memory-limit" in words and "memory_limit" not in options:
        options["memory_limit"] = words[words.index("--memory-limit") + 1]
    for name in ("checkpoint", "method"):
        if f"--{name}" in words and name not in options:
            options[name] = words[words.index(f"--{name}") + 1]
    bytes_of = {"saved_bytes": [1000] * 6, "output_bytes": [100] * 6}
    times = [1.0, 2.0, 3.0, 2.5, 1.0, 1.0]
    larger = Profile.from_costs([1.5 * time for time in times], rows=4, **bytes_of)
    profile = Profile.from_costs(times, rows=2, chunks=4, **bytes_of)
    profile = replace(profile, other_sizes=(larger,))
    profile.save(tmp_path / "profile.json")
    plan = solve(profile, 2, **options)
    said = _said(["solve", str(tmp_path / "profile.json"), "-n", "2", "--json", *words], capsys)
    assert Plan.from_dict(json.loads(said)) == plan


@pytest.mark.parametrize(
    ("words", "options", "limits"),
    [
        ([], {}, {}),
        (["--checkpoint", "always,never"], {"checkpoint": ["always", "never"]}, {}),
        (["--reserve", "500B"], {}, {"reserve": "500B"}),
        (["--schedule", "1f1b"], {"schedule": "1f1b"}, {}),
        (["--speeds", "1,2"], {"devices": [1.0, 2.0]}, {"devices": [1.0, 2.0]}),
        (["--bandwidth", "1e3"], {"link": Link(1000.0)}, {"link": Link(1000.0)}),
    ],
    ids=lambda item: " ".join(item) if isinstance(item, list) else "",
)
def test_solve_recomputes_single_layers(
    words: list[str],
    options: dict[str, Any],
    limits: dict[str, Any],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The balance is the best without a limit; under it runs of layers are recomputed."""
    profile = Profile.from_costs([1.0, 2.0, 3.0, 2.5, 1.0, 1.0], saved_bytes=[1000] * 6, chunks=4)
    profile.save(tmp_path / "profile.json")
    plan = solve(profile, 2, **{"checkpoint": "never", **options})
    chosen = recompute_layers(profile, plan, memory_limit="5 KiB", **limits)
    assert chosen.runs
    words = ["solve", str(tmp_path / "profile.json"), "-n", "2", "--memory-limit", "5KiB", *words]
    words.append("--recompute-layers")
    said = _said([*words, "--explain"], capsys)
    assert said == f"{chosen}\n\n{chosen.explain()}\n"
    assert Plan.from_dict(json.loads(_said([*words, "--json"], capsys))) == chosen.plan
    assert chosen.before.balance == plan.balance


def test_solve_recomputes_layers_of_a_balance(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A balance may be given instead of a number of partitions."""
    words = ["solve", str(folder / "profile.json"), "--memory-limit", "1MiB", "--recompute-layers"]
    plan = evaluate(PROFILE, [1, 5], checkpoint="never")
    chosen = recompute_layers(PROFILE, plan, memory_limit="1MiB")
    assert _said([*words, "--balance", "1,5"], capsys) == f"{chosen}\n"


def test_a_plan_with_runs_is_written(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its file holds the layers that are recomputed by themselves."""
    profile = Profile.from_costs([1.0, 2.0, 3.0, 2.5], saved_bytes=[10**6] * 4, rows=2, chunks=4)
    profile.save(folder / "large.json")
    path = folder / "with-runs.json"
    words = ["solve", str(folder / "large.json"), "-n", "2", "--recompute-layers", "-o", str(path)]
    _said([*words, "--memory-limit", "5MB"], capsys)
    plan = Plan.load(path)
    assert plan.runs
    assert all(part.memory.total <= 5 * 10**6 for part in plan.partitions)
    assert "Recomputed by themselves" in str(plan)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "nothing limits the memory"),
        (["--memory-limit", "1GiB", "--schedule", "zb_h1"], "memory is not known"),
    ],
)
def test_solve_says_what_single_layers_need(
    words: list[str], message: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without a limit there is nothing to do, and not under schedules that only torch runs."""
    asked = ["solve", str(folder / "profile.json"), "-n", "2", "--recompute-layers", *words]
    assert main(asked) == 2
    said = capsys.readouterr().err
    assert message in said and "Fix: " in said


@pytest.mark.parametrize("limit", ["60", "16GiB,24"])
def test_a_limit_without_a_unit_is_a_slip(
    limit: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Who writes 60 means no 60 bytes; who writes 60B does, and who writes a million may."""
    words = ["solve", str(folder / "profile.json"), "-n", "2", "--memory-limit"]
    with pytest.raises(SystemExit) as ended:
        main([*words, limit])
    said = capsys.readouterr().err
    assert ended.value.code == 2 and "has no unit" in said and "Fix: " in said
    for meant in ("60B", str(2**40)):
        main([*words, meant])
        assert "no unit" not in capsys.readouterr().err


def test_solve_explains_in_plain_words(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With --explain the plan's own explanation stands below its table."""
    plan = solve(PROFILE, 2)
    said = _said(["solve", str(folder / "profile.json"), "-n", "2", "--explain"], capsys)
    assert said == f"{plan}\n\n{plan.explain()}\n"


def test_no_plan_has_a_status_of_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where no plan fits, the status is 3, and what would fit is said in words that work."""
    profile = Profile.from_costs([1.0] * 4, saved_bytes=[1000] * 4, chunks=2)
    profile.save(tmp_path / "profile.json")
    words = ["solve", str(tmp_path / "profile.json"), "-n", "2", "--memory-limit"]
    assert main([*words, "1 KiB"]) == 3
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("gpipebal: error: ") and "Fix: " in err
    assert "memory_limit=" not in err
    assert main([*words, "1 MiB"]) == 0


def test_solve_prints_json_for_machines(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With --json the output is the plan, and nothing else."""
    words = ["solve", str(folder / "profile.json"), "-n", "2", "--json"]
    assert Plan.from_dict(json.loads(_said(words, capsys))) == solve(PROFILE, 2)


def test_simulate_draws_the_timeline_of_a_plan(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The timeline is that of the plan, under its own schedule or another, and is written."""
    plan, path = solve(PROFILE, 2), folder / "timeline.json"
    words = ["simulate", str(folder / "plan.json"), "--width", "52", "-o", str(path)]
    assert _said(words, capsys) == f"{simulate(plan).text_gantt(52)}\nWritten to {path}\n"
    assert Timeline.load(path) == simulate(plan)
    words = ["simulate", str(folder / "plan.json"), "--schedule", "1f1b", "--json"]
    assert Timeline.from_dict(json.loads(_said(words, capsys))) == simulate(plan, "1f1b")


def test_simulate_makes_the_plan_of_a_profile(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A profile is planned first, in the same words as for solve."""
    words = ["simulate", str(folder / "profile.json"), "-n", "3", "--checkpoint", "never", "--json"]
    found = Timeline.from_dict(json.loads(_said(words, capsys)))
    assert found == simulate(solve(PROFILE, 3, checkpoint="never"))


def test_simulate_counts_memory_where_a_profile_tells_it(tmp_path: Path) -> None:
    """The trace of a profile has a counter for every device, at the plan's number of rows."""
    small, large = (
        Profile.from_costs([1.0] * 4, rows=rows, chunks=8 // rows, saved_bytes=[100 * rows] * 4)
        for rows in (2, 4)
    )
    replace(small, other_sizes=(large,)).save(tmp_path / "profile.json")
    solve(small, 2).save(tmp_path / "plan.json")
    peaks = {}
    for name, more in {"profile": ["-n", "2", "--chunks", "2"], "plan": []}.items():
        path = tmp_path / f"of_{name}.json"
        assert main(["simulate", str(tmp_path / f"{name}.json"), "-o", str(path), *more]) == 0
        events = json.loads(path.read_text())["traceEvents"]
        counters = [event for event in events if event["ph"] == "C"]
        assert {event["name"] for event in counters} <= {f"memory of partition {j}" for j in (0, 1)}
        peaks[name] = max((event["args"]["bytes"] for event in counters), default=None)
    # The last partition keeps its one recorded micro-batch of two layers, with four rows.
    assert peaks == {"profile": 800, "plan": None}


def test_simulate_counts_the_loss_between_the_phases(folder: Path) -> None:
    """The pause that the plan knows is in the timeline, unless it is not wanted."""
    plan = Plan.from_dict({**solve(PROFILE, 2).to_dict(), "pause_time": 7.0})
    plan.save(folder / "plan.json")
    makespans = []
    for more in ([], ["--no-loss"], ["--schedule", "1f1b"]):
        words = ["simulate", str(folder / "plan.json"), "-o", str(folder / "t.json"), *more]
        assert main(words) == 0
        makespans.append(Timeline.load(folder / "t.json").makespan)
    assert makespans[0] == simulate(plan, pause=7.0).makespan > makespans[1]
    assert makespans[1:] == [simulate(plan).makespan, simulate(plan, "1f1b").makespan]


def test_compare_sets_a_plan_beside_its_own_timeline(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What simulate makes of a plan, with or without the loss, is what compare takes it for."""
    plan = Plan.from_dict({**solve(PROFILE, 2).to_dict(), "pause_time": 7.0})
    plan.save(folder / "plan.json")
    for more in ([], ["--no-loss"]):
        paths = [str(folder / "plan.json"), str(folder / "t.json")]
        assert main(["simulate", paths[0], "-o", paths[1], *more]) == 0
        capsys.readouterr()
        first, last = json.loads(_said(["compare", *paths, "--json"], capsys))["rows"]
        for name in ("makespan", "bubble_fraction", "imbalance"):
            assert first[name] == last[name]
    text = _said(["compare", *paths], capsys)
    assert "that of a plan by itself, of one micro-batch" in text


def test_compare_sets_plans_side_by_side(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every plan has a line, with its makespan in relation to the first."""
    words = ["compare", str(folder / "plan.json"), str(folder / "other.json")]
    lines = _said(words, capsys).splitlines()
    assert [line.split()[0] for line in lines[1:3]] == ["plan", "other"]
    change = evaluate(PROFILE, [1, 5]).makespan / solve(PROFILE, 2).makespan - 1
    assert f"+{100 * change:.1f} %" in lines[2] and lines[2].endswith("[1,5]")


def test_compare_says_that_plans_are_of_other_layers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Their number may be the same, and so may names be that are only numbers."""

    def saved(name: str, *fingerprints: str) -> str:
        layers = tuple(
            replace(layer, fingerprint=known)
            for layer, known in zip(
                Profile.from_costs([1.0, 2.0]).layers, fingerprints, strict=True
            )
        )
        solve(Profile(layers, rows=1, storages=(0,) * 4), 2).save(tmp_path / f"{name}.json")
        return str(tmp_path / f"{name}.json")

    one, same = saved("one", "2:ab", "2:cd"), saved("same", "2:ab", "2:cd")
    unknown, other = saved("unknown", "1:ef", ""), saved("other", "2:ab", "2:ef")
    assert "Note" not in _said(["compare", one, same, unknown], capsys)
    said = _said(["compare", one, same, other], capsys)
    assert "\nNote: other: layers differ from those of one, so this compares models" in said
    record = json.loads(_said(["compare", one, other, "--json"], capsys))
    assert record["other_layers"] == ["other"]


def test_compare_says_that_a_timeline_may_be_of_another_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the number of its partitions, and by the profile that its costs are from."""

    def saved(name: str, n: int, device: str, date: str) -> list[str]:
        provenance = {"method": "measure", "device": device, "date": date}
        plan = solve(replace(PROFILE, provenance=provenance), n, chunks=8)
        plan.save(tmp_path / f"{name}-plan.json")
        simulate(plan).save(tmp_path / f"{name}.json")
        replace(simulate(plan), source="measured", provenance={}).save(
            tmp_path / f"{name}-run.json"
        )
        return [str(tmp_path / f"{name}{end}.json") for end in ("-plan", "", "-run")]

    one, other, four = (
        saved("one", 2, "A100", "2026-01-01"),
        saved("other", 2, "A100", "2026-01-02"),
        saved("four", 4, "A100", "2026-01-01"),
    )
    assert "Note" not in _said(["compare", *one], capsys)
    assert "Note" not in _said(["compare", *one, *four], capsys)  # there is a plan for each
    assert "Note" not in _said(["compare", one[1], four[1]], capsys)  # and here there is none
    said = _said(["compare", one[0], four[1], four[2]], capsys)
    text = "has 4 partitions, as no plan here: another split, or another model."
    assert f"\nNote: four {text}\nNote: four-run {text}\n" in f"{said}\n"
    said = _said(["compare", one[0], other[1], other[2]], capsys)
    assert said.count("\nNote: ") == 1 and "Note: other has the costs of another profile" in said
    record = json.loads(_said(["compare", one[0], four[2], "--json"], capsys))
    assert record["doubts"] == [f"four-run {text}"]


def test_compare_sets_prediction_beside_measurement(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A plan and a measured timeline are compared in total and cell by cell."""
    words = ["compare", str(folder / "plan.json"), str(folder / "measured.json"), "--json"]
    found = json.loads(_said(words, capsys))
    assert [row["kind"] for row in found["rows"]] == ["plan", "measured"]
    first, last = (row["makespan"] for row in found["rows"])
    assert last == 2 * first
    assert [(cell["partition"], cell["kind"]) for cell in found["cells"]] == [
        *((0, kind) for kind in "FRB"),
        *((1, kind) for kind in "FRB"),
    ]
    assert all(cell["last"] == pytest.approx(2 * cell["first"]) for cell in found["cells"])
    assert "+100.0 %" in _said(words[:-1], capsys)


def test_compare_knows_one_file_twice(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Files of the same name are told apart by their folders, and the same file by a number."""
    (folder / "sub").mkdir()
    solve(PROFILE, 2).save(folder / "sub" / "plan.json")
    one, two = str(folder / "plan.json"), str(folder / "sub" / "plan.json")
    for first, second, names in (
        (one, two, [one[:-5], two[:-5]]),
        (one, one, [f"0: {one[:-5]}", f"1: {one[:-5]}"]),
    ):
        found = json.loads(_said(["compare", first, second, "--json"], capsys))
        assert [row["name"] for row in found["rows"]] == names


def test_compare_shows_a_profile_under_all_schedules(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One profile alone gives the table of schedules."""
    words = ["compare", str(folder / "profile.json"), "-n", "3", "--chunks", "6"]
    table = compare_schedules(PROFILE, 3, chunks=6)
    assert _said(words, capsys) == f"{table}\n"
    found = json.loads(_said([*words, "--json"], capsys))
    assert [row["schedule"] for row in found["rows"]] == [row.schedule for row in table.rows]


@pytest.mark.parametrize(
    "words",
    [
        ["solve", "profile.json", "-n", "2"],
        ["simulate", "plan.json"],
        ["compare", "plan.json", "measured.json"],
        ["compare", "profile.json", "-n", "2"],
        ["show", "profile.json"],
        ["show", "plan.json"],
        ["show", "measured.json"],
    ],
    ids=" ".join,
)
def test_pictures_are_written(
    words: list[str], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every command draws what it prints, if asked to."""
    path = folder / "picture.png"
    paths = [str(folder / word) if word.endswith(".json") else word for word in words]
    assert main([*paths, "--plot", str(path)]) == 0
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["solve", "profile.json"], "number of partitions is not given: a profile can be cut into"),
        (["solve", "profile.json", "-n", "7"], "fewer layers than partitions: --partitions 7"),
        (["solve", "profile.json", "-n", "2", "--chunks", "0"], "chunks is too small: --chunks 0"),
        (["solve", "profile.json", "--balance", "1,2"], "balance does not fit the profile"),
        (["solve", "profile.json", "--balance", "1,5", "-n", "2"], "--partitions with --balance"),
        (["solve", "profile.json", "--balance", "1,5", "--chunks", "auto"], "--chunks with"),
        (["solve", "profile.json", "-n", "2", "--no-overlap"], "--no-overlap without --bandwidth"),
        (["solve", "profile.json", "-n", "2", "--schedule", "zz"], "not exist: --schedule zz"),
        (["solve", "profile.json", "-n", "2", "--bandwidth", "0"], "above 0: --bandwidth 0 ("),
        (["solve", "profile.json", "-n", "2", "--quantile", "2"], "--quantile 2 (expected"),
        (["solve", "profile.json", "-n", "2", "--time-limit", "-1"], "a time: --time-limit -1 ("),
        (["solve", "profile.json", "-n", "2", "--pin", "0"], "not readable: --pin 0 (expected"),
        (["solve", "profile.json", "-n", "2", "--memory-limit", "x"], "--memory-limit x (expected"),
        (["solve", "plan.json", "-n", "2"], "file is not a profile"),
        (["solve", "profile.json", "-n", "2", "--objective", "fun"], "--objective fun"),
        (["solve", "profile.json", "-n", "2", "--plot", "p.gif"], "--plot p.gif (expected a name"),
        (["solve", "profile.json", "-n", "2", "-o", "no/p.json"], "--output no/p.json (its folder"),
        (["simulate", "measured.json"], "file is not a plan or profile"),
        (["simulate", "plan.json", "-n", "2"], "the plan is made already: --partitions"),
        (["simulate", "plan.json", "--schedule", "zz"], "not exist: --schedule zz"),
        (["simulate", "plan.json", "--width", "0"], "too narrow: --width 0 (expected 20..10000)"),
        (["simulate", "plan.json", "--width", "19", "--json"], "too narrow: --width 19"),
        (["simulate", "plan.json", "--width", "99999999999"], "too wide: --width 99999999999 ("),
        (["simulate", "plan.json", "--plot", ".png"], "--plot .png (expected a name"),
        (["compare", "plan.json"], "there is nothing to compare with"),
        (["compare", "profile.json"], "number of devices is not given"),
        (["compare", "profile.json", "-n", "0"], "too small: --partitions 0"),
        (["compare", "profile.json", "-n", "2", "--latency", "-1"], "a time: --latency -1 ("),
        (["compare", "profile.json", "profile.json"], "profiles are not compared with each other"),
        (["compare", "profile.json", "plan.json"], "there is nothing to compare with"),
        (["compare", "plan.json", "other.json", "-n", "2"], "are made already: --partitions"),
        (["show", "profile.json", "--layers", "0"], "too small: --layers 0"),
        (["show", "profile.json", "--layers", "3", "--json"], "--layers 3 with --json, which"),
        (["show", "plan.json", "--layers", "3"], "--layers 3 with no profile (expected"),
        (["solve", "profile.json", "-n", "2", "--explain", "--json"], "--explain with --json ("),
        (["simulate", "plan.json", "--width", "52", "--json"], "--width with --json (expected"),
        (["show", "plan.json", "other.json", "--plot", "p.png"], "one picture for several files"),
    ],
    ids=lambda item: " ".join(item) if isinstance(item, list) else "",
)
def test_bad_input_is_said_in_options(
    words: list[str],
    message: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """What cannot be is said in one line, in words of the command line, with the fix below."""
    monkeypatch.chdir(folder)
    before = set(folder.iterdir())
    assert main(words) == 2
    out, err = capsys.readouterr()
    first, second = err.splitlines()
    assert out == "" and message in first and second.startswith("Fix: ")
    assert "None" not in err and "math." not in err
    assert set(folder.iterdir()) == before


@pytest.mark.parametrize(
    "words",
    [
        ["--balance", "1,x"],
        ["--chunks", "many"],
        ["--bandwidth", "fast"],
        ["--keep-together", "1"],
        ["--speeds", "1,,2"],
    ],
    ids=" ".join,
)
def test_words_that_cannot_be_read_are_refused(
    words: list[str], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A value that is none of its option is refused by name, in one line."""
    with pytest.raises(SystemExit) as caught:
        main(["solve", str(folder / "profile.json"), "-n", "2", *words])
    first, second = capsys.readouterr().err.splitlines()
    assert caught.value.code == 2
    assert f"argument {words[0]}" in first and second.startswith("Fix: see gpipebal solve")


def test_planning_needs_no_torch(folder: Path) -> None:
    """A saved profile is planned, simulated and compared without torch."""
    profile, plan = str(folder / "profile.json"), str(folder / "plan.json")
    code = (
        "import sys\nfrom gpipebal.cli import main\n"
        f"main(['solve', {profile!r}, '-n', '2'])\n"
        f"main(['simulate', {plan!r}])\n"
        f"main(['compare', {plan!r}, {str(folder / 'other.json')!r}])\n"
        f"main(['compare', {profile!r}, '-n', '2'])\n"
        "print('torch' in sys.modules)"
    )
    assert _python(code)[-1] == "False"


@pytest.mark.parametrize("is_closed", [False, True])
def test_what_a_library_prints_is_no_part_of_the_result(tmp_path: Path, is_closed: bool) -> None:
    """HiGHS has printed a line to standard output: JSON stays JSON, whatever is closed."""
    path = tmp_path / "profile.json"
    Profile.from_costs([1.0, 2.0, 3.0, 4.0], chunks=2).save(path)
    code = (
        "import ctypes, os, sys, scipy.optimize\n"
        f"{is_closed} and os.close(2)\n"
        "real = scipy.optimize.milp\n"
        "def noisy(*args, **kwargs):\n"
        "    ctypes.CDLL(None).puts(b'noise')\n"
        "    return real(*args, **kwargs)\n"
        "scipy.optimize.milp = noisy\n"
        "from gpipebal.cli import main\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    words = ["solve", str(path), "-n", "2", "--method", "integer program", "--json"]
    done = subprocess.run(
        [sys.executable, "-c", code, *words], capture_output=True, text=True, check=True, timeout=60
    )
    assert json.loads(done.stdout)["format"] == "gpipebal-plan"
    assert ("noise" in done.stderr) != is_closed
