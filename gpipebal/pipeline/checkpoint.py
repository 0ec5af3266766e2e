"""Which pass a layer is running in: what `is_checkpointing` and `is_recomputing` answer."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["is_checkpointing", "is_recomputing", "phase"]


class _Pass(threading.local):
    checkpointing = False
    recomputing = False


_current = _Pass()


def is_checkpointing() -> bool:
    """Tell a layer that this forward records no graph and will be run again in the backward.

    Returns:
        True inside the first pass of a checkpointed micro-batch, else False.
    """
    return _current.checkpointing


def is_recomputing() -> bool:
    """Tell a layer that this forward is a repetition, made in the backward.

    A layer that counts its calls or updates a state must do so only where this is False.

    Returns:
        True inside the recompute of a checkpointed micro-batch, else False.
    """
    return _current.recomputing


@contextmanager
def phase(*, checkpointing: bool = False, recomputing: bool = False) -> Iterator[None]:
    """Set, for this thread and this block, what the two questions answer."""
    before = _current.checkpointing, _current.recomputing
    _current.checkpointing, _current.recomputing = checkpointing, recomputing
    try:
        yield
    finally:
        _current.checkpointing, _current.recomputing = before
