"""Rules about layers, as a caller gives them: by index or name, in several arguments."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from gpipebal.argument_kinds import check_kind, is_list, whole_number
from gpipebal.errors import BalanceError
from gpipebal.problem import Rules
from gpipebal.profile import Profile
from gpipebal.schedule import check_count

__all__ = ["LayerKey", "join_rules"]

#: A layer, by its index or its name.
LayerKey = int | str


def join_rules(
    profile: Profile,
    given: Rules | None = None,
    *,
    pin: Mapping[LayerKey, int] | None = None,
    keep_together: Iterable[tuple[LayerKey, LayerKey]] | None = None,
    no_cut: Iterable[LayerKey] | None = None,
    max_layers: int | None = None,
    min_layers: int | None = None,
) -> Rules | None:
    """Join the rules that were given, with layers by their index; None if there are none.

    Raises:
        BalanceError: a rule about a layer that does not exist, or about no layer; a single layer
            where a list is expected.

    Example:
        >>> profile = Profile.from_costs([1.0] * 4, names=["a", "b", "c", "d"])
        >>> join_rules(profile, no_cut=["c"], keep_together=[("d", "b")]).uncut
        frozenset({2, 3})
    """
    if given is not None:
        check_kind("rules", given, Rules, "rules=Rules(no_cut=[2]), say")
    groups = _groups(profile, keep_together)
    together = [tuple(_layer(profile, "keep_together", one) for one in group) for group in groups]
    if no_cut is not None and not is_list(no_cut):
        one = no_cut if isinstance(no_cut, str) else whole_number(no_cut)
        example = profile.names[0] if one is None else one
        raise _wrong_form("no_cut", no_cut, "list of layers", [example])
    uncut = [_layer(profile, "no_cut", one) for one in (() if no_cut is None else no_cut)]
    if pin is not None and not isinstance(pin, Mapping):
        raise _wrong_form("pin", pin, "mapping from layers to partitions", {profile.names[0]: 0})
    most = [check_count("max_layers", n) for n in (max_layers,) if n is not None]
    fewest = [check_count("min_layers", n) for n in (min_layers,) if n is not None]
    pinned = [(_layer(profile, "pin", one), j) for one, j in (pin or {}).items()]
    for pair in together:
        if not pair:
            raise BalanceError(
                "keep_together has an empty group (expected the "
                "first and the last layer of each).\nFix: keep_together=[('embed', 'head')]."
            )
    spans = [(min(pair), max(pair)) for pair in together]
    if given is not None:
        spans += list(given.keep_together)
        uncut += list(given.no_cut)
        pinned += list(given.pinned)
        most += [check_count("max_layers", n) for n in (given.max_layers,) if n is not None]
        fewest += [check_count("min_layers", n) for n in (given.min_layers,) if n is not None]
    # A limit that forbids nothing would only leave the choice to other solvers.
    longest = min((n for n in most if n < profile.n_layers), default=None)
    shortest = max((n for n in fewest if n > 1), default=None)
    joined = Rules(uncut, spans, pinned, longest, shortest)
    return None if joined == Rules() else joined


def _groups(profile: Profile, given: Any) -> list[Any]:
    """Return the groups of layers to keep together; one layer is not a group."""
    given = () if given is None else given
    groups = list(given) if is_list(given) else [given]
    if not all(map(is_list, groups)):
        ends: tuple[Any, ...] = (profile.names[0], profile.names[min(1, profile.n_layers - 1)])
        plain = [one if isinstance(one, str) else whole_number(one) for one in groups]
        if len(groups) > 1 and None not in plain:
            ends = tuple(plain)  # one flat list is mostly meant as one group
        raise _wrong_form("keep_together", given, "list of groups of layers", [ends])
    return groups


def _wrong_form(rule: str, given: object, expected: str, example: object) -> BalanceError:
    return BalanceError(
        f"{rule} has the wrong form: {rule}={given!r:.60} (expected a {expected}).\n"
        f"Fix: {rule}={example!r}."
    )


def _layer(profile: Profile, rule: str, key: LayerKey) -> int:
    """Return the index of a layer that is given by index or name."""
    if isinstance(key, str):
        if profile.names.count(key) == 1:
            return profile.names.index(key)
        if key in profile.names:
            places = [k for k, name in enumerate(profile.names) if name == key]
            raise BalanceError(
                f"several layers have one name: {rule} has {key!r} (expected a name that one layer "
                f"has: layers {', '.join(map(str, places))} have it).\nFix: {places[0]}, its index."
            )
    elif (index := whole_number(key)) is not None and 0 <= index < profile.n_layers:
        return index
    raise BalanceError(
        f"rule is about a layer that does not exist: {rule} has {key!r:.60} (expected 0 <= index < "
        f"{profile.n_layers}, or one of the names {', '.join(map(repr, profile.names[:5]))}"
        f"{', ...' if profile.n_layers > 5 else ''}).\n"
        "Fix: profile.names lists all layers; count from 0."
    )
