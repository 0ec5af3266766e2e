"""How much is left of a time limit: the only clock of searches."""

from __future__ import annotations

import time

__all__ = ["NO_DEADLINE", "Deadline"]


class Deadline:
    """How much is left of a time limit, which begins to run now; None: no limit.

    Attributes:
        time_limit: The limit in seconds.

    Example:
        >>> Deadline(None).left, Deadline(0).left, Deadline(None).is_up, Deadline(0).is_up
        (None, 0.0, False, True)
    """

    def __init__(self, time_limit: float | None) -> None:
        self.time_limit = time_limit
        self._until = None if time_limit is None else time.monotonic() + time_limit

    @property
    def left(self) -> float | None:
        """Seconds that are left, 0 if none are; None: no limit."""
        return None if self._until is None else max(self._until - time.monotonic(), 0.0)

    @property
    def is_up(self) -> bool:
        """Whether no time is left."""
        return self.left == 0


#: That of searches without a limit.
NO_DEADLINE = Deadline(None)
