"""Profiles as JSON values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, TypeVar

from gpipebal.errors import FileFormatError, ProfileError
from gpipebal.profile.checks import STORAGE_FIELDS, TEXT_FIELDS
from gpipebal.profile.layer import (
    MOMENTS,
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
        step=_step(content["step"]),
        skips=_each(_skip, content["skips"], "skips"),
        ties=_each(_tie, content["ties"], "ties"),
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


def _step(record: Any) -> StepTerms:
    content = fields_of(record, "step", StepTerms, also=StepTerms.__dataclass_fields__)
    for name in ("loss", "whole_loss"):
        if content[name] is not None:
            content[name] = _layer(content[name], path_in("step", name))
    kinds: Mapping[str, Any] = {"side_by_side": AloneShares, "turns": TurnTimes}
    for name, kind in kinds.items():
        if content[name] is not None:
            every = kind.__dataclass_fields__
            part = fields_of(content[name], path_in("step", name), kind, also=every)
            content[name] = kind(**part)
    content["gathered"] = tuple_of(content["gathered"], "step.gathered")
    groups = content["optimizer_groups"]
    content["optimizer_groups"] = _each(tuple_of, groups, "step.optimizer_groups")
    return StepTerms(**content)


def _layer(record: Any, where: str) -> LayerProfile:
    # Small files leave out what has its default (`profiles/make.py`).
    content = fields_of(record, where, LayerProfile, also=("saved", "outputs"))
    for name in STORAGE_FIELDS:
        is_unknown = name == "gradient_storages" and content.get(name) is None
        if name in content and not is_unknown:
            content[name] = tuple_of(content[name], path_in(where, name))
    for name in MOMENTS.values():
        content[name] = tuple_of(content.get(name, ()), path_in(where, name))
    for name in TEXT_FIELDS:
        text_of(content.get(name, ""), path_in(where, name))
    return LayerProfile(**content)


def _skip(record: Any, where: str) -> SkipProfile:
    content = fields_of(record, where, SkipProfile, also=SkipProfile.__dataclass_fields__)
    text_of(content["name"], path_in(where, "name"))
    content["storages"] = tuple_of(content["storages"], path_in(where, "storages"))
    if content["gradient_storages"] is not None:
        where = path_in(where, "gradient_storages")
        content["gradient_storages"] = tuple_of(content["gradient_storages"], where)
    return SkipProfile(**content)


def _tie(record: Any, where: str) -> TieProfile:
    content = fields_of(record, where, TieProfile)
    return TieProfile(
        **{**content, "layers": tuple_of(content["layers"], path_in(where, "layers"))}
    )
