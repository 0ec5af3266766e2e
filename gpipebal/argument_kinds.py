"""Whether an argument is of the kind that a verb takes, and how to get one if not."""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import fields
from difflib import get_close_matches
from functools import cache
from inspect import formatannotation
from numbers import Integral, Real
from operator import index
from pathlib import Path
from typing import Any, TypeGuard, TypeVar

from gpipebal.errors import KindError, UsageError
from gpipebal.text import either

__all__ = [
    "annotations_of",
    "check_index",
    "check_kind",
    "check_list",
    "check_mapping",
    "check_options",
    "check_path",
    "check_whole",
    "is_list",
    "is_word",
    "keep_as_tuples",
    "of_array",
    "plain_number",
    "row_of",
    "whole_number",
]

_Row = TypeVar("_Row")

#: Every noun with the verb that makes it from the one before; the first is made from a model.
_MADE_BY = {
    "Profile": "profile_model({}, sample)",
    "Plan": "solve({}, partitions)",
    "Timeline": "simulate({})",
}


def check_kind(name: str, value: object, kind: type, fix: str | None = None) -> None:
    """Refuse an argument of another kind, and say how to get one of the right kind.

    Args:
        name: Name of the argument.
        value: What was given.
        kind: What it has to be.
        fix: What to do instead; None: load it, if a path was given, or make it with the verbs that
            lead from what was given to a profile, a plan or a timeline.

    Raises:
        KindError: it is of another kind.

    Example:
        >>> from gpipebal import Plan, Profile
        >>> check_kind("plan", Profile.from_costs([1.0]), Plan)
        Traceback (most recent call last):
        gpipebal.errors.KindError: plan is not a Plan: type(plan)=Profile (expected Plan).
        Fix: plan = solve(profile, partitions).
    """
    if not isinstance(value, kind):
        wanted, given = kind.__name__, type(value).__name__
        raise KindError(
            f"{name} is not {_a(wanted)}: type({name})={given} (expected {wanted}).\n"
            f"Fix: {fix or _way(name, value, wanted)}."
        )


def _a(noun: str) -> str:
    return f"{'an' if noun[0] in 'AEIOUaeiou' else 'a'} {noun}"


def check_list(
    name: str, value: object, kind: type | None = None, fix: str | None = None
) -> tuple[Any, ...]:
    """Return an iterable as a tuple; a text, a mapping or a single thing is refused.

    Args:
        name: Name of the argument.
        value: What was given.
        kind: Kind that every element has to be; None: any.
        fix: As for `check_kind`.

    Raises:
        KindError: it is not a list, or has something else in it.

    Example:
        >>> check_list("storages", range(2)), check_list("storages", [])
        ((0, 1), ())
    """
    if isinstance(value, (bytes, Mapping)) or not is_list(value):
        raise KindError(
            f"{name} is not a list: type({name})={type(value).__name__} (expected a list"
            f"{f' of {kind.__name__}' if kind else ''}).\nFix: {fix or f'{name}=[...]'}."
        )
    found = tuple(value)
    if kind is not None:
        for k, one in enumerate(found):
            check_kind(f"{name}[{k}]", one, kind, fix)
    return found


def is_list(value: object, *, in_order: bool = False) -> TypeGuard[Iterable[Any]]:
    """Whether this can be gone through, and is neither a text nor an array of a single number.

    Args:
        value: What was given.
        in_order: Whether the order matters, so that sets and mappings are none either.

    Example:
        >>> import numpy as np
        >>> is_list(np.array([2])), is_list(np.array(2)), is_list("ab")
        (True, False, False)
    """
    is_one = isinstance(value, str) or getattr(value, "ndim", None) == 0
    is_loose = in_order and isinstance(value, (Mapping, Set))
    return isinstance(value, Iterable) and not is_one and not is_loose


def is_word(value: object, *words: str) -> bool:
    """Whether this is one of some words; arrays, which know no single answer, are none.

    Example:
        >>> import numpy as np
        >>> is_word("auto", "auto", "never"), is_word(np.array(["auto", "auto"]), "auto")
        (True, False)
    """
    return isinstance(value, str) and value in words


def keep_as_tuples(noun: Any) -> None:
    """Turn all lists of a frozen dataclass into tuples, as they are when it is read from a file.

    Its annotations say which fields are tuples, and which of these may be None.

    Args:
        noun: The object, from its ``__post_init__``.

    Raises:
        KindError: one is not a list.
    """
    kind: Any = type(noun)  # mypy does not take a class to be hashable
    for name, may_be_none in _tuples_of(kind):
        value = getattr(noun, name)
        if type(value) is not tuple and not (value is None and may_be_none):
            object.__setattr__(noun, name, check_list(name, value))


@cache
def _tuples_of(kind: Any) -> list[tuple[str, bool]]:
    """List the fields of a dataclass that are tuples, and whether each may be None."""
    types = annotations_of(kind).items()
    return [(name, each.endswith("| None")) for name, each in types if each.startswith("tuple")]


@cache
def annotations_of(kind: Any) -> Mapping[str, str]:
    """Return the annotations of a dataclass's fields as texts, as they stand in its module.

    A subclass may be in a module that evaluates its annotations.

    Example:
        >>> from dataclasses import make_dataclass
        >>> annotations_of(make_dataclass("Noun", [("rows", int), ("notes", "tuple[str, ...]")]))
        {'rows': 'int', 'notes': 'tuple[str, ...]'}
    """
    return {
        item.name: item.type if isinstance(item.type, str) else formatannotation(item.type)
        for item in fields(kind)
    }


