"""Saved files: whole or not at all, and refused with a reason when they are not what they claim."""

from __future__ import annotations

import errno
import json
import os
import resource
import stat
from functools import reduce
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpipebal import files
from gpipebal.errors import FileFormatError
from gpipebal.files import atomic_path, read_record, why_not_writable, write_record

RECORD = {"format": "thing", "version": 1, "values": [1, 2.5, None, "a"]}


def test_record_survives_a_round_trip(tmp_path: Path) -> None:
    """What was written is read back, with format and version as the first keys of the file."""
    path = tmp_path / "a" / "thing.json"
    write_record(path, RECORD)
    assert read_record(path, "thing", 1) == RECORD
    assert path.read_text().split('"')[1::2][:2] == ["format", "thing"]


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_floats_keep_every_bit(tmp_path_factory: pytest.TempPathFactory, value: float) -> None:
    """A float is read back as exactly the one that was written."""
    path = tmp_path_factory.mktemp("bits") / "thing.json"
    write_record(path, {"format": "thing", "version": 1, "value": value})
    found = read_record(path, "thing", 1)["value"]
    assert (found, str(found)) == (value, str(value))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), object()])
def test_what_json_cannot_hold_is_not_written(tmp_path: Path, value: object) -> None:
    """A value that no reader could take leaves the old file whole and no other file behind."""
    path = tmp_path / "thing.json"
    write_record(path, RECORD)
    with pytest.raises((ValueError, TypeError), match="JSON"):
        write_record(path, {"value": value})
    assert read_record(path, "thing", 1) == RECORD
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_for_which_there_is_no_room_is_one_error(tmp_path: Path) -> None:
    """A file that grows beyond a limit is named, and the old one stays whole."""
    path = tmp_path / "thing.json"
    write_record(path, RECORD)
    old_limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, old_limits[1]))
    try:
        with pytest.raises(FileFormatError, match=r"thing.json cannot be written: .*\nFix: give"):
            write_record(path, {**RECORD, "text": "x" * 5000})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old_limits)
    assert read_record(path, "thing", 1) == RECORD
    assert list(tmp_path.iterdir()) == [path]


def test_no_room_for_a_name_is_the_same_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A quota may be one of files, so that not even an empty one can be made."""

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    monkeypatch.setattr(files, "_make_beside", refuse)
    with pytest.raises(FileFormatError, match=r"thing.json cannot be written: Disk quota"):
        write_record(tmp_path / "thing.json", RECORD)
    assert not list(tmp_path.iterdir())


def test_interrupted_write_keeps_the_old_file(tmp_path: Path) -> None:
    """An exception in the block, also Ctrl-C, leaves the old file and no temporary one."""
    path = tmp_path / "thing.json"
    path.write_text("old")
    with pytest.raises(KeyboardInterrupt), atomic_path(path) as temporary:
        temporary.write_text("half of the n")
        assert temporary.suffix == ".json" and temporary.parent == tmp_path
        raise KeyboardInterrupt
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_written_file_has_the_permissions_of_an_ordinary_file(tmp_path: Path) -> None:
    """The file can be read by whoever the umask allows, not by its owner only."""
    path = tmp_path / "thing.json"
    mask = os.umask(0o022)
    try:
        write_record(path, RECORD)
    finally:
        os.umask(mask)
    assert path.stat().st_mode & 0o777 == 0o644


def test_a_file_that_is_replaced_keeps_its_permissions(tmp_path: Path) -> None:
    """What only its owner may read stays so."""
    path = tmp_path / "thing.json"
    write_record(path, RECORD)
    for mode in (0o600, 0o640, 0o400):
        path.chmod(mode)
        write_record(path, RECORD)
        assert stat.S_IMODE(path.stat().st_mode) == mode


def test_any_name_that_the_system_takes_can_be_written(tmp_path: Path) -> None:
    """The temporary name is not longer than the name itself; a longer one is refused by itself."""
    for name in ("d" * 250 + ".json", "d." + "e" * 253, "ü" * 127):
        write_record(tmp_path / name, RECORD)
        assert why_not_writable(tmp_path / name) is None
    assert "too long" in (why_not_writable(tmp_path / ("d" * 256)) or "")
    with pytest.raises(OSError, match="too long"):
        write_record(tmp_path / ("d" * 256), RECORD)


@pytest.mark.skipif(not os.path.exists("/dev/stdout"), reason="the system has no /dev/stdout")
def test_what_is_open_is_not_replaced() -> None:
    """Behind it may be an ordinary file, to which something else is being written."""
    assert why_not_writable("/dev/stdout") == "it is not an ordinary file"
    with pytest.raises(FileFormatError, match="cannot be written: it is not an ordinary file"):
        write_record("/dev/stdout", RECORD)


def test_writing_leaves_the_umask_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the whole process's: what other threads make meanwhile must not be open to all."""
    asked: list[int] = []
    monkeypatch.setattr(os, "umask", asked.append)
    write_record(tmp_path / "thing.json", RECORD)
    assert why_not_writable(tmp_path / "thing.json") is None
    assert not asked


