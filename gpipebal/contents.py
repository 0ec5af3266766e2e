"""What containers and objects of others hold, read and put back without any method of their own.

A class that is derived from a container may do anything when it is asked what it holds: a registry
of models imports them all, one of functions makes them. So containers are asked by the methods of
Python's own classes, which only look.
"""

from __future__ import annotations

import gc
from collections import OrderedDict, UserDict, UserList, deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from types import MappingProxyType, MemberDescriptorType
from typing import Any

__all__ = [
    "attribute_values",
    "attributes_in",
    "contents_of",
    "delete_entry",
    "pairs_of",
    "put_row_back",
    "set_entry",
    "size_of",
    "slots_in",
]

_ROWS: tuple[Any, ...] = (list, tuple, set, frozenset, deque)


def pairs_of(value: Any) -> list[tuple[Any, Any]] | None:
    """Return the keys and values of a dictionary, or of what stands for one; None: it is none.

    Example:
        >>> class Registry(dict):
        ...     def items(self):
        ...         raise ValueError("asked")
        >>> pairs_of(Registry(a=1)), pairs_of([1])
        ([('a', 1)], None)
    """
    kept = _dict_in(value)
    return None if kept is None else list(dict.items(kept))


def contents_of(value: Any) -> list[Any] | None:
    """Return the values in a container of any kind; None: it is no container."""
    kept = _dict_in(value)
    if kept is not None:
        return list(dict.values(kept))
    row = _row_in(value)
    return None if row is None else list(_base_of(row).__iter__(row))


def size_of(value: Any) -> int | None:
    """Return how many values are in a container; None: it is no container."""
    kept = _dict_in(value)
    if kept is not None:
        return dict.__len__(kept)
    row = _row_in(value)
    return None if row is None else int(_base_of(row).__len__(row))


def attributes_in(value: Any) -> dict[str, Any]:
    """Return the attributes that an object has in a dictionary; that dictionary itself, if any.

    Example:
        >>> from types import SimpleNamespace
        >>> attributes_in(SimpleNamespace(a=1)), attributes_in(3)
        ({'a': 1}, {})
    """
    try:
        found = object.__getattribute__(value, "__dict__")
    except Exception:  # it has none, or a property of its own by this name
        return {}
    return found if issubclass(type(found), dict) else {}


def attribute_values(value: Any) -> list[Any]:
    """Return what these attributes are."""
    return list(dict.values(attributes_in(value)))


def slots_in(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the attributes that an object does not have in a dictionary, with their names."""
    for kind in type(value).__mro__:
        for name, slot in vars(kind).items() if "__slots__" in vars(kind) else ():
            if isinstance(slot, MemberDescriptorType):
                with suppress(AttributeError):  # it has no value
                    yield name, slot.__get__(value)


def set_entry(space: dict[Any, Any], key: Any, value: Any) -> None:
    """Set an entry of a dictionary."""
    _dict_class(space).__setitem__(space, key, value)


def delete_entry(space: dict[Any, Any], key: Any) -> None:
    """Delete an entry of a dictionary."""
    _dict_class(space).__delitem__(space, key)


def put_row_back(row: Any, before: Iterable[Any]) -> None:
    """Give a list or a deque other values."""
    kind = _base_of(row)
    kind.clear(row)
    kind.extend(row, before)


def _dict_in(value: Any) -> dict[Any, Any] | None:
    kind = type(value)  # what an object says of its class may be anything, or raise
    if issubclass(kind, dict):
        return value
    if issubclass(kind, UserDict):
        return _dict_in(dict.get(attributes_in(value), "data"))
    # A view has no way to its dictionary but methods that ask that.
    return _dict_in(gc.get_referents(value)[0]) if kind is MappingProxyType else None


def _row_in(value: Any) -> Any:
    if issubclass(type(value), UserList):
        value = dict.get(attributes_in(value), "data")
    return value if issubclass(type(value), _ROWS) else None


def _base_of(row: Any) -> Any:
    """Return Python's own class that the class of a row is derived from."""
    return next(kind for kind in _ROWS if issubclass(type(row), kind))


def _dict_class(space: dict[Any, Any]) -> Any:
    # An ordered dictionary has its order beside its entries.
    return OrderedDict if issubclass(type(space), OrderedDict) else dict
