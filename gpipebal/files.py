"""Saved files: versioned JSON, written whole or not at all, read with suspicion.

Every file that gpipebal writes is one JSON object whose first keys are ``format`` (what it is)
and ``version`` (an int that grows when old readers would misread it).
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from gpipebal.errors import FileFormatError

__all__ = ["atomic_path", "read_record", "write_record"]

#: A file above this size is not a profile or a plan: refused before it is read (bytes).
MAX_FILE_BYTES = 512 * 2**20


@contextmanager
def atomic_path(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Give a temporary name beside `path`; move it there only when the block ends well.

    The old file, if any, stays whole when the block raises or the process dies.
    """
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    # The suffix stays last because writers such as matplotlib read the file type from it.
    handle, name = tempfile.mkstemp(
        dir=target.parent, prefix=f".{target.stem}.", suffix=target.suffix
    )
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        # mkstemp makes files that only their owner may read; a result is an ordinary file.
        umask = os.umask(0)
        os.umask(umask)
        temporary.chmod(0o666 & ~umask)
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)


def write_record(path: str | os.PathLike[str], record: Mapping[str, Any]) -> None:
    """Write `record` as JSON to `path`, atomically. Floats keep every bit."""
    with atomic_path(path) as temporary:
        text = json.dumps(record, indent=1, allow_nan=False)
        temporary.write_text(text + "\n", encoding="utf-8")


def read_record(path: str | os.PathLike[str], kind: str, version: int) -> dict[str, Any]:
    """Read a JSON object whose ``format`` is `kind` and whose ``version`` is at most `version`.

    Raises:
        FileFormatError: the file does not exist, cannot be read, is no JSON object, is of
            another kind, or was written by a newer gpipebal.
    """
    source = Path(path)

    def refuse(what: str, fix: str, cause: BaseException | None = None) -> NoReturn:
        raise FileFormatError(f"{source} {what}\nFix: {fix}") from cause

    try:
        if source.stat().st_size > MAX_FILE_BYTES:
            refuse(
                f"is too large: {source.stat().st_size} bytes (expected at most {MAX_FILE_BYTES}).",
                f"give a {kind} file.",
            )
        text = source.read_text(encoding="utf-8")
    except OSError as error:
        refuse(
            f"cannot be read: {error.strerror or error}.", f"give the path of a {kind} file.", error
        )
    except UnicodeDecodeError as error:
        refuse("is not text.", f"give the path of a {kind} file.", error)
    try:
        record = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        refuse(f"is not readable JSON: {error}.", "make the file again.", error)
    if not isinstance(record, dict) or record.get("format") != kind:
        found = record.get("format") if isinstance(record, dict) else type(record).__name__
        refuse(f"is not a {kind} file: format={found!r}.", f"give a {kind} file.")
    found = record.get("version")
    if type(found) is not int or found < 1:
        refuse(f"has no readable version: version={found!r}.", "make the file again.")
    if found > version:
        refuse(
            f"has a newer format: version={found} (this gpipebal reads up to {version}).",
            "upgrade gpipebal, or make the file again with this one.",
        )
    return record


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number that a profile or a plan may hold")
