"""Saved files: versioned JSON, written whole or not at all, read with suspicion.

Every file that gpipebal writes is one JSON object whose first keys are ``format`` (what it is)
and ``version`` (an int that grows when old readers would misread it). Files of the versions that
there were before the first release are not read.
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from gpipebal.argument_kinds import check_path
from gpipebal.errors import FileFormatError, MissingFileError

__all__ = [
    "NO_ROOM",
    "atomic_path",
    "check_values",
    "noun_of",
    "read_any",
    "read_noun",
    "read_record",
    "why_not_writable",
    "write_record",
]

#: A file above this size is not a profile or a plan: refused before it is read (bytes).
MAX_FILE_BYTES = 256 * 2**20
#: Nor is one with more values: each takes some tens of bytes more as an object than in the file.
MAX_VALUES = 2**23
#: No file of ours nests deeper than this; one that does is refused before it is walked through.
MAX_DEPTH = 32
#: A suffix of so many bytes tells no type of file.
_LONG_SUFFIX = 100
#: Errors of writing: a full disk, a user's share of it that is used up, a limit on a file's size.
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
#: How to make a file again that was made before the first release, by its kind.
_MADE_AGAIN = {"gpipebal-profile": "profile the model again.", "gpipebal-plan": "solve again."}
#: How JSON writes one of the two halves of a character; most often the other one is next to it.
_HALF_CHARACTER = re.compile(r"\\u[dD][89a-fA-F]")

_Noun = TypeVar("_Noun")


@contextmanager
def atomic_path(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Give a temporary name next to `path`; move the file there only if the block succeeds.

    The old file, if any, stays whole when the block raises or the process dies; the new one has its
    permissions. A link stays a link, and the file that it leads to is the one that is written.

    Raises:
        KindError: `path` is not a path.
        FileFormatError: `path` is something other than an ordinary file, which this would replace,
            or there is no room for it.
    """
    what, target = _not_a_file(path), Path(os.path.realpath(check_path(path)))
    if what is not None:
        raise _refused(path, f"cannot be written: {what}.", "give the name of an ordinary file.")
    temporary: Path | None = None
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = _make_beside(target)
        yield temporary
        with suppress(FileNotFoundError):
            temporary.chmod(stat.S_IMODE(target.stat().st_mode))
        temporary.replace(target)
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise
        what = f"cannot be written: {error.strerror}."
        raise _refused(path, what, "give a place with more room.") from error
    finally:
        if temporary is not None:
            temporary.unlink(missing_ok=True)


def why_not_writable(path: str | os.PathLike[str]) -> str | None:
    """Say why no file can be written to `path`, by making one next to it; None if one can."""
    what, target = _not_a_file(path), Path(os.path.realpath(path))
    if what is not None:
        return what
    if not os.path.isdir(target.parent):
        return "its folder does not exist"
    try:
        # Permissions are no proof: some folders take no files from anyone.
        _make_beside(target).unlink()
    except OSError as error:
        return f"its folder takes no such file: {error.strerror or error}"
    return None


def _not_a_file(path: str | os.PathLike[str]) -> str | None:
    """Say what is at a path if it is not an ordinary file, such as a device; None if nothing."""
    # An empty name is the current folder as a path, and nothing to the system.
    if os.path.isdir(check_path(path)):
        return "it is a folder"
    # What is behind an open file, as /dev/stdout is, may be an ordinary one: it would be replaced.
    is_open = Path(os.path.abspath(path)).parts[:2] in (("/", "dev"), ("/", "proc"))
    if os.path.exists(path) and (is_open or not os.path.isfile(path)):
        return "it is not an ordinary file"
    return None


def _make_beside(target: Path) -> Path:
    """Make an empty file with a temporary name in the folder of another.

    It is an ordinary file, as all that a program makes. Those of `tempfile` are for their owner
    only, and to learn what others may read the umask of the process would have to be changed.
    """
    with suppress(FileNotFoundError):
        target.stat()  # refuses a name that the system does not take, whatever is to be in it
    # The name itself may be as long as names can be. Its suffix stays last because writers such as
    # matplotlib read the file type from it.
    suffix = target.suffix if len(os.fsencode(target.suffix)) < _LONG_SUFFIX else ""
    path = target.with_name(f".gpipebal.{os.urandom(8).hex()}{suffix}")
    os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
    return path


