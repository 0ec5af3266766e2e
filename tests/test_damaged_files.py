"""Damaged files: always one clear error, never a raw one, and never a plan that fails later."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

import gpipebal as gb
from gpipebal.errors import FileFormatError

JUNK: list[Any] = [None, "text", -1, -0.5, [], {}, True, 10**400, [[]], {"a": 1}]


def _places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the path of every value inside a JSON value."""
    items = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value[:2])
        if isinstance(value, list)
        else ()
    )
    return [p for k, v in items for p in [(*path, k), *_places(v, (*path, k))]]


def _nouns() -> dict[str, tuple[Any, Any]]:
    profile = gb.Profile.from_costs([1.0, 2.0, 3.0], chunks=2, output_bytes=[1, 2, 3])
    plan = gb.solve(profile, 2)
    return {
        "profile": (profile, gb.Profile.load),
        "plan": (plan, gb.Plan.load),
        "timeline": (gb.simulate(plan), gb.Timeline.load),
    }


@pytest.mark.parametrize("kind", ["profile", "plan", "timeline"])
def test_every_field_is_checked(kind: str, tmp_path: Path) -> None:
    """A file with any one value replaced by junk loads as something usable, or says why not."""
    noun, load = _nouns()[kind]
    record = noun.to_dict()
    path = tmp_path / "file.json"
    n_refused = 0
    for place in _places(record):
        if place[0] in ("provenance", "traceEvents"):
            continue  # free text about where the figures come from
        for junk in JUNK:
            damaged = copy.deepcopy(record)
            target = damaged
            for key in place[:-1]:
                target = target[key]
            if type(target[place[-1]]) is type(junk):
                continue
            target[place[-1]] = junk
            path.write_text(json.dumps(damaged))
            try:
                loaded = load(path)
            except FileFormatError as error:
                assert "\nFix: " in str(error)
                n_refused += 1
            else:
                assert str(loaded)
                if kind == "plan":
                    gb.simulate(loaded)
                if kind == "profile":
                    gb.solve(loaded, 2)
    assert n_refused > 50


@pytest.mark.parametrize("kind", ["profile", "plan", "timeline"])
@pytest.mark.parametrize("share", [0.0, 0.3, 0.9, 0.999])
def test_truncated_files_are_refused(kind: str, share: float, tmp_path: Path) -> None:
    """A file that ends too early is refused."""
    noun, load = _nouns()[kind]
    path = tmp_path / "file.json"
    noun.save(path)
    text = path.read_text()
    path.write_text(text[: int(share * len(text))])
    with pytest.raises(FileFormatError, match="is not readable JSON"):
        load(path)


@pytest.mark.parametrize("kind", ["profile", "plan", "timeline"])
def test_hostile_files_are_refused(kind: str, tmp_path: Path) -> None:
    """Deep nesting, NaN and files of another kind or version are refused."""
    noun, load = _nouns()[kind]
    path = tmp_path / "file.json"
    record = noun.to_dict()
    for text, message in (
        ("[" * 100_000, "is not readable JSON"),
        (json.dumps({**record, "extra": float("nan")}), "NaN is not a number"),
        (json.dumps({**record, "version": 99}), "has a newer format: version=99"),
        (json.dumps({**record, "format": "other"}), "is not a"),
        (json.dumps([record]), "is not a"),
    ):
        path.write_text(text)
        with pytest.raises(FileFormatError, match=message):
            load(path)
    with pytest.raises(FileFormatError, match="cannot be read"):
        load(tmp_path / "missing.json")
    with pytest.raises(FileFormatError, match="cannot be read"):
        load(tmp_path)
