"""Inboxes: where one worker leaves a value for another."""

from __future__ import annotations

import threading
from collections.abc import Hashable
from typing import Any

__all__ = ["Inbox", "InboxClosedError"]


class InboxClosedError(Exception):
    """The mini-batch failed elsewhere: nothing more will come, and nothing new should start."""


class Inbox:
    """Values by key. `take` waits for its key, until the inbox is closed.

    Each key is put once and taken once. Closing wakes everyone who waits, for good: a closed
    inbox gives nothing out, even if it holds a value, so that no new cell starts after a fault.
    """

    def __init__(self) -> None:
        self._values: dict[Hashable, Any] = {}
        self._changed = threading.Condition()
        self._closed = False

    def put(self, key: Hashable, value: Any) -> None:
        """Leave a value. After closing it is dropped."""
        with self._changed:
            if not self._closed:
                self._values[key] = value
                self._changed.notify_all()

    def take(self, key: Hashable) -> Any:
        """Wait for a value and take it out.

        Raises:
            InboxClosedError: the inbox is closed.
        """
        with self._changed:
            while not self._closed and key not in self._values:
                self._changed.wait()
            if self._closed:
                raise InboxClosedError
            return self._values.pop(key)

    def check_open(self) -> None:
        """Raise InboxClosedError if the inbox is closed."""
        if self._closed:
            raise InboxClosedError

    def close(self) -> None:
        """Drop all values and wake everyone who waits."""
        with self._changed:
            self._closed = True
            self._values.clear()
            self._changed.notify_all()
