"""The output folder of a run, and which of its files this run has written."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from gpipebal.errors import UsageError

__all__ = ["FILES", "Folder"]

#: Files of a run, in the order in which they are written.
FILES = ("profile.json", "plan.json", "timeline.json", "report.json", "plan.png")


class Folder:
    """A folder that exists and can be written to.

    Raises:
        UsageError: it cannot be made, or not be written to.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._written: list[str] = []
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise _bad_folder(path, error.strerror or str(error)) from error
        if not os.access(path, os.W_OK | os.X_OK):
            raise _bad_folder(path, "no permission to write into it")

    def write(self, name: str, save: Callable[[Path], None]) -> None:
        """Let `save` write a file, and remember it once it is whole."""
        save(self.path / name)
        self._written.append(name)

    def summary(self) -> str:
        """Say what this run has written so far, and what is older."""
        kept = f"{', '.join(self._written)} written" if self._written else "nothing written"
        older = [n for n in FILES if n not in self._written and (self.path / n).exists()]
        return f"{self.path}: {kept}" + (f"; {', '.join(older)} from before" if older else "")


def _bad_folder(path: Path, reason: str) -> UsageError:
    return UsageError(
        f"output folder cannot be used: output={str(path)!r} ({reason}).\n"
        "Fix: name a folder that you may write to with --output."
    )
