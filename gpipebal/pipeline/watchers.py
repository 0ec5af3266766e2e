"""Who looks on while a mini-batch runs: a trace, a meter, and the clock."""

from __future__ import annotations

from dataclasses import dataclass

from gpipebal.pipeline.ledger import Ledger
from gpipebal.pipeline.recorder import MiniBatchRecord

__all__ = ["Watchers"]


@dataclass(frozen=True)
class Watchers:
    """Who looks on, and for how long.

    Attributes:
        record: Where each action's times go; None when nobody traces.
        ledger: Where live memory is counted; None when nobody meters.
        timeout: Seconds without the end of any action after which the caller gives up; None:
            never.
    """

    record: MiniBatchRecord | None = None
    ledger: Ledger | None = None
    timeout: float | None = None
