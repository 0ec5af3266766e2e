"""Caches that layers keep outside of themselves, put back as they were.

A layer may keep a table of positions in a dictionary of its closure, under a global name, in its
class, as a default of an argument or behind `functools.lru_cache`. Copies of the layer fill the
same one, with tensors of the device that is measured, or without values.

Only what is or holds tensors is put back: whatever else such a place is for goes on.
"""

from __future__ import annotations

import dis
import functools
import types
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["caches_kept", "global_names"]

#: Objects inside objects are looked at so deep, containers if they hold no more than so many.
_DEPTH, _MOST_INSIDE, _MOST_OBJECTS = 8, 1000, 20_000
#: Packages whose functions keep nothing of a layer.
_OTHERS = frozenset({"torch", "numpy", "gpipebal", "builtins", "functools", "contextlib", "typing"})


class _Places:
    """The places outside of layers where code of theirs may put tensors.

    Attributes:
        undo: What puts each place back.
        memos: Functions that remember their results, with how many were new before.
    """

    def __init__(self, objects: Iterable[Any]) -> None:
        self.undo: list[Callable[[], None]] = []
        self.memos: list[tuple[Any, int]] = []
        self._seen: set[int] = set()
        # What is only looked at for a moment must not leave its identity to another.
        self._alive: list[Any] = []
        for each in objects:
            self._look_at_own(each)

    def _look_at_own(self, value: Any) -> None:
        """Look at what copies have too: only its functions lead elsewhere."""
        if not isinstance(value, nn.Module):
            self._look(value, _DEPTH)
            return
        for module in value.modules():
            self._look(type(module), _DEPTH)
            for each in vars(module).values():
                if not isinstance(each, (nn.Module, dict, list)):
                    self._look(each, _DEPTH)

    def _look(self, value: Any, depth: int) -> None:
        if isinstance(value, (staticmethod, classmethod)):
            value = value.__func__
        if not depth or id(value) in self._seen or len(self._seen) > _MOST_OBJECTS:
            return
        if isinstance(value, (Tensor, nn.Module, str, bytes, int, float, type(None))):
            return
        self._seen.add(id(value))
        self._alive.append(value)
        if hasattr(type(value), "cache_info") and hasattr(type(value), "cache_clear"):
            self.memos.append((value, value.cache_info().misses))
            self._look(getattr(value, "__wrapped__", None), depth)
        elif isinstance(value, types.FunctionType):
            if not _is_others(value):
                self._look_into_function(value, depth - 1)
        elif isinstance(value, types.MethodType):
            self._look(value.__func__, depth)
            self._look(value.__self__, depth - 1)
        elif isinstance(value, property):
            self._look(value.fget, depth)
        elif isinstance(value, functools.partial):
            self._look_at_all((value.func, *value.args, *value.keywords.values()), depth - 1)
        elif isinstance(value, type):
            self._look_into_class(value, depth - 1)
        elif isinstance(value, dict):
            self._look_into_names(value, depth - 1)
        elif isinstance(value, list):
            if len(value) <= _MOST_INSIDE:
                before = list(value)
                self.undo.append(lambda: _put_back_list(value, before))
                self._look_at_all(before, depth - 1)
        elif isinstance(value, (tuple, set, frozenset)):
            self._look_at_all(value, depth - 1)
        elif not isinstance(value, types.ModuleType) and not _is_others(type(value)):
            self._look_into_names(getattr(value, "__dict__", None), depth - 1)
            self._look(type(value), depth)

    def _look_at_all(self, values: Iterable[Any], depth: int) -> None:
        for each in values:
            self._look(each, depth)

    def _look_into_names(self, names: Any, depth: int) -> None:
        if isinstance(names, dict) and len(names) <= _MOST_INSIDE:
            before = dict(names)
            self.undo.append(lambda: _put_back(names, before, names.__setitem__, names.pop))
            self._look_at_all(before.values(), depth)

    def _look_into_class(self, kind: type, depth: int) -> None:
        for each in kind.__mro__:
            if (id(each) in self._seen and each is not kind) or _is_others(each):
                continue
            self._seen.add(id(each))
            before = dict(vars(each))
            self.undo.append(lambda each=each, before=before: _put_back_class(each, before))  # type: ignore[misc]
            self._look_at_all(before.values(), depth)

    def _look_into_function(self, function: types.FunctionType, depth: int) -> None:
        self._look_at_all(function.__defaults__ or (), depth)
        self._look_at_all((function.__kwdefaults__ or {}).values(), depth)
        for cell in function.__closure__ or ():
            try:
                held = cell.cell_contents
            except ValueError:
                continue  # not filled yet
            self.undo.append(lambda cell=cell, held=held: _put_back_cell(cell, held))  # type: ignore[misc]
            self._look(held, depth)
        space = function.__globals__
        names = {name: space.get(name) for name in global_names(function)}
        self.undo.append(lambda: _put_back_names(space, names))
        for value in names.values():
            if isinstance(value, types.ModuleType):
                # Of another module of the user's, what the code speaks of.
                inside = vars(value) if not _is_others(value) else {}
                spoken = set(_attribute_names(function)) & inside.keys()
                self._look_at_all([inside[name] for name in spoken], depth)
            else:
                self._look(value, depth)


