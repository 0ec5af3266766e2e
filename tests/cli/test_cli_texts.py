"""What people read and write: words of commands, titles, tables."""

from __future__ import annotations

import json
import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gpipebal import Profile, evaluate, plots, simulate, solve
from gpipebal.cli import _parser, main, words
from gpipebal.cli.words import BAD_INPUT, NO_PLAN, with_flags, within_reach
from gpipebal.models.catalogue import read_word
from gpipebal.plan import Plan
from gpipebal.planner.quantiles import at_quantile
from gpipebal.problem import Link
from gpipebal.profile import LayerProfile, StepTerms
from gpipebal.schedule import ALL_SCHEDULES, interleaved_schedule
from gpipebal.tables import profile_table
from gpipebal.timeline import Timeline

pytestmark = pytest.mark.timeout(120)

SIZES: dict[str, Any] = {"saved_bytes": [100] * 6, "output_bytes": [10] * 6}
PROFILE = Profile.from_costs([1.0, 2.0, 3.0, 2.5, 1.0, 1.0], chunks=4, **SIZES)


@pytest.fixture
def profile_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Write a profile into an empty folder, in which the command then works."""
    monkeypatch.chdir(tmp_path)
    PROFILE.save("profile.json")
    return "profile.json"


def said(words: list[str], capsys: pytest.CaptureFixture[str], status: int = 0) -> str:
    """Return what a command prints, on standard error where it fails."""
    assert main(words) == status
    out, err = capsys.readouterr()
    return err if status else out


def refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Return what a command says of a word that it cannot read."""
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == BAD_INPUT
    return capsys.readouterr().err


# A profile is planned for the schedule that is simulated.


def _differs() -> Profile:
    """Return a profile whose best balances under GPipe and 1F1B have other makespans."""
    draw = random.Random(67)
    forward = [draw.randint(1, 9) for _ in range(8)]
    backward = [draw.randint(1, 20) for _ in range(8)]
    sizes: dict[str, Any] = {"saved_bytes": [100] * 8, "output_bytes": [10] * 8}
    return Profile.from_costs(forward, backward=backward, chunks=6, **sizes)


