"""Files in, tables and pictures out: what the commands that need no model share."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from gpipebal.cli.words import check_output
from gpipebal.errors import FileFormatError, UsageError
from gpipebal.files import noun_of, read_any
from gpipebal.text import either

if TYPE_CHECKING:
    import argparse

    from gpipebal.plan import Plan
    from gpipebal.profile import Profile
    from gpipebal.timeline import Timeline

    Noun: TypeAlias = Profile | Plan | Timeline

__all__ = ["check_files", "load_noun", "say_written"]


def load_noun(path: str, *kinds: str) -> Noun:
    """Read a profile, a plan or a timeline, whichever the file holds.

    Args:
        path: A file that gpipebal wrote.
        kinds: The nouns that can be used here, such as ``'plan'``; none: all of them.

    Raises:
        FileFormatError: the file cannot be read, is damaged, or holds something else.
    """
    from gpipebal.plan import Plan, plan
    from gpipebal.profile import Profile
    from gpipebal.profile import record as profile
    from gpipebal.timeline import Timeline, timeline

    known: dict[str, tuple[int, Callable[[Mapping[str, Any]], Noun]]] = {
        "profile": (profile.VERSION, Profile.from_dict),
        "plan": (plan.VERSION, Plan.from_dict),
        "timeline": (timeline.VERSION, Timeline.from_dict),
    }
    record = read_any(path)
    # A timeline is a Chrome trace, with the exact record under a key of its own.
    inner = record.get("gpipebal", record)
    found = inner.get("format", "") if isinstance(inner, dict) else ""
    name = found.removeprefix("gpipebal-") if isinstance(found, str) else ""
    wanted = kinds or tuple(known)
    if name not in wanted:
        raise FileFormatError(
            f"file is not a {either(wanted)}: file={str(path)!r}"
            + (f" (it is a {name})" if name in known else "")
            + f".\nFix: name a file that {' or '.join(_MAKERS[kind] for kind in wanted)} wrote."
        )
    return noun_of(path, record, found, *known[name])


#: Which commands write which noun.
_MAKERS = {
    "profile": "gpipebal profile",
    "plan": "gpipebal solve",
    "timeline": "gpipebal simulate",
}


#: Types of pictures that are always available.
_SUFFIXES = (".png", ".svg", ".pdf")


def check_files(options: argparse.Namespace, *inputs: str) -> None:
    """Refuse files to write that cannot be written, or would be written over one another.

    Args:
        options: With ``output``, if the command has it, and ``plot``.
        inputs: Files that are read.

    Raises:
        UsageError: there is such a file, or the picture's suffix is not one of a picture.
    """
    taken = {os.path.realpath(path): "a file that is read" for path in inputs}
    for option in ("output", "plot"):
        path = getattr(options, option, None)
        check_output(path, f"--{option}")
        if path is None:
            continue
        place = os.path.realpath(path)
        if place in taken:
            raise UsageError(
                f"a file would be lost: --{option} {path} is {taken[place]} (expected a file of "
                f"its own).\nFix: give --{option} another name."
            )
        taken[place] = f"also --{option}"
    if options.plot is not None:
        _check_picture(options.plot)


def _check_picture(path: str) -> None:
    """Refuse a picture whose type cannot be written.

    Raises:
        UsageError: the name does not end in the suffix of a picture, or is nothing but one.
    """
    folder, name = os.path.split(path)
    if Path(path).suffix.lower() in _SUFFIXES:
        return
    is_suffix = name.lower() in _SUFFIXES
    better = os.path.join(folder, f"plot{name}") if is_suffix else f"{path}.png"
    raise UsageError(
        f"picture has a type that cannot be written: --plot {path} (expected a name that ends in "
        f"{either(_SUFFIXES)}).\nFix: --plot {better}."
    )


def say_written(options: argparse.Namespace) -> None:
    """Say which files were written."""
    for option in ("output", "plot"):
        path = getattr(options, option, None)
        if path is not None:
            print(f"Written to {path}")
