"""Records: the content of a file, as JSON values, checked before a noun is made from it.

A refused value is named by its place: ``layers[3].name`` is a field of the fourth layer.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import MISSING, fields
from difflib import get_close_matches
from typing import Any

from gpipebal.errors import FileFormatError, KindError

__all__ = [
    "COUNT",
    "MOST",
    "MOST_CHUNKS",
    "NUMBER",
    "SIZE",
    "WHOLE",
    "another_kind",
    "check_missing",
    "check_unknown",
    "damaged",
    "fields_of",
    "is_quantity",
    "object_of",
    "path_in",
    "text_of",
    "tuple_of",
    "without_header",
]

#: More micro-batches than this are a mistake, and their schedule would fill the memory.
MOST_CHUNKS = 2**20
#: The most that bytes and seconds can be: a larger int may be too large for a float as well.
MOST = 2**63 - 1
#: What a number of things can be, in the words of errors.
COUNT = "a whole number, 1 or more"
#: What a number of things that can be none can be.
WHOLE = "a whole number, 0 or more"
#: What a size can be.
SIZE = "a whole number of bytes, 0 or more"
#: What a time or a rate can be.
NUMBER = "a finite number, 0 or more"

#: How annotations begin, and the JSON type for each; all others are objects.
_IN_JSON = {
    "tuple": "a list",
    "Sequence": "a list",
    "str": "a text",
    "Source": "a text",
    "Checkpoint": "a text, or a list of them",
    "float": "a number",
    "int": "a whole number",
    "bool": "true or false",
}


def is_quantity(value: Any, *, whole: bool = False) -> bool:
    """Whether this is a number from 0 to `MOST`, and an int if it is to be whole.

    Example:
        >>> is_quantity(2.5), is_quantity(2.5, whole=True), is_quantity(True), is_quantity(-1)
        (True, False, False, False)
    """
    kinds = int if whole else (int, float)
    return isinstance(value, kinds) and not isinstance(value, bool) and 0 <= value <= MOST


def path_in(where: str, name: str | int) -> str:
    """Return the place of a field in words.

    Example:
        >>> path_in("layers", 3), path_in("layers[3]", "name"), path_in("", "layers")
        ('layers[3]', 'layers[3].name', 'layers')
    """
    if isinstance(name, int):
        return f"{where}[{name}]"
    return f"{where}.{name}" if where else name


def without_header(record: Any, kind: str, version: int) -> dict[str, Any]:
    """Return a record without its format and version, which are checked.

    Raises:
        KindError: it is not an object.
        FileFormatError: another format or version.
    """
    content = object_of(record, "record")
    found, number = content.pop("format", None), content.pop("version", None)
    if found != kind or type(number) is not int or number != version:
        raise FileFormatError(
            f"it is of another format: format={found!r:.60}, version={number!r:.60} (expected "
            f"{kind!r}, {version})."
        )
    return content


def object_of(value: Any, where: str) -> dict[str, Any]:
    """Return an object of a record as a dict.

    Raises:
        KindError: it is of another kind.
    """
    if not isinstance(value, Mapping):
        raise another_kind(where, value, "an object with named values")
    return dict(value)


def fields_of(value: Any, where: str, kind: type, also: Collection[str] = ()) -> dict[str, Any]:
    """Return an object that has the fields of a dataclass and no others, as a dict.

    Args:
        value: The object.
        where: Its place in the record.
        kind: The dataclass; fields with a default may be missing.
        also: Fields that must be there even so.

    Raises:
        KindError: it is not an object.
        FileFormatError: a field is missing or unknown.
    """
    content = object_of(value, where)
    known = {item.name: _in_json(str(item.type)) for item in fields(kind)}
    required = [
        item.name
        for item in fields(kind)
        if item.name in also or item.default is item.default_factory is MISSING
    ]
    check_missing(content, where, {name: known[name] for name in required})
    check_unknown(content, where, known)
    return content


def check_missing(content: Mapping[str, Any], where: str, required: Mapping[str, str]) -> None:
    """Refuse an object that lacks a field.

    Args:
        content: The object.
        where: Its place in the record.
        required: What each field can be, by its name.

    Raises:
        FileFormatError: it lacks one.

    Example:
        >>> check_missing({"row": 3}, "layers[3]", {"rows": "a whole number"})
        Traceback (most recent call last):
        gpipebal.errors.FileFormatError: missing 'layers[3].rows' (expected a whole number).
    """
    for name, expected in required.items():
        if name not in content:
            raise FileFormatError(f"missing {path_in(where, name)!r} (expected {expected}).")


def check_unknown(content: Mapping[str, Any], where: str, known: Collection[str]) -> None:
    """Refuse an object that has other fields than those known.

    Raises:
        FileFormatError: it has one.

    Example:
        >>> check_unknown({"row": 3}, "layers[3]", ["name", "rows"])
        Traceback (most recent call last):
        gpipebal.errors.FileFormatError: unknown field: 'layers[3].row' (expected such as 'rows').
    """
    for name in content:
        if name not in known:
            near = get_close_matches(name, known, 1) or list(known)[:3]
            raise FileFormatError(
                f"unknown field: {path_in(where, name)!r:.100} (expected such as "
                f"{', '.join(map(repr, near))})."
            )


def tuple_of(value: Any, where: str) -> tuple[Any, ...]:
    """Return a list of a record as a tuple; a text or an object is not taken for one.

    Raises:
        KindError: it is of another kind.
    """
    if not isinstance(value, (list, tuple)):
        raise another_kind(where, value, "a list")
    return tuple(value)


def text_of(value: Any, where: str) -> str:
    """Return a text of a record: one that can be written and printed again.

    Raises:
        KindError: it is of another kind.
    """
    if not isinstance(value, str):
        raise another_kind(where, value, "a text")
    try:
        value.encode()
    except UnicodeEncodeError:  # a half of a surrogate pair is not a character
        raise another_kind(where, value, "a text of whole characters") from None
    return value


def damaged(noun: str, error: Exception, fix: str) -> FileFormatError:
    """Return the error for a damaged record, with the first line of the error that showed it.

    Args:
        noun: The noun that it should have become.
        error: The error that was raised on the way.
        fix: What to do about it.
    """
    return FileFormatError(f"{noun} is damaged: {str(error).splitlines()[0]}\nFix: {fix}")


def another_kind(where: str, value: Any, expected: str, fix: str | None = None) -> KindError:
    """Return the error for a value of another kind.

    Args:
        where: Its place in the record.
        value: The value.
        expected: What it can be.
        fix: What to do about it; None: give what is expected.
    """
    return KindError(
        f"value is of another kind: {where}={value!r:.60} (expected {expected}).\n"
        f"Fix: {fix or f'give {expected}'}."
    )


def _in_json(annotation: str) -> str:
    """Say what an annotation is in JSON."""
    words = next((w for kind, w in _IN_JSON.items() if annotation.startswith(kind)), "an object")
    return f"{words} or null" if annotation.endswith("| None") else words
