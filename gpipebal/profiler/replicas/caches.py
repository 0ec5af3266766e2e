"""Caches that layers keep outside of themselves, restored as they were.

A layer may keep a table of positions in a dictionary of its closure, under a global name, in its
class, in a module that it calls but does not register, as an attribute of a function, as a default
of an argument, or in `functools.lru_cache`. Copies of the layer fill the same cache, with tensors
of the device that is measured, or without values.

Entries that are or hold tensors are restored; all else in such a place keeps its changes. A
`functools.lru_cache` cannot be restored in part, so those that have grown are emptied. Caches that
code does not name, or that are in objects with ``__slots__`` or very many entries, are not found.
"""

from __future__ import annotations

import contextvars
import functools
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from torch import Tensor, nn

from gpipebal.contents import (
    attributes_in,
    contents_of,
    delete_entry,
    put_row_back,
    set_entry,
    size_of,
    slots_in,
)
from gpipebal.pipeline.layers.attributes import MOST_INSIDE, inside_of, tensors_in
from gpipebal.profiler.replicas.spoken import (
    global_names,
    held_by,
    imported_in,
    is_others,
    spoken_of,
)

__all__ = ["caches_kept"]

#: Objects inside objects are looked at to this depth, and this many at most.
_DEPTH, _MOST_OBJECTS = 12, 20_000
_PLAIN = (Tensor, str, bytes, int, float, type(None))
_GONE = object()
#: Attributes that every module has, mostly empty, such as hooks; without those that a forward may
#: add to: buffers and parameters.
_EMPTY_MOSTLY = frozenset(vars(nn.Module())) - {"_parameters", "_buffers"}


class _Places:
    """The places outside of layers where their code may put tensors.

    Attributes:
        undo: For each place, what restores it.
        memos: Functions that remember their results, with how many were new before.
        leaves: Tensors with gradients, by identity.
    """

    def __init__(self, objects: Iterable[Any]) -> None:
        self.undo: list[Callable[[], None]] = []
        self.memos: list[tuple[Any, int]] = []
        self.leaves: dict[int, Tensor] = {}
        self._seen: set[int] = set()
        # Temporary objects are kept, so that no other object gets the identity of one.
        self._alive: list[Any] = []
        # Modules outside of layers, with all that they have: looked at last, as they may be many.
        self._outside: list[tuple[nn.Module, int]] = []
        for each in objects:
            self._look_at_own(each)
        while self._outside:
            self._look_into_module(*self._outside.pop(0))

    def _look_at_own(self, value: Any) -> None:
        """Look at a part that copies have too: only its functions lead elsewhere."""
        if not isinstance(value, nn.Module):
            self._look(value, _DEPTH)
            return
        for module in value.modules():
            self._look(type(module), _DEPTH)
            for each in vars(module).values():
                # Copies have containers of their own, with the same functions in them, as hooks.
                is_container = issubclass(type(each), (dict, list))
                for one in (contents_of(each) or ()) if is_container else (each,):
                    if not issubclass(type(one), (nn.Module, dict, list)):
                        self._look(one, _DEPTH)

    def _look(self, value: Any, depth: int) -> None:
        if not depth or id(value) in self._seen or len(self._seen) > _MOST_OBJECTS:
            return
        if issubclass(type(value), Tensor) and value.is_leaf and value.requires_grad:
            self.leaves[id(value)] = value
        if issubclass(type(value), _PLAIN):
            return
        self._seen.add(id(value))
        self._alive.append(value)
        # Objects of the user's may refuse to be looked at; they then lead nowhere.
        with suppress(Exception):
            self._look_into(value, type(value), depth - 1)

    def _look_into(self, value: Any, kind: type, depth: int) -> None:
        held = held_by(value)
        if held is not None:
            self._look_at_all(held, depth)
        elif kind is functools._lru_cache_wrapper:
            self.memos.append((value, value.cache_info().misses))
            self._look(value.__wrapped__, depth)
        elif issubclass(kind, types.FunctionType):
            if not is_others(value):
                self._look_into_function(value, depth)
        elif issubclass(kind, contextvars.ContextVar):
            self._look(value.get(None), depth)
        elif issubclass(kind, type):
            self._look_into_class(value, depth)
        elif issubclass(kind, dict):
            self._look_into_names(value, depth)
        elif issubclass(kind, (list, deque)):
            if (size_of(value) or 0) <= MOST_INSIDE:
                before = contents_of(value) or []
                self.undo.append(functools.partial(_put_back_row, value, before))
                self._look_at_all(before, depth)
        elif issubclass(kind, (tuple, set, frozenset)):
            self._look_at_all(inside_of(value), depth)
        elif issubclass(kind, nn.Module):
            self._outside.append((value, depth))
        elif not issubclass(kind, types.ModuleType) and not is_others(kind):
            self._look_at_all((each for _, each in slots_in(value)), depth)
            self._look(kind, depth)
            self._look_into_names(attributes_in(value), depth)

    def _look_at_all(self, values: Iterable[Any], depth: int) -> None:
        for each in values:
            self._look(each, depth)

    def _look_into_names(self, names: dict[Any, Any], depth: int) -> None:
        if dict.__len__(names) <= MOST_INSIDE:
            before = dict(dict.items(names))
            self.undo.append(functools.partial(_put_back_names, names, before))
            self._look_at_all(before.values(), depth)

    def _look_into_class(self, kind: type, depth: int) -> None:
        for each in kind.__mro__:
            if (each is kind or id(each) not in self._seen) and not is_others(each):
                self._seen.add(id(each))
                before = dict(vars(each))
                self.undo.append(functools.partial(_put_back_class, each, before))
                self._look_at_all(before.values(), depth)

    def _look_into_module(self, value: nn.Module, depth: int) -> None:
        """Look into a module that copies of layers have in common with them."""
        # Submodules do not count as a further depth.
        modules = [value, *(each for each in value.modules() if id(each) not in self._seen)]
        self._seen.update(map(id, modules))
        for module in modules:
            before = dict(vars(module))
            self.undo.append(functools.partial(_put_back_names, vars(module), before))
            for name, each in before.items():
                if name not in _EMPTY_MOSTLY or each:
                    self._look(each, depth)
            self._look(type(module), depth)

    def _look_into_function(self, function: types.FunctionType, depth: int) -> None:
        self._look_into_names(vars(function), depth)
        self._look_at_all(function.__defaults__ or (), depth)
        self._look_at_all((function.__kwdefaults__ or {}).values(), depth)
        for cell in function.__closure__ or ():
            with suppress(ValueError):  # not filled yet
                held = cell.cell_contents
                self.undo.append(functools.partial(_put_back_cell, cell, held))
                self._look(held, depth)
        for module in imported_in(function):
            if not is_others(module):
                self._look_at_all(spoken_of(module, function), depth)
        space, named = function.__globals__, global_names(function)
        before = {name: space[name] for name in named if name in space}
        self.undo.append(functools.partial(_put_back_names, space, before, named))
        for value in before.values():
            if not issubclass(type(value), types.ModuleType):
                self._look(value, depth)
            elif not is_others(value):
                self._look_at_all(spoken_of(value, function), depth)


