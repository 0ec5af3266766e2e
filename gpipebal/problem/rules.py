"""Rules about a split: where cuts may not be, which layers belong where, how many there may be."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from gpipebal.errors import BalanceError
from gpipebal.kinds import whole_number
from gpipebal.problem.checks import plain_number

__all__ = ["Rules"]


@dataclass(frozen=True)
class Rules:
    """Where cuts may not be, and which layers belong where.

    Attributes:
        no_cut: Layers that stay with the layer before them: no partition begins with one of these.
        keep_together: Pairs of layers, first and last in either order: one partition holds both
            and all layers between them; for example, layers that share a parameter.
        pin: The partition of each pinned layer.
        max_layers: Most layers of a partition; None for no limit.

    Raises:
        BalanceError: a layer where a list is expected, or single layers where pairs are expected.

    Example:
        >>> Rules(no_cut=[3], keep_together=[(5, 7)]).uncut
        frozenset({3, 6, 7})
    """

    no_cut: Iterable[int] = ()
    keep_together: Iterable[tuple[int, int]] = ()
    pin: Mapping[int, int] | Iterable[tuple[int, int]] = ()
    max_layers: int | None = None

    def __post_init__(self) -> None:
        for name in ("no_cut", "keep_together", "pin"):
            if not isinstance(getattr(self, name), Iterable):
                raise BalanceError(
                    f"{name} is not a list: {name}={getattr(self, name)!r} (expected one of "
                    f"layers, or pairs of them).\nFix: {name}=(), for none."
                )
        pins = self.pin.items() if isinstance(self.pin, Mapping) else self.pin
        uncut = [*map(_whole, self.no_cut)]
        if any(not isinstance(layer, (int, float)) for layer in uncut):
            raise BalanceError(
                f"no_cut has the wrong form: no_cut={uncut!r:.60} (expected indices of layers).\n"
                "Fix: no_cut=[2]."
            )
        object.__setattr__(self, "no_cut", tuple(sorted(set(uncut))))
        pairs = _pairs("keep_together", self.keep_together)
        pairs = tuple(sorted((min(pair), max(pair)) for pair in pairs))
        object.__setattr__(self, "keep_together", pairs)
        object.__setattr__(self, "pin", _pairs("pin", pins))
        object.__setattr__(self, "max_layers", _whole(self.max_layers))

    @cached_property
    def pinned(self) -> tuple[tuple[int, int], ...]:
        """Layer and partition of each pinned layer."""
        return tuple(self.pin.items() if isinstance(self.pin, Mapping) else self.pin)

    @cached_property
    def uncut(self) -> frozenset[int]:
        """Layers before which there is no cut; not the first one, as no cut could be there."""
        between = (range(first + 1, last + 1) for first, last in self.keep_together)
        return frozenset(self.no_cut).union(*between) - {0}

    def allows(self, start: int, end: int, partition: int) -> bool:
        """Whether a partition may hold the layers `start` to ``end - 1``.

        A split keeps the rules if all its partitions do. A cut is only checked as the start of the
        partition after it.

        Example:
            >>> rules = Rules(no_cut=[2], pin={3: 1})
            >>> rules.allows(0, 3, 0), rules.allows(2, 4, 1), rules.allows(0, 4, 0)
            (True, False, False)
        """
        return (
            start not in self.uncut
            and (self.max_layers is None or end - start <= self.max_layers)
            and all((start <= layer < end) == (j == partition) for layer, j in self.pinned)
        )

    def check(self, n_layers: int, n_partitions: int) -> None:
        """Refuse rules about layers or partitions that do not exist.

        Raises:
            BalanceError: there is such a rule.
        """
        layers = [("no_cut", layer) for layer in self.no_cut]
        layers += [("keep_together", layer) for pair in self.keep_together for layer in pair]
        layers += [("pin", layer) for layer, _ in self.pinned]
        for name, layer in layers:
            if layer not in range(n_layers):
                raise BalanceError(
                    f"rule is about a layer that does not exist: {name} has layer={layer!r} "
                    f"(expected 0 <= layer < {n_layers}).\nFix: count layers from 0."
                )
        for layer, partition in self.pinned:
            if partition not in range(n_partitions):
                raise BalanceError(
                    f"layer {layer} is pinned to a partition that does not exist: "
                    f"partition={partition!r} (expected 0 <= partition < {n_partitions}).\n"
                    "Fix: count partitions from 0."
                )
        most = self.max_layers
        if most is not None and not (plain_number(most) >= 1 and isinstance(most, int)):
            raise BalanceError(
                f"max_layers is too small: max_layers={most!r} (expected 1 or more, whole).\n"
                f"Fix: max_layers={-(-n_layers // n_partitions)}, which an equal split keeps."
            )


def _pairs(name: str, given: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    asked, pairs = tuple(given), []
    for pair in asked:
        both = () if isinstance(pair, (str, bytes)) or not isinstance(pair, Iterable) else [*pair]
        pairs.append(tuple(map(_whole, both)))
    if not all(len(pair) == 2 and all(type(each) is int for each in pair) for pair in pairs):
        raise BalanceError(
            f"{name} has the wrong form: {name}={asked!r:.60} (expected pairs of indices).\n"
            f"Fix: {name}=[(0, 1)]."
        )
    return tuple(sorted(pairs))


def _whole(number: Any) -> Any:
    """Return a whole number, such as numpy's or a float, as an int; anything else as it is."""
    found = whole_number(number)
    if found is not None:
        return found
    return int(number) if isinstance(number, float) and number.is_integer() else number
