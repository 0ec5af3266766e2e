"""Numbers of storages: a storage that two layers of a chain share has one number in both."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gpipebal.pipeline.values.tensors import has_storage, storage_key
from gpipebal.profiler.chain.gradients import needs_gradient
from gpipebal.profiler.chain.value import Value
from gpipebal.skip.tracker import Key

__all__ = ["Arrived", "Numbers", "distinct_numbers"]


class Numbers:
    """Numbers of storages over a whole chain, given in the order in which they are first seen.

    Attributes:
        bytes: Bytes of every storage.
    """

    def __init__(self) -> None:
        self.bytes: list[int] = []
        # For storages between layers, whether a gradient goes back through them anywhere.
        self._gradients: dict[int, bool] = {}

    def new(self, n_bytes: int) -> int:
        """Give a storage its number."""
        self.bytes.append(n_bytes)
        return len(self.bytes) - 1

    def note(self, numbers: Iterable[int | None], needs_gradient: Iterable[bool]) -> None:
        """Note which tensors between two layers need a gradient, by the numbers of their storages.

        Args:
            numbers: One per tensor; None: it has no storage of its own.
            needs_gradient: Whether it does.
        """
        for number, needs in zip(numbers, needs_gradient, strict=True):
            if number is not None:
                self._gradients[number] = self._gradients.get(number, False) or needs

    @property
    def without_gradient(self) -> tuple[int, ...]:
        """Storages between layers that no gradient goes back through."""
        return tuple(sorted(number for number, has in self._gradients.items() if not has))


@dataclass
class Arrived:
    """A value between two layers, with the numbers of its storages.

    Attributes:
        value: The value.
        numbers: One per leaf of the value; None: the leaf has no storage of its own.
        skips: The same for every skip that waits.
    """

    value: Value
    numbers: list[int | None]
    skips: dict[Key, list[int | None]]

    @classmethod
    def first(cls, value: Value, numbers: Numbers) -> Arrived:
        """Number the storages of a chain's input.

        A view into the mini-batch counts for its own rows.
        """
        arrived = cls.of(value, {}, numbers, {})
        own = dict.fromkeys(arrived.storages, 0)
        for leaf, number in zip(value.leaves, arrived.numbers, strict=True):
            if number is not None:
                own[number] += leaf.nbytes
        for number, n_bytes in own.items():
            numbers.bytes[number] = min(numbers.bytes[number], n_bytes)
        return arrived

    @classmethod
    def of(
        cls,
        value: Value,
        known: dict[int, int],
        numbers: Numbers,
        waiting: Mapping[Key, list[int | None]],
    ) -> Arrived:
        """Number the storages of a value.

        Args:
            value: The value.
            known: Numbers of storages that it may have, by their keys; new ones are added.
            numbers: Numbers of all storages so far; new ones are added.
            waiting: Those of the skips that have waited before; others are numbered, too.
        """

        def numbered(leaves: list[Any]) -> list[int | None]:
            found = [_number_of(leaf, known, numbers) for leaf in leaves]
            numbers.note(found, map(needs_gradient, leaves))
            return found

        own = numbered(value.leaves)
        skips = {
            key: waiting[key] if key in waiting else numbered(leaves)
            for key, (leaves, _) in value.skips.items()
        }
        return cls(value, own, skips)

    def known(self, popped: Sequence[Key] = ()) -> dict[int, int]:
        """Return the numbers of what goes into a layer, by the keys of their storages."""
        pairs = zip(self.value.leaves_with(popped), self.of_inputs(popped), strict=True)
        return {storage_key(leaf): number for leaf, number in pairs if number is not None}

    def of_inputs(self, popped: Iterable[Key]) -> list[int | None]:
        """Return the numbers of what goes into a layer: of the value, then of what it pops."""
        return [*self.numbers, *(number for key in popped for number in self.skips[key])]

    @property
    def storages(self) -> tuple[int, ...]:
        """Numbers of the value's storages, each once."""
        return distinct_numbers(self.numbers)


def _number_of(leaf: Any, known: dict[int, int], numbers: Numbers) -> int | None:
    """Return the number of a leaf's storage, a new one if it is not known; None: it has none."""
    if not has_storage(leaf):
        return None
    key = storage_key(leaf)
    if key not in known:
        known[key] = numbers.new(leaf.untyped_storage().nbytes())
    return known[key]


def distinct_numbers(numbers: Iterable[int | None]) -> tuple[int, ...]:
    """Return numbers of storages, each once, in their order."""
    return tuple(dict.fromkeys(number for number in numbers if number is not None))