def _is_others(value: Any) -> bool:
    home = value.__name__ if isinstance(value, types.ModuleType) else value.__module__
    return home is not None and home.partition(".")[0] in _OTHERS


def _codes(function: types.FunctionType) -> Iterator[types.CodeType]:
    codes = [function.__code__]
    while codes:
        code = codes.pop()
        codes += [each for each in code.co_consts if isinstance(each, types.CodeType)]
        yield code


def global_names(function: types.FunctionType) -> list[str]:
    """Return the global names that a function reads or sets, also in functions inside of it."""
    return [
        str(step.argval)
        for code in _codes(function)
        for step in dis.get_instructions(code)
        if step.opname in ("LOAD_GLOBAL", "STORE_GLOBAL", "LOAD_NAME")
    ]


def _attribute_names(function: types.FunctionType) -> Iterator[str]:
    for code in _codes(function):
        yield from code.co_names


def _holds_tensors(value: Any, depth: int = 4) -> bool:
    if isinstance(value, Tensor):
        return True
    if not depth or not isinstance(value, (tuple, list, dict, set)) or len(value) > _MOST_INSIDE:
        return False
    inside = value.values() if isinstance(value, dict) else value
    return any(_holds_tensors(each, depth - 1) for each in list(inside))


_GONE = object()


def _put_back(now: Any, before: dict[Any, Any], put: Any, drop: Any) -> None:
    for name in dict.fromkeys((*before, *now)):
        old, new = before.get(name, _GONE), now.get(name, _GONE)
        if old is new or not (_holds_tensors(old) or _holds_tensors(new)):
            continue
        if old is _GONE:
            drop(name)
        else:
            put(name, old)


def _put_back_class(kind: type, before: dict[str, Any]) -> None:
    _put_back(
        dict(vars(kind)),
        before,
        lambda name, value: setattr(kind, name, value),
        lambda name: delattr(kind, name),
    )


def _put_back_names(space: dict[str, Any], before: dict[str, Any]) -> None:
    now = {name: space.get(name) for name in before}
    _put_back(now, before, space.__setitem__, space.pop)


def _put_back_list(now: list[Any], before: list[Any]) -> None:
    changed = len(now) != len(before) or any(map(_is_other, now, before))
    if changed and (_holds_tensors(now) or _holds_tensors(before)):
        now[:] = before


def _is_other(one: Any, other: Any) -> bool:
    return one is not other


def _put_back_cell(cell: Any, held: Any) -> None:
    try:
        now = cell.cell_contents
    except ValueError:
        now = None
    if now is not held and (_holds_tensors(now) or _holds_tensors(held)):
        cell.cell_contents = held


@contextmanager
def caches_kept(objects: Iterable[Any]) -> Iterator[None]:
    """Put back behind a block what code of some objects keeps of tensors outside of them.

    What `functools.lru_cache` has remembered in between is forgotten, with all that it knew.

    Args:
        objects: Layers, and functions such as a loss.
    """
    places = _Places(objects)
    try:
        yield
    finally:
        # Objects that came into being in between die with the names that hold them.
        with torch.no_grad():
            for undo in places.undo:
                undo()
        for memo, misses in places.memos:
            if memo.cache_info().misses != misses:
                memo.cache_clear()
