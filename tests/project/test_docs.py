"""The documentation: its examples run, its figures are stored ones, and it leaves no name out."""

from __future__ import annotations

import doctest
import importlib
import inspect
import re
import sys
from pathlib import Path
from typing import Any

import pytest

import gpipebal as gb
from gpipebal import errors
from gpipebal.profiler.estimate.approximate import REASONS
from gpipebal.solvers import METHODS

ROOT = Path(gb.__file__).parent.parent
DOCS = ROOT / "docs"
sys.path.insert(0, str(DOCS / "extensions"))

from benchmark_pages import benchmarks, write_pages  # noqa: E402
from content import comment_of, constants_of, draw, help_of  # noqa: E402
from link_inventories import read_inventory, write_inventories  # noqa: E402
from stored_results import figures  # noqa: E402

PAGES = sorted(path for path in DOCS.rglob("*.md") if "generated" not in path.parts)
TEXTS = {str(path.relative_to(DOCS)): path.read_text(encoding="utf-8") for path in PAGES}
#: Fenced blocks: the words behind the fence, and the content.
BLOCK = re.compile(r"^```(.*)\n((?:(?!```).*\n)*)```$", re.MULTILINE)
WITH_EXAMPLES = [name for name, text in TEXTS.items() if ">>> " in text]
PICTURES = {
    words.split(" ", 1)[1]: re.sub(r"^:.*\n", "", content, flags=re.MULTILINE)
    for text in TEXTS.values()
    for words, content in BLOCK.findall(text)
    if words.startswith("{picture}")
}
#: What other parts of the package need, and no user.
INTERNAL = {"contents", "copies"}
#: What is public beside the names of `gpipebal` itself.
MODULES = [
    *(f"gpipebal.{name}" for name in sorted(gb._modules() - INTERNAL)),
    "gpipebal.profiler.estimate",
    *(f"gpipebal.compat.torchgpipe{name}" for name in ("", ".balance", ".skip", ".batchnorm")),
]


@pytest.mark.parametrize("page", WITH_EXAMPLES)
def test_examples_of_a_page_hold(
    page: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """All examples of a page run, from top to bottom, and print what stands there."""
    # What they write is gone with the folder; what they read is the checkout's.
    (tmp_path / "profiles").symlink_to(ROOT / "profiles")
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "__main__"}
    runner = doctest.DocTestRunner()
    told: list[str] = []
    for k, (words, content) in enumerate(BLOCK.findall(TEXTS[page])):
        if words == "python" and ">>> " in content:
            test = doctest.DocTestParser().get_doctest(content, names, f"{page}[{k}]", page, 0)
            runner.run(test, out=told.append, clear_globs=False)
            names = test.globs
    assert runner.summarize(verbose=False).attempted
    assert not told, "".join(told)


