"""Files changed at random: either they load to something valid, or there is one clear error."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import gpipebal as gb
from gpipebal.errors import FileFormatError
from gpipebal.planner import evaluate
from gpipebal.profile import LayerProfile, SkipProfile, StepTerms

#: What a value is replaced by.
JUNK = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 5),
    st.sampled_from([2**31, 2**63, 2**64, 10**400, -1, 1.5, -0.5, 1e308, "x", "\ud800"]),
    st.just([]),
    st.just({}),
    st.lists(st.integers(0, 3), max_size=3),
    st.recursive(st.just(0), lambda inner: st.lists(inner, max_size=2), max_leaves=5),
)

#: All examples write to one folder, one after the other.
ONE_FOLDER = [HealthCheck.function_scoped_fixture]


@cache
def texts() -> dict[str, str]:
    """Return a good profile and a good plan as the text of a file."""
    loss = LayerProfile("loss", "f", 0.5, 0.5, 0.5, saved=(1,), buffer_bytes=8)
    profile = gb.Profile.from_costs(
        [1.0, 2.0, 3.0], parameter_bytes=[4, 5, 6], output_bytes=[1, 2, 3], rows=4, chunks=2
    )
    profile = replace(
        profile,
        step=StepTerms(0.25, loss, loss, (1,), 0.125, optimizer_groups=((1, 2, 3),)),
        skips=(SkipProfile("skip", 0, 2, (1,)),),
        other_sizes=(gb.Profile.from_costs([0.5, 1.0, 1.5], rows=2),),
        provenance={"threads": 1, "device_type": "cpu"},
    )
    plan = evaluate(profile, [1, 2], checkpoint=["always", "never"], schedule="1f1b")
    return {"profile": json.dumps(profile.to_dict()), "plan": json.dumps(plan.to_dict())}


def check_load(kind: str, path: Path) -> bool:
    """Load a file; return whether it did. Whatever loads can be printed, used and saved again."""
    load = gb.Profile.load if kind == "profile" else gb.Plan.load
    try:
        found: Any = load(path)
    except FileFormatError as error:
        lines = str(error).splitlines()
        assert len(lines) == 2 and lines[1].startswith("Fix: ") and path.name in lines[0]
        return False
    assert str(found).encode()
    again = path.with_suffix(".again.json")
    found.save(again)
    assert load(again) == found
    if kind == "profile":
        assert len(found.to_frame(all_sizes=True)) >= found.n_layers
        assert found.at_rows(3).rows == 3
    return True


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the path of every value inside a JSON value."""
    items: Any = ()
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list):
        items = enumerate(value)
    return [p for k, v in items for p in [(*path, k), *places(v, (*path, k))]]


KINDS = st.sampled_from(["profile", "plan"])


@settings(
    deadline=None, max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(KINDS, st.integers(0, 10**6), JUNK, st.sampled_from(["replace", "remove", "add", "rename"]))
def test_a_value_changed_anywhere(
    tmp_path: Path, kind: str, where: int, junk: Any, how: str
) -> None:
    """Any value replaced, removed, added or renamed: a valid noun, or a FileFormatError."""
    record = json.loads(texts()[kind])
    all_places = places(record)
    *way, last = all_places[where % len(all_places)]
    target = record
    for key in way:
        target = target[key]
    if how == "replace":
        target[last] = junk
    elif how == "remove":
        del target[last]
    elif isinstance(target, list):
        target.insert(last, junk)
    elif how == "add":
        target["surprise"] = junk
    else:
        target["surprise"] = target.pop(last)
    path = tmp_path / "file.json"
    path.write_text(json.dumps(record))
    check_load(kind, path)


@settings(
    deadline=None, max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    KINDS,
    st.lists(
        st.tuples(st.integers(0, 10**6), st.binary(max_size=3), st.integers(0, 4)),
        min_size=1,
        max_size=3,
    ),
)
@example("profile", [(0, b"\xef\xbb\xbf", 0)])
@example("plan", [(5, b"\xff", 1)])
def test_bytes_changed_anywhere(
    tmp_path: Path, kind: str, changes: list[tuple[int, bytes, int]]
) -> None:
    """Any bytes overwritten, inserted or cut out: a valid noun, or a FileFormatError."""
    data = bytearray(texts()[kind].encode())
    for where, put, n_cut in changes:
        at = where % len(data)
        data[at : at + n_cut] = put
    path = tmp_path / "file.json"
    path.write_bytes(data)
    check_load(kind, path)


@settings(
    deadline=None, max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(KINDS, st.integers(0, 10**6), st.sampled_from("0123456789eE+-."))
def test_digits_changed_anywhere(tmp_path: Path, kind: str, where: int, digit: str) -> None:
    """Any digit of any number changed: a valid noun, or a FileFormatError."""
    text = texts()[kind]
    digits = [k for k, sign in enumerate(text) if sign.isdigit()]
    at = digits[where % len(digits)]
    path = tmp_path / "file.json"
    path.write_text(text[:at] + digit + text[at + 1 :])
    check_load(kind, path)


@pytest.mark.parametrize("kind", ["profile", "plan"])
def test_unchanged_files_load(kind: str, tmp_path: Path) -> None:
    """The files that are damaged here are good before that."""
    path = tmp_path / "file.json"
    path.write_text(texts()[kind])
    assert check_load(kind, path)


@pytest.mark.parametrize("kind", ["profile", "plan"])
@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"rows"', '"rows": 3, "rows"', "'rows' stands twice in one object"),
        ('"threads": 1', '"threads": 1e999', "1e999 is too large for a number"),
        ('"threads": 1', '"threads": ' + "1" * 5000, "is not readable JSON"),
        ('"threads": 1', '"x": ' + "[" * 40 + "]" * 40, "nested deeper than 32"),
        ('"threads": 1', '"x": ' + '{"a":' * 9000 + "0" + "}" * 9000, "is not readable JSON"),
        ('"chunks": 2', '"chunks": 2000000000', "too many micro-batches: chunks=2000000000"),
        ('"chunks": 2', '"chunks": true', "chunks"),
        ('"rows": 4', '"rows": -4', "rows=-4"),
        ('"rows": 4', '"rows": 4.0', "rows=4.0"),
    ],
)
def test_hostile_files_are_refused(
    kind: str, old: str, new: str, message: str, tmp_path: Path
) -> None:
    """Repeated names, numbers beyond all bounds and deep nesting are refused by name."""
    path = tmp_path / "file.json"
    path.write_text(texts()[kind].replace(old, new, 1))
    load: Any = gb.Profile.load if kind == "profile" else gb.Plan.load
    with pytest.raises(FileFormatError, match=message):
        load(path)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    """Opening a pipe that nobody writes to would never end: it is refused."""
    path = tmp_path / "pipe.json"
    os.mkfifo(path)
    with pytest.raises(FileFormatError, match="nothing writes to this pipe"):
        gb.Profile.load(path)
