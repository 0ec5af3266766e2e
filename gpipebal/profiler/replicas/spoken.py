"""What code speaks of: the names in it, and what functions and their like hold."""

from __future__ import annotations

import dis
import functools
import sys
import types
import weakref
from collections.abc import Iterator
from contextlib import suppress
from importlib.util import resolve_name
from typing import Any

__all__ = ["global_names", "held_by", "imported_in", "is_others", "spoken_in", "spoken_of"]

#: Packages whose functions keep nothing of a layer.
_OTHERS = frozenset({"torch", "numpy", "gpipebal", "builtins", "functools", "contextlib", "typing"})


def held_by(value: Any) -> tuple[Any, ...] | None:
    """Return what a bound method, a partial call, a descriptor or a weak reference holds.

    Example:
        >>> held_by(functools.partial(max, 1, key=abs)), held_by(3)
        ((<built-in function max>, 1, <built-in function abs>), None)
    """
    kind = type(value)  # what an object says of its class may be anything, or raise
    if issubclass(kind, functools.partial):
        return (value.func, *value.args, *value.keywords.values())
    if issubclass(kind, types.MethodType):
        return (value.__func__, value.__self__)
    if issubclass(kind, (staticmethod, classmethod)):
        return (value.__func__,)
    if issubclass(kind, property):
        return (value.fget,)
    if issubclass(kind, functools.cached_property):
        return (value.func,)
    if issubclass(kind, weakref.ref):
        return (weakref.ref.__call__(value),)
    return None


def is_others(value: Any) -> bool:
    """Tell whether a function, a class or a module of Python is a library's."""
    home = value.__name__ if isinstance(value, types.ModuleType) else value.__module__
    return home is not None and home.partition(".")[0] in _OTHERS


def _codes_of(function: types.FunctionType) -> Iterator[types.CodeType]:
    """Yield the code of a function, and of those inside of it."""
    codes = [function.__code__]
    while codes:
        code = codes.pop()
        codes += [each for each in code.co_consts if isinstance(each, types.CodeType)]
        yield code


def global_names(function: types.FunctionType) -> list[str]:
    """Return the global names that a function reads or sets, also in functions inside of it."""
    return [name for code in _codes_of(function) for name in _names_in(code)]


def spoken_in(function: types.FunctionType) -> set[str]:
    """Return the names that a function speaks of, also of attributes."""
    return {name for code in _codes_of(function) for name in code.co_names}


def spoken_of(module: types.ModuleType, function: types.FunctionType) -> list[Any]:
    """Return what of a Python module has names that a function speaks of."""
    return [vars(module)[name] for name in spoken_in(function) & vars(module).keys()]


def imported_in(function: types.FunctionType) -> Iterator[types.ModuleType]:
    """Yield the modules that a function imports itself, if they are loaded already."""
    package = function.__globals__.get("__package__") or ""
    for code in _codes_of(function):
        for name, level in _imports_in(code):
            with suppress(ImportError, ValueError):
                module = sys.modules.get(resolve_name("." * level + name, package))
                if module is not None:
                    yield module


@functools.lru_cache(4096)
def _imports_in(code: types.CodeType) -> tuple[tuple[str, int], ...]:
    steps = list(dis.get_instructions(code))
    found = []
    for k, step in enumerate(steps):
        if step.opname == "IMPORT_NAME":
            level = steps[k - 2].argval if k > 1 else 0
            found.append((str(step.argval), level if isinstance(level, int) else 0))
    return tuple(found)


@functools.lru_cache(4096)
def _names_in(code: types.CodeType) -> tuple[str, ...]:
    return tuple(
        str(step.argval)
        for step in dis.get_instructions(code)
        if step.opname in ("LOAD_GLOBAL", "STORE_GLOBAL", "LOAD_NAME")
    )