def check_mapping(name: str, value: object, fix: str) -> Mapping[Any, Any]:
    """Return a mapping, or refuse anything else.

    Raises:
        KindError: it is of another kind.
    """
    if not isinstance(value, Mapping):
        raise KindError(
            f"{name} is not a mapping: type({name})={type(value).__name__} (expected a dict).\n"
            f"Fix: {fix}."
        )
    return value


def check_whole(name: str, value: object) -> int:
    """Return a whole number of any kind as Python's, or refuse anything else.

    Raises:
        KindError: it is of another kind.
    """
    number = whole_number(value)
    if number is None:
        raise KindError(
            f"{name} is not a whole number: {name}={value!r:.60} (expected an int).\n"
            f"Fix: {name}=1, say."
        )
    return number


def check_index(name: str, value: object, count: int) -> int:
    """Return the index of one of several things, from 0; negative ones count from the end.

    Raises:
        KindError: it is not a whole number.
        UsageError: there are fewer.
    """
    number = check_whole(name, value)
    if not -count <= number < count:
        raise UsageError(
            f"{name} does not exist: {name}={number} (expected 0..{count - 1}).\n"
            f"Fix: {name}=0, say."
        )
    return number % count


def whole_number(value: object) -> int | None:
    """Return a whole number of any kind, such as numpy's, as Python's; None if it is not one.

    Example:
        >>> whole_number(3), whole_number(3.0), whole_number(True)
        (3, None, None)
    """
    if not isinstance(value, bool):
        with suppress(TypeError, ValueError, RuntimeError):  # arrays of several values raise
            return index(value)  # type: ignore[arg-type]
    return None


def plain_number(value: object) -> float:
    """Return a number of any kind, such as numpy's, as an int or a float; NaN if it is none.

    Example:
        >>> plain_number(True), plain_number(3)
        (nan, 3)
    """
    if type(value) is float or type(value) is int:
        return value
    # A bool is an Integral but no time.
    if isinstance(value, Integral) and not isinstance(value, bool):
        whole = whole_number(value)  # numpy's time spans are none
        return math.nan if whole is None else whole
    if isinstance(value, Real) and not isinstance(value, bool):
        number: Any = value
        try:
            return float(number)
        except OverflowError:  # of a fraction
            return math.inf if number > 0 else -math.inf
    return math.nan


def of_array(value: Any) -> Any:
    """Return an array as a list, and one of its elements as Python's; anything else as it is.

    Example:
        >>> import numpy as np
        >>> of_array(np.array([1, 2])), of_array(np.int64(3)), of_array((1, 2))
        ([1, 2], 3, (1, 2))
    """
    to_list = getattr(value, "tolist", None)
    if to_list is not None and not isinstance(value, type):
        with suppress(RuntimeError):  # a tensor without values, or a sparse one
            return to_list()
    return value


def check_path(path: object) -> Path:
    """Return a path, or refuse anything else.

    Raises:
        KindError: it is neither a text nor an `os.PathLike`, or no system has such a name.
    """
    if not isinstance(path, (str, os.PathLike)) or isinstance(os.fspath(path), bytes):
        raise KindError(
            f"path is not a path: type(path)={type(path).__name__} (expected a str or a Path).\n"
            "Fix: give the name of a file."
        )
    if "\0" in os.fspath(path):
        raise KindError(
            f"path is not a path: path={path!r} (expected no null character).\n"
            "Fix: give the name of a file."
        )
    return Path(path)


def check_options(given: Iterable[str], known: Collection[str], verb: str) -> None:
    """Refuse keyword arguments that a verb does not have, as Python does for those it lists.

    Raises:
        KindError: there is one.

    Example:
        >>> check_options(["memory_limits"], ["memory_limit", "devices"], "top_plans")
        Traceback (most recent call last):
        gpipebal.errors.KindError: top_plans has no argument 'memory_limits' (expected one of 'memory_limit', 'devices').
        Fix: memory_limit=...
    """  # noqa: E501
    for name in given:
        if name not in known:
            near = get_close_matches(name, known, 1)
            raise KindError(
                f"{verb} has no argument {name!r} (expected one of "
                f"{', '.join(map(repr, known))}).\nFix: "
                f"{f'{near[0]}=...' if near else f'leave {name} out.'}"
            )


def _way(name: str, value: object, wanted: str) -> str:
    if isinstance(value, (str, os.PathLike)):
        return f"{name} = {wanted}.load({os.fspath(value)!r})"
    nouns = list(_MADE_BY)
    given = type(value).__name__
    if wanted not in nouns:
        return f"give a {wanted}"
    last = nouns.index(wanted)
    first = nouns.index(given) + 1 if given in nouns else 0
    if first > last:
        return f"give the {wanted} that the {given} was made from"
    text = given.lower() if given in nouns else "model"
    for noun in nouns[first : last + 1]:
        text = _MADE_BY[noun].format(text)
    return f"{name} = {text}"


def row_of(rows: Sequence[_Row], name: str, asked: object) -> _Row:
    """Return the first row of a table that has a value.

    Args:
        rows: The rows.
        name: The attribute that tells them apart.
        asked: Its value.

    Raises:
        UsageError: there is none.

    Example:
        >>> row_of([range(1), range(5)], "stop", 3)
        Traceback (most recent call last):
        gpipebal.errors.UsageError: the table has no such row: stop=3 (expected 1 or 5).
        Fix: stop=1, or another row of these.
    """
    for row in rows:
        if getattr(row, name) == asked:
            return row
    values = list(dict.fromkeys(repr(getattr(row, name)) for row in rows))
    if not values:
        raise UsageError(f"the table has no rows: {name}={asked!r}.\nFix: look at table.rows.")
    raise UsageError(
        f"the table has no such row: {name}={asked!r} (expected {either(values)}).\n"
        f"Fix: {name}={values[0]}, or another row of these."
    )
