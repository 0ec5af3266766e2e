"""README, stored results and stored profiles: what they say is what the code does."""

from __future__ import annotations

import configparser
import json
import re
from pathlib import Path

import pytest
import torch

import gpipebal as gb
from gpipebal.units import format_bytes, format_seconds

ROOT = Path(gb.__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
FIRST_RUN = ROOT / "benchmarks" / "first_run"

#: What the README's examples are shrunk by, so that they take a moment.
SMALLER = {
    "resnet101(), torch.randn(32, 3, 64, 64)": "resnet((1,) * 4, 8, 4), torch.ones(8, 3, 32, 32)",
    "import resnet101": "import resnet",
    "images, chunks=8)  #": "images, chunks=4, timeout=0)  #",
    "images, 2, chunks=8)  # or": "images, 2, chunks=4, timeout=0)  # or",
    "randint(0, 1000, (32,))": "randint(0, 4, (8,))",
    "balance, chunks=8)": "balance, chunks=4)",
}


def test_readme_examples_run(capsys: pytest.CaptureFixture[str]) -> None:
    """The README's code runs as it stands, with a smaller model."""
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len(blocks) == 3
    code = "\n".join(blocks)
    for text, smaller in SMALLER.items():
        assert text in code, f"the README changed: {text!r} is not in its examples"
        code = code.replace(text, smaller)
    names: dict[str, object] = {}
    exec(compile(code, "README.md", "exec"), names)
    plan = names["plan"]
    assert capsys.readouterr().out == f"{plan}\n"
    model = names["model"]
    assert isinstance(model, torch.nn.Sequential)
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_readme_table_is_the_stored_plan() -> None:
    """The table in the README is what printing the stored plan gives."""
    plan = gb.Plan.load(FIRST_RUN / "plan.json")
    assert f"plan.json -->\n```\n{plan}\n```" in README


@pytest.mark.parametrize("mode", ["except_last", "never"])
def test_first_run_figures_are_the_stored_ones(mode: str) -> None:
    """Every row of the first run's table comes from its report."""
    report = json.loads((FIRST_RUN / f"report-{mode}.json").read_text())
    text = (FIRST_RUN / "README.md").read_text(encoding="utf-8")
    (row,) = [line for line in text.splitlines() if line.startswith(f"{mode} ")]
    one, every = report["speedups"].values()
    for figure in (
        format_seconds(report["predicted_step_time"]),
        format_seconds(report["step_time"]),
        format_bytes(sum(report["predicted_peak_bytes"])),
        format_bytes(sum(report["peak_bytes"])),
        f"{one:.2f}x",
        f"{every:.2f}x",
    ):
        assert figure in row
    assert report["checkpoint"] == mode
    assert {"torch", "device", "date", "gpipebal"} <= report["provenance"].keys()


#: A number with a unit of time, memory or comparison: what only a measurement can tell.
FIGURE = re.compile(
    r"(?<![\w.])(\d[\d,]*(?:\.\d+)?)"
    r"(?:x\b|\u00d7|\s?(?:%|percent\b|times\b|ms\b|us\b|s\b|seconds\b|minutes\b|[kMGT]i?B\b))"
)


@pytest.mark.parametrize(
    ("text", "figures"),
    [
        ("2.5x faster, 10 % less", ["2.5", "10"]),
        ("1,024 MiB in 3.2 ms", ["1,024", "3.2"]),
        ("Python 3.11, 175 billion parameters, 64 x 64, step 1f1b, 2 partitions", []),
    ],
)
def test_figures_are_found(text: str, figures: list[str]) -> None:
    """A number with a unit is a figure; a version, a size of an image or a count is none."""
    assert FIGURE.findall(text) == figures


def test_every_figure_of_the_readme_is_from_a_stored_result() -> None:
    """A figure in a paragraph stands in generated tables of a benchmark that the paragraph links.

    Blocks of code have tests of their own: the table's, and the examples'.
    """
    prose = re.sub(r"```.*?```", "", README, flags=re.DOTALL)
    for paragraph in re.split(r"\n\s*\n|\n(?=[*|] )", prose):
        figures = FIGURE.findall(paragraph)
        if not figures:
            continue
        linked = re.findall(r"\]\((benchmarks/\w+)/[^)]*\)", paragraph)
        tables = "\n".join(_generated(ROOT / folder / "README.md") for folder in linked)
        for figure in figures:
            assert re.search(rf"(?<![\d.,]){re.escape(figure)}(?![\d])", tables), (
                f"the README says {figure}, and no stored result does: link the benchmark with it "
                f"in the same paragraph\n{paragraph}"
            )


def test_every_benchmark_has_its_tables_from_a_stored_result() -> None:
    """Every benchmark has a README with Result, Environment and Reproduce, and stored results."""
    for readme in (ROOT / "benchmarks").glob("*/README.md"):
        text = readme.read_text(encoding="utf-8")
        assert [line for line in text.splitlines() if line.startswith("## ")][-1] == "## Reproduce"
        assert "## Result" in text and "## Environment" in text, readme
        assert list(readme.parent.glob("*.json")), readme
        assert _generated(readme), readme


def _generated(readme: Path) -> str:
    """Return what a benchmark's README has between the marks that results are written to."""
    text = readme.read_text(encoding="utf-8")
    marked = re.findall(r"<!-- (\w+): [\w.]+ -->(.*?)<!-- end of \1 -->", text, re.DOTALL)
    first_run = re.findall(r"<!-- result -->\n```\n(.*?)```", text, re.DOTALL)
    return "\n".join([content for name, content in marked if name != "environment"] + first_run)


def test_readme_names_the_versions_that_are_required() -> None:
    """Python and torch versions in the README are those of the package's metadata."""
    metadata = configparser.ConfigParser()
    metadata.read(ROOT / "setup.cfg")
    python = metadata["options"]["python_requires"].removeprefix(">=").strip()
    torch_version = re.search(r"torch >= (\S+)", metadata["options"]["install_requires"])
    assert torch_version is not None
    assert f"Python {python} or later, torch {torch_version.group(1)} or later" in README


def test_readme_asks_for_the_torch_that_is_pinned() -> None:
    """A torch for CPUs that is installed first satisfies the pins: pip keeps it."""
    pins = (ROOT / "constraints-cpu.txt").read_text(encoding="utf-8")
    pinned = re.search(r"^torch==\S+$", pins, re.MULTILINE)
    assert pinned is not None
    asked = re.findall(r"pip install (torch\S*) --index-url \S+/whl/cpu", README)
    assert asked == [pinned.group()]


def test_links_inside_the_documents_exist() -> None:
    """Every relative link of README.md and docs/ leads to a file."""
    for path in (ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *ROOT.glob("*/*/README.md")):
        for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", path.read_text(encoding="utf-8")):
            assert (path.parent / target).exists(), f"{path.name}: {target}"
