"""Whether an argument is what a verb takes, and how to get that if not."""

from __future__ import annotations

import os
from pathlib import Path

from gpipebal.errors import KindError

__all__ = ["check_kind", "check_path"]

#: Every noun with the verb that makes it of the one before; the first is made of a model.
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
        gpipebal.errors.KindError: plan is no Plan: type(plan)=Profile (expected Plan).
        Fix: plan = solve(profile, partitions).
    """
    if not isinstance(value, kind):
        wanted, given = kind.__name__, type(value).__name__
        raise KindError(
            f"{name} is no {wanted}: type({name})={given} (expected {wanted}).\n"
            f"Fix: {fix or _way(name, value, wanted)}."
        )


def check_path(path: object) -> Path:
    """Return a path, or refuse what is none.

    Raises:
        KindError: it is neither a text nor an `os.PathLike`.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise KindError(
            f"path is no path: type(path)={type(path).__name__} (expected a str or a Path).\n"
            "Fix: give the name of a file."
        )
    return Path(path)


def _way(name: str, value: object, wanted: str) -> str:
    if isinstance(value, (str, os.PathLike)):
        return f"{name} = {wanted}.load({os.fspath(value)!r})"
    nouns = list(_MADE_BY)
    given = type(value).__name__
    last = nouns.index(wanted)
    first = nouns.index(given) + 1 if given in nouns else 0
    if first > last:
        return f"give the {wanted} that the {given} was made from"
    text = given.lower() if given in nouns else "model"
    for noun in nouns[first : last + 1]:
        text = _MADE_BY[noun].format(text)
    return f"{name} = {text}"
