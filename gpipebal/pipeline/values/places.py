"""Where tensors lie in memory, and which of them have any of it in common.

A tensor lies in a block of bytes without gaps, or in several that are repeated at a distance::

    x.select(0, 1)    . . . . x x x x . . . .    one block
    x.select(1, 1)    . x . . . x . . . x . .    a block of one element, repeated with each row

Tensors in one and the same place are compared with others once. Of tensors that are repeated with
each row, and within the row, only what they have of one row is compared: they are all the parts of
a matrix that `torch.unbind` and `torch.chunk` make.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from gpipebal.pipeline.values.tensors import has_storage, parts_of, storage_key

__all__ = ["find_overlaps", "find_shared", "find_to_part"]

#: How hard numpy tries to find out whether two tensors with gaps have an element in common.
_MAX_WORK = 10_000


class _Place(NamedTuple):
    """Where a tensor lies: a block of bytes, repeated along several dimensions.

    Attributes:
        begin: Address of the first byte.
        block: Bytes of the block.
        repeats: By dimension, the innermost first: how many bytes the repetitions are apart, and
            how many there are.
    """

    begin: int
    block: int
    repeats: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, tensor: Tensor) -> _Place | None:
        """Find out where a tensor with elements lies.

        None: nobody knows. Subclasses of `torch.Tensor` may keep their elements elsewhere.
        """
        begin, size = tensor.data_ptr(), tensor.element_size()
        if not begin:
            return None
        block, repeats = size, list[tuple[int, int]]()
        for stride, n in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
            step = stride * size
            if n == 1 or not step:
                continue
            if not repeats and step <= block:  # side by side, or across each other: no gaps
                block += (n - 1) * step
            elif repeats and step == repeats[-1][0] * repeats[-1][1]:
                repeats[-1] = repeats[-1][0], repeats[-1][1] * n
            else:
                repeats.append((step, n))
        return cls(begin, block, tuple(repeats))

    @property
    def end(self) -> int:
        """Address behind its last byte."""
        return self.begin + self.block + sum((n - 1) * step for step, n in self.repeats)

    def array(self) -> np.ndarray:
        """Return it as an array of bytes, for numpy to compare and never to read."""
        return np.asarray(_Bytes(self))


class _Bytes:
    """The bytes of a place, as numpy asks for them."""

    def __init__(self, place: _Place) -> None:
        dims = ((1, place.block), *place.repeats)
        self.__array_interface__ = {
            "version": 3,
            "shape": tuple(n for _, n in dims),
            "strides": tuple(step for step, _ in dims),
            "typestr": "|V1",
            "data": (place.begin, True),
        }


#: A place, and its number.
_Lot = tuple[_Place, int]


def _meetings(lots: Iterable[_Lot]) -> Iterator[tuple[int, int]]:
    """Yield pairs of places in one storage that have a byte in common, by number."""
    for group in _reaching_into_another(lots):
        outermost = {place.repeats[-1:] for place, _ in group}
        begin = group[0][0].begin
        if len(outermost) == 1 and outermost != {()}:
            (((row, _),),) = outermost
            of_row = [(one._replace(repeats=one.repeats[:-1]), number) for one, number in group]
            if max(one.end for one, _ in of_row) - begin <= row:
                # Each is in the same rows, so what they have of the first row tells.
                yield from _meetings(of_row)
                continue
        yield from _compared(group)


def _reaching_into_another(lots: Iterable[_Lot]) -> Iterator[list[_Lot]]:
    """Yield groups of several places each of which begins before those before it have ended."""
    group: list[_Lot] = []
    end = 0
    for lot in sorted(lots):
        if lot[0].begin >= end:
            if len(group) > 1:
                yield group
            group = []
        group.append(lot)
        end = max(end, lot[0].end)
    if len(group) > 1:
        yield group


def _compared(group: Sequence[_Lot]) -> Iterator[tuple[int, int]]:
    """Yield pairs of places that have a byte in common; each begins no earlier than the last."""
    arrays = [place.array() for place, _ in group]
    for i, (one, number) in enumerate(group):
        end = one.end
        for j in range(i + 1, len(group)):
            other, its_number = group[j]
            if other.begin >= end:
                break
            # Into a block without gaps it reaches with its first byte.
            if not one.repeats or _have_common_byte(arrays[i], arrays[j]):
                yield number, its_number


def _have_common_byte(one: np.ndarray, other: np.ndarray) -> bool:
    """Tell whether two arrays have, or may have, a byte in common."""
    try:
        return np.shares_memory(one, other, max_work=_MAX_WORK)  # type: ignore[arg-type]
    except np.exceptions.TooHardError:
        return True


class _Places(NamedTuple):
    """The places of tensors that share their storage with others.

    Attributes:
        held: For each place the indices of the tensors that lie there, in ascending order.
        meetings: Pairs of places that have memory in common.
    """

    held: list[list[int]]
    meetings: list[tuple[int, int]]


def _places_of(leaves: Sequence[Any]) -> _Places:
    """Find the places of tensors, and of the parts of sparse and nested ones."""
    by_storage: dict[int, list[tuple[int, Tensor]]] = {}
    for k, leaf in enumerate(leaves):
        for part in parts_of(leaf) if isinstance(leaf, Tensor) else ():
            if has_storage(part) and part.numel():
                by_storage.setdefault(storage_key(part), []).append((k, part))
    found = _Places([], [])
    for parts in by_storage.values():
        if len(parts) == 1:
            continue
        by_place: dict[_Place | None, list[int]] = {}
        for k, part in parts:
            leaves_there = by_place.setdefault(_Place.of(part), [])
            if k not in leaves_there[-1:]:
                leaves_there.append(k)
        numbers = {place: len(found.held) + n for n, place in enumerate(by_place)}
        found.held.extend(by_place.values())
        lots = [(place, number) for place, number in numbers.items() if place is not None]
        found.meetings.extend(_meetings(lots))
        if None in numbers:  # it may be anywhere
            found.meetings.extend((numbers[None], number) for _, number in lots)
    return found


def find_overlaps(leaves: Sequence[Any]) -> frozenset[int]:
    """Return the indices of the tensors that have memory in common with another one.

    The parts of sparse and nested ones count too. Two views of one tensor that have no element in
    common, as `torch.chunk` makes them, have none.

    Complexity:
        O(n log n + p) for n tensors and p pairs of places with memory in common, where tensors lie
        without gaps, or side by side in the same rows; O(v^2) for v of them that lie across each
        other in another way.
    """
    if len(leaves) < 2:
        return frozenset()
    held, meetings = _places_of(leaves)
    met = {place for place, there in enumerate(held) if len(there) > 1}
    for one, other in meetings:
        if held[one] != held[other]:  # parts of one tensor may have memory in common
            met.update((one, other))
    return frozenset(k for place in met for k in held[place])


def find_shared(leaves: Sequence[Any], others: Sequence[Any]) -> frozenset[int]:
    """Return the indices of the tensors that have memory in common with one of the others.

    Complexity:
        That of `find_overlaps` for both.
    """
    if not others:
        return frozenset()
    held, meetings = _places_of([*leaves, *others])
    of_others = {place for place, there in enumerate(held) if there[-1] >= len(leaves)}
    met = set(of_others)
    for one, other in meetings:
        if one in of_others or other in of_others:
            met.update((one, other))
    return frozenset(k for place in met for k in held[place] if k < len(leaves))


def find_to_part(leaves: Sequence[Any], others: Sequence[Any]) -> frozenset[int]:
    """Return the indices of the tensors to copy, so that no two have memory in common.

    A tensor that has none in common with the others, nor with one before it that stays, stays.

    Args:
        leaves: The tensors.
        others: What stays in any case, wherever it is.

    Complexity:
        That of `find_overlaps` for both.
    """
    held, meetings = _places_of([*others, *leaves])
    beside: dict[int, list[int]] = {}
    for one, other in meetings:
        beside.setdefault(one, []).append(other)
        beside.setdefault(other, []).append(one)
    places_of_leaf: dict[int, list[int]] = {}
    for place, there in enumerate(held):
        for k in there:
            places_of_leaf.setdefault(k, []).append(place)
    # Where something lies that stays, and what has memory in common with such a place.
    taken: set[int] = set()
    stays: set[int] = set()
    found = []
    for k, places in sorted(places_of_leaf.items()):
        if k >= len(others) and not taken.isdisjoint(places):
            found.append(k - len(others))
            continue
        for place in places:
            if place not in stays:
                stays.add(place)
                taken.update((place, *beside.get(place, ())))
    return frozenset(found)
