"""Profiles as JSON values."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from copy import deepcopy
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

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
    content = without_header(record, FORMAT, VERSION)
    content = fields_of(content, "", kind, also=kind.__dataclass_fields__)
    others = tuple_of(content["other_sizes"], "other_sizes")
    if others and not has_others:
        raise ProfileError(
            "a profile at another number of rows has other sizes itself: "
            f"len(other_sizes)={len(others)} (expected 0)."
        )
    numbers = {
        name: tuple_of(content[name], name)
        for name in ("storages", "inputs", "common_inputs", "without_gradient")
    }
    return kind(
        **numbers,
        layers=_each(_layer, content["layers"], "layers"),
        rows=content["rows"],
        mini_batch_rows=content["mini_batch_rows"],
        chunks=content["chunks"],
        step=_step(content["step"], "step"),
        skips=_each(partial(_part, SkipProfile), content["skips"], "skips"),
        ties=_each(partial(_part, TieProfile), content["ties"], "ties"),
        other_sizes=tuple(_other(other, kind, k) for k, other in enumerate(others)),
        provenance=deepcopy(object_of(content["provenance"], "provenance")),
    )


def _other(record: Any, kind: type[_Profile], number: int) -> _Profile:
    """Make a profile at another number of rows."""
    try:
        return _profile(record, kind, has_others=False)
    except (TypeError, ValueError) as error:
        raise FileFormatError(f"{path_in('other_sizes', number)}: {error}") from error


def _each(make: Callable[[Any, str], _Part], records: Any, where: str) -> tuple[_Part, ...]:
    """Make parts of a profile of a list of records."""
    return tuple(make(one, path_in(where, k)) for k, one in enumerate(tuple_of(records, where)))


def _step(record: Any, where: str) -> StepTerms:
    content = fields_of(record, where, StepTerms, also=StepTerms.__dataclass_fields__)
    kinds: Mapping[str, Any] = {"side_by_side": AloneShares, "turns": TurnTimes}
    for name, kind in kinds.items():
        if content[name] is not None:
            content[name] = _part(kind, content[name], path_in(where, name))
    for name in ("loss", "whole_loss"):
        if content[name] is not None:
            content[name] = _layer(content[name], path_in(where, name))
    content["gathered"] = tuple_of(content["gathered"], path_in(where, "gathered"))
    groups = content["optimizer_groups"]
    content["optimizer_groups"] = _each(tuple_of, groups, path_in(where, "optimizer_groups"))
    return StepTerms(**content)


def _layer(record: Any, where: str) -> LayerProfile:
    # Small files leave out what has its default (`profiles/make.py`).
    return _part(LayerProfile, record, where, also=("saved", "outputs"))


def _part(kind: type[_Part], record: Any, where: str, also: Collection[str] | None = None) -> _Part:
    """Make a part of a profile, whose numbers are checked later.

    Args:
        kind: Its class.
        record: Its record.
        where: Its place in the file.
        also: Fields that must be there although they have defaults; None: all.
    """
    every: Mapping[str, Any] = kind.__dataclass_fields__  # type: ignore[attr-defined]
    content = fields_of(record, where, kind, also=every if also is None else also)
    for name, value in content.items():
        field = every[name]
        if value is None and field.default is None:
            continue
        if field.type.startswith("tuple"):
            content[name] = tuple_of(value, path_in(where, name))
        elif field.type == "str":
            text_of(value, path_in(where, name))
    return kind(**content)
