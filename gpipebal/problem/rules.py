"""Rules about a split: where cuts may not be, which layers belong where, how many there may be.

All that a rule means is in this file: `Rules.allows` for one run of layers, `Rules.places` and
`Rules.lengths` the same for all runs at once, `Rules.loosened` and `Rules.most_partitions` for
advice, and `Within` for searches through a part of all splits. Everything else takes the names of
rules from `RULE_NAMES`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

from gpipebal.argument_kinds import is_list, plain_number, whole_number
from gpipebal.errors import BalanceError
from gpipebal.units import count

__all__ = ["RULE_NAMES", "Rules", "Within"]


@dataclass(frozen=True)
class Rules:
    """Where cuts may not be, and which layers belong where.

    Attributes:
        no_cut: Layers that stay with the layer before them: no partition begins with one of these.
        keep_together: Pairs of layers, first and last in either order: one partition holds both
            and all layers between them; for example, layers that share a parameter.
        pin: The partition of each pinned layer.
        max_layers: Most layers of a partition; None for no limit.
        min_layers: Fewest layers of a partition; None for no limit.

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
    min_layers: int | None = None

    def __post_init__(self) -> None:
        for name in ("no_cut", "keep_together", "pin"):
            if not is_list(getattr(self, name)):
                raise BalanceError(
                    f"{name} is not a list: {name}={getattr(self, name)!r:.60} (expected one of "
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
        for name in _LOOSEST:
            object.__setattr__(self, name, _whole(getattr(self, name)))

    @cached_property
    def pinned(self) -> tuple[tuple[int, int], ...]:
        """Layer and partition of each pinned layer."""
        return tuple(self.pin)  # type: ignore[arg-type]  # made so when the rules were

    @cached_property
    def uncut(self) -> frozenset[int]:
        """Layers before which there is no cut; not the first one, as no cut could be there."""
        between = (range(first + 1, last + 1) for first, last in self.keep_together)
        return frozenset(self.no_cut).union(*between) - {0}

    @cached_property
    def longest(self) -> int:
        """Most layers of a partition; more than any chain has if there is no limit."""
        return sys.maxsize if self.max_layers is None else self.max_layers

    @cached_property
    def shortest(self) -> int:
        """Fewest layers of a partition."""
        return 1 if self.min_layers is None else self.min_layers

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
            and self.shortest <= end - start <= self.longest
            and all((start <= layer < end) == (j == partition) for layer, j in self.pinned)
        )

    def keeps(self, bounds: Sequence[int]) -> bool:
        """Whether a split has only cuts that are allowed, and all layers where they belong.

        Example:
            >>> Rules(no_cut=[2]).keeps((0, 1, 3)), Rules(max_layers=1).keeps((0, 1, 3))
            (True, False)
        """
        return all(self.allows(start, end, j) for j, (start, end) in enumerate(pairwise(bounds)))

    def lengths(self, n_layers: int) -> range:
        """Return the numbers of layers that a partition of a chain may have.

        Example:
            >>> Rules(max_layers=3).lengths(9)
            range(1, 4)
        """
        return range(self.shortest, min(self.longest, n_layers) + 1)

    def places(self, n_layers: int, n_partitions: int) -> list[int]:
        """Return the set of places of each bound; bit ``p`` stands for the place before layer `p`.

        A split keeps the rules if its bounds are in these sets, in ascending order, and its
        partitions have allowed lengths.

        Example:
            >>> [bin(places) for places in Rules(no_cut=[1], pin={2: 1}).places(4, 2)]
            ['0b1', '0b100', '0b10000']
        """
        inside = (1 << n_layers) - 2
        for place in self.uncut:
            inside &= ~(1 << place)
        places = [1, *[inside] * (n_partitions - 1), 1 << n_layers]
        for layer, partition in self.pinned:
            # The partition begins at the layer or before, and ends after it. The limits on the
            # bounds before and after these two follow from their order.
            places[partition] &= (1 << (layer + 1)) - 1
            places[partition + 1] &= -1 << (layer + 1)
        return places

    def most_partitions(self, n_layers: int) -> int:
        """Bound the number of partitions of a chain: there are no more, whatever is pinned.

        Example:
            >>> Rules(no_cut=[1]).most_partitions(4), Rules(min_layers=2).most_partitions(7)
            (3, 3)
        """
        found, start = 1, 0
        # A partition that ends as early as it may leaves the most to the others.
        for place in range(self.shortest, n_layers - self.shortest + 1):
            if place not in self.uncut and place - start >= self.shortest:
                found, start = found + 1, place
        return found

    def looser(self) -> Iterator[tuple[str, Rules]]:
        """Yield the name of each rule there is, and the others.

        Example:
            >>> [name for name, _ in Rules(no_cut=[2], max_layers=3).looser()]
            ['no_cut', 'max_layers']
        """
        for field in fields(self):
            if getattr(self, field.name) != field.default:
                yield field.name, self._with(field.name, field.default)

    def loosened(
        self, n_layers: int, works: Callable[[Rules], bool]
    ) -> Iterator[tuple[str, str, Rules]]:
        """Yield rules that may work: one dropped, or a limit only as far as needed.

        Args:
            n_layers: Number of layers of the chain.
            works: Tells whether rules work; called only to find limits.

        Yields:
            The name of a rule, the words that change it, and the changed rules. Dropped ones are
            not known to work; changed limits are.

        Example:
            >>> rules = Rules(no_cut=[2], max_layers=3)
            >>> for _, words, _ in rules.loosened(9, lambda rules: rules.longest >= 5):
            ...     print(words)
            without no_cut
            without max_layers
            max_layers=5
        """
        for name, others in self.looser():
            yield name, f"without {name}", others
            if name not in _LOOSEST or not works(others):
                continue
            # A looser limit never hurts: the closest one that works lies between the given one,
            # which does not (nor one of a layer more than there are), and one that every partition
            # keeps.
            fails, good = min(getattr(self, name), n_layers + 1), _LOOSEST[name](n_layers)
            while abs(good - fails) > 1:
                middle = (fails + good) // 2
                works_too = works(self._with(name, middle))
                fails, good = (fails, middle) if works_too else (middle, good)
            if good != _LOOSEST[name](n_layers):
                yield name, f"{name}={good}", self._with(name, good)

    def _with(self, name: str, value: Any) -> Rules:
        return replace(self, **{name: value})

    def stated(self) -> list[str]:
        """Say in short what the rules demand, for an error.

        Example:
            >>> Rules(no_cut=[2], keep_together=[(4, 6)], max_layers=3).stated()
            ['3 places without a cut', 'max_layers=3']
        """
        said = [f"{count(len(self.uncut), 'place')} without a cut"] if self.uncut else []
        pins = dict(self.pinned)
        if pins:  # a layer may be pinned twice, to different partitions
            said.append(f"pin={pins if len(pins) == len(self.pinned) else list(self.pinned)}")
        limits = [(name, getattr(self, name)) for name in _LOOSEST]
        return said + [f"{name}={limit}" for name, limit in limits if limit is not None]

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
        equal = {"max_layers": -(-n_layers // n_partitions), "min_layers": n_layers // n_partitions}
        for name, kept in equal.items():
            limit = getattr(self, name)
            if limit is not None and not (plain_number(limit) >= 1 and isinstance(limit, int)):
                raise BalanceError(
                    f"{name} is too small: {name}={limit!r:.60} (expected 1 or more, whole).\n"
                    f"Fix: {name}={kept}, which an equal split keeps."
                )


@dataclass(frozen=True)
class Within(Rules):
    """Rules of splits that are a part of all: each bound has its own places.

    Attributes:
        within: The set of places of each bound, as `Rules.places` returns it.

    Example:
        >>> rules = Within.of(Rules(no_cut=[3]), [0b1, 0b1100, 0b10000])
        >>> rules.keeps((0, 2, 4)), rules.keeps((0, 1, 4)), rules.keeps((0, 3, 4))
        (True, False, False)
    """

    within: tuple[int, ...] = ()

    @classmethod
    def of(cls, rules: Rules, within: Sequence[int]) -> Within:
        """Return rules that are to be kept, with such places besides."""
        kept = {name: getattr(rules, name) for name in RULE_NAMES}
        return cls(**kept, within=tuple(within))

    def allows(self, start: int, end: int, partition: int) -> bool:
        """Whether a partition may hold the layers `start` to ``end - 1``."""
        begins, ends = self.within[partition : partition + 2]
        return bool(begins >> start & ends >> end & 1) and super().allows(start, end, partition)

    def places(self, n_layers: int, n_partitions: int) -> list[int]:
        """Return the set of places of each bound; see `Rules.places`."""
        kept = super().places(n_layers, n_partitions)
        return [here & there for here, there in zip(kept, self.within, strict=True)]


#: The rules, by the names of arguments of `gpipebal.solve`.
RULE_NAMES = tuple(field.name for field in fields(Rules))

#: Rules that are limits of the number of layers; and the limit, for a chain of so many layers, that
#: every partition keeps.
_LOOSEST: Mapping[str, Callable[[int], int]] = {
    "max_layers": lambda n_layers: n_layers,
    "min_layers": lambda n_layers: 1,
}


def _pairs(name: str, given: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    asked, pairs = tuple(given), []
    for pair in asked:
        both = () if isinstance(pair, bytes) or not is_list(pair) else [*pair]
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