def test_what_is_no_file_is_not_replaced(tmp_path: Path) -> None:
    """A device, a pipe or a folder stays what it is, and the error says so; nothing is left."""
    pipe, folder = tmp_path / "pipe", tmp_path / "folder"
    os.mkfifo(pipe)
    folder.mkdir()
    link = tmp_path / "link"
    link.symlink_to(pipe)
    for path, what in (
        (pipe, "not an ordinary file"),
        (link, "not an ordinary file"),
        (folder, "a folder"),
    ):
        with pytest.raises(FileFormatError, match=f"cannot be written: it is {what}"):
            write_record(path, RECORD)
        assert what in (why_not_writable(path) or "")
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    assert sorted(tmp_path.iterdir()) == [folder, link, pipe]


def test_an_empty_name_is_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the current folder, as for `Path`; nothing is written, there or beside it."""
    folder = tmp_path / "folder"
    folder.mkdir()
    monkeypatch.chdir(folder)
    with pytest.raises(FileFormatError, match="cannot be written: it is a folder"):
        write_record("", RECORD)
    assert why_not_writable("") == "it is a folder"
    assert list(tmp_path.rglob("*")) == [folder]


def test_a_link_stays_one(tmp_path: Path) -> None:
    """What it leads to is written, also where there is nothing yet, and the link is kept."""
    real, link = tmp_path / "real" / "thing.json", tmp_path / "latest.json"
    link.symlink_to(real)
    for record in (RECORD, {**RECORD, "values": []}):
        write_record(link, record)
        assert link.is_symlink() and read_record(real, "thing", 1) == record
    assert why_not_writable(link) is None


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is not readable JSON"),
        (b"{", "is not readable JSON"),
        (b"\xff\xfe", "is not text"),
        (b"[" * 100_000, "is not readable JSON"),
        (b'{"format": "thing", "version": 1, "value": NaN}', "NaN is not a number"),
        (b"[1]", "is not a thing file: format='list'"),
        (b"1", "is not a thing file: format='int'"),
        (b"1.5", "is not a thing file: format='float'"),
        (b"true", "is not a thing file: format='bool'"),
        (b"null", "is not a thing file: format='NoneType'"),
        (b"{}", "is not a thing file: format=None"),
        (b'{"format": "other", "version": 1}', "is not a thing file: format='other'"),
        (b'{"format": "thing"}', "has no readable version: version=None"),
        (b'{"format": "thing", "version": "1"}', "has no readable version: version='1'"),
        (b'{"format": "thing", "version": true}', "has no readable version: version=True"),
        (b'{"format": "thing", "version": 0}', "has no readable version: version=0"),
        (b'{"format": "thing", "version": 3}', r"has a newer format: version=3 \(.* 2\)"),
    ],
)
def test_damaged_file_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    """A file that is not what it should be is refused by name, with what is wrong and a fix."""
    path = tmp_path / "thing.json"
    path.write_bytes(content)
    with pytest.raises(FileFormatError, match=message) as caught:
        read_record(path, "thing", 2)
    assert str(path) in str(caught.value) and "\nFix: " in str(caught.value)


def test_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    """A missing file, and a folder, are refused as a file is."""
    with pytest.raises(FileFormatError, match="cannot be read: No such file"):
        read_record(tmp_path / "missing.json", "thing", 1)
    with pytest.raises(FileFormatError, match="cannot be read: Is a directory"):
        read_record(tmp_path, "thing", 1)


def test_huge_file_is_refused_before_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file above the limit is refused by its size alone."""
    monkeypatch.setattr(files, "MAX_FILE_BYTES", 10)
    path = tmp_path / "thing.json"
    path.write_text(json.dumps(RECORD))
    with pytest.raises(FileFormatError, match=r"is too large: \d+ bytes \(expected at most 10\)"):
        read_record(path, "thing", 1)


