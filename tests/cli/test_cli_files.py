"""The commands that write and read files: what ``profile`` writes, ``show`` prints."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
from cli.test_cli import WATCHDOG, _command, _environment

from gpipebal.cli import main
from gpipebal.models.catalogue import CATALOGUE
from gpipebal.plan import Plan
from gpipebal.planner import solve
from gpipebal.profile import Profile
from gpipebal.simulator import simulate
from gpipebal.tables import profile_table
from gpipebal.timeline import Timeline

PROFILE = Profile.from_costs([1.0, 3.0, 2.0], names=["a", "b", "c"], rows=4, chunks=2)


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    """Write one file of each kind."""
    plan = solve(PROFILE, 2)
    nouns = {"profile": PROFILE, "plan": plan, "timeline": simulate(plan)}
    paths = {name: tmp_path / f"{name}.json" for name in nouns}
    for name, noun in nouns.items():
        noun.save(paths[name])  # type: ignore[attr-defined]
    return paths


@pytest.mark.parametrize("method", ["measure", "estimate"])
def test_profile_writes_what_it_prints(
    method: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The file holds the layers that the table names, and says how they were found out."""
    path = tmp_path / "tiny.json"
    words = ["profile", "workloads:tiny", "--chunks", "2", "--output", str(path)]
    words += ["--estimate", "A100"] if method == "estimate" else ["--timeout", "0"]
    assert main([*words, "--device", "cpu"] if method == "measure" else words) == 0
    profile = Profile.load(path)
    assert (profile.n_layers, profile.chunks) == (5, 2)
    assert profile.provenance["method"] == method
    assert profile.step.loss is not None and profile.step.optimizer_time is not None
    out = capsys.readouterr().out
    assert out == f"{profile_table(profile)}\n\nWritten to {path}\n"


