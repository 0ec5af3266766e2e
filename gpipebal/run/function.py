"""The user's own function: found by its name, and called."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

from gpipebal.errors import UsageError
from gpipebal.text import one_line

__all__ = ["call_function", "named_by_path"]

#: Defaults that make a parameter longer than this are left out of errors.
_LONGEST = 60


def call_function(name: str, arguments: Mapping[str, Any]) -> Any:
    """Call ``package.module:function``, found from the current directory too.

    Raises:
        UsageError: there is none of this name, or it does not take these arguments. An error of the
            user's own code is raised as it is.
    """
    function = _find_function(name)
    _check_arguments(name, function, arguments)
    return function(**arguments)


def _find_function(name: str) -> Callable[..., Any]:
    """Import ``package.module:function``; errors of the user's module are raised as they are."""
    module_name, _, attribute = name.partition(":")
    if not module_name or not attribute:
        raise UsageError(
            f"model is not readable: model={name!r} (expected package.module:function).\n"
            "Fix: name both a module and a function in it."
        )
    # A console script starts with its own folder on the path, not with the user's.
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if missing != module_name and not module_name.startswith(missing + "."):
            raise
        if module_name.endswith(".py") or os.sep in module_name:
            raise named_by_path(module_name, attribute) from error
        raise UsageError(
            f"module cannot be imported: module={module_name!r} (no module named {missing!r} in "
            f"{os.getcwd()} or on the path).\nFix: run the command from the module's folder, or "
            "install it."
        ) from error
    except (TypeError, ValueError) as error:
        if all(part.isidentifier() for part in module_name.split(".")):
            raise
        raise named_by_path(module_name, attribute) from error
    function: Any = module
    for part in attribute.split("."):
        function = getattr(function, part, None)
    if not callable(function):
        found = "does not exist" if function is None else f"is of type {type(function).__name__}"
        raise UsageError(
            f"function cannot be called: function={attribute!r} of module {module_name!r} "
            f"{found} (expected a function).\nFix: name a function that returns (model, sample)."
        )
    return function


def named_by_path(module_name: str, attribute: str) -> UsageError:
    """Say how to name a module that was given as the path of its file."""
    name = os.path.basename(module_name.removesuffix(".py")).lstrip(".")
    return UsageError(
        f"module is named by a path: module={module_name!r} (expected names with dots, as import "
        f"has them).\nFix: {name or 'package.module'}:{attribute}, in the folder of that file, "
        f"where {attribute}() returns (model, sample)."
    )


def _shown(parameter: inspect.Parameter) -> str:
    """Write a parameter as in the code, without its annotation; a default only if it is short."""
    text = one_line(str(parameter.replace(annotation=inspect.Parameter.empty)))
    return text if len(text) <= _LONGEST else f"{parameter.name}=..."


def _check_arguments(name: str, function: Callable[..., Any], given: Mapping[str, Any]) -> None:
    """Refuse arguments that the user's function does not take, or missing ones that it needs."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return  # some builtins have no readable signature; calling them will show
    try:
        signature.bind(**given)
    except TypeError as error:
        takes = ", ".join(map(_shown, signature.parameters.values())) or "no argument"
        raise UsageError(
            f"function cannot be called with these arguments: {name!r} with {dict(given)} "
            f"({error}; it takes {takes}).\nFix: --set NAME=VALUE for each argument without a "
            "default, and only for arguments that it has."
        ) from error