def _holds_tensors(value: Any) -> bool:
    return next(tensors_in(value), None) is not None


def _changes(
    before: dict[Any, Any], now: dict[Any, Any], names: Iterable[Any]
) -> Iterator[tuple[Any, Any]]:
    """Yield which names have other tensors than before, and what they had."""
    for name in names:
        old, new = before.get(name, _GONE), dict.get(now, name, _GONE)
        if old is not new and (_holds_tensors(old) or _holds_tensors(new)):
            yield name, old


def _put_back_names(
    space: dict[Any, Any], before: dict[Any, Any], names: Iterable[Any] | None = None
) -> None:
    every = dict.fromkeys((*before, *dict.keys(space))) if names is None else dict.fromkeys(names)
    for name, old in list(_changes(before, space, every)):
        if old is _GONE:
            delete_entry(space, name)
        else:
            set_entry(space, name, old)


def _put_back_class(kind: type, before: dict[str, Any]) -> None:
    now = dict(vars(kind))
    for name, old in _changes(before, now, dict.fromkeys((*before, *now))):
        if old is _GONE:
            delattr(kind, name)
        else:
            setattr(kind, name, old)


def _put_back_row(row: Any, before: list[Any]) -> None:
    now = contents_of(row) or []
    changed = len(now) != len(before) or any(a is not b for a, b in zip(now, before, strict=True))
    if changed and (_holds_tensors(now) or _holds_tensors(before)):
        put_row_back(row, before)


def _put_back_cell(cell: Any, held: Any) -> None:
    now = cell.cell_contents
    if now is not held and (_holds_tensors(now) or _holds_tensors(held)):
        cell.cell_contents = held


@contextmanager
def caches_kept(objects: Iterable[Any]) -> Iterator[dict[int, Tensor]]:
    """Restore, after a block, the tensors that the code of some objects keeps outside of them.

    Args:
        objects: Layers, and functions such as a loss.

    Yields:
        Tensors with gradients that were found on the way, by identity.
    """
    places = _Places(objects)
    try:
        yield places.leaves
    finally:
        for undo in places.undo:
            # A place that refuses does not keep the others from being restored.
            with suppress(Exception):
                undo()
        for memo, misses in places.memos:
            if memo.cache_info().misses != misses:
                memo.cache_clear()
