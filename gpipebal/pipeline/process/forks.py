"""Locks, and forks: what a forked child does with those of its parent, and what threads had noted.

A fork copies locks as they are, and of the threads only the one that forks. So a lock that another
thread holds at that moment would never be opened in the child; and what that thread has noted for
the time of a block would stay.

A thread may also come upon a lock that it holds itself: in a signal handler, or in a destructor,
which run in the middle of whatever it was doing.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, TypeVar

from gpipebal.errors import PipelineError

__all__ = ["check_not_inside", "in_child", "open_in_child"]

L = TypeVar("L")


def in_child(renew: Callable[[], None]) -> None:
    """Let something be done in each forked child, before it goes on; for the life of the process.

    Several are done in the order in which they were given.
    """
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=renew)


def open_in_child(lock: L) -> L:
    """Return a lock of `threading`, which will be open in forked children.

    An `RLock` that the thread which forks holds itself stays closed: in the child it goes on there,
    and opens it.

    Example:
        >>> import threading
        >>> lock = open_in_child(threading.Lock())
        >>> lock.locked()
        False
    """
    # As Python's own modules do with theirs.
    reopen: Any = getattr(lock, "_at_fork_reinit", None)
    is_own: Any = getattr(lock, "_is_owned", None)

    def renew() -> None:
        if is_own is None or not is_own():
            reopen()

    if reopen is not None:
        in_child(renew)
    return lock


def check_not_inside(lock: Any) -> None:
    """Make sure that the present thread is not in a block in which something is started.

    Args:
        lock: The `threading.RLock` of the block.

    Raises:
        PipelineError: it is, and would wait for itself, or start the same once more.
    """
    if lock._is_owned():
        raise PipelineError(
            "a pipeline was called in a thread that was just starting one: by a signal handler or "
            "a destructor, which had to wait for itself.\n"
            "Fix: let it take a note, and run the pipeline where the program looks at that."
        )
