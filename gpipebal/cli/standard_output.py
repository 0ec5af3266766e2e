"""Standard output is for results, in any encoding; what a library prints goes to standard error."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

__all__ = ["libraries_on_standard_error", "output_escaped"]

_OUTPUT, _ERROR = 1, 2

#: What Python chooses for standard output by itself; anything else is its user's choice.
_DEFAULTS = ("strict", "surrogateescape")


@contextmanager
def output_escaped() -> Iterator[None]:
    """Let text that standard output cannot encode be printed with escapes, as in errors."""
    stream: Any = sys.stdout
    chosen = getattr(stream, "errors", None)
    if chosen not in _DEFAULTS or not hasattr(stream, "reconfigure"):
        yield
        return
    with suppress(OSError, ValueError):  # it is gone: whoever prints will notice
        stream.reconfigure(errors="backslashreplace")
    try:
        yield
    finally:
        with suppress(OSError, ValueError):
            stream.reconfigure(errors=chosen)


@contextmanager
def libraries_on_standard_error() -> Iterator[None]:
    """Let nothing reach standard output in the block: HiGHS sometimes prints a line of its own.

    For the main thread of a command, which itself prints no results in the block.
    """
    _flush()
    try:
        os.fstat(_OUTPUT)
    except OSError:  # there is none
        yield
        return
    # Before anything else is opened, which would get the number of one that is closed.
    try:
        elsewhere = os.dup(_ERROR)
    except OSError:  # there is no standard error either: nothing would be seen
        elsewhere = os.open(os.devnull, os.O_WRONLY)
    own = os.dup(_OUTPUT)
    try:
        os.dup2(elsewhere, _OUTPUT)
        yield
    finally:
        _flush()
        os.dup2(own, _OUTPUT)
        os.close(own)
        os.close(elsewhere)


def _flush() -> None:
    """Write earlier output that Python and C still have buffered to where it was meant to go."""
    with suppress(OSError, ValueError, AttributeError):
        sys.stdout.flush()
    with suppress(OSError, AttributeError, TypeError):  # none of the kind on Windows
        ctypes.CDLL(None).fflush(None)
