"""benchmarks/benchmark_tools: what the benchmarks have in common."""

from __future__ import annotations

import doctest
from functools import partial
from pathlib import Path

import pytest
from benchmark_tools import machine, text
from benchmark_tools.bars import Bar, bars_table
from benchmark_tools.script import publish
from benchmark_tools.turns import seconds_in_turns

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


def test_trial_leaves_the_readme_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The first block of any result is printed; only the stored one gets into the README."""
    readme, stored = tmp_path / "README.md", tmp_path / "results.json"
    readme.write_text("<!-- a: results.json --><!-- end of a -->", encoding="utf-8")
    publish(tmp_path / "trial.json", stored, {"a": "of a trial"})
    assert "of a trial" not in readme.read_text(encoding="utf-8")
    publish(stored, stored, {"a": "whole"})
    assert "\nwhole\n" in readme.read_text(encoding="utf-8")
    assert capsys.readouterr().out == "of a trial\nwhole\n"


def test_verdict_is_on_the_right_side() -> None:
    """A figure that equals its bar reaches it; one without a bar has no verdict."""
    assert Bar("", 0.05, 0.05, True, "").reached is True
    assert Bar("", 0.05, 0.051, True, "").reached is False
    assert Bar("", -0.01, -0.01, False, "").reached is True
    assert Bar("", -0.01, -0.011, False, "").reached is False
    assert Bar("", None, 1.0, True, "").reached is None
    assert Bar("", 0.97, None, False, "").reached is None


def test_every_bar_has_a_line() -> None:
    """With its limit, figure and verdict, or what of them there is."""
    bars = [
        Bar("a", 2.0, 3.0, True, "x"),
        Bar("b", None, 1.0, True, ""),
        Bar("c", 4, None, False, ""),
    ]
    lines = bars_table(bars, lambda bar, value: f"{value:.1f} s").splitlines()
    assert lines[0].split() == ["figure", "bar", "value", "where"]
    assert [" ".join(line.split()) for line in lines[1:]] == [
        "a <= 2.0 s 3.0 s NOT REACHED x",
        "b 1.0 s",
        "c >= 4.0 s not measured",
    ]


def test_first_step_of_a_turn_does_not_count() -> None:
    """Each way does three steps in a row in each round; the last two are what they took."""
    calls: list[str] = []

    def way(name: str) -> float:
        calls.append(name)
        return float(len(calls))

    found = seconds_in_turns({name: partial(way, name) for name in "abc"}, 4)
    turns = [calls[k : k + 3] for k in range(0, len(calls), 3)]
    assert all(len(set(turn)) == 1 for turn in turns)
    assert sorted(turn[0] for turn in turns) == sorted("abc" * 4)
    counted = sorted(time for times in found.values() for time in times)
    assert counted == [number for number in range(1, 37) if number % 3 != 1]


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