@pytest.mark.parametrize("part", ["[],", "{},", "1,", '"a",'])
def test_a_file_of_too_many_values_is_refused_before_it_is_parsed(
    part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Objects are larger than their text: a small file of very many takes no memory for them."""
    path = tmp_path / "thing.json"
    path.write_text('{"format": "thing", "version": 1, "x": [' + part * 100 + "1]}")
    assert len(read_record(path, "thing", 1)["x"]) == 101
    monkeypatch.setattr(files, "MAX_VALUES", 99)
    monkeypatch.setattr(files.json, "loads", None)
    with pytest.raises(FileFormatError, match=r"has too many values: \d+ \(expected at most 99\)"):
        read_record(path, "thing", 1)


@pytest.mark.parametrize(("limit", "most"), [("MAX_VALUES", 99), ("MAX_FILE_BYTES", 400)])
def test_what_could_not_be_read_again_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str, most: int
) -> None:
    """The error comes when the file is saved, and the old one stays."""
    path = tmp_path / "thing.json"
    record = {**RECORD, "x": list(range(100))}
    write_record(path, record)
    before = path.read_text()
    monkeypatch.setattr(files, limit, most)
    with pytest.raises(FileFormatError, match=r"could not be read back: \d+ values in \d+ bytes"):
        write_record(path, {**record, "x": list(range(1000))})
    assert path.read_text() == before
    assert os.listdir(tmp_path) == ["thing.json"]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({1: "a"}, "an object has a name that is not a text: 1"),
        ({"a": [{None: 2}]}, "an object has a name that is not a text: None"),
        (reduce(lambda inner, _: [inner], range(40), []), "nested deeper than 32"),
    ],
)
def test_what_would_be_read_as_something_else_is_not_written(
    tmp_path: Path, value: object, message: str
) -> None:
    """What was written is read back, and is the same."""
    with pytest.raises(FileFormatError, match=f"could not be read back: {message}"):
        write_record(tmp_path / "thing.json", {**RECORD, "value": value})
    assert not list(tmp_path.iterdir())


def test_a_mark_in_front_of_the_text_is_no_part_of_it(tmp_path: Path) -> None:
    """Some editors write one."""
    path = tmp_path / "thing.json"
    path.write_text(json.dumps(RECORD), encoding="utf-8-sig")
    assert read_record(path, "thing", 1) == RECORD


def test_older_version_is_refused(tmp_path: Path) -> None:
    """Only files of the present version are read; that of an earlier one has to be made again."""
    path = tmp_path / "thing.json"
    write_record(path, RECORD)
    message = r"was made before the first release: version=1 \(.* 7\)\.\nFix: make the file again"
    with pytest.raises(FileFormatError, match=message):
        read_record(path, "thing", 7)
