"""What watches a mini-batch while it runs: a trace, a meter, and the timeout."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gpipebal.pipeline.observers.ledger import Ledger
from gpipebal.pipeline.observers.recorder import MiniBatchRecord
from gpipebal.pipeline.values.lane import Lane
from gpipebal.schedule import Action

__all__ = ["Watchers"]


@dataclass(frozen=True)
class Watchers:
    """The trace and the meter of a mini-batch, and its timeout.

    Attributes:
        record: Where each action's times go; None when no trace is on.
        ledger: Where live memory is counted; None when memory is not metered.
        timeout: Seconds without the end of any action after which the caller gives up; None:
            never.
    """

    record: MiniBatchRecord | None = None
    ledger: Ledger | None = None
    timeout: float | None = None

    def started(self, lane: Lane) -> Any:
        """Note the time at which an action begins; for `ended`."""
        return lane.clock() if self.record is not None else None

    def ended(self, action: Action, started: Any, lane: Lane) -> None:
        """Keep the times of an action that has ended."""
        if self.record is not None:
            self.record.add(*action, started, lane.clock())
