"""Timeline: when every action of one mini-batch began and ended, predicted or measured.

The simulator and the tracer of a running pipeline make the same type, so that a prediction and a
measurement are compared, drawn and saved by the same code. A saved timeline is at once a Chrome
trace, which https://ui.perfetto.dev opens, and an exact record, which `Timeline.load` reads.
"""

from __future__ import annotations

from gpipebal.timeline.events import (
    ALL_KINDS,
    COMPUTE_KINDS,
    COPY_KIND,
    EVENT_KINDS,
    KIND_NAMES,
    LAUNCH_KIND,
    Event,
    EventKind,
    kind_of,
)
from gpipebal.timeline.outline import outline
from gpipebal.timeline.table import EventTable
from gpipebal.timeline.timeline import Source, Timeline

__all__ = [
    "ALL_KINDS",
    "COMPUTE_KINDS",
    "COPY_KIND",
    "EVENT_KINDS",
    "KIND_NAMES",
    "LAUNCH_KIND",
    "Event",
    "EventKind",
    "EventTable",
    "Source",
    "Timeline",
    "kind_of",
    "outline",
]