def write_record(path: str | os.PathLike[str], record: Mapping[str, Any]) -> None:
    """Write `record` as JSON to `path`, atomically. Floats keep every bit.

    Raises:
        FileFormatError: it has more in it than `read_any` accepts, or a value that JSON lacks.
    """
    with atomic_path(path) as temporary:
        try:
            _check_depth(record)
            _check_names(record)
            text = json.dumps(record, indent=1, allow_nan=False) + "\n"
            _check_characters(record)
        except (TypeError, ValueError) as error:
            raise _refused(
                path,
                f"could not be read back: {error}.",
                "remove it (from the provenance, perhaps); numbers must be finite, texts Unicode.",
            ) from None
        n_values = _count_values(text)
        if n_values > MAX_VALUES or len(text) > MAX_FILE_BYTES:
            much = f"{n_values} values in {len(text)} bytes"
            raise _too_much(path, much, f"{MAX_VALUES} in {MAX_FILE_BYTES}")
        temporary.write_text(text, encoding="utf-8")


def check_values(path: str | os.PathLike[str], n_values: int) -> None:
    """Refuse to write so many values, or more, before there are any; counted as in a text.

    Raises:
        KindError: `path` is not a path.
        FileFormatError: `read_any` does not accept as many.
    """
    check_path(path)
    if n_values > MAX_VALUES:
        raise _too_much(path, f"more than {n_values} values", f"{MAX_VALUES}")


def _too_much(path: str | os.PathLike[str], much: str, most: str) -> FileFormatError:
    return _refused(
        path,
        f"could not be read back: {much} (expected at most {most}).",
        "save less: of a timeline its outline (simulate(..., detail=False), --no-detail) or fewer "
        "micro-batches, of a profile one size.",
    )


def _count_values(text: str) -> int:
    """Estimate the number of values in a JSON text by its signs; those in texts count too."""
    return sum(text.count(sign) for sign in ",[{")


def read_record(path: str | os.PathLike[str], kind: str, version: int) -> dict[str, Any]:
    """Read a JSON object whose ``format`` is `kind` and whose ``version`` is `version`.

    Raises:
        FileFormatError: the file does not exist, cannot be read, is not a JSON object, is of
            another kind, or was written by a newer gpipebal, or before the first release.
    """
    record = read_any(path, kind)
    _check_header(path, record, kind, version)
    return record


def _check_header(
    path: str | os.PathLike[str], record: Mapping[str, Any], kind: str, version: int
) -> None:
    if record.get("format") != kind:
        raise _refused(
            path, f"is not a {kind} file: format={record.get('format')!r}.", f"give a {kind} file."
        )
    found = record.get("version")
    if type(found) is not int or found < 1:
        raise _refused(
            path, f"has no readable version: version={found!r:.60}.", "make the file again."
        )
    if found > version:
        raise _refused(
            path,
            f"has a newer format: version={found!r:.60} (this gpipebal reads {version}).",
            "upgrade gpipebal, or make the file again with this one.",
        )
    if found < version:
        raise _refused(
            path,
            f"was made before the first release: version={found} (this gpipebal reads {version}).",
            _MADE_AGAIN.get(kind, "make the file again."),
        )


def read_any(path: str | os.PathLike[str], kind: str = "gpipebal") -> dict[str, Any]:
    """Read a JSON object of any ``format``.

    Args:
        path: File to read.
        kind: What was expected, for the error.

    Raises:
        FileFormatError: the file cannot be read, or is not a JSON object.
        MissingFileError: the file does not exist (a FileFormatError).
        KindError: `path` is not a path.
    """
    source = check_path(path)
    fix = f"give the path of a {kind} file."
    try:
        # Some editors put a mark in front of what they save.
        text = _bytes_of(source, fix).decode("utf-8-sig")
    except FileNotFoundError as error:
        raise _refused(path, f"cannot be read: {error.strerror}.", fix, MissingFileError) from error
    except OSError as error:
        raise _refused(path, f"cannot be read: {error.strerror or error}.", fix) from error
    except UnicodeDecodeError as error:
        raise _refused(path, "is not text.", fix) from error
    n_values = _count_values(text)
    if n_values > MAX_VALUES:
        raise _refused(
            path,
            f"has too many values: {n_values} (expected at most {MAX_VALUES}).",
            f"give a {kind} file.",
        )
    try:
        record = json.loads(
            text,
            parse_constant=_refuse_constant,
            parse_float=_finite,
            object_pairs_hook=_without_duplicates,
        )
        _check_depth(record)
        if _HALF_CHARACTER.search(text):
            _check_characters(record)
    except (ValueError, RecursionError) as error:
        raise _refused(path, f"is not readable JSON: {error}.", "make the file again.") from error
    if not isinstance(record, dict):
        raise _refused(
            path, f"is not a {kind} file: format={type(record).__name__!r}.", f"give a {kind} file."
        )
    return record


