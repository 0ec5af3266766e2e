"""Profiles as JSON values.

Records of earlier versions are still read: version 1 (before the loss was a layer, and without skip
connections and other sizes), version 2 (without the results of a trial as a pipeline), version 3
(without tied parameters, and without which values have no gradient or are handed through),
version 4 (without copies of buffers, and without how partitions side by side slow each other down),
version 5 (without the bytes of gradients between layers), version 6 (without inputs that all
micro-batches have in common), version 7 (without turns), version 8 (without the turns of first
cells), version 9 (without what gradients hold that are parts of larger ones), version 10 (without
the bytes of inputs that layers write to), version 11 (without what gradients have in common, and
which inputs are written to), version 12 (without how much of peaks is copies of gradients that have
memory in common), version 13 (without which outputs layers keep), version 14 (without groups of an
optimizer) and version 15 (without the moments that peaks are of, and without which memory only
gradients of what layers hand through lie in). What they do not tell is unknown, so that every
storage between layers is taken to have a gradient, in memory of its own, and to be another for each
micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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
    check_missing,
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

#: Fields that later versions have in addition: the last version without them, the place of the
#: object that has them, and what they are taken to be where a record does not tell.
_ADDED: Sequence[tuple[int, str, Mapping[str, Any]]] = (
    (
        2,
        "step",
        {
            "optimizer_together": False,
            "overhead_time": None,
            "inside_overhead_time": None,
            "cell_overhead_time": None,
        },
    ),
    (3, "", {"without_gradient": (), "ties": ()}),
    (4, "step", {"side_by_side": None}),
    (6, "", {"common_inputs": ()}),
    (7, "step", {"turns": None}),
    (14, "step", {"optimizer_groups": ()}),
)

#: Fields of layers and skips up to version 11.
_TOLD_ALONE = (
    "excess_gradient_bytes",
    "hands_back_given",
    "gradient_is_given",
    "value_gradient_bytes",
)

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
    content = _up_to_date(without_header(record, FORMAT, VERSION), record["version"])
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
    content = fields_of(record, where, SkipProfile, also=("storages",))
    text_of(content["name"], path_in(where, "name"))
    content["storages"] = tuple_of(content["storages"], path_in(where, "storages"))
    if content.get("gradient_storages") is not None:
        where = path_in(where, "gradient_storages")
        content["gradient_storages"] = tuple_of(content["gradient_storages"], where)
    return SkipProfile(**content)


def _tie(record: Any, where: str) -> TieProfile:
    content = fields_of(record, where, TieProfile)
    return TieProfile(
        **{**content, "layers": tuple_of(content["layers"], path_in(where, "layers"))}
    )


def _up_to_date(content: dict[str, Any], version: int) -> dict[str, Any]:
    """Bring a record of an earlier version up to date.

    Raises:
        FileFormatError: it lacks a field that has to be changed, or has one of a later version.
    """
    check_missing(content, "", {"step": "an object"})
    step = object_of(content["step"], "step")
    content = {**content, "step": step}
    if version <= 1:
        content |= {"skips": (), "other_sizes": ()}
        _describe_loss(step)
    for last, where, added in _ADDED:
        if version <= last:
            part = step if where else content
            for name in added:
                if name in part:
                    raise _too_early(where, name)
            part |= added
    if version <= 8 and step.get("turns") is not None:
        step["turns"] = _with_first_turns(step["turns"])
    if version <= 11:
        _leave_out_told_alone(content)
    return content


def _describe_loss(step: dict[str, Any]) -> None:
    """Describe the loss of a step of version 1 as a layer.

    It was one time and one peak, over the mini-batch, forward and backward together.
    """
    own = {"loss_time": "a number or null", "loss_bytes": "a whole number or null"}
    check_missing(step, "step", own)
    loss_time, loss_bytes = step.pop("loss_time"), step.pop("loss_bytes")
    loss = None
    if loss_time is not None:
        if type(loss_time) not in (int, float) or not 0 <= loss_time < 2**63:
            raise ProfileError(
                f"step has an impossible value: loss_time={loss_time!r:.60} (expected a finite "
                "number, 0 or more)."
            )
        half = loss_time / 2
        peak = 0 if loss_bytes is None else loss_bytes
        loss = asdict(LayerProfile("loss", "loss", half, half, 0.0, backward_peak_bytes=peak))
    step |= {"loss": None, "whole_loss": loss, "gathered": ()}


def _with_first_turns(record: Any) -> dict[str, Any]:
    """Say of turns up to version 8 what they were: those of the first cells of a step."""
    turns = object_of(record, "step.turns")
    for name in ("forward", "no_grad_forward", "backward"):
        if f"first_{name}" in turns:
            raise _too_early("step.turns", f"first_{name}")
        turns[f"first_{name}"] = turns.get(name, 0.0)
    return turns


def _leave_out_told_alone(content: dict[str, Any]) -> None:
    """Leave out of layers, skips and losses what they told up to version 11.

    Skips keep what their gradients hold; what values have in common with them is not known.
    """

    def without(record: Any) -> Any:
        if not isinstance(record, Mapping):
            return record  # refused later, by its place
        return {name: value for name, value in record.items() if name not in _TOLD_ALONE}

    for name in ("layers", "skips"):
        if name in content:
            content[name] = [without(one) for one in tuple_of(content[name], name)]
    step = content["step"]
    for name in ("loss", "whole_loss"):
        if name in step:
            step[name] = without(step[name])


def _too_early(where: str, name: str) -> FileFormatError:
    return FileFormatError(
        f"unknown field: {path_in(where, name)!r} (expected none that its version does not have)."
    )