def test_first_example_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The code of the first page runs as it stands."""
    monkeypatch.chdir(tmp_path)
    (code,) = [content for words, content in BLOCK.findall(TEXTS["index.md"]) if words == "python"]
    names: dict[str, Any] = {}
    exec(compile(code, "index.md", "exec"), names)
    assert all(parameter.grad is not None for parameter in names["model"].parameters())


@pytest.mark.parametrize("name", PICTURES)
def test_picture_is_drawn_by_its_code(name: str) -> None:
    """The code beside a picture leaves a figure with something in it."""
    figure = draw(PICTURES[name], name)
    assert any(ax.has_data() for ax in figure.axes)


def test_little_is_held_before_the_last_forward_of_a_picture() -> None:
    """The text beside the memory of a recompute says so, and the picture shows it."""
    names: dict[str, Any] = {}
    exec(PICTURES["memory-recomputed"], names)
    sizes = names["held_of"](names["profile"], names["plan"])
    for track in names["memory_over_time"](gb.simulate(names["plan"], pause=0.0), sizes):
        before = track.total[track.times < 3.0 + track.device]
        assert before.max() < 0.75 * track.peak


def test_pictures_have_names_of_their_own() -> None:
    """No two pictures would be written to one file."""
    assert len(PICTURES) == sum(text.count("```{picture}") for text in TEXTS.values())


def test_picture_without_axes_is_refused() -> None:
    """Code that draws nothing is an error of the build, not an empty picture."""
    with pytest.raises(NameError, match="leaves no axes called ax"):
        draw("x = 1", "nothing")


def test_figures_in_the_text_are_stored_ones() -> None:
    """Pages quote figures that exist, and every figure that exists is quoted."""
    known = figures()
    quoted = {
        name
        for text in TEXTS.values()
        for name in re.findall(r"\{\{ (\w+) \}\}", re.sub(r"`[^`\n]*`", "", text))
    }
    assert quoted == known.keys()
    assert all(re.search(r"\d", value) for value in known.values()), known


LIMITS = ("guide/limits.md", "limits_in_detail.md")
#: What is not a measurement: settings, sizes of examples, definitions.
NOT_MEASURED = ("512 MiB and a twentieth", "Each layer saves 25 MiB", "hands on 10 MiB")


@pytest.mark.parametrize("page", TEXTS)
def test_no_figure_is_written_by_hand(page: str) -> None:
    """Outside of code no page has a percentage, a time, a size or a ratio that was typed in."""
    prose = BLOCK.sub("", TEXTS[page])
    prose = re.sub(r"`[^`\n]*`", "", prose)
    for text in NOT_MEASURED:
        prose = prose.replace(text, "")
    found = re.findall(r"\d[\d.,]* ?(?:%|x\b|ms\b|µs\b|KiB|MiB|GiB|GB)(?=\W|$)", prose)
    assert not found


def test_every_public_name_has_a_page() -> None:
    """Each name that a module makes public is documented on a page of the API reference."""
    text = "\n".join(text for name, text in TEXTS.items() if name.startswith("api/"))
    single = re.findall(r"^\.\. auto(?:function|class):: (\S+)$", text, re.MULTILINE)
    whole = dict(
        re.findall(
            r"^\.\. automodule:: (\S+)\n(?:   :exclude-members: (.*)\n)?", text, re.MULTILINE
        )
    )
    tables = re.findall(r"^```\{constants\} (\S+)$", text, re.MULTILINE)
    # Not by equality: the same object may be public in two places, and is explained in one.
    shown = {id(_resolve(name)) for name in single}
    shown |= {id(value) for name in tables for value in constants_of(name).values()}
    for module, left_out in whole.items():
        home = importlib.import_module(module)
        names = set(home.__all__) - set(left_out.split(", ")) - constants_of(module).keys()
        shown |= {id(getattr(home, name)) for name in names}
    missing = [f"gpipebal.{name}" for name in gb.__all__ if id(getattr(gb, name)) not in shown]
    for module in MODULES:
        home = importlib.import_module(module)
        missing += [
            f"{module}.{name}" for name in home.__all__ if id(getattr(home, name)) not in shown
        ]
    assert not missing, f"add to docs/api: {missing}"


def test_top_level_names_are_explained_under_that_name() -> None:
    """What users import as `gpipebal.x` is documented as `gpipebal.x`."""
    text = "\n".join(TEXTS.values())
    for name in gb.__all__:
        found = re.search(rf"^\.\. auto(function|class):: gpipebal\.{name}$", text, re.MULTILINE)
        assert found, f"add gpipebal.{name} to a page in docs/api, as autofunction or autoclass"


@pytest.mark.parametrize("module", MODULES)
def test_every_public_name_says_what_it_is(module: str) -> None:
    """Public classes and functions have a docstring of their own, constants a comment."""
    home = importlib.import_module(module)
    assert home.__doc__
    for name in home.__all__:
        value = getattr(home, name)
        if inspect.isclass(value):
            assert vars(value).get("__doc__"), name
            assert not str(value.__doc__).startswith(f"{name}("), name
        elif inspect.isroutine(value):
            assert value.__doc__, name
    for name, value in constants_of(module).items():
        assert comment_of(module, name) or value, name


def _resolve(path: str) -> Any:
    module, name = path.rsplit(".", 1)
    return getattr(importlib.import_module(module), name)


def test_every_command_shows_its_help() -> None:
    """The page of commands has each of them, as it prints its own help."""
    commands = re.findall(r"^    (\w+) +\w", help_of(""), re.MULTILINE)
    assert {"run", "profile", "solve"} <= set(commands)
    for command in commands:
        assert f"```{{command-help}} {command}\n" in TEXTS["api/commands.md"]
        assert help_of(command).startswith(f"$ gpipebal {command} --help\nusage: gpipebal")


def test_links_between_pages_exist() -> None:
    """Relative links and references to pages lead to pages."""
    generated = {f"generated/benchmarks/{path.name}" for path in benchmarks(ROOT / "benchmarks")}
    for name, text in TEXTS.items():
        folder = (DOCS / name).parent
        for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", text):
            assert (folder / target).exists(), f"{name}: {target}"
        for target in re.findall(r"\{doc\}`(?:[^`<]*<)?([^`>]+)>?`", text):
            page = (folder / target).resolve().relative_to(DOCS)
            assert str(page) in generated or f"{page}.md" in TEXTS, f"{name}: {target}"


def test_limits_in_detail_have_the_topics_of_the_guide() -> None:
    """Each of their headings is one of the guide's page, in its order."""
    topics = {name: re.findall(r"^## (.+)$", TEXTS[name], re.MULTILINE) for name in LIMITS}
    short, detailed = topics.values()
    assert detailed == [topic for topic in short if topic in detailed]


