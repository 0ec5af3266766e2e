"""Profiles as JSON values."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from copy import deepcopy
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from gpipebal.argument_kinds import annotations_of
from gpipebal.errors import FileFormatError, ProfileError
from gpipebal.profile.layer import (
    AloneShares,
    LayerProfile,
    SkipProfile,
    StepTerms,
    TieProfile,
    TurnTimes,
)
from gpipebal.records import (
    damaged,
    fields_of,
    object_of,
    path_in,
    text_of,
    tuple_of,
    without_header,
)

if TYPE_CHECKING:
    from gpipebal.profile.profile import Profile

__all__ = ["FORMAT", "VERSION", "parts_of", "record_of"]

FORMAT = "gpipebal-profile"
VERSION = 16

_Profile = TypeVar("_Profile", bound="Profile")
_Part = TypeVar("_Part")


def record_of(profile: Profile) -> dict[str, Any]:
    """Return a profile as JSON values."""
    return {
        "format": FORMAT,
        "version": VERSION,
        "rows": profile.rows,
        "mini_batch_rows": profile.mini_batch_rows,
        "chunks": profile.chunks,
        "provenance": deepcopy(dict(profile.provenance)),
        "step": asdict(profile.step),
        "skips": [asdict(skip) for skip in profile.skips],
        "ties": [asdict(tie) for tie in profile.ties],
        "inputs": list(profile.inputs),
        "common_inputs": list(profile.common_inputs),
        "without_gradient": list(profile.without_gradient),
        "storages": list(profile.storages),
        "layers": [asdict(layer) for layer in profile.layers],
        "other_sizes": [record_of(other) for other in profile.other_sizes],
    }


def parts_of(record: Mapping[str, Any], kind: type[_Profile]) -> _Profile:
    """Make a profile of what `record_of` returned.

    Raises:
        FileFormatError: a field is missing or unknown, or has a value it cannot have.
    """
    try:
        return _profile(record, kind)
    except (TypeError, ValueError) as error:
        raise damaged("profile", error, "profile the model again.") from error


def _profile(record: Any, kind: type[_Profile], *, has_others: bool = True) -> _Profile:
    content = _content(kind, without_header(record, FORMAT, VERSION), "")
    n_others = len(content["other_sizes"])
    if n_others and not has_others:
        raise ProfileError(
            "a profile at another number of rows has other sizes itself: "
            f"len(other_sizes)={n_others} (expected 0)."
        )
    content["layers"] = _each(_layer, content["layers"], "layers")
    content["step"] = _step(content["step"], "step")
    content["skips"] = _each(partial(_part, SkipProfile), content["skips"], "skips")
    content["ties"] = _each(partial(_part, TieProfile), content["ties"], "ties")
    content["other_sizes"] = _each(partial(_other, kind), content["other_sizes"], "other_sizes")
    content["provenance"] = deepcopy(object_of(content["provenance"], "provenance"))
    return kind(**content)


def _other(kind: type[_Profile], record: Any, where: str) -> _Profile:
    """Make a profile at another number of rows."""
    try:
        return _profile(record, kind, has_others=False)
    except (TypeError, ValueError) as error:
        raise FileFormatError(f"{where}: {error}") from error


def _each(
    make: Callable[[Any, str], _Part], records: tuple[Any, ...], where: str
) -> tuple[_Part, ...]:
    """Make parts of a profile of their records."""
    return tuple(make(one, path_in(where, k)) for k, one in enumerate(records))


def _step(record: Any, where: str) -> StepTerms:
    content = _content(StepTerms, record, where)
    makers: Mapping[str, Callable[[Any, str], Any]] = {
        "side_by_side": partial(_part, AloneShares),
        "turns": partial(_part, TurnTimes),
        "loss": _layer,
        "whole_loss": _layer,
    }
    for name, make in makers.items():
        if content[name] is not None:
            content[name] = make(content[name], path_in(where, name))
    groups = content["optimizer_groups"]
    content["optimizer_groups"] = _each(tuple_of, groups, path_in(where, "optimizer_groups"))
    return StepTerms(**content)


def _layer(record: Any, where: str) -> LayerProfile:
    # Small files leave out what has its default (`profiles/make.py`).
    return LayerProfile(**_content(LayerProfile, record, where, also=("saved", "outputs")))


def _part(kind: type[_Part], record: Any, where: str) -> _Part:
    return kind(**_content(kind, record, where))


def _content(
    kind: Any, record: Any, where: str, also: Collection[str] | None = None
) -> dict[str, Any]:
    """Return the fields of a profile or a part of one: lists as tuples, texts as they are.

    Args:
        kind: Its class.
        record: Its record, whose numbers are checked later.
        where: Its place in the file.
        also: Fields that must be there although they have defaults; None: all.
    """
    every: Mapping[str, Any] = kind.__dataclass_fields__
    annotations = annotations_of(kind)
    content = fields_of(record, where, kind, also=every if also is None else also)
    for name, value in content.items():
        if value is None and every[name].default is None:
            continue
        if annotations[name].startswith("tuple"):
            content[name] = tuple_of(value, path_in(where, name))
        elif annotations[name] == "str":
            text_of(value, path_in(where, name))
    return content
