"""The output folder of a run, and which of its files this run has written."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from gpipebal.errors import UsageError
from gpipebal.files import why_not_writable
from gpipebal.text import is_whole

__all__ = ["FILES", "Folder"]

#: Files of a run, in the order in which they are written.
FILES = ("profile.json", "plan.json", "timeline.json", "report.json", "plan.png")


class Folder:
    """A folder that exists and can be written to.

    Raises:
        UsageError: it cannot be made, or cannot be written to.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        if not is_whole(str(path)):  # on some systems names are any bytes
            raise _bad_folder(path, "the report could not name it")
        self._written: list[str] = []
        # Not `Path.exists`, which raises if it may not look, or if a name is too long.
        self._made = [one for one in (path, *path.parents) if not os.path.exists(one)]
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            self.drop_if_empty()
            raise _bad_folder(path, error.strerror or str(error)) from error
        reasons = [reason for name in FILES if (reason := why_not_writable(path / name))]
        if reasons:
            self.drop_if_empty()
            raise _bad_folder(path, reasons[0])

    def write(self, name: str, save: Callable[[Path], None]) -> None:
        """Let `save` write a file, and remember it once it is whole."""
        save(self.path / name)
        self._written.append(name)

    def drop_if_empty(self) -> None:
        """Remove the folder, and those above it, if this run made them and wrote nothing there."""
        for folder in self._made:
            with suppress(OSError):  # something is in it, or it is not there
                folder.rmdir()

    def summary(self) -> str:
        """Say what this run has written so far, and what is older."""
        kept = f"{', '.join(self._written)} written" if self._written else "nothing written"
        older = self._older()
        return f"{self.path}: {kept}" + (f"; {', '.join(older)} from before" if older else "")

    @property
    def is_mixed(self) -> bool:
        """Whether it holds files of this run next to older ones."""
        return bool(self._written and self._older())

    def _older(self) -> list[str]:
        return [n for n in FILES if n not in self._written and (self.path / n).exists()]


def _bad_folder(path: Path, reason: str) -> UsageError:
    return UsageError(
        f"output folder cannot be used: output={str(path)!r} ({reason}).\n"
        "Fix: name a folder that you may write to with --output."
    )