def test_terms_are_in_the_glossary() -> None:
    """Every term that the introduction sets in bold is in the glossary."""
    glossary = TEXTS["glossary.md"].lower()
    bold = re.findall(r"\*\*([\w -]+)\*\*", TEXTS["understanding.md"])
    for term in bold:
        word = re.sub(r"(?:ing|(?<=ch)es|s)$", "", term.lower())
        assert re.search(rf"^{re.escape(word)}", glossary, re.MULTILINE), term


def test_every_method_is_explained() -> None:
    """The table of the solver's methods has all of them."""
    for method in METHODS:
        assert method == "auto" or f"| {method} |" in TEXTS["solving.md"]


def test_every_error_is_explained() -> None:
    """The table of errors has all of them, and nothing else."""
    rows = re.findall(r"^\| \{py:class\}`~gpipebal\.errors\.(\w+)`", TEXTS["guide/errors.md"], re.M)
    assert sorted([*rows, "GpipebalError"]) == sorted(errors.__all__)


def test_tests_that_contributors_are_told_of_exist() -> None:
    """Each test that CONTRIBUTING names for a part of the package matches some file."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    named = re.findall(r"`(tests/[^`]+)`", text)
    assert len(named) > 12
    assert [pattern for pattern in named if not list(ROOT.glob(pattern))] == []


def test_every_reason_of_approximate_estimates_is_listed() -> None:
    """The table of layers whose estimated memory is approximate has all reasons, and no other."""
    names = {("cpu",): "CPU", ("cuda",): "CUDA", ("cpu", "cuda"): "both"}
    rows = [f"| {names[one.device_types]} | {one.layers} | {one.why} |" for one in REASONS.values()]
    found = re.findall(r"^\| (?:CPU|CUDA|both) \|.*\|$", TEXTS["profiling.md"], re.MULTILINE)
    assert found == rows


def test_every_benchmark_gets_a_page(tmp_path: Path) -> None:
    """Pages of benchmarks are written for all that there are, and removed with them."""
    (tmp_path / "gone.md").write_text("old")
    write_pages(ROOT / "benchmarks", tmp_path)
    assert {path.stem for path in tmp_path.glob("*.md")} == {
        path.name for path in benchmarks(ROOT / "benchmarks")
    }
    for path in tmp_path.glob("*.md"):
        assert f"benchmarks/{path.stem}/README.md" in path.read_text(encoding="utf-8")


@pytest.mark.parametrize("path", sorted((DOCS / "inventories").glob("*.txt")), ids=lambda p: p.stem)
def test_names_of_other_projects_exist(path: Path) -> None:
    """Every name that can be linked to exists in the project that documents it."""
    address, entries = read_inventory(path)
    assert address.startswith("https://") and entries
    for name, _, page in entries:
        if "." not in name:
            name = f"builtins.{name}"
        module, _, last = name.rpartition(".")
        assert page.endswith(".html")
        assert hasattr(importlib.import_module(module), last), name


def test_inventories_need_no_network(tmp_path: Path) -> None:
    """Each inventory is written as a file, in the form that Sphinx reads."""
    mapping = write_inventories(DOCS / "inventories", tmp_path)
    assert {"python", "torch"} <= mapping.keys()
    for _, file in mapping.values():
        assert Path(file).read_bytes().startswith(b"# Sphinx inventory version 2\n")


def test_changelog_has_the_headings_of_its_own() -> None:
    """What changed in plans and in files is told under headings that stay."""
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert "\n### Plans changed\n" in text and "\n### Profile format\n" in text


def test_changelog_names_the_versions_of_saved_files() -> None:
    """Whoever changes a format tells what is new in it."""
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    for module in ("profile.record", "plan.plan", "timeline.timeline", "report"):
        home = importlib.import_module(f"gpipebal.{module}")
        assert f"`{home.FORMAT}` {home.VERSION}" in text


def _rows(room: str) -> list[list[str]]:
    """Return the cells of a table of files in the architecture."""
    _, rest = TEXTS["architecture.md"].split(f" of `{room}/`, in the order")
    table = re.search(r"(?:^\|.*\n)+", rest, re.MULTILINE)
    assert table is not None
    return [row.split("|")[1:-1] for row in table[0].splitlines()]


def _files(folder: Path) -> list[str]:
    return sorted(path.stem for path in folder.glob("*.py") if path.stem != "__init__")


def _read_in_order(package: str) -> list[str]:
    """Return the files that a package's docstring names."""
    home = importlib.import_module(package)
    assert home.__doc__ is not None
    _, rest = home.__doc__.split("Read in this order: ")
    # `module` or `module.entry`; one may be named again where another builds on it.
    return sorted(set(re.findall(r"`(\w+)(?:\.\w+)?`", rest)))


