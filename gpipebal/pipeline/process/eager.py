"""Eager code: let compiled layers run as they were written, for a while.

Code that watches single operations cannot see into compiled code. Worse, a function that
`torch.compile` first meets under a dispatch mode is never compiled again, in the whole process:
watching would change what is watched.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["EagerDispatchMode", "run_eagerly"]

# The stance belongs to the process, and blocks of several threads may end in any order: the first
# sets it, the last puts it back.
_lock = threading.Lock()
_users = 0
_stance: Any = None


@contextmanager
def run_eagerly() -> Iterator[None]:
    """Run compiled code as it was written, in all threads, for as long as a block runs.

    What is compiled stays compiled, and runs compiled again after the block. Where nothing was ever
    compiled, torch's compiler is not even imported.
    """
    _enter()
    try:
        yield
    finally:
        _leave()


class EagerDispatchMode(TorchDispatchMode):
    """A dispatch mode in which compiled code runs as it was written."""

    def __enter__(self) -> Any:
        _enter()
        try:
            return super().__enter__()
        except BaseException:
            _leave()
            raise

    def __exit__(self, *error: Any) -> None:
        try:
            super().__exit__(*error)
        finally:
            _leave()


def _enter() -> None:
    global _users, _stance
    with _lock:
        _users += 1
        if _stance is None and "torch._dynamo" in sys.modules:
            _stance = torch.compiler.set_stance("force_eager")


def _leave() -> None:
    global _users, _stance
    with _lock:
        _users -= 1
        if not _users and _stance is not None:
            stance, _stance = _stance, None
            stance.__exit__(None, None, None)
