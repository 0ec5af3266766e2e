"""Events: one action with its times, and the rules that the events of a timeline obey."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from gpipebal.errors import ProfileError

__all__ = ["COMPUTE_KINDS", "COPY_KIND", "KIND_NAMES", "Event", "check_events"]

#: What a partition computes, one action at a time: forward, recompute, backward.
COMPUTE_KINDS = ("F", "R", "B")

#: A tensor on its way into a partition; copies may run beside the compute kinds.
COPY_KIND = "C"

KIND_NAMES = {"F": "forward", "R": "recompute", "B": "backward", "C": "copy"}

#: How far two actions of a partition may overlap, as a fraction of the last end: CUDA events
#: count milliseconds in float32, which is good for 6e-8 of a time.
OVERLAP_TOLERANCE = 1e-6


class Event(NamedTuple):
    """One action with its times.

    Attributes:
        partition: Index of the partition; for a copy, of the one that receives.
        kind: ``F`` forward, ``R`` recompute, ``B`` backward or ``C`` copy.
        micro_batch: Index of the micro-batch.
        start: Seconds from the start of the mini-batch.
        end: Seconds from the start of the mini-batch.
    """

    partition: int
    kind: str
    micro_batch: int
    start: float
    end: float

    def __str__(self) -> str:
        return f"{self.partition}{self.kind}{self.micro_batch}"


def check_events(events: Sequence[Event], n_partitions: int) -> None:
    """Verify each event, and that every partition computes one action at a time.

    Raises:
        ProfileError: an event outside of the partitions, of an unknown kind or with impossible
            times, or two actions of one partition at the same time.

    Complexity:
        O(n log n) for n events.
    """
    for event in events:
        _check_event(event, n_partitions)
    tolerance = OVERLAP_TOLERANCE * max((event.end for event in events), default=0.0)
    previous: dict[int, Event] = {}
    for event in sorted(events, key=lambda event: event[3:]):
        if event.kind not in COMPUTE_KINDS:
            continue
        before = previous.get(event.partition)
        if before is not None and event.start < before.end - tolerance:
            raise ProfileError(
                f"partition {event.partition} does two things at once: {event} starts at "
                f"{event.start!r} s, {before} ends at {before.end!r} s (expected one after the "
                "other).\nFix: record one mini-batch per timeline and one worker per partition."
            )
        previous[event.partition] = event


def _check_event(event: Event, n_partitions: int) -> None:
    partition, kind, micro_batch, start, end = event
    wrong = None
    if type(partition) is not int or not 0 <= partition < n_partitions:
        wrong = f"partition={partition!r} (expected 0..{n_partitions - 1})"
    elif kind not in KIND_NAMES:
        wrong = f"kind={kind!r} (expected one of {', '.join(KIND_NAMES)})"
    elif type(micro_batch) is not int or micro_batch < 0:
        wrong = f"micro_batch={micro_batch!r} (expected an int of 0 or more)"
    elif not (_is_number(start) and _is_number(end) and 0 <= start <= end < math.inf):
        wrong = f"start={start!r}, end={end!r} (expected finite seconds, 0 <= start <= end)"
    if wrong:
        raise ProfileError(f"event {event} cannot be: {wrong}.\nFix: record the mini-batch again.")


def _is_number(value: Any) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    # A larger int is no time, and may be too large for a float.
    return number and abs(value) < 2**63