def test_simulate_plans_for_the_schedule(
    profile_file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """It used to plan for GPipe, and to draw that under the schedule."""
    profile = _differs()
    profile.save(profile_file)
    plan = solve(profile, 3, checkpoint="never", schedule="1f1b")
    assert plan.balance != solve(profile, 3, checkpoint="never").balance
    words = ["simulate", profile_file, "-n", "3", "--checkpoint", "never", "--schedule", "1f1b"]
    assert Timeline.from_dict(json.loads(said([*words, "--json"], capsys))) == simulate(plan)
    # 1F1B holds fewer micro-batches: a limit that only it keeps.
    assert main([*words, "--memory-limit", "1000B"]) == 0


@pytest.mark.parametrize("command", ["solve", "simulate"])
def test_help_names_every_schedule(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Each known schedule, and how many partitions a device has where it is not one."""
    with pytest.raises(SystemExit):
        main([command, "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert f"{', '.join(ALL_SCHEDULES[:-1])} or {ALL_SCHEDULES[-1]}" in text
    assert "one for each device, or 2 with interleaved_1f1b or looped_bfs" in text


@pytest.mark.parametrize("schedule", ALL_SCHEDULES)
def test_simulate_takes_a_balance_under_every_schedule(
    schedule: str, profile_file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A balance needs no plan for the schedule."""
    words = ["simulate", profile_file, "--balance", "2,4", "--schedule", schedule, "--json"]
    found = Timeline.from_dict(json.loads(said(words, capsys)))
    assert found.makespan == simulate(evaluate(PROFILE, [2, 4]), schedule).makespan
    assert main([*words, "-o", "timeline.json"]) == 0


@pytest.mark.parametrize("words", [["--memory-limit", "1GiB"], ["--reserve", "1MiB"]])
def test_a_timeline_of_a_balance_knows_no_limit(
    words: list[str], profile_file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """It would be the same, and nothing would say whether the limit is kept."""
    err = said(["simulate", profile_file, "--balance", "2,4", *words], capsys, BAD_INPUT)
    assert f"a limit changes no timeline: {words[0]} with --balance" in err


# Units.


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("100Gb/s", "100GB/s, or 12.5GB/s for 100 gigabits"),
        ("25 gb", "25GB/s, or 3.125GB/s for 25 gigabits"),
        ("800Kb", "800kB/s, or 100kB/s for 800 kilobits"),
        ("1Mib/s", "1MiB/s, or 0.125MiB/s for 1 mebibits"),
        ("2.5Tb/s", "2.5TB/s, or 0.3125TB/s for 2.5 terabits"),
    ],
)
def test_a_small_b_may_be_a_bit(
    word: str, expected: str, profile_file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """It used to be read as bytes; links are mostly measured in bits."""
    for command in ("solve", "compare"):
        words = [command, profile_file, "-n", "2", "--bandwidth", word]
        assert f"may be bits or bytes (expected {expected})" in refused(words, capsys)


@pytest.mark.parametrize("word", ["12GB", "12GB/s", "12 GB/s", "12GiB", "500kB", "1e9", "12b"])
def test_bytes_are_bytes(word: str, profile_file: str) -> None:
    """A large B, and bytes without a prefix, mean one thing."""
    assert main(["solve", profile_file, "-n", "2", "--bandwidth", word]) == 0


def test_a_bandwidth_without_a_unit_is_a_slip(
    profile_file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """12 is twelve bytes in a second, with which no plan cuts anywhere but at the least output."""
    said = refused(["solve", profile_file, "-n", "2", "--bandwidth", "12"], capsys)
    assert "too small for bytes per second (expected 12GB, say; or 12B)" in said


@pytest.mark.parametrize("flag", ["--memory-limit", "--reserve"])
@pytest.mark.parametrize("word", ["2.5", "60", " 7 ", "3.", ".5"])
def test_sizes_without_a_unit_are_slips(
    flag: str, word: str, profile_file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """2.5 used to be two bytes, and a reserve of 2 two as well."""
    words = ["solve", profile_file, "-n", "2", "--memory-limit", "1GiB", flag, word]
    assert f"has no unit, and is too small for bytes (expected {word.strip()}GiB" in refused(
        words, capsys
    )


@pytest.mark.parametrize("word", ["0", "0.0", "1MiB", "500B", "2000000"])
def test_a_reserve_may_be_nothing(word: str, profile_file: str) -> None:
    """What has a unit, is nothing, or is as large as a device's memory is what it says."""
    words = ["solve", profile_file, "-n", "2", "--memory-limit", "1GiB", "--reserve", word]
    assert main(words) == 0


def test_advice_about_sizes_can_be_followed(
    profile_file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Few bytes without a unit would be refused."""
    words = ["solve", profile_file, "-n", "2", "--checkpoint", "never", "--memory-limit"]
    err = said([*words, "500B"], capsys, NO_PLAN)
    (limit,) = re.findall(r"or --memory-limit (\w+)\.", err)
    assert limit.endswith("B")
    assert main([*words, limit]) == 0


# Errors name options, and advise what the command can do.


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Fix: without keep_together.", "Fix: without --keep-together."),
        (
            "Fix: loss_inside=True, schedule='1f1b', partitions=3 (and train with pipe.step).",
            "Fix: --loss-inside, --schedule 1f1b, --partitions 3 (and train with pipe.step).",
        ),
        ("without no_cut and pin and max_layers", "without --no-cut and --pin and --max-layers"),
        ("pin has 5 (expected 0)", "--pin has 5 (expected 0)"),
        ("splits: pin={0: 1, 3: 0} (expected", "splits: --pin 0=1 --pin 3=0 (expected"),
        ("no_cut=[2, 'b']", "--no-cut 2 --no-cut b"),
        ("keep_together=[('a', 'b'), (2, 3)].", "--keep-together a,b --keep-together 2,3."),
        ("memory_limit=1930.", "--memory-limit 1930B."),
        ("memory_limit=[10, 2000000]", "--memory-limit 10B,2MB"),
        ("reserve=0", "--reserve 0"),
        ("see profile.names lists all layers;", "see gpipebal show lists the layers;"),
        ("a layer 'pin' that keeps together", "a layer 'pin' that keeps together"),
    ],
)
def test_errors_about_rules_and_sizes_speak_of_options(text: str, words: str) -> None:
    """They used to speak Python."""
    options = _parser().parse_args(["solve", "profile.json"])
    assert with_flags(text, options.flags) == words


def test_advice_is_within_reach() -> None:
    """What a command has no option for is left out; if nothing stays, the model has to change."""
    flags = {"chunks": "--chunks", "checkpoint": "--checkpoint"}
    text = "no.\nFix: loss_inside=True, checkpoint='auto'; or reserve=0; or checkpoint='auto'."
    assert within_reach(text, flags) == "no.\nFix: checkpoint='auto'."
    assert "smaller model" in within_reach("no.\nFix: reserve=0.", flags)
    assert within_reach("no.", flags) == "no."


def test_a_run_that_fails_says_what_is_older(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Advice has options of `run` only, and whose files the folder holds is said."""
    (tmp_path / "plan.json").write_text("older")
    words = ["run", "workloads:tiny_classifier", "--chunks", "2", "--output", str(tmp_path)]
    err = said([*words, "--memory-limit", "1KiB"], capsys, NO_PLAN)
    first, fix, note = err.strip().splitlines()[-3:]
    assert "does not fit" in first
    assert fix.startswith("Fix: ") and "--memory-limit" in fix
    assert "loss_inside" not in fix and "reserve" not in fix
    assert note == f"{tmp_path}: profile.json written; plan.json from before"
    assert (tmp_path / "plan.json").read_text() == "older"


def test_groups_of_micro_batches_are_no_speeds() -> None:
    """The number of devices used to be read as their speeds."""
    with pytest.raises(ValueError, match=r"chunks=7 \(expected a multiple of 2\)") as caught:
        interleaved_schedule(3, 7)
    flags = {"chunks": "--chunks", "devices": "--speeds"}
    assert "--speeds" not in with_flags(str(caught.value), flags)


@pytest.mark.parametrize(
    ("schedule", "fix"), [("zb_h1", "--chunks 6."), ("interleaved_1f1b", "4 partitions, or")]
)
def test_a_plan_that_does_not_fit_is_solved_anew(
    schedule: str, fix: str, profile_file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A plan has its number of micro-batches: no option of `simulate` can change it."""
    solve(PROFILE, 3, chunks=7).save("plan.json")
    err = said(["simulate", "plan.json", "--schedule", schedule], capsys, BAD_INPUT)
    assert f"\nFix: a new plan, by gpipebal solve PROFILE --schedule {schedule} with {fix}" in err


# What a balance can be asked about.


@pytest.mark.parametrize(
    ("words", "options"),
    [
        (["--bandwidth", "100B"], {"link": Link(100.0)}),
        (["--latency", "1", "--no-overlap"], {"link": Link(float("inf"), 1.0, overlaps=False)}),
        (["--speeds", "1,2"], {"devices": [1.0, 2.0]}),
        (["--memory-limit", "1GiB"], {"memory_limit": "1GiB"}),
        (
            ["--memory-limit", "1GiB", "--reserve", "1MiB"],
            {"memory_limit": "1GiB", "reserve": "1MiB"},
        ),
    ],
    ids=" ".join,
)
def test_a_balance_has_devices_links_and_limits(
    words: list[str],
    options: dict[str, Any],
    profile_file: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """They choose nothing; they used to be refused."""
    found = said(["solve", profile_file, "--balance", "2,4", "--json", *words], capsys)
    assert Plan.from_dict(json.loads(found)) == evaluate(PROFILE, [2, 4], **options)


def test_a_balance_has_quantiles(profile_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A quantile changes the times, and chooses nothing."""
    found = said(["solve", profile_file, "--balance", "2,4", "--json", "--quantile", "0.9"], capsys)
    assert Plan.from_dict(json.loads(found)) == evaluate(at_quantile(PROFILE, 0.9), [2, 4])


@pytest.mark.parametrize(
    "words",
    [
        *(["--objective", "bottleneck"], ["--any-order"], ["--pin", "0=0"], ["--no-cut", "1"]),
        *(["--max-layers", "4"], ["--method", "bisection"], ["--time-limit", "1"]),
    ],
    ids=" ".join,
)
def test_a_balance_leaves_nothing_to_choose(
    words: list[str], profile_file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """What chooses a balance is refused beside one."""
    err = said(["solve", profile_file, "--balance", "2,4", *words], capsys, BAD_INPUT)
    assert f"a balance leaves nothing to choose: {words[0]} with --balance" in err


def test_a_plan_with_runs_can_be_shown(
    profile_file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With --json the plan is printed, and not what is known of the search for its runs."""
    words = ["solve", profile_file, "-n", "2", "--recompute-layers", "--memory-limit", "900B"]
    (tmp_path / "plan.json").write_text(said([*words, "--json"], capsys))
    assert "Recomputed by themselves" in said(["show", "plan.json"], capsys)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (
            ["profile", "gpt", "--estimate", "A100", "--device", "cpu"],
            "no meaning with --estimate: --device cpu (expected nothing).\n"
            "Fix: leave --device out; --estimate names the device to estimate for.\n",
        ),
        (["profile", "gpt", "--estimate", "foo"], "\nFix: one of these names.\n"),
        (
            ["solve", "profile.json", "--balance", "3,3", "--schedule", "zb_h1"],
            "and simulated by gpipebal simulate.\n",
        ),
        (["profile", ".:plain"], "\nFix: package.module:plain, in the folder of that file, where"),
        (["run", "gpt", "--output", ""], "\nFix: --output gpipebal-run, or --output . for the"),
    ],
    ids=lambda item: " ".join(item) if isinstance(item, list) else "",
)
def test_fixes_are_words_of_the_command_line(
    words: list[str], expected: str, profile_file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """They used to speak Python, or to repeat what was typed."""
    assert profile_file == "profile.json"
    assert expected in said(words, capsys, BAD_INPUT)


@pytest.mark.parametrize("command", ["run", "profile"])
def test_a_model_without_values_can_be_estimated(
    command: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The error used to name a device that nobody typed, and a call in Python."""
    monkeypatch.chdir(tmp_path)
    err = said([command, "workloads:on_meta", "--device", "cpu"], capsys, BAD_INPUT)
    assert "layer '0' has no values to measure with: it is on the meta device (" in err
    assert err.endswith("\nFix: gpipebal profile MODEL --estimate A100, say, needs shapes only.\n")
    assert not list(tmp_path.iterdir())


# Layers whose names are numbers.


@pytest.fixture
def shifted(profile_file: str) -> str:
    """Write a profile whose layers are called 2 to 5."""
    Profile.from_costs([1.0] * 4, names=["2", "3", "4", "5"], chunks=4).save(profile_file)
    return profile_file


def _solved(words: list[str], capsys: pytest.CaptureFixture[str]) -> Plan:
    return Plan.from_dict(json.loads(said([*words, "--json"], capsys)))


def test_a_word_is_a_name_first(shifted: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Layer 5 used not to exist; what is not a name is an index."""
    solve_it = ["solve", shifted, "-n", "2"]
    assert _solved([*solve_it, "--pin", "4=0", "--pin", "5=1"], capsys).balance == [3, 1]
    assert _solved([*solve_it, "--no-cut", "4"], capsys).balance in ([1, 3], [3, 1])
    assert _solved([*solve_it, "--pin", "1=1"], capsys).balance == [1, 3]


@pytest.mark.parametrize(
    ("words", "rule"),
    [
        (["--pin", "2=0"], "pin"),
        (["--no-cut", "3"], "no-cut"),
        (["--keep-together", "2,5"], "keep-together"),
    ],
    ids=lambda item: " ".join(item) if isinstance(item, list) else "",
)
def test_a_word_with_two_meanings_is_refused(
    words: list[str], rule: str, shifted: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The index used to be taken, silently."""
    err = said(["solve", shifted, "-n", "2", *words], capsys, BAD_INPUT)
    assert f"word means several layers: --{rule} has " in err
    argument = repr(rule.replace("-", "_"))
    assert f"\nFix: gpipebal.solve in Python, whose argument {argument} takes " in err


# Values of --set.


@pytest.mark.parametrize(
    ("word", "value"),
    [
        *(("2024_01", "2024_01"), ("1_0.5", "1_0.5"), ("inf", "inf"), ("-nan", "-nan")),
        *(("infinity", "infinity"), ("1e999", "1e999"), ("0x10", "0x10"), ("e5", "e5")),
        *(("-3", -3), ("+4", 4), ("1e-3", 0.001), (".5", 0.5), ("2.", 2.0), ("no", False)),
    ],
)
def test_only_finite_numbers_are_numbers(word: str, value: object) -> None:
    """Python reads underscores within numbers, infinity and what is not a number."""
    found = read_word(word)
    assert found == value and type(found) is type(value)


# Tables and pictures.


def test_the_loss_inside_is_not_once_per_step() -> None:
    """It is there for each micro-batch, and used to stand among what a step has once."""
    loss = LayerProfile("loss", "Loss", 0.5, 1.0, 0.5)
    profile = replace(PROFILE, step=StepTerms(optimizer_time=2.0, loss=loss))
    lines = profile_table(profile).splitlines()
    assert "Once per step: optimizer 2.00 s." in lines
    assert "With the loss inside, for each micro-batch: loss 1.50 s." in lines


def test_a_table_says_why_memory_is_approximate() -> None:
    """It used to name a place that only Python can look at."""
    stored = Path(__file__).parents[2] / "profiles"
    profile = Profile.load(stored / "unet-B5-C64-192px-rows4-v100-estimate.json")
    assert profile_table(profile).endswith(
        "\nNote: approximate: the memory of 111 layers:"
        "\n  56 layers: convolution: cuDNN chooses a workspace"
        "\n  55 layers: batch normalisation: cuDNN may keep a reserve"
    )


def test_the_title_counts_shared_tensors_once() -> None:
    """Bars have what each layer saves; their sum is not a memory that anything needs."""
    layers = (
        LayerProfile("a", "Layer", 1.0, 1.0, 1.0, saved=(0,), parameter_bytes=2**20),
        LayerProfile("b", "Layer", 1.0, 1.0, 1.0, saved=(0, 1)),
    )
    profile = Profile(layers, storages=(2**20, 2**21))
    title = plots.plot_profile(profile, by="memory").get_title(loc="left")
    assert title.endswith("4.00 MiB together")


@pytest.mark.parametrize("n", [2, 12])
def test_the_title_of_a_run_stays_in_the_picture(n: int) -> None:
    """Modes of many partitions used to run off it."""
    modes: list[Any] = ["always" if j % 2 else "never" for j in range(n)]
    profile = Profile.from_costs([1.0] * (2 * n), chunks=8)
    plan = solve(profile, n, checkpoint=modes)
    figure = plots.plot_run(profile, plan, simulate(plan))
    (title,) = (text for text in figure.texts if "layers on" in text.get_text())
    assert title.get_text().endswith("checkpoint by partition")
    figure.draw_without_rendering()
    assert title.get_window_extent().x1 < figure.bbox.width


# What only Python can do.

_PLANNED = ["solve", "profile.json", "-n", "2"]

#: Words that make an error with each text that the command line says in another way.
ONLY_IN_PYTHON = {
    "profile.names lists all layers": [*_PLANNED, "--no-cut", "nowhere"],
    "a Device, a Profile, or its speed as a number above 0": [*_PLANNED, "--speeds", "0,1"],
    "one limit per device, None for no limit; or": [*_PLANNED, "--memory-limit", "1GB,1GB,1GB"],
    "Fix: in devices=, the": [
        *("solve", "profile.json", "-n", "4", "--schedule", "interleaved_1f1b"),
        *("--speeds", "1,2,3,4"),
    ],
    "or give devices.": [*_PLANNED, "--any-order"],
    "Fix: 1 for one as fast as": [*_PLANNED, "--speeds", "0,1"],
    "profile_model(model, sample, method='estimate') needs": [
        "profile",
        "workloads:without_values",
    ],
    "profile_model(model, sample, method='measure')": [
        *("profile", "workloads:with_choosing_layer", "--estimate", "A100"),
    ],
    "simulated by gpipebal.simulate": [
        "solve",
        "profile.json",
        "--balance",
        "2,4",
        "--schedule",
        "zb_h1",
    ],
    "no meaning with method='estimate':": [
        *("profile", "workloads:tiny", "--estimate", "A100", "--device", "cpu"),
    ],
    "; rates= names the device": [
        *("profile", "workloads:tiny", "--estimate", "A100", "--device", "cpu"),
    ],
    ", or DeviceRates(name, {'float32': 1e13}, bandwidth=1e12) with your own figures.": [
        *("profile", "workloads:tiny", "--estimate", "abacus"),
    ],
    "profile_model(model, sample, chunks=..., rows=None), which": [*_PLANNED, "--chunks", "2,4"],
    "with one_at_a_time=True, or ": [
        *("profile", "workloads:too_large", "--chunks", "2", "--device", "cpu"),
    ],
}


def test_no_text_that_is_said_in_another_way_is_missing() -> None:
    """Each has words above that make it."""
    assert words._ONLY_IN_PYTHON.keys() == ONLY_IN_PYTHON.keys()


@pytest.mark.parametrize("text", ONLY_IN_PYTHON)
def test_texts_that_are_said_in_another_way_exist(
    text: str,
    profile_file: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A command raises an error with the text, and prints it without: no key is out of date."""
    raised = []

    def recorded(error: str, *rest: Any) -> str:
        raised.append(error)
        return with_flags(error, *rest)

    monkeypatch.setattr("gpipebal.cli.with_flags", recorded)
    err = said(ONLY_IN_PYTHON[text], capsys, BAD_INPUT)
    assert text in raised[0] and text not in err
    assert words._ONLY_IN_PYTHON[text] in err
