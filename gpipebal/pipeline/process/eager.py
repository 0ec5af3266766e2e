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

__all__ = ["EagerDispatchMode", "eager_blocks", "leave_eager_blocks", "run_eagerly"]

# The stance belongs to the process, and blocks of several threads may end in any order: the first
# sets it, the last puts it back.
_lock = threading.Lock()
#: Blocks of each thread, by its number; a thread without any is not in it.
_blocks: dict[int, int] = {}
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


def eager_blocks() -> int:
    """Return how many such blocks this thread is in."""
    return _blocks.get(threading.get_ident(), 0)


def leave_eager_blocks(n_blocks: int) -> bool:
    """Leave those that an interrupt has left open in this thread, but for so many.

    Returns:
        Whether no thread is in any.
    """
    global _stance
    with _lock:
        if n_blocks:
            _blocks[threading.get_ident()] = n_blocks
        else:
            _blocks.pop(threading.get_ident(), None)
        if not _blocks and _stance is not None:
            stance, _stance = _stance, None
            stance.__exit__(None, None, None)
        return not _blocks


def _enter() -> None:
    global _stance
    with _lock:
        _blocks[threading.get_ident()] = eager_blocks() + 1
        if _stance is None and "torch._dynamo" in sys.modules:
            _stance = torch.compiler.set_stance("force_eager")


def _leave() -> None:
    leave_eager_blocks(max(0, eager_blocks() - 1))
