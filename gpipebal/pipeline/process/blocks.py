"""Blocks in which something is installed for the whole process, entered and left by any thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from gpipebal.pipeline.process.forks import in_child, open_in_child

__all__ = ["SharedBlocks", "all_shared_blocks"]

_all: list[SharedBlocks] = []


class SharedBlocks:
    """What the first block of any thread installs and the last one removes.

    Blocks are counted by thread, so that those which an interrupt has left open in a thread can be
    left afterwards. Instances live as long as the process.

    Args:
        install: Called when the first block begins. If it returns False, because there is nothing
            to install yet, also when the next ones begin.
        remove: Called when the last one ends; also if `install` was interrupted, and again if it
            was interrupted itself.
    """

    def __init__(self, install: Callable[[], bool | None], remove: Callable[[], None]) -> None:
        self._install, self._remove = install, remove
        # A signal handler or a destructor may enter and leave a block in the middle of either.
        self._lock = open_in_child(threading.RLock())
        self._is_installed = False
        #: Blocks of each thread, by its number; a thread without any is not in it.
        self._counts: dict[int, int] = {}
        _all.append(self)
        in_child(self._keep_own)

    def here(self) -> int:
        """Return how many blocks this thread is in."""
        return self._counts.get(threading.get_ident(), 0)

    def enter(self) -> None:
        """Begin a block."""
        with self._lock:
            self._counts[threading.get_ident()] = self.here() + 1
            if not self._is_installed:
                self._is_installed = True
                if self._install() is False:
                    self._is_installed = False

    def leave(self) -> None:
        """End a block."""
        self.leave_all_but(max(0, self.here() - 1))

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Run a block; of two in one thread, the one that began first may end first."""
        n_blocks, is_inside = self.here(), False
        try:
            self.enter()
            is_inside = True
            yield
        finally:
            try:
                if is_inside:
                    n_blocks = max(0, self.here() - 1)
                self.leave_all_but(n_blocks)
            except BaseException:  # an interrupt came in between
                self.leave_all_but(n_blocks)
                raise

    def enter_with(self, enter: Callable[[], Any]) -> Any:
        """Begin a block, then enter something; if that fails, the block is over too."""
        n_blocks = self.here()
        try:
            self.enter()
            return enter()
        except BaseException:
            self.leave_all_but(n_blocks)
            raise

    def leave_with(self, leave: Callable[..., Any], *error: Any) -> None:
        """Leave what `enter_with` has entered, then end the block, also if leaving fails."""
        n_blocks = max(0, self.here() - 1)
        try:
            leave(*error)
        finally:
            try:
                self.leave_all_but(n_blocks)
            except BaseException:  # an interrupt came in between
                self.leave_all_but(n_blocks)
                raise

    def _keep_own(self) -> None:
        """Keep the blocks of this thread, which is the only one of a forked child."""
        n_blocks = self.here()
        self._counts.clear()
        self.leave_all_but(n_blocks)

    def leave_all_but(self, n_blocks: int) -> None:
        """End the blocks of this thread but for so many, the first ones."""
        with self._lock:
            if n_blocks:
                self._counts[threading.get_ident()] = n_blocks
            else:
                self._counts.pop(threading.get_ident(), None)
            if not self._counts and self._is_installed:
                self._remove()
                self._is_installed = False


def all_shared_blocks() -> list[SharedBlocks]:
    """Return all of the process."""
    return list(_all)
