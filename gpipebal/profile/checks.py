"""Checks of a profile: what makes no sense is refused."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any

from gpipebal.argument_kinds import annotations_of, check_kind, check_list, check_mapping
from gpipebal.errors import ProfileError
from gpipebal.profile.layer import (
    MOMENTS,
    AloneShares,
    LayerProfile,
    SkipProfile,
    StepTerms,
    TieProfile,
    TurnTimes,
)
from gpipebal.records import COUNT, MOST, MOST_CHUNKS, NUMBER, SIZE, WHOLE, is_quantity
from gpipebal.units import count

if TYPE_CHECKING:
    from gpipebal.profile.profile import Profile

__all__ = [
    "COUNT_FIELDS",
    "STORAGE_FIELDS",
    "bad_value",
    "check_profile",
]


def _fields_of(kind: Any, *annotations: str) -> tuple[str, ...]:
    """Name the fields of a dataclass that are annotated so, whether or not they may be None."""
    every = annotations_of(kind).items()
    return tuple(name for name, each in every if each.removesuffix(" | None") in annotations)


#: The whole numbers of a layer: its bytes, and its operations.
COUNT_FIELDS = _fields_of(LayerProfile, "int")
#: Its fields that name storages; others with whole numbers are bytes at its `MOMENTS`.
STORAGE_FIELDS = tuple(
    name for name in _fields_of(LayerProfile, "tuple[int, ...]") if name not in MOMENTS.values()
)
_TEXTS = _fields_of(LayerProfile, "str")
_STEP_TIMES = _fields_of(StepTerms, "float")
#: The numbers of a layer, by name: whether each is whole, and whether it may be unknown.
_NUMBERS = [
    (item.name, item.name in COUNT_FIELDS, item.default is None)
    for item in fields(LayerProfile)
    if item.name in _fields_of(LayerProfile, "int", "float")
]


def check_profile(profile: Profile) -> None:
    """Verify the invariants of a profile.

    Raises:
        KindError: a part of the profile is of the wrong kind.
        ProfileError: no layers, a count below 1, a time or size that is negative or not finite, a
            storage or layer that does not exist, or another size that does not fit.
    """
    if not profile.layers:
        raise ProfileError(
            "profile has no layers: len(layers)=0 (expected 1 or more).\n"
            "Fix: profile a module with at least one layer."
        )
    for name, kind in (
        ("layers", LayerProfile),
        ("skips", SkipProfile),
        ("ties", TieProfile),
    ):
        check_list(name, getattr(profile, name), kind)
    check_kind("step", profile.step, StepTerms, "step=StepTerms()")
    check_mapping("provenance", profile.provenance, "provenance={}")
    for name in ("rows", "mini_batch_rows", "chunks"):
        _check_count("profile", name, getattr(profile, name))
    if profile.chunks > MOST_CHUNKS:
        raise ProfileError(
            f"profile has too many micro-batches: chunks={profile.chunks!r:.60} (expected at most "
            f"{MOST_CHUNKS}).\nFix: profile with fewer chunks."
        )
    threads = profile.provenance.get("threads")
    if threads is not None:
        _check_count("provenance", "threads", threads)
    n_storages = len(profile.storages)
    for index, n_bytes in enumerate(profile.storages):
        if not is_quantity(n_bytes, whole=True):
            raise bad_value("profile", f"storages[{index}]", n_bytes, SIZE)
    for layer in profile.layers:
        _check_layer(layer, f"layer {layer.name!r}", n_storages)
    for name in ("inputs", "common_inputs", "without_gradient"):
        for storage in getattr(profile, name):
            _check_storage(storage, n_storages, name)
    if not set(profile.common_inputs) <= set(profile.inputs):
        raise ProfileError(
            f"profile has common inputs that are not valid: common_inputs={profile.common_inputs} "
            f"(expected some of inputs={profile.inputs}).\nFix: profile the model again."
        )
    _check_step(profile, n_storages)
    for skip in profile.skips:
        _check_skip(skip, profile.n_layers, n_storages)
    for tie in profile.ties:
        _check_tie(tie, profile.n_layers)
    _check_shares(profile)
    _check_other_sizes(profile)


def _check_skip(skip: SkipProfile, n_layers: int, n_storages: int) -> None:
    for index in (skip.source, skip.destination):
        if type(index) is not int or not 0 <= index < n_layers:
            raise ProfileError(
                f"skip connection {skip.name!r} names a layer that does not exist: "
                f"layer={index!r} (expected 0..{n_layers - 1}).\nFix: profile the model again."
            )
    if skip.source > skip.destination:
        raise ProfileError(
            f"skip connection {skip.name!r} goes backwards: source={skip.source} (expected at "
            f"most destination={skip.destination}).\nFix: profile the model again."
        )
    where = f"skip connection {skip.name!r}"
    for storage in (*skip.storages, *(skip.gradient_storages or ())):
        _check_storage(storage, n_storages, where)


def _check_tie(tie: TieProfile, n_layers: int) -> None:
    places = tie.layers
    known = all(type(index) is int and 0 <= index < n_layers for index in places)
    if not known or len(places) < 2 or list(places) != sorted(set(places)):
        raise ProfileError(
            f"tied parameters have impossible layers: layers={list(places)!r} (expected two or "
            f"more of 0..{n_layers - 1}, ascending).\nFix: profile the model again."
        )
    for name in ("parameter_bytes", "gradient_bytes"):
        if not is_quantity(getattr(tie, name), whole=True):
            raise bad_value("tied parameters", name, getattr(tie, name), SIZE)


def _check_shares(profile: Profile) -> None:
    """Refuse ties of more bytes of gradients than their layers have.

    Of parameters they may have more: where these are parts of what an earlier layer has.
    """
    gradients = [0] * profile.n_layers
    for tie in profile.ties:
        for k in tie.layers:
            gradients[k] += tie.gradient_bytes
    for layer, tied in zip(profile.layers, gradients, strict=True):
        if tied > layer.gradient_bytes:
            raise ProfileError(
                f"layer {layer.name!r} has less than what is tied to others: "
                f"gradient_bytes={layer.gradient_bytes} (expected {tied} or more).\n"
                "Fix: profile the model again."
            )


def _check_other_sizes(profile: Profile) -> None:
    rows = [other.rows for other in profile.other_sizes]
    if sorted(set(rows)) != rows or profile.rows in rows:
        raise ProfileError(
            f"other sizes are not in order: rows={rows} beside {profile.rows} (expected ascending "
            "numbers, each once, without the profile's own).\nFix: profile the model again."
        )
    for other in profile.other_sizes:
        if other.names != profile.names or other.other_sizes:
            raise ProfileError(
                f"a profile at another size is of another chain: rows={other.rows} (expected the "
                f"same {count(profile.n_layers, 'layer')}, and no other sizes of its own).\n"
                "Fix: profile the model again."
            )


def _check_step(profile: Profile, n_storages: int) -> None:
    step = profile.step
    for name in _STEP_TIMES:
        value = getattr(step, name)
        if value is not None and not is_quantity(value):
            raise bad_value("step", name, value, NUMBER)
    if not isinstance(step.optimizer_together, bool):
        value = step.optimizer_together
        raise bad_value("step", "optimizer_together", value, "true or false")
    for group in step.optimizer_groups:
        if len(group) != profile.n_layers or not all(is_quantity(n, whole=True) for n in group):
            raise bad_value("step", "optimizer_groups", group, f"{SIZE} for each layer")
    parts = {"side_by_side": AloneShares, "turns": TurnTimes}
    for name, kind in {**parts, "loss": LayerProfile, "whole_loss": LayerProfile}.items():
        if getattr(step, name) is not None:
            check_kind(f"step.{name}", getattr(step, name), kind)
    if step.side_by_side is not None:
        _check_side_by_side(step.side_by_side)
    if step.turns is not None:
        _check_turns(step.turns)
    for name in ("loss", "whole_loss"):
        loss = getattr(step, name)
        if loss is not None:
            _check_layer(loss, f"step.{name}", n_storages)
    for storage in step.gathered:
        _check_storage(storage, n_storages, "step.gathered")


def _check_side_by_side(shares: AloneShares) -> None:
    if type(shares.n_partitions) is not int or shares.n_partitions < 2:
        raise ProfileError(
            "step.side_by_side has an impossible number of partitions: "
            f"n_partitions={shares.n_partitions!r} (expected 2 or more).\n"
            "Fix: profile the model again."
        )
    for item in fields(shares):
        value = getattr(shares, item.name)
        if item.name != "n_partitions" and not (is_quantity(value) and 0 < value <= 1):
            raise ProfileError(
                f"step.side_by_side has an impossible share: {item.name}={value!r} (expected more "
                "than 0, and at most 1).\nFix: profile the model again."
            )


def _check_turns(turns: TurnTimes) -> None:
    for item in fields(turns):
        value = getattr(turns, item.name)
        # A turn may be faster, too.
        size = -value if type(value) in (int, float) and value < 0 else value
        if not is_quantity(size):
            raise ProfileError(
                f"step.turns has an impossible value: {item.name}={value!r} (expected finite "
                "seconds).\nFix: correct the value, or profile the model again."
            )


def _check_layer(layer: LayerProfile, where: str, n_storages: int) -> None:
    for name in _TEXTS:
        if not isinstance(getattr(layer, name), str):
            raise bad_value(where, name, getattr(layer, name), "a text")
    for name, whole, may_be_unknown in _NUMBERS:
        value = getattr(layer, name)
        if value is None and may_be_unknown:
            continue
        if not is_quantity(value, whole=whole):
            expected = SIZE if name.endswith("_bytes") else WHOLE if whole else NUMBER
            raise bad_value(where, name, value, expected)
    for name in STORAGE_FIELDS:
        for storage in getattr(layer, name) or ():
            _check_storage(storage, n_storages, where)
    for name in MOMENTS.values():
        for n_bytes in getattr(layer, name):
            # Fewer than 0 where more is freed than made.
            if type(n_bytes) is not int or not is_quantity(abs(n_bytes), whole=True):
                raise bad_value(where, name, n_bytes, "a whole number of bytes")


def _check_count(where: str, name: str, value: Any) -> None:
    # Chunks have a smaller limit than numbers in general, which has an error of its own.
    known = isinstance(value, int) if name == "chunks" else is_quantity(value, whole=True)
    if not known or isinstance(value, bool) or value < 1:
        expected = f"a whole number, 1 to {MOST_CHUNKS}" if name == "chunks" else COUNT
        raise bad_value(where, name, value, expected)


def _check_storage(storage: Any, n_storages: int, where: str) -> None:
    if type(storage) is not int or not 0 <= storage < n_storages:
        raise ProfileError(
            f"{where} names a storage that does not exist: storage={storage!r:.60} "
            f"(expected 0..{n_storages - 1}).\nFix: profile the model again."
        )


def bad_value(where: str, name: str, value: Any, expected: str) -> ProfileError:
    """Return the error for a value that something in a profile cannot have."""
    most = ""
    if isinstance(value, (int, float)) and value > MOST and expected.endswith("or more"):
        most = f", at most {MOST:.3g}"
    return ProfileError(
        f"{where} has an impossible value: {name}={value!r:.60} (expected {expected}{most}).\n"
        "Fix: correct the value, or profile the model again."
    )
