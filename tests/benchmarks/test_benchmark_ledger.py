"""The ledger's benchmark: its tables are its results, and it tells what differs."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
from benchmark_tools.text import fill_in

import gpipebal as gb
from gpipebal.files import read_record

FOLDER = Path(gb.__file__).parent.parent / "benchmarks" / "ledger"
TABLES = runpy.run_path(str(FOLDER / "ledger_tables.py"))


def test_the_readme_says_what_is_stored() -> None:
    """Its tables are made from the results, and from nothing else."""
    record = read_record(FOLDER / "results.json", TABLES["FORMAT"], TABLES["VERSION"])
    text = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert fill_in(text, TABLES["blocks"](record)) == text


def test_what_differs_is_counted_and_listed() -> None:
    """By samples and by operators; a few numbers more or less are no difference."""
    assert [TABLES["difference"]([1000, n]) for n in (1000, 1064, 1100, 900)] == [0, 0, -100, 100]
    operators: list[dict[str, Any]] = [
        {"name": "a", "samples": 4, "forward": [], "backward": [[300, 100], [100, 400]]},
        {"name": "b", "samples": 2, "forward": [[0, 90]], "backward": []},
    ]
    lines = TABLES["summary"]({"operators": operators}).splitlines()
    assert lines[1].split() == ["forward", "6", "5", "1", "0", "2", "1", "0"]
    assert lines[2].split() == ["backward", "6", "4", "1", "1", "2", "1", "1"]


def test_operators_are_counted_as_the_allocator_reports() -> None:
    """Those that pick elements and a loss agree; a product, which torch computes otherwise, not."""
    pytest.importorskip("expecttest", reason="torch's samples need the package expecttest")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FOLDER))
        measure = runpy.run_path(str(FOLDER / "make.py"))["measure"]
    record = measure(["gather", "nn.functional.mse_loss", "prod"])
    found = {operator["name"]: operator for operator in record["operators"]}
    assert not found["nn_functional_mse_loss"]["backward"]
    assert len(found["gather"]["backward"]) < found["gather"]["samples"]
    assert any(TABLES["difference"](peaks) > 0 for peaks in found["prod"]["backward"])
