"""Inboxes: where one worker leaves a value for another."""

from __future__ import annotations

import threading
import time
from collections.abc import Hashable
from queue import Empty, SimpleQueue
from typing import Any

__all__ = ["Flag", "Inbox", "InboxClosedError", "Stop"]

#: Seconds after which a waiting thread looks around by itself. A worker at `Stop`: an interrupt can
#: come between setting it and waking all of them. The main thread for signals: one that comes
#: between Python's last look at them and the wait wakes no thread.
LOOK_AROUND = 0.5


class InboxClosedError(Exception):
    """The mini-batch failed elsewhere: nothing more will come, and nothing new should start."""


class Flag:
    """What one thread waits for and another sets, once.

    A `threading.Event` does the same, but an interrupt that comes while the main thread takes its
    lock leaves it locked for ever. Here a queue wakes the waiter; its lock is held only in C.
    """

    def __init__(self) -> None:
        self._is_set = False
        self._wakes: SimpleQueue[None] = SimpleQueue()

    def set(self) -> None:
        """Set it, and wake the thread that waits."""
        self._is_set = True
        self._wakes.put(None)

    def wake(self) -> None:
        """Let the thread that waits for it look around, without setting it."""
        self._wakes.put(None)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it is set or `wake` is called, or for some seconds; tell whether it is set."""
        until = None if timeout is None else time.monotonic() + timeout
        # Other threads go on sleeping: woken while the interpreter ends, they would be killed.
        most = LOOK_AROUND if threading.current_thread() is threading.main_thread() else None
        while not self._is_set:
            left = None if until is None else max(until - time.monotonic(), 0.0)
            turn = min((one for one in (left, most) if one is not None), default=None)
            try:
                self._wakes.get(timeout=turn)
            except Empty:
                if turn != left:
                    continue
            break
        return self._is_set


class Stop:
    """Whether a mini-batch has been stopped; one for all its inboxes, and for good.

    Attributes:
        is_set: Whether it has.
        is_exit: Whether because the interpreter ends.
    """

    def __init__(self) -> None:
        self.is_set = False
        self.is_exit = False

    def check(self) -> None:
        """Raise InboxClosedError if the mini-batch has been stopped."""
        if self.is_set:
            raise InboxClosedError


class Inbox:
    """Values by key. `take` waits for its key, until the mini-batch is stopped.

    Each key is put once and taken once. A stopped inbox gives nothing out, even if it holds a
    value, so that no new cell starts after a fault.

    A thread that puts faster than another one takes can wait for room, if these are the only two
    that use the inbox, and in the same order of keys: else they might wait for each other.
    """

    def __init__(self, stop: Stop) -> None:
        self._values: dict[Hashable, Any] = {}
        # Entered by itself, which takes a quarter of the time of entering the condition.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._stop = stop
        self._is_awaited = False

    def put(self, key: Hashable, value: Any) -> None:
        """Leave a value. After a stop it is dropped."""
        with self._lock:
            if not self._stop.is_set:
                self._values[key] = value
                self._changed.notify_all()

    def take(self, key: Hashable) -> Any:
        """Wait for a value and take it out.

        Raises:
            InboxClosedError: the mini-batch has been stopped.
        """
        with self._lock:
            while not self._stop.is_set and key not in self._values:
                self._changed.wait(LOOK_AROUND)
            self._stop.check()
            if self._is_awaited:
                self._changed.notify_all()
            return self._values.pop(key)

    def wait_for_room(self, most: int) -> None:
        """Wait until fewer than `most` values are in it.

        Raises:
            InboxClosedError: the mini-batch has been stopped.
        """
        # Without the lock: while this thread puts nothing, there can only be more room.
        if len(self._values) < most:
            return
        with self._lock:
            self._is_awaited = True
            while not self._stop.is_set and len(self._values) >= most:
                self._changed.wait(LOOK_AROUND)
            self._is_awaited = False
            self._stop.check()

    def wake(self) -> None:
        """Let every waiting thread look at the stop, and drop all values if it is set."""
        with self._lock:
            if self._stop.is_set:
                self._values.clear()
            self._changed.notify_all()
