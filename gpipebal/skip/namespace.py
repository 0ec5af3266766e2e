"""Namespaces: what tells two skips of one name apart."""

from __future__ import annotations

import functools
import itertools
import uuid
from typing import Any

__all__ = ["Namespace"]

_serials = itertools.count()


@functools.total_ordering
class Namespace:
    """A place for the names of skips, so that two pairs of layers may use the same name.

    Every namespace differs from every other, even from those of other processes; a copy (by
    `copy`, `copy.deepcopy` or pickle) equals its original, so a copied model keeps its pairs.
    Namespaces are hashable and ordered by when they were made. None stands for the default
    namespace, and comes first.

    Example:
        >>> first, second = Namespace(), Namespace()
        >>> first == second, first < second, first > None
        (False, True, True)
    """

    __slots__ = ("_id", "_serial")

    def __init__(self) -> None:
        # The serial gives an order that is the same in every run. It starts again in every
        # process, so a namespace from another process is told apart by its id.
        self._serial = next(_serials)
        self._id = uuid.uuid4().bytes

    def __reduce__(self) -> tuple[Any, ...]:
        return _restore, (self._serial, self._id)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Namespace) and self._id == other._id

    def __lt__(self, other: Namespace | None) -> bool:
        if other is None:
            return False
        if not isinstance(other, Namespace):
            return NotImplemented
        return (self._serial, self._id) < (other._serial, other._id)

    def __hash__(self) -> int:
        return hash(self._id)

    def __repr__(self) -> str:
        return f"<Namespace {self._serial}>"


def _restore(serial: int, id: bytes) -> Namespace:
    namespace = Namespace.__new__(Namespace)
    namespace._serial, namespace._id = serial, id
    return namespace