@pytest.mark.parametrize("room", ["solvers", "planner", "memory"])
def test_every_file_of_a_room_is_in_its_docstring(room: str) -> None:
    """It has all files and folders, each folder's has all of its files, and none is gone."""
    home = ROOT / "gpipebal" / room
    folders = [path.parent.name for path in home.glob("*/__init__.py")]
    assert _read_in_order(f"gpipebal.{room}") == sorted([*_files(home), *folders])
    for folder in folders:
        assert _read_in_order(f"gpipebal.{room}.{folder}") == _files(home / folder)


@pytest.mark.parametrize("room", ["pipeline", "profiler"])
def test_every_file_of_a_room_with_folders_is_on_the_map(room: str) -> None:
    """The table of folders, and the docstring of each folder, have all files, and none gone."""
    home = ROOT / "gpipebal" / room
    folders = {row[0].strip(" `/"): re.findall("`(.+?)`", row[1]) for row in _rows(room)[2:]}
    assert {name for name in folders if name != room} == {
        path.parent.name for path in home.glob("*/__init__.py")
    }
    for name, named in folders.items():
        folder = home if name == room else home / name
        assert sorted(named) == _files(folder)
        if folder != home:
            assert _read_in_order(f"gpipebal.{room}.{name}") == _files(folder)
