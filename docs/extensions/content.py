"""What the directives of the documentation show; no Sphinx here, so that tests can try it all."""

from __future__ import annotations

import inspect
import io
import os
import re
from collections.abc import Mapping
from contextlib import chdir, redirect_stdout, suppress
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).parents[2]


def draw(code: str, name: str) -> Any:
    """Run the code of a picture from the root of the checkout; return the figure that it drew.

    Args:
        code: What stands in the page.
        name: Name of the picture, for errors.

    Raises:
        NameError: the code leaves no ``ax``.
    """
    names: dict[str, Any] = {}
    with chdir(ROOT):
        exec(compile(code, f"picture {name}", "exec"), names)
    if "ax" not in names:
        raise NameError(f"the code of picture {name!r} leaves no axes called ax")
    return names["ax"].figure


def help_of(command: str) -> str:
    """Return what ``gpipebal COMMAND --help`` prints on a terminal of 80 columns."""
    from gpipebal.cli import main

    text = io.StringIO()
    words = [*command.split(), "--help"]
    with mock.patch.dict(os.environ, COLUMNS="80"), redirect_stdout(text), suppress(SystemExit):
        main(words)
    return f"$ gpipebal {' '.join(words)}\n{text.getvalue().rstrip()}"


def constants_of(module: str) -> dict[str, Any]:
    """Return the constants that a module makes public, by name, but for those autodoc finds."""
    home = import_module(module)
    values = {name: getattr(home, name) for name in home.__all__}
    own = Path(inspect.getfile(home)).read_text(encoding="utf-8")
    return {
        name: value
        for name, value in values.items()
        if not (inspect.isclass(value) or inspect.isroutine(value) or inspect.ismodule(value))
        and not _comment_in(own, name)
    }


def comment_of(module: str, name: str) -> str:
    """Return the comment ``#:`` above a constant's definition, in the module or in its package."""
    file = Path(inspect.getfile(import_module(module)))
    files = sorted(file.parent.rglob("*.py")) if file.name == "__init__.py" else [file]
    found = (_comment_in(path.read_text(encoding="utf-8"), name) for path in files)
    return next(filter(None, found), "")


def _comment_in(source: str, name: str) -> str:
    found = re.search(rf"((?:^#: .*\n)+){name}\b[^=\n]*=", source, re.MULTILINE)
    if found is None:
        return ""
    return " ".join(line.removeprefix("#: ") for line in found[1].splitlines())


def text_of(value: Any) -> str:
    """Write a value on one line: of a mapping the keys, of a long text nothing.

    Example:
        >>> text_of({"a": 1, "b": 2}), text_of(("x",)), text_of("two lines, " * 100)
        ("'a', 'b'", "('x',)", '')
    """
    if isinstance(value, Mapping):
        return ", ".join(map(repr, value))
    text = repr(value) if isinstance(value, str) else str(value).replace("typing.", "")
    return text if len(text) <= 400 else ""
