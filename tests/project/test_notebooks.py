"""The notebooks: text and notebook are the same, small, and run from top to bottom."""

from __future__ import annotations

import json
import os
import re
import runpy
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import gpipebal

FOLDER = Path(gpipebal.__file__).parents[1] / "notebooks"
TEXTS = sorted(FOLDER.glob("[0-9][0-9]-*.py"))

#: What each notebook is shrunk by, so that it takes a few seconds. A text that a notebook no
#: longer has fails the test.
SMALLER: dict[str, dict[str, str]] = {
    "01-profile": {
        "resnet((3, 4, 6, 3), num_classes=1000, width=32)": "resnet((1,) * 4, 8, 4)",
        "torch.randn(16, 3, 64, 64)": "torch.randn(16, 3, 33, 33)",
        "torch.randint(1000, (16,))": "torch.randint(8, (16,))",
        "timeout=10.0": "timeout=0.1",
        "layers=40, width=5120": "layers=2, width=80",
        "context=2048": "context=64",
        "zeros(8, 2048": "zeros(8, 64",
    },
    "02-balance": {
        "num_classes=1000, width=32": "num_classes=8, width=4",
        "torch.randn(8, 3, 64, 64)": "torch.randn(8, 3, 33, 33)",
        "chunks=4, timeout=0.5": "chunks=4, timeout=0.0",
        "gb.solve(profile, 8)": "gb.solve(profile, 3)",
    },
    "03-schedules": {"(1, 2, 4, 8, 16, 32, 64)": "(1, 2, 4)"},
    "04-run": {
        "WIDTH, ROWS = 512, 2048": "WIDTH, ROWS = 16, 64",
        "timeout=8.0": "timeout=0.1",
        "range(5)": "range(3)",
    },
    "05-language-model": {
        "24, 1024, 64_000, 1024, 8": "6, 64, 1_000, 32, 3",
        "(32_000, 64_000, 128_000, 256_000)": "(1_000, 2_000)",
    },
    "06-thousand-devices": {
        "BLOCKS, WIDTH = 1024, 4096": "BLOCKS, WIDTH = 64, 64",
        "DEVICES = (8, 64, 256, 1024)": "DEVICES = (4, 8, 16, 32)",
        "run(64, 256, ": "run(8, 16, ",
    },
}

#: What a notebook may be at most: cells, bytes with its outputs.
MOST_CELLS = 30
LARGEST = 250_000


def notebook_of(path: Path) -> dict[str, Any]:
    """Read the notebook beside a text."""
    found: dict[str, Any] = json.loads(path.with_suffix(".ipynb").read_text(encoding="utf-8"))
    return found


def cells_of(text: str) -> list[tuple[str, str]]:
    """Part a text in percent format into kinds and contents of cells."""
    cells = []
    for part in text.split("\n# %%")[1:]:
        head, _, body = part.partition("\n")
        lines = body.strip("\n").splitlines()
        if head.strip() == "[markdown]":
            lines = [line.removeprefix("#").removeprefix(" ") for line in lines]
            cells.append(("markdown", "\n".join(lines)))
        else:
            lines = [line.removeprefix("# ") if line[:3] == "# %" else line for line in lines]
            cells.append(("code", "\n".join(lines)))
    return cells


def test_there_are_six_in_order() -> None:
    """The notebooks are numbered without gaps, and every one has a way to be shrunk."""
    assert [path.name[:2] for path in TEXTS] == [f"{k:02}" for k in range(1, 7)]
    assert [path.stem for path in TEXTS] == list(SMALLER)


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: path.stem)
def test_notebook_is_its_text_with_outputs(path: Path) -> None:
    """The notebook was made from the text that stands beside it, by a run without errors."""
    notebook = notebook_of(path)
    kept = [(cell["cell_type"], "".join(cell["source"])) for cell in notebook["cells"]]
    assert kept == cells_of(path.read_text(encoding="utf-8")), "run notebooks/make.py"
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    outputs = [output for cell in code for output in cell["outputs"]]
    assert outputs and not [o for o in outputs if o["output_type"] == "error"]
    assert not [o for o in outputs if o.get("name") == "stderr"]


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: path.stem)
def test_notebook_has_nothing_that_changes_by_chance(path: Path) -> None:
    """What is printed in a row is one output; there are no times of runs and no random names."""
    notebook = notebook_of(path)
    assert set(notebook["metadata"]) == {"jupytext", "kernelspec"}
    for k, cell in enumerate(notebook["cells"]):
        assert cell["id"] == f"cell-{k}" and "execution" not in cell["metadata"]
        kinds = [output.get("name", "") for output in cell.get("outputs", ())]
        assert not any(one and one == other for one, other in pairwise(kinds)), f"cell {k}"


def test_what_is_printed_in_pieces_is_joined() -> None:
    """Pieces of one stream are joined where nothing stands between them."""
    pytest.importorskip("jupytext", reason="needs the extra `notebooks`")
    pytest.importorskip("nbclient", reason="needs the extra `notebooks`")
    joined = runpy.run_path(str(FOLDER / "make.py"))["joined"]
    streams = [
        ("stdout", "a\n"),
        ("stdout", "b\n"),
        ("stderr", "c"),
        ("stdout", "d"),
        ("stdout", "e"),
    ]
    outputs = [{"output_type": "stream", "name": name, "text": text} for name, text in streams]
    outputs.insert(4, {"output_type": "display_data", "data": {}})
    found = [output.get("text") for output in joined(outputs)]
    assert found == ["a\nb\n", "c", "d", None, "e"]


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: path.stem)
def test_notebook_is_small(path: Path) -> None:
    """Few cells, small outputs, and no path of the machine that it ran on."""
    content = path.with_suffix(".ipynb").read_text(encoding="utf-8")
    assert len(notebook_of(path)["cells"]) < MOST_CELLS
    assert len(content) < LARGEST
    for output in (o for cell in notebook_of(path)["cells"] for o in cell.get("outputs", ())):
        said = json.dumps({k: v for k, v in output.get("data", output).items() if k[:5] != "image"})
        assert "/tmp" not in said and "/home" not in said and "/root" not in said


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: path.stem)
def test_links_lead_somewhere(path: Path) -> None:
    """A link to another notebook or file names one that exists."""
    for _, text in (cell for cell in cells_of(path.read_text()) if cell[0] == "markdown"):
        for target in re.findall(r"\]\(([^)]+)\)", text.replace("\n", "")):
            assert target.startswith("https://") or (FOLDER / target).exists(), target


@pytest.mark.slow
@pytest.mark.parametrize("path", TEXTS, ids=lambda path: path.stem)
def test_notebook_runs(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every notebook runs from top to bottom, with smaller numbers."""
    reason = "needs the extra `notebooks`"
    jupytext = pytest.importorskip("jupytext", reason=reason)
    nbclient = pytest.importorskip("nbclient", reason=reason)
    pytest.importorskip("ipykernel", reason=reason)
    text = path.read_text(encoding="utf-8")
    for part, smaller in SMALLER[path.stem].items():
        assert part in text, f"{path.name} changed: {part!r} is not in it"
        text = text.replace(part, smaller)
    package = str(FOLDER.parent)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([package, os.environ.get("PYTHONPATH", "")]))
    notebook = jupytext.reads(text, fmt="py:percent")
    client = nbclient.NotebookClient(
        notebook, timeout=None, kernel_name="python3", resources={"metadata": {"path": FOLDER}}
    )
    client.execute()
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(cell.execution_count for cell in code)
