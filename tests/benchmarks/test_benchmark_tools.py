"""benchmarks/benchmark_tools: what the benchmarks have in common."""

from __future__ import annotations

import doctest
from pathlib import Path

import pytest
from benchmark_tools import machine, text

import gpipebal as gb


def test_examples_hold() -> None:
    """The literal examples beside the functions that write tables hold."""
    failed, tried = doctest.testmod(text)
    assert tried and not failed


def test_filling_in_replaces_what_stands_there() -> None:
    """A README's own text stays, and a second filling in changes nothing."""
    readme = "kept\n<!-- a: results.json -->\nold\n<!-- end of a -->\nkept too\n"
    filled = text.fill_in(readme, {"a": "new"})
    assert filled == "kept\n<!-- a: results.json -->\nnew\n<!-- end of a -->\nkept too\n"
    assert text.fill_in(filled, {"a": "new"}) == filled
    with pytest.raises(ValueError, match="marks"):
        text.fill_in(filled, {"b": "new"})
    with pytest.raises(ValueError, match="once each"):
        text.fill_in(filled * 2, {"a": "new"})


def test_readme_is_written_whole(tmp_path: Path) -> None:
    """A file gets its blocks, and nothing is left beside it."""
    path = tmp_path / "README.md"
    path.write_text("<!-- a: results.json --><!-- end of a -->", encoding="utf-8")
    text.write_readme(path, {"a": text.block("x")})
    assert "```\nx\n```" in path.read_text(encoding="utf-8")
    assert list(tmp_path.iterdir()) == [path]


def test_provenance_says_what_and_where() -> None:
    """A result's provenance has everything that its description needs."""
    lines = machine.describe(machine.provenance())
    assert gb.__version__ in lines[1] and "cores" in lines[0]
    assert all(line.strip() for line in lines)


def test_other_load_does_not_count_ourselves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 2 cores in 10 s, 8 s busy, 6 of them our own: 2 of 20 belong to others."""
    busy, own, clock = iter([100.0, 108.0]), iter([1.0, 7.0]), iter([0.0, 10.0])
    monkeypatch.setattr(machine, "_busy_seconds", lambda: next(busy))
    monkeypatch.setattr(machine, "_own_seconds", lambda: next(own))
    monkeypatch.setattr(machine.time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(machine.os, "cpu_count", lambda: 2)
    load = machine.OtherLoad()
    share = load.share()
    monkeypatch.undo()
    assert share == pytest.approx(0.1)
