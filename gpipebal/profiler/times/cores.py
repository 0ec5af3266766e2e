"""Whether a thread had a core to itself: what other programs do is no part of a layer's time.

A wide spread tells of short disturbances. Who shares the cores all the time makes all times longer
alike, and only the system knows.
"""

from __future__ import annotations

import time

__all__ = ["CoreWatch"]

#: Where Linux says how long a thread has run, and how long it has waited for a core, in
#: nanoseconds (``Documentation/scheduler/sched-stats.rst`` of its source).
_PATH = "/proc/thread-self/schedstat"


def _seconds_waited() -> float | None:
    """Return how long this thread has waited for a core in its life; None: nobody tells."""
    try:
        with open(_PATH, encoding="ascii") as file:
            return int(file.read().split()[1]) * 1e-9
    except (OSError, ValueError, IndexError):
        return None


class CoreWatch:
    """Tells for what share of the time a thread was ready to run and had no core.

    Waiting until another thread or a device has done its part does not count.

    Example:
        >>> watch = CoreWatch()
        >>> share = watch.share_waited()
        >>> share is None or 0 <= share <= 1
        True
    """

    def __init__(self) -> None:
        self._waited, self._begun = _seconds_waited(), time.perf_counter()

    def share_waited(self) -> float | None:
        """Return the share since the watch was made, in the same thread; None: nobody tells."""
        now, seconds = _seconds_waited(), time.perf_counter() - self._begun
        if now is None or self._waited is None or seconds <= 0:
            return None
        return min(1.0, max(0.0, now - self._waited) / seconds)
