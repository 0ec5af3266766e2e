"""The command line: one clear line for bad input, and an interrupt that ends it cleanly."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import gpipebal
from gpipebal.cli import EXIT_STATUS, NOBODY_READS, _parser, main
from gpipebal.cli.interrupts import INTERRUPTED
from gpipebal.cli.words import BAD_INPUT, NO_PLAN, with_flags
from gpipebal.errors import ProfileError
from gpipebal.plan import Plan
from gpipebal.profile import Profile

#: Seconds after which a process that should have ended is killed and the test fails.
WATCHDOG = 90


def _command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "gpipebal", *arguments]


def _environment() -> dict[str, str]:
    """Return an environment in which a process finds the tests' models."""
    here = Path(__file__).parents[1] / "helpers"
    package = Path(gpipebal.__file__).parents[1]
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(package), str(here)])}


@contextmanager
def _started(tmp_path: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Run the command; whatever the test finds, the process and its pipes are gone afterwards."""
    with subprocess.Popen(
        _command(*arguments),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        env=_environment(),
    ) as process:
        # It ends the reading in `_wait_for`, too.
        watchdog = threading.Timer(WATCHDOG, process.kill)
        watchdog.start()
        try:
            yield process
        finally:
            watchdog.cancel()
            watchdog.join()
            process.kill()


def _wait_for(process: subprocess.Popen[str], word: str) -> None:
    """Read lines of its output until one begins with `word`."""
    assert process.stdout is not None and process.stderr is not None
    for line in process.stdout:
        if line.startswith(word):
            return
    pytest.fail(f"the process ended before it said {word!r}: {process.stderr.read()}")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["resnet18"], "model is not known: model='resnet18'"),
        (["my_module"], "model is not known: model='my_module'"),
        (["workloads:missing"], "function cannot be called"),
        (["workloads:model_only"], "function returned the wrong thing"),
        (["no_such_module_at_all:f"], "module cannot be imported"),
        (["workloads:tiny", "--partitions", "9"], "fewer layers than partitions: --partitions 9"),
        (["workloads:no_layers"], "model has no layers"),
        (["workloads:tiny", "--chunks", "0"], "chunks is too small: --chunks 0"),
        (["workloads:tiny", "--device", "cuda:99"], "device does not exist: --device cuda:99"),
        (["workloads:tiny", "--rows", "4"], "--rows is for built-in models"),
        (["workloads:tiny", "--checkpoint", "no"], "mode does not exist: --checkpoint no"),
        (["workloads:tiny", "--try", "0"], "attempts is too small: --try 0"),
    ],
)
def test_bad_input_gives_one_clear_line(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What cannot be is said in one line, with the fix on the next, and exit status 2."""
    assert main(["run", *words, "--output", str(tmp_path / "out")]) == 2
    out, err = capsys.readouterr()
    first, second = err.splitlines()
    assert first.startswith("gpipebal: error: ") and message in first
    assert second.startswith("Fix: ")
    assert out == "" and not (tmp_path / "out").exists()


def test_a_built_in_model_is_found_in_capitals(capsys: pytest.CaptureFixture[str]) -> None:
    """A name as papers write it is not taken for a module of the user's."""
    assert main(["run", "ResNet101"]) == 2
    assert capsys.readouterr().err.endswith("Fix: resnet101.\n")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "the following arguments are required: COMMAND"),
        (["walk"], "invalid choice: 'walk'"),
        (["run"], "the following arguments are required: MODEL"),
        (["run", "resnet101", "--chunks", "many"], "argument --chunks: invalid int value: 'many'"),
        (["run", "resnet101", "--colour", "red"], "unrecognized arguments: --colour red"),
        (["solve", "p.json", "--partitons=2"], "arguments: --partitons=2 (perhaps --partitions)"),
        (["solve", "p.json", "-n2", "-partitions", "2"], "-partitions 2 (perhaps --partitions)"),
        (["solve", "p.json", "-n2", "--memry", "1"], "--memry 1 (perhaps --memory-limit)"),
        (["solve", "p.json", "-n2", "--limit", "1"], "--memory-limit and --time-limit)"),
        (["simulate", "p.json", "--explain"], "arguments: --explain\n"),
        (["compare", "p.json", "--schedule", "1f1b"], "arguments: --schedule 1f1b\n"),
        (["run", "resnet101", "--objective", "cost"], "arguments: --objective cost\n"),
    ],
)
def test_words_that_mean_nothing_give_one_clear_line(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A command line that cannot be read is refused without a page of usage."""
    with pytest.raises(SystemExit) as caught:
        main(words)
    assert caught.value.code == 2
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith("gpipebal: error: ") and message in first + "\n"
    command = " ".join(["gpipebal", *[word for word in words[:1] if word != "walk"]])
    assert second == f"Fix: see {command} --help."


def test_exception_in_users_code_is_not_bad_input(capsys: pytest.CaptureFixture[str]) -> None:
    """A function that fails, and a layer that fails, keep their own exception and traceback."""
    with pytest.raises(ZeroDivisionError, match="the user's own fault"):
        main(["run", "workloads:raising"])
    assert "gpipebal: error" not in capsys.readouterr().err


def test_exception_in_users_layer_names_the_layer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A layer that fails is named, and its own exception stands in the traceback."""
    words = ["run", "workloads:with_broken_layer", "--output", str(tmp_path), "--device", "cpu"]
    with pytest.raises(ProfileError, match=r"layer '1' \(layer 1\) failed") as caught:
        main(words)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert "gpipebal: error" not in capsys.readouterr().err


def test_a_layer_that_only_an_estimate_cannot_follow_needs_no_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing of the user's failed, and the error says in which line values are missing."""
    monkeypatch.chdir(tmp_path)
    assert main(["profile", "workloads:with_choosing_layer", "--estimate", "H100"]) == BAD_INPUT
    said = capsys.readouterr().err
    assert "gpipebal: error: layer '1' cannot be estimated: " in said
    assert " of workloads.py: " in said
    assert "\nFix: measure, without --estimate." in said
    assert main(["profile", "workloads:with_choosing_layer", "--timeout", "0"]) == 0


def test_traceback_ends_with_status_one(tmp_path: Path) -> None:
    """The process of a failing user function shows the traceback and ends with status 1."""
    done = subprocess.run(
        _command("run", "workloads:raising"),
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=_environment(),
        timeout=WATCHDOG,
        check=False,
    )
    assert done.returncode == 1
    assert "in raising" in done.stderr and "ZeroDivisionError: the user's" in done.stderr


#: All commands.
COMMANDS = ("run", "profile", "solve", "simulate", "compare", "show")


def _python(code: str) -> list[str]:
    """Run code in a fresh interpreter; return the lines that it prints."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env=_environment(),
        timeout=WATCHDOG,
        check=True,
    )
    return done.stdout.splitlines()


def test_help_needs_no_torch() -> None:
    """Help and version come at once, without loading torch, numpy or any drawing."""
    heavy = ("torch", "numpy", "matplotlib", "pandas")
    asked = [["--help"], ["--version"], *([command, "--help"] for command in COMMANDS)]
    # In one process: what the first of them loads is there for all that follow.
    code = (
        "import sys, gpipebal.cli\n"
        f"for words in {asked!r}:\n"
        "    try: gpipebal.cli.main(words)\n"
        "    except SystemExit as end:\n"
        f"        print('status', end.code, words, set({heavy!r}) & set(sys.modules))\n"
    )
    ends = [line for line in _python(code) if line.startswith("status ")]
    assert ends == [f"status 0 {words} set()" for words in asked]


@pytest.mark.parametrize("command", COMMANDS)
def test_help_shows_examples_that_can_be_read(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The help ends with lines that can be copied, and their words exist; -o is --output."""
    with pytest.raises(SystemExit):
        main([command, "--help"])
    lines = capsys.readouterr().out.splitlines()
    for line in lines:
        assert not line.startswith("  --output") or ", -o " in line
    examples = [line.strip() for line in lines if line.startswith(f"  gpipebal {command} ")]
    assert len(examples) >= 3
    assert lines[-1] == "exit status: gpipebal --help lists them all."
    for example in examples:
        words = shlex.split(example.split("|")[0])[1:]
        assert _parser().parse_args(words).command is not None


def test_exit_statuses_are_documented() -> None:
    """The help of the command lists every exit status that there is."""
    listed = {int(line.split()[0]) for line in EXIT_STATUS.splitlines()[1:]}
    assert listed == {0, 1, BAD_INPUT, NO_PLAN, INTERRUPTED, NOBODY_READS}


@pytest.mark.parametrize("words", [["--help"], ["run", "--help"]])
def test_help_into_a_closed_pipe_is_no_error(words: list[str]) -> None:
    """``gpipebal --help | true`` ends without a word on standard error."""
    # Without a buffer argparse itself writes, and swallows the error.
    environment = {k: v for k, v in _environment().items() if k != "PYTHONUNBUFFERED"}
    with subprocess.Popen(
        _command(*words), stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        err = process.stderr.read()
        assert (process.wait(WATCHDOG), err) == (141, b"")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("n_partitions=9 (expected 1).", "--partitions 9 (expected 1)."),
        ("balance=[1, 2]; chunks=2.5.", "--balance 1,2; --chunks 2.5."),
        ("time_limit=None, or chunks=8", "no --time-limit, or --chunks 8"),
        ("profile.chunks=3, my_chunks=4", "profile.chunks=3, my_chunks=4"),
        ("checkpoint='always'.", "--checkpoint always."),
        ("checkpoint=('never', 'always')", "--checkpoint never,always"),
        ("sum(balance)=3", "sum(balance)=3"),
        ("chunks='' is none", "--chunks '' is none"),
        ("balance[0]=0 is none", "--balance 0 at position 1 is none"),
        ("balance[1]='' is none", "--balance '' at position 2 is none"),
        ("balance[0] and balance[2].", "--balance at position 1 and --balance at position 3."),
        ("balance[0].chunks=3", "balance[0].chunks=3"),
        (
            "time_limit is not a time: time_limit=-1.0.",
            "--time-limit is not a time: --time-limit -1.",
        ),
        ("len(balance)=3 (expected", "3 in --balance (expected"),
        ("'time_limit' and my.time_limit(3)", "'time_limit' and my.time_limit(3)"),
    ],
)
def test_errors_speak_of_options(text: str, words: str) -> None:
    """An argument in Python is said as the option that sets it, and nothing else is changed."""
    names = ("partitions", "n_partitions", "balance", "chunks", "time_limit", "checkpoint")
    flags = {name: f"--{name.replace('_', '-')}" for name in names}
    assert with_flags(text, {**flags, "n_partitions": "--partitions"}) == words
    assert with_flags(text, {}) == text


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--memory-limit", "10 MiB"], "--memory-limit 10MiB "),
        (["--memory-limit", "10485760"], "--memory-limit 10485760 "),
        (["--memory-limit", "40MiB", "--reserve", "10MB"], "--memory-limit 42534KiB."),
        (["--pin", "first=1"], "--pin first=1 (expected"),
        (["--pin", "0=1"], "--pin 0=1 (expected"),
        (["--pin", "first=7"], "layer 'first' is pinned to"),
        (["--pin", "first=0", "--pin", "first=1"], "--pin first=1 beside --pin first=0 (expected"),
        (["--speeds", "0,1"], "--speeds 0 at position 1 (expected its speed"),
        (["--speeds", "1,1,1"], "3 in --speeds (expected --partitions 2)"),
        (["--balance", "0,4"], "--balance 0 at position 1 (expected 1 or more)"),
    ],
    ids=lambda item: " ".join(item) if isinstance(item, list) else "",
)
def test_errors_say_what_was_typed(
    words: list[str], expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Sizes with their units, layers by their names, and no names of Python."""
    costs = {"parameter_bytes": [2**23] * 4, "names": ["first", "a", "b", "last"]}
    path = tmp_path / "profile.json"
    Profile.from_costs([1.0] * 4, **costs, chunks=2).save(path)  # type: ignore[arg-type]
    partitions = [] if "--balance" in words else ["-n", "2"]
    assert main(["solve", str(path), *partitions, *words]) in (BAD_INPUT, NO_PLAN)
    assert expected in capsys.readouterr().err


def test_sizes_in_advice_can_be_followed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """They are rounded to where it still fits."""
    path = tmp_path / "profile.json"
    Profile.from_costs([1.0] * 4, parameter_bytes=[2**27 + 1] * 4, chunks=2).save(path)
    words = ["solve", str(path), "-n", "2", "--memory-limit"]
    assert main([*words, "600MiB", "--reserve", "100MiB"]) == NO_PLAN
    fix = capsys.readouterr().err.splitlines()[1]
    (reserve,) = re.findall(r"--reserve (\w+)", fix)
    (limit,) = re.findall(r"--memory-limit (\w+)", fix)
    assert (reserve, limit) == ("90111KiB", "613MiB")
    assert main([*words, "600MiB", "--reserve", reserve]) == 0
    assert main([*words, limit, "--reserve", "100MiB"]) == 0


def test_command_does_the_whole_job(tmp_path: Path) -> None:
    """The command prints plan and report, names its files, and ends with status 0."""
    words = ["workloads:tiny", "--device", "cpu", "--chunks", "2", "--steps", "1"]
    with _started(tmp_path, "run", *words) as process:
        out, err = process.communicate(timeout=WATCHDOG)
    assert process.returncode == 0, err
    assert f"{Plan.load(tmp_path / 'gpipebal-run' / 'plan.json')}" in out
    assert "predicted is off by" in out and "plain model, 1 thread" in out
    assert out.endswith(
        "Files in gpipebal-run: profile.json, plan.json, timeline.json, report.json, plan.png\n"
    )
    # Progress bars are for terminals: a file gets none of their control characters.
    assert "\r" not in err


def test_nothing_but_json_is_printed_whatever_the_users_code_prints(tmp_path: Path) -> None:
    """With --json the report is all of the standard output, and the rest is on standard error."""
    words = ["workloads:printing", "--device", "cpu", "--chunks", "2", "--steps", "1", "--json"]
    with _started(tmp_path, "run", *words) as process:
        out, err = process.communicate(timeout=WATCHDOG)
    assert process.returncode == 0, err
    assert json.loads(out)["balance"] == list(
        Plan.load(tmp_path / "gpipebal-run" / "plan.json").balance
    )
    assert "from Python\n" in err and "from C\n" in err and "Training" in err
    words = ["workloads:printing", "--device", "cpu", "--chunks", "2", "--timeout", "0", "--json"]
    with _started(tmp_path, "profile", *words) as process:
        out, err = process.communicate(timeout=WATCHDOG)
    assert process.returncode == 0, err
    assert json.loads(out) == json.loads((tmp_path / "profile.json").read_text(encoding="utf-8"))
    assert "from Python\n" in err and "from C\n" in err


def test_interrupt_ends_the_run_and_keeps_the_files(tmp_path: Path) -> None:
    """One Ctrl-C ends a run that would go on for hours, with status 130 and one line."""
    words = ["workloads:tiny", "--device", "cpu", "--chunks", "2", "--output", "out"]
    words += ["--steps", "100000000"]
    with _started(tmp_path, "run", *words) as process:
        _wait_for(process, "Training")
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=WATCHDOG)
    assert process.returncode == 130, err
    # Where it ends late it has said so before.
    assert err.splitlines()[-1] == "gpipebal: interrupted. out: profile.json, plan.json written"
    assert Profile.load(tmp_path / "out" / "profile.json").n_layers == 5
    assert Plan.load(tmp_path / "out" / "plan.json").n_layers == 5
    assert {p.name for p in (tmp_path / "out").iterdir()} == {"profile.json", "plan.json"}


def test_interrupt_inside_executed_text_ends_with_the_same_status(tmp_path: Path) -> None:
    """Wherever an interrupt strikes, the status is 130 and nobody is told of files never made."""
    with _started(tmp_path, "run", "workloads:interrupted") as process:
        _, err = process.communicate(timeout=WATCHDOG)
    assert process.returncode == 130
    # What torch logs where a part of it is missing comes before.
    assert err.splitlines()[-1] == "gpipebal: interrupted. No file is half-written."


def test_second_interrupt_ends_at_once(tmp_path: Path) -> None:
    """When the cell in progress never ends, one Ctrl-C says so, and a second does not wait."""
    words = ["workloads:with_blocking_layer", "--device", "cpu"]
    with _started(tmp_path, "run", *words) as process:
        _wait_for(process, "blocked")
        process.send_signal(signal.SIGINT)
        assert process.stderr is not None
        told = next((line for line in process.stderr if "Ctrl-C again" in line), "")
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=WATCHDOG)
    assert told.startswith("gpipebal: ending after the work in progress; ")
    assert process.returncode == 130
    assert "gpipebal: stopped at once." in err


def test_an_interrupt_that_is_ignored_stays_so(tmp_path: Path) -> None:
    """As in a job that a shell runs in the background: interrupts are for the foreground."""
    code = (
        "import signal, sys\n"
        "signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "from gpipebal.cli.interrupts import second_interrupt_ends_at_once\n"
        "with second_interrupt_ends_at_once():\n"
        "    for _ in range(3):\n"
        "        signal.raise_signal(signal.SIGINT)\n"
        "assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN\n"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False, timeout=WATCHDOG)
    assert done.returncode == 0


@pytest.mark.parametrize("words", [["run", "resnet101"], ["solve", "p"], ["compare", "p"]])
def test_the_number_of_partitions_has_one_short_name(words: list[str]) -> None:
    """Every command that takes it takes ``-n``."""
    assert _parser().parse_args([*words, "-n", "3"]).partitions == 3
