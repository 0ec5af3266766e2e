"""What a forked child does with the locks of its parent, and with what other threads had noted.

A fork copies locks as they are, and of the threads only the one that forks. So a lock that another
thread holds at that moment would never be opened in the child; and what that thread has noted for
the time of a block would stay.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, TypeVar

__all__ = ["in_child", "open_in_child"]

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
