"""What tests of the benchmarks have in common: their scripts, stored results and READMEs."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmark_tools.text import fill_in

import gpipebal as gb

__all__ = ["assert_in_readme", "folder_of", "script_of", "stored"]

ROOT = Path(gb.__file__).parent.parent


def folder_of(benchmark: str) -> Path:
    """Return a benchmark's folder, and let its modules be imported."""
    folder = ROOT / "benchmarks" / benchmark
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    return folder


def script_of(benchmark: str) -> Any:
    """Import a benchmark's make.py, which is a script."""
    path = folder_of(benchmark) / "make.py"
    spec = importlib.util.spec_from_file_location(f"make_{benchmark}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def stored(benchmark: str, file: str = "results.json") -> dict[str, Any]:
    """Read what a benchmark has stored; every call gives a record of its own."""
    record = json.loads((folder_of(benchmark) / file).read_text(encoding="utf-8"))
    assert isinstance(record, dict)
    return record


def assert_in_readme(
    benchmark: str, blocks: Mapping[str, str], source: str = "results.json"
) -> None:
    """Assert that a benchmark's README has these blocks, between the marks of this file."""
    readme = (folder_of(benchmark) / "README.md").read_text(encoding="utf-8")
    assert fill_in(readme, blocks, source) == readme