def test_profile_prints_json_for_machines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With --json the output is the file's content, and nothing else."""
    path = tmp_path / "tiny.json"
    words = ["profile", "workloads:tiny", "--device", "cpu", "--timeout", "0", "--json"]
    assert main([*words, "--chunks", "2", "-o", str(path)]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("output", "reason"),
    [
        (".", "it is a folder"),
        ("no/such/folder/p.json", "its folder does not exist"),
        # Whoever asks, the system takes no such name.
        (f"{'p' * 300}.json", "its folder takes no such file"),
    ],
)
def test_output_that_cannot_be_written_is_refused_first(
    output: str, reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is measured for a file that could not be written in the end."""
    words = ["profile", "workloads:raising", "--output", str(tmp_path / output)]
    assert main(words) == 2
    first, second = capsys.readouterr().err.splitlines()
    assert reason in first and second.startswith("Fix: ")


@pytest.mark.parametrize("option", ["--output", "--plot"])
def test_an_empty_name_of_a_file_is_refused(
    option: str, files: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """As a script gives it whose variable is not set."""
    assert main(["simulate", str(files["plan"]), option, ""]) == 2
    first, second = capsys.readouterr().err.splitlines()
    assert f"file cannot be written: {option} '' (it is a folder)" in first
    assert second.startswith("Fix: ")


def test_show_prints_every_kind_of_file(
    files: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """A profile is shown as a table, a plan and a timeline as their own text."""
    assert main(["show", *map(str, files.values())]) == 0
    plan = Plan.load(files["plan"])
    texts = [profile_table(PROFILE), str(plan), str(simulate(plan))]
    assert capsys.readouterr().out == "\n\n".join(texts) + "\n"


def test_show_prints_json_for_machines(
    files: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """With --json every file is one line."""
    assert main(["show", "--json", str(files["plan"]), str(files["profile"])]) == 0
    plan, profile = map(json.loads, capsys.readouterr().out.splitlines())
    assert Plan.from_dict(plan) == Plan.load(files["plan"])
    assert Profile.from_dict(profile) == PROFILE


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{}", "is not a profile, plan or timeline"),
        ('{"format": 3}', "is not a profile, plan or timeline"),
        ('{"format": "gpipebal-report", "version": 1}', "is not a profile, plan or timeline"),
        ('{"gpipebal": 3}', "is not a profile, plan or timeline"),
        ("[", "is not readable JSON"),
        ('{"format": "gpipebal-plan", "version": 8}', "plan is damaged"),
        ('{"format": "gpipebal-plan", "version": 7}', "was made before the first release"),
        ('{"format": "gpipebal-profile", "version": 99}', "newer format"),
    ],
)
def test_show_refuses_other_files(
    text: str,
    message: str,
    files: dict[str, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A file of another kind gives one clear line, before any other file is printed."""
    path = tmp_path / "other.json"
    path.write_text(text, encoding="utf-8")
    assert main(["show", str(files["plan"]), str(path)]) == 2
    out, err = capsys.readouterr()
    first, second = err.splitlines()
    assert out == "" and message in first and second.startswith("Fix: ")


@pytest.mark.parametrize(
    ("words", "lost"),
    [
        (["solve", "{profile}", "-n", "2", "-o", "{profile}"], "--output"),
        (["solve", "{profile}", "-n", "2", "--plot", "{link}.png"], "--plot"),
        (["solve", "{profile}", "-n", "2", "-o", "{new}.png", "--plot", "{new}.png"], "--plot"),
        (["simulate", "{plan}", "-o", "{link}"], "--output"),
        (["show", "{profile}", "--plot", "{profile}"], "--plot"),
        (["compare", "{plan}", "{timeline}", "--plot", "{timeline}"], "--plot"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else None,
)
def test_no_file_is_written_over_another(
    words: list[str],
    lost: str,
    files: dict[str, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """What is read stays, also behind a link, and a picture does not take the plan's place."""
    link = tmp_path / "link"
    link.symlink_to(files["plan"])
    (tmp_path / "link.png").symlink_to(files["profile"])
    before = {path: path.read_bytes() for path in files.values()}
    places = {**files, "link": link, "new": tmp_path / "new"}
    assert main([word.format(**places) for word in words]) == 2
    assert f"a file would be lost: {lost} " in capsys.readouterr().err
    assert {path: path.read_bytes() for path in files.values()} == before
    assert not (tmp_path / "new.png").exists()


@pytest.mark.parametrize("command", ["solve", "simulate", "show", "compare"])
def test_pictures_are_said_to_be_written(
    command: str, files: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A command that draws says where, unless machines read what it prints."""
    picture = tmp_path / "picture.svg"
    words = [command, str(files["profile"]), "--plot", str(picture)]
    words += [] if command == "show" else ["--partitions", "2"]
    assert main(words) == 0
    assert capsys.readouterr().out.endswith(f"Written to {picture}\n")
    assert main([*words, "--json"]) == 0
    json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("kind", ["profile", "plan", "timeline"])
def test_files_may_come_out_of_pipes(kind: str, files: dict[str, Path]) -> None:
    """They are read once, which is all that a pipe allows."""
    done = subprocess.run(
        _command("show", "--json", "/dev/stdin"),
        input=files[kind].read_bytes(),
        capture_output=True,
        env=_environment(),
        timeout=WATCHDOG,
        check=True,
    )
    noun = {"profile": Profile, "plan": Plan, "timeline": Timeline}[kind]
    assert json.loads(done.stdout) == json.loads(json.dumps(noun.load(files[kind]).to_dict()))  # type: ignore[attr-defined]


def test_what_is_no_file_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder, nothing, and what never ends, each with an error of its own."""
    monkeypatch.setattr("gpipebal.files.MAX_FILE_BYTES", 2**20)
    for path, message in (
        (tmp_path, "cannot be read: Is a directory"),
        ("/dev/null", "is not readable JSON"),
        ("/dev/zero", "is too large"),
    ):
        assert main(["show", str(path)]) == 2
        first, second = capsys.readouterr().err.splitlines()
        assert f"{path} {message}" in first and second.startswith("Fix: ")


def test_show_needs_no_torch(files: dict[str, Path]) -> None:
    """A file is shown without loading torch."""
    code = (
        "import sys, gpipebal.cli\n"
        f"gpipebal.cli.main(['show', *{[str(path) for path in files.values()]!r}])\n"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env=_environment(),
        timeout=WATCHDOG,
        check=True,
    )
    assert done.stdout.splitlines()[-1] == "False"


def test_reader_that_goes_away_is_no_error(tmp_path: Path) -> None:
    """``gpipebal show ... | head -1`` ends without a word, with the status of a closed pipe."""
    path = tmp_path / "profile.json"
    Profile.from_costs([1.0] * 5000).save(path)
    with subprocess.Popen(
        _command("show", str(path), "--layers", "5000"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=_environment(),
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline().startswith(b"Profile of 5,000 layers")
        process.stdout.close()
        err = process.stderr.read()
        assert (process.wait(WATCHDOG), err) == (141, b"")


def test_output_that_nobody_can_take_is_one_error(tmp_path: Path) -> None:
    """A full disk is said in one line; where there is no output at all nothing is printed."""
    path = tmp_path / "profile.json"
    Profile.from_costs([1.0] * 5).save(path)
    words = _command("show", str(path))
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            words, stdout=full, stderr=subprocess.PIPE, env=_environment(), timeout=WATCHDOG
        )
    assert done.returncode == 2
    assert done.stderr.decode().startswith("gpipebal: error: the output cannot be written")
    limited = ["sh", "-c", 'ulimit -f 0; "$@"', "sh", *words]
    with open(tmp_path / "shown.txt", "w") as file:
        done = subprocess.run(
            limited, stdout=file, stderr=subprocess.PIPE, env=_environment(), timeout=WATCHDOG
        )
    assert done.returncode == 2
    assert done.stderr.decode().startswith("gpipebal: error: the output cannot be written")
    closed = ["sh", "-c", '"$@" >&-', "sh", *words]
    done = subprocess.run(closed, stderr=subprocess.PIPE, env=_environment(), timeout=WATCHDOG)
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.parametrize("words", [["show"], ["simulate"], ["solve", "--partitions", "2"]])
def test_a_file_that_does_not_exist_is_one_error(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The system's error for it is not taken for one about the output, and shows no traceback."""
    assert main([*words, str(tmp_path / "nowhere.json")]) == 2
    first, second = capsys.readouterr().err.splitlines()
    assert "nowhere.json cannot be read" in first and second.startswith("Fix: ")


def test_table_shows_the_slowest_layers() -> None:
    """Of many layers the slowest are shown, in the order of the chain, and the rest is told."""
    text = profile_table(Profile.from_costs([1.0, 5.0, 2.0, 4.0], names=list("abcd")), 2)
    assert [line.split()[1] for line in text.splitlines()[2:4]] == ["b", "d"]
    assert text.splitlines()[4] == "2 layers with less time not shown: together 25.0 %."


def test_arguments_of_a_built_in_model_reach_it(tmp_path: Path) -> None:
    """With --set a built-in model is built from other numbers."""
    path = tmp_path / "gpt.json"
    sizes = {"layers": 2, "width": 8, "heads": 2, "vocabulary": 11, "context": 4}
    words = [word for name, value in sizes.items() for word in ("--set", f"{name}={value}")]
    words += ["--rows", "2", "--chunks", "2", "--output", str(path), "--estimate", "A100"]
    assert main(["profile", "gpt", *words]) == 0
    assert Profile.load(path).n_layers == 7


def test_arguments_of_a_function_reach_it(tmp_path: Path) -> None:
    """With --set a function of one's own gets keyword arguments, as what they look like."""
    path = tmp_path / "own.json"
    words = ["--set", "width=5", "--output", str(path), "--estimate", "A100", "--chunks", "2"]
    assert main(["profile", "workloads:needing_arguments", *words]) == 0
    assert Profile.load(path).layers[0].parameter_bytes == 4 * (5 * 5 + 5)


def test_a_parser_of_the_users_own_reads_no_words_of_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A function that reads the command line finds an empty one, and takes its defaults."""
    path = tmp_path / "own.json"
    words = ["profile", "workloads:reading_the_command_line", "--estimate", "A100", "-o", str(path)]
    monkeypatch.setattr("sys.argv", ["gpipebal", *words])
    assert main(words) == 0
    assert Profile.load(path).layers[0].parameter_bytes == 4 * (5 * 5 + 5)
    assert sys.argv == ["gpipebal", *words]


@pytest.mark.parametrize("estimate", [[], ["--estimate", "A100"]])
def test_a_model_without_a_default_loss_has_one_fix(
    estimate: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where no loss was given and none can be taken, the error says what is missing, once."""
    words = ["profile", "workloads:without_a_loss", *estimate, "--chunks", "2"]
    assert main([*words, "-o", str(tmp_path / "p.json")]) == 2
    first, second = capsys.readouterr().err.splitlines()
    assert "the loss failed: model gives no floating-point output" in first
    assert second == "Fix: let the function return a mapping with 'loss_fn'."


@pytest.mark.parametrize(
    ("model", "word", "message"),
    [
        ("gpt", "layers", "argument of the model is not readable: --set layers"),
        ("workloads:tiny", "depth=", "argument of the model is not readable: --set depth="),
        ("gpt", "colour=3", "colour"),
        ("gpt", "layers=many", "layers"),
        ("workloads:tiny", "layers=2", "unexpected keyword argument 'layers'"),
    ],
)
def test_arguments_that_cannot_be_are_refused(
    model: str, word: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is not an argument of the model gives one clear line, with the fix on the next."""
    assert main(["profile", model, "--set", word, "-o", str(tmp_path / "p.json")]) == 2
    first, second = capsys.readouterr().err.splitlines()
    assert message in first and second.startswith("Fix: ")
    if "not readable" in message:
        assert f"--set {word.rstrip('=')}=2" in second


def test_help_lists_the_built_in_models(capsys: pytest.CaptureFixture[str]) -> None:
    """The help of a command names every built-in model and what it is built from."""
    with pytest.raises(SystemExit):
        main(["profile", "--help"])
    out = capsys.readouterr().out
    for model, described in CATALOGUE.items():
        assert f"  {model}: {described.about}" in out
        assert all(f"    {name}=" in out for name in described.arguments)


def test_what_the_output_cannot_encode_is_escaped(tmp_path: Path) -> None:
    """A name that is not ASCII is printed with escapes to an output that is; not elsewhere."""
    path = tmp_path / "profile.json"
    Profile.from_costs([1.0, 2.0], names=["été", "b"]).save(path)
    for encoding, name in (("ascii", "\\xe9t\\xe9"), ("ascii:replace", "?t?"), ("utf-8", "été")):
        done = subprocess.run(
            _command("show", str(path)),
            capture_output=True,
            encoding="utf-8",
            env={**_environment(), "PYTHONIOENCODING": encoding},
            timeout=WATCHDOG,
        )
        assert (done.returncode, done.stderr) == (0, "")
        assert name in done.stdout.split()


def test_the_callers_output_is_left_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """Called from Python, the command lets standard output fail on other text as before."""
    output = io.TextIOWrapper(io.BytesIO(), encoding="ascii", errors="strict")
    monkeypatch.setattr(sys, "stdout", output)
    with pytest.raises(SystemExit):
        main(["--version"])
    assert output.errors == "strict"


def test_a_picture_needs_a_name(
    files: dict[str, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A name that is nothing but a suffix is refused first, with one that works."""
    monkeypatch.chdir(tmp_path)
    for given, better in ((".png", "plot.png"), ("x.PDF.", "x.PDF..png"), ("a/.svg", "a/plot.svg")):
        (tmp_path / "a").mkdir(exist_ok=True)
        assert main(["show", str(files["plan"]), "--plot", given]) == 2
        out, err = capsys.readouterr()
        assert out == "" and err.endswith(f"Fix: --plot {better}.\n")


def test_help_says_why_compare_and_solve_differ(capsys: pytest.CaptureFixture[str]) -> None:
    """The table of schedules has costs that a plan's times do not have."""
    with pytest.raises(SystemExit):
        main(["compare", "--help"])
    out = " ".join(capsys.readouterr().out.split())
    assert "unless transfers take time; solve and simulate do not count it." in out