def _bytes_of(path: Path, fix: str) -> bytes:
    """Read a file, or what comes out of a pipe or a device, such as standard input.

    Raises:
        FileFormatError: it is too large, or a pipe to which nothing writes.
        OSError: it is a folder, or cannot be read.
    """
    about = path.stat()
    is_pipe = stat.S_ISFIFO(about.st_mode)
    size = about.st_size
    if size <= MAX_FILE_BYTES:
        # Opening a pipe would wait for a writer, perhaps for ever.
        with open(path, "rb", opener=_open_at_once if is_pipe else None) as file:
            found = file.read(MAX_FILE_BYTES + 1)
        size = len(found)
    if size > MAX_FILE_BYTES:
        raise _refused(
            path, f"is too large: {size} bytes (expected at most {MAX_FILE_BYTES}).", fix
        )
    if is_pipe and not found:
        raise _refused(path, "cannot be read: nothing writes to this pipe.", fix)
    return found


def _open_at_once(path: str, flags: int) -> int:
    handle = os.open(path, flags | os.O_NONBLOCK)
    os.set_blocking(handle, True)
    return handle


def _refused(
    path: str | os.PathLike[str],
    what: str,
    fix: str,
    error: type[FileFormatError] = FileFormatError,
) -> FileFormatError:
    return error(f"{Path(path)} {what}\nFix: {fix}")


def read_noun(
    path: str | os.PathLike[str],
    kind: str,
    version: int,
    make: Callable[[Mapping[str, Any]], _Noun],
) -> _Noun:
    """Read a file as `read_record` does, and make from its record the object that it describes.

    Raises:
        FileFormatError: as for `read_record`, or `make` refused the record; the file is named.
    """
    return noun_of(path, read_any(path, kind), kind, version, make)


def noun_of(
    path: str | os.PathLike[str],
    record: Mapping[str, Any],
    kind: str,
    version: int,
    make: Callable[[Mapping[str, Any]], _Noun],
) -> _Noun:
    """Do what `read_noun` does with the record of a file that was read: a pipe is read only once.

    Raises:
        FileFormatError: as for `read_noun`.
    """
    _check_header(path, record, kind, version)
    try:
        return make(record)
    except FileFormatError as error:
        raise FileFormatError(f"{Path(path)}: {error}") from error


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number that a profile or a plan may hold")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:20]} is too large for a number")
    return value


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                raise ValueError(f"{name[:40]!r} stands twice in one object")
            seen.add(name)
    return found


def _check_characters(record: Any) -> None:
    """Refuse texts with a half of a character, which cannot be printed."""
    try:
        json.dumps(record, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half = error.object[error.start : error.end]
        raise ValueError(f"a text has a half of a character: {half!r}") from None


def _check_depth(record: Any) -> None:
    for depth, _ in enumerate(_levels(record)):
        if depth == MAX_DEPTH:
            raise ValueError(f"nested deeper than {MAX_DEPTH}")


def _check_names(record: Any) -> None:
    """Refuse names in objects that are not texts: read back, they would be."""
    for level in _levels(record):
        names = (name for value in level if isinstance(value, dict) for name in value)
        for name in names:
            if not isinstance(name, str):
                raise ValueError(f"an object has a name that is not a text: {name!r:.40}")


def _levels(record: Any) -> Iterator[list[Any]]:
    """Yield a record if it is an object or list, then those inside of it, and so on."""
    level = [record] if isinstance(record, (dict, list, tuple)) else []
    while level:
        yield level
        level = [
            inner
            for value in level
            for inner in (value.values() if isinstance(value, dict) else value)
            if isinstance(inner, (dict, list, tuple))
        ]
