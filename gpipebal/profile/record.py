"""Profiles as JSON values.

Records of version 1 (before the loss was a layer, and without skip connections and other sizes),
version 2 (without what a trial as a pipeline tells), version 3 (without tied parameters, and what
has no gradient or is handed through), version 4 (without copies of buffers, and what partitions
side by side do to each other), version 5 (without the bytes of gradients between layers), version 6
(without inputs that all micro-batches have in common), version 7 (without turns) and version 8
(without the turns of first cells) are still read; what they do not tell is unknown, so that
everything between layers is taken to have a gradient, each storage one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, TypeVar

from gpipebal.errors import FileFormatError
from gpipebal.files import text_of, tuple_of, without_header
from gpipebal.profile.checks import TEXT_FIELDS
from gpipebal.profile.layer import (
    LayerProfile,
    SideBySide,
    SkipProfile,
    StepTerms,
    TieProfile,
    TurnTimes,
)

if TYPE_CHECKING:
    from gpipebal.profile.profile import Profile

__all__ = ["FORMAT", "VERSION", "parts_of", "record_of"]

FORMAT = "gpipebal-profile"
VERSION = 9

_FIELDS = frozenset(
    {
        "chunks",
        "common_inputs",
        "inputs",
        "layers",
        "mini_batch_rows",
        "other_sizes",
        "provenance",
        "rows",
        "skips",
        "step",
        "storages",
        "ties",
        "without_gradient",
    }
)

_Profile = TypeVar("_Profile", bound="Profile")


def record_of(profile: Profile) -> dict[str, Any]:
    """Return a profile as JSON values."""
    return {
        "format": FORMAT,
        "version": VERSION,
        "rows": profile.rows,
        "mini_batch_rows": profile.mini_batch_rows,
        "chunks": profile.chunks,
        "provenance": dict(profile.provenance),
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


def parts_of(record: Mapping[str, Any], kind: type[_Profile], depth: int = 0) -> _Profile:
    """Make a profile of what `record_of` returned.

    Raises:
        FileFormatError: a field is missing or unknown, or has a value it cannot have.
    """
    try:
        content = without_header(record, FORMAT, VERSION)
        if record.get("version") == 1:
            content = _of_version_1(content)
        if record.get("version") in (1, 2):
            content = _of_version_2(content)
        if record.get("version") in (1, 2, 3):
            content = _of_version_3(content)
        if record.get("version") in (1, 2, 3, 4):
            content = _of_version_4(content)
        if record.get("version") in (1, 2, 3, 4, 5, 6):
            content = _of_version_6(content)
        if record.get("version") in (1, 2, 3, 4, 5, 6, 7):
            content = _of_version_7(content)
        if record.get("version") == 8:
            content = _of_version_8(content)
        _check_fields("a profile", content, _FIELDS)
        step = _fields_of(content["step"], "step")
        _check_fields("step", step, frozenset(StepTerms.__dataclass_fields__))
        for name in ("loss", "whole_loss"):
            if step[name] is not None:
                step[name] = _layer(step[name])
        if step["side_by_side"] is not None:
            step["side_by_side"] = SideBySide(**_fields_of(step["side_by_side"], "side_by_side"))
        if step["turns"] is not None:
            turns = _fields_of(step["turns"], "turns")
            _check_fields("turns", turns, frozenset(TurnTimes.__dataclass_fields__))
            step["turns"] = TurnTimes(**turns)
        step["gathered"] = tuple_of(step["gathered"], "gathered")
        others = tuple_of(content["other_sizes"], "other_sizes")
        if depth and others:
            raise TypeError("a profile at another number of rows has other sizes itself")
        return kind(
            layers=tuple(_layer(layer) for layer in tuple_of(content["layers"], "layers")),
            storages=tuple_of(content["storages"], "storages"),
            inputs=tuple_of(content["inputs"], "inputs"),
            common_inputs=tuple_of(content["common_inputs"], "common_inputs"),
            without_gradient=tuple_of(content["without_gradient"], "without_gradient"),
            rows=content["rows"],
            mini_batch_rows=content["mini_batch_rows"],
            chunks=content["chunks"],
            step=StepTerms(**step),
            skips=tuple(_skip(skip) for skip in tuple_of(content["skips"], "skips")),
            ties=tuple(_tie(tie) for tie in tuple_of(content["ties"], "ties")),
            other_sizes=tuple(parts_of(other, kind, depth + 1) for other in others),
            provenance=_fields_of(content["provenance"], "provenance"),
        )
    except FileFormatError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        reason = f"missing {error}" if isinstance(error, KeyError) else str(error)
        raise FileFormatError(
            f"profile is damaged: {reason.splitlines()[0]}\nFix: profile the model again."
        ) from error


def _check_fields(where: str, found: Mapping[str, Any], expected: frozenset[str]) -> None:
    for name in sorted(expected - set(found)):
        raise KeyError(name)
    for name in sorted(set(found) - expected):
        raise TypeError(f"{where} has an unknown field: {name!r}")


def _fields_of(value: Any, name: str) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise TypeError(f"{name} is no object of named values: {type(value).__name__}")
    return dict(value)


def _layer(record: Any) -> LayerProfile:
    content = _fields_of(record, "a layer")
    for name in ("saved", "outputs"):
        content[name] = tuple_of(content[name], name)
    content["handed_through"] = tuple_of(content.get("handed_through", ()), "handed_through")
    for name in TEXT_FIELDS:
        text_of(content.get(name, ""), name)
    return LayerProfile(**content)


def _skip(record: Any) -> SkipProfile:
    content = _fields_of(record, "a skip connection")
    text_of(content["name"], "name")
    return SkipProfile(**{**content, "storages": tuple_of(content["storages"], "storages")})


def _tie(record: Any) -> TieProfile:
    content = _fields_of(record, "tied parameters")
    return TieProfile(**{**content, "layers": tuple_of(content["layers"], "layers")})


def _of_version_1(content: dict[str, Any]) -> dict[str, Any]:
    """Bring a record of version 1 up to date.

    Its loss was one time and one peak, over the mini-batch, forward and backward together.
    """
    step = _fields_of(content["step"], "step")
    loss_time, loss_bytes = step.pop("loss_time"), step.pop("loss_bytes")
    loss = None
    if loss_time is not None:
        half = float(loss_time) / 2
        peak = 0 if loss_bytes is None else loss_bytes
        loss = asdict(LayerProfile("loss", "loss", half, half, 0.0, backward_peak_bytes=peak))
    step = {**step, "loss": None, "whole_loss": loss, "gathered": ()}
    return {**content, "step": step, "skips": (), "other_sizes": ()}


def _of_version_2(content: dict[str, Any]) -> dict[str, Any]:
    """Bring a record of version 2 up to date: no trial was run."""
    later = StepTerms()
    names = ("optimizer_together", "overhead_time", "inside_overhead_time", "cell_overhead_time")
    step = _fields_of(content["step"], "step")
    for name in names:
        if name in step:
            raise TypeError(f"step has an unknown field: {name!r}")
    return {**content, "step": {**step, **{name: getattr(later, name) for name in names}}}


def _of_version_3(content: dict[str, Any]) -> dict[str, Any]:
    """Bring a record of version 3 up to date: all has a gradient, and no parameters are tied."""
    for name in ("without_gradient", "ties"):
        if name in content:
            raise TypeError(f"a profile has an unknown field: {name!r}")
    return {**content, "without_gradient": (), "ties": ()}


def _of_version_4(content: dict[str, Any]) -> dict[str, Any]:
    """Bring a record of version 4 up to date: partitions do nothing to each other."""
    step = _fields_of(content["step"], "step")
    if "side_by_side" in step:
        raise TypeError("step has an unknown field: 'side_by_side'")
    return {**content, "step": {**step, "side_by_side": None}}


def _of_version_6(content: dict[str, Any]) -> dict[str, Any]:
    """Bring a record of version 6 up to date: every micro-batch has inputs of its own."""
    if "common_inputs" in content:
        raise TypeError("a profile has an unknown field: 'common_inputs'")
    return {**content, "common_inputs": ()}


def _of_version_7(content: dict[str, Any]) -> dict[str, Any]:
    """Bring a record of version 7 up to date: what turns cost is not known."""
    step = _fields_of(content["step"], "step")
    if "turns" in step:
        raise TypeError("step has an unknown field: 'turns'")
    return {**content, "step": {**step, "turns": None}}


def _of_version_8(content: dict[str, Any]) -> dict[str, Any]:
    """Bring a record of version 8 up to date: its turns are those of the first cells of a step."""
    step = _fields_of(content["step"], "step")
    if step["turns"] is None:
        return content
    turns = _fields_of(step["turns"], "turns")
    for name in ("forward", "no_grad_forward", "backward"):
        if f"first_{name}" in turns:
            raise TypeError(f"turns has an unknown field: 'first_{name}'")
        turns[f"first_{name}"] = turns.get(name, 0.0)
    return {**content, "step": {**step, "turns": turns}}
