"""Whether a profile still fits a model: which layers have changed, gone, come, moved or tied."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gpipebal.argument_kinds import check_kind
from gpipebal.errors import ModelError
from gpipebal.profile.fingerprint import is_same_layer, is_uninitialized
from gpipebal.profile.layer import TieProfile
from gpipebal.profile.ties import find_ties

if TYPE_CHECKING:
    from gpipebal.profile.profile import Profile

__all__ = ["ProfileMatch", "match_profile"]


#: What the fingerprint of a layer tells.
_WHAT_MAY_CHANGE = "its class, options, parameters, or which of them are trained"


@dataclass(frozen=True)
class ProfileMatch:
    """What differs between a profile and a model; true if nothing does.

    Attributes:
        n_layers: Layers of the profile.
        changed: Names of layers whose class, options or parameters differ from the profiled ones.
        missing: Names of layers that were profiled and are not in the model.
        added: Names of layers of the model that were not profiled.
        moved: Names of layers whose order among the other layers has changed.
        unknown: Names of layers of which the profile has no fingerprint, or one of another
            version, and of lazy layers that have no shapes yet: they match by name only.
        tied: Names of layers that share parameters with other layers than when they were profiled.
            For a profile without ties in which a layer has no fingerprint, nothing is known.
    """

    n_layers: int
    changed: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    added: tuple[str, ...] = ()
    moved: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()
    tied: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return not (self.changed or self.missing or self.added or self.moved or self.tied)

    def __str__(self) -> str:
        lines = [
            f"layer {name!r} {what}"
            for names, what in (
                (self.changed, f"has changed: {_WHAT_MAY_CHANGE}"),
                (self.missing, "is missing: it was profiled, and the model has it no more"),
                (self.added, "is new: the model has it, and it was not profiled"),
                (self.moved, "has moved: it is at another place of the chain"),
                (self.tied, "is tied otherwise: it shares its parameters with other layers"),
            )
            for name in names
        ]
        if not lines:
            doubt = f", {len(self.unknown)} of them by name only" if self.unknown else ""
            all_of = (
                f"all {self.n_layers} layers match" if self.n_layers > 1 else "the layer matches"
            )
            lines = [f"{all_of}{doubt}"]
        return "\n".join(lines)


def match_profile(profile: Profile, module: Any) -> ProfileMatch:
    """Compare the layers of a model with those that were profiled, by name and fingerprint.

    Args:
        profile: Costs of the layers, with the fingerprints that they had.
        module: An `nn.Sequential` or a `GPipe` over one; its children are the layers.

    Returns:
        A `ProfileMatch`: true if the profile fits, else its text has one line per difference.

    Raises:
        KindError: `profile` is not a Profile.
        ModelError: `module` is not a `torch.nn.Module`.

    Complexity:
        O(n log n) for n modules and parameters.

    Example:
        >>> from torch import nn
        >>> from gpipebal import profile_model
        >>> import torch
        >>> profile = profile_model(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), torch.ones(2, 4),
        ...                         timeout=0)
        >>> print(match_profile(profile, nn.Sequential(nn.Linear(4, 5), nn.ReLU())))
        layer '0' has changed: its class, options, parameters, or which of them are trained
    """
    from gpipebal.profile.profile import Profile  # which imports this module

    check_kind("profile", profile, Profile)
    children = getattr(module, "_modules", None)
    if not isinstance(children, dict):
        raise ModelError(
            f"module is not a module: type(module)={type(module).__name__} "
            "(expected nn.Sequential).\n"
            "Fix: give the model that was profiled, an nn.Sequential of its layers."
        )
    layers = {name: layer for name, layer in children.items() if layer is not None}
    profiled = {layer.name: layer.fingerprint for layer in profile.layers}
    both = [name for name in layers if name in profiled]
    place_of = {name: place for place, name in enumerate(profile.names)}
    same = {name: is_same_layer(profiled[name], layers[name]) for name in both}
    # Given costs know no ties, as they know no fingerprints.
    knows_ties = bool(profile.ties) or None not in same.values()
    tied = _tied_otherwise(profile, layers) if knows_ties else set()
    in_order = _longest_run_in_order([place_of[name] for name in both])
    return ProfileMatch(
        n_layers=profile.n_layers,
        changed=tuple(name for name in both if same[name] is False),
        missing=tuple(name for name in profile.names if name not in layers),
        added=tuple(name for name in layers if name not in profiled),
        moved=tuple(name for k, name in enumerate(both) if k not in in_order),
        unknown=tuple(name for name in both if same[name] is None),
        # That a tied parameter has another shape is reported already.
        tied=tuple(
            name
            for name in both
            if name in tied and same[name] is not False and not _is_lazy(layers[name])
        ),
    )


def _is_lazy(layer: Any) -> bool:
    """Tell whether a layer has parameters without a shape, whose ties cannot be known."""
    return any(map(is_uninitialized, layer.parameters()))


def _tied_otherwise(profile: Profile, layers: Mapping[str, Any]) -> set[str]:
    """Return names of layers that share parameters with other layers, or share other bytes."""
    before = _ties_by_name(profile.ties, profile.names)
    now = _ties_by_name(find_ties(list(layers.values())), list(layers))
    return {name for names, *_ in before ^ now for name in names}


def _ties_by_name(
    ties: Sequence[TieProfile], names: Sequence[str]
) -> set[tuple[frozenset[str], int, int]]:
    return {
        (frozenset(names[k] for k in tie.layers), tie.parameter_bytes, tie.gradient_bytes)
        for tie in ties
    }


def _longest_run_in_order(places: list[int]) -> set[int]:
    """Return the positions of a longest ascending subsequence: layers that moved are not in it."""
    if places == sorted(places):
        return set(range(len(places)))
    # lowest[n]: the lowest place that an ascending subsequence of n + 1 places can end with.
    lowest: list[int] = []
    ends: list[int] = []
    before: list[int] = []
    for position, place in enumerate(places):
        n = bisect_left(lowest, place)
        before.append(ends[n - 1] if n else -1)
        lowest[n : n + 1] = [place]
        ends[n : n + 1] = [position]
    found = set()
    position = ends[-1] if ends else -1
    while position >= 0:
        found.add(position)
        position = before[position]
    return found
