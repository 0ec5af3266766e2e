"""Damaged files: always one clear error, never a raw one, and never a plan that fails later."""

from __future__ import annotations

import copy
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import gpipebal as gb
from gpipebal.errors import FileFormatError
from gpipebal.profile import (
    AloneShares,
    LayerProfile,
    SkipProfile,
    StepTerms,
    TieProfile,
    TurnTimes,
)

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
    for header in ({"version": 99}, {"format": "other"}):
        with pytest.raises(FileFormatError, match="is of another format: "):
            type(noun).from_dict({**record, **header})
    path.write_text(json.dumps({**record, "provenance": {"device": "\ud800 \U0001f600"}}))
    with pytest.raises(FileFormatError, match=r"half of a character: '.ud800'"):
        load(path)
    with pytest.raises(FileFormatError, match="cannot be read"):
        load(tmp_path / "missing.json")
    with pytest.raises(FileFormatError, match="cannot be read"):
        load(tmp_path)


#: Errors of Python itself, which say nothing to who has a file in front of them.
PYTHONS_OWN = re.compile(
    r"__\w+__|positional argument|keyword argument|object (is not|has no|cannot)|unhashable|codec"
    r"|cannot convert|not supported|dictionary update|unpack"
)


def _full_records() -> dict[str, tuple[dict[str, Any], Any]]:
    """Return a record of each kind in which no part is left out, and what reads it."""
    loss = LayerProfile("loss", "f", 0.5, 0.5, 0.5, saved=(1,), buffer_bytes=8)
    profile = replace(
        gb.Profile.from_costs([1.0, 2.0, 3.0], parameter_bytes=[4, 5, 6], rows=4, chunks=2),
        step=StepTerms(
            *(0.25, loss, loss, (1,), 0.125),
            side_by_side=AloneShares(2, 0.9, 0.9, 0.9, 0.9),
            turns=TurnTimes(0.1),
            optimizer_groups=((1, 2, 3),),
        ),
        skips=(SkipProfile("skip", 0, 2, (1,)),),
        ties=(TieProfile((0, 1), 2, 2),),
        inputs=(0,),
        common_inputs=(0,),
        other_sizes=(gb.Profile.from_costs([0.5, 1.0, 1.5], rows=2),),
    )
    plan = gb.evaluate(profile, [1, 2], checkpoint=["always", "never"])
    timeline = replace(gb.simulate(plan), devices=(0, 1))
    plan = replace(plan, runs=(range(1, 2),), notes=("a",), sensitivity=((1.0, None),))
    return {
        "profile": (json.loads(json.dumps(profile.to_dict())), gb.Profile.from_dict),
        "plan": (json.loads(json.dumps(plan.to_dict())), gb.Plan.from_dict),
        "timeline": (timeline.to_dict(), gb.Timeline.from_dict),
    }


def _at(record: Any, place: tuple[Any, ...]) -> Any:
    for key in place:
        record = record[key]
    return record


@pytest.mark.parametrize("kind", ["profile", "plan", "timeline"])
def test_errors_of_damaged_files_are_our_own(kind: str) -> None:
    """A field missing, unknown or of another kind is named, with what is expected instead."""
    record, load = _full_records()[kind]

    def refused(damaged: Any) -> str | None:
        try:
            load(damaged)
        except FileFormatError as error:
            first, second = str(error).splitlines()
            assert "(expected " in first and second.startswith("Fix: ")
            assert not PYTHONS_OWN.search(first), first
            return first
        return None

    assert load(record).to_dict() == load(copy.deepcopy(record)).to_dict()
    for place in [(), *_places(record)]:
        *way, name = place or ("",)
        for junk in (*JUNK, "\ud800", ["a"], [1, 2, 3, 4, 5, 6], [None]) if place else ():
            damaged = copy.deepcopy(record)
            _at(damaged, tuple(way))[name] = junk
            refused(damaged)
        if place:
            damaged = copy.deepcopy(record)
            del _at(damaged, tuple(way))[name]
            missing = refused(damaged)
            assert missing is None or isinstance(name, int) or repr(name)[1:-1] in missing
        if isinstance(_at(record, place), dict) and "provenance" not in place:
            damaged = copy.deepcopy(record)
            _at(damaged, place)["sur\nprise"] = 1
            unknown = refused(damaged)
            assert unknown is not None and "unknown field: " in unknown


@pytest.mark.parametrize("kind", ["profile", "plan"])
@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        *[("chunks", junk, "expected") for junk in (0, -1, True, "2", None)],
        *[("chunks", junk, "(expected a whole number, 1 to 1048576)") for junk in (2.5, 1e308)],
        *[("rows", junk, "1 or more") for junk in (0, -1, 2.5, 1e308, False)],
        ("chunks", 10**300, "at most 1048576"),
    ],
)
def test_counts_are_refused_with_what_they_can_be(
    kind: str, name: str, value: Any, expected: str, tmp_path: Path
) -> None:
    """Not with a range that the value is in."""
    noun, load = _nouns()[kind]
    path = tmp_path / "file.json"
    path.write_text(json.dumps({**noun.to_dict(), name: value}))
    with pytest.raises(FileFormatError) as raised:
        load(path)
    first = str(raised.value).splitlines()[0]
    assert str(path) in first and f"{name}=" in first and expected in first and len(first) < 300


def _edited_plan(partitions: int, changes: dict[str, Any], folder: Path) -> Path:
    """Write the plan of a small chain to a file, with changes."""
    profile = gb.Profile.from_costs([1.0, 2.0, 3.0], chunks=2)
    record = json.loads(json.dumps(gb.solve(profile, partitions).to_dict()))
    path = folder / "file.json"
    path.write_text(json.dumps({**record, **changes}))
    return path


@pytest.mark.parametrize(
    "changes",
    [
        {"schedule": "foo"},
        {"objective": "foo"},
        {"schedule": "interleaved_1f1b"},  # of three partitions
    ],
)
def test_plans_of_what_does_not_exist_are_refused(changes: dict[str, Any], tmp_path: Path) -> None:
    """Whoever loads them is told, and not who simulates them."""
    path = _edited_plan(3, changes, tmp_path)
    with pytest.raises(FileFormatError, match=r"file\.json: plan is damaged: .*\(expected"):
        gb.Plan.load(path)


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"chunks": 400, "mini_batch_rows": 400}, "makespan"),
        ({"makespan": 1.0, "value": 1.0, "lower_bound": 1.0}, "makespan"),
        ({"value": 5.0, "lower_bound": 5.0}, "value"),
        ({"bottleneck": 0.5}, "bottleneck"),
    ],
)
def test_plans_whose_figures_cannot_all_be_true_are_refused(
    changes: dict[str, Any], name: str, tmp_path: Path
) -> None:
    """A plan that was edited is not printed as proven optimal."""
    path = _edited_plan(2, changes, tmp_path)
    with pytest.raises(FileFormatError, match=rf"file\.json: plan is damaged: .*{name}=.*expected"):
        gb.Plan.load(path)
