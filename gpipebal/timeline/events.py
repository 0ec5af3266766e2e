"""Events: one action with its times, and the rules that the events of a timeline obey."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from gpipebal.errors import ProfileError

__all__ = [
    "ALL_KINDS",
    "COMPUTE_KINDS",
    "COPY_KIND",
    "KIND_NAMES",
    "LAUNCH_KIND",
    "Event",
    "check_events",
]

#: What a device computes, one action at a time: forward, recompute, backward; the two parts of a
#: backward, where they are done separately; and the optimizer's step.
COMPUTE_KINDS = ("F", "R", "B", "I", "W", "O")

#: A tensor on its way into a partition; copies may run at the same time as the compute kinds.
COPY_KIND = "C"

#: The host launching an action on a device that works asynchronously.
LAUNCH_KIND = "H"

KIND_NAMES = {
    "F": "forward",
    "R": "recompute",
    "B": "backward",
    "I": "input gradient",
    "W": "weight gradient",
    "O": "optimizer",
    "C": "copy",
    "H": "launch",
}

#: All kinds; in a table of events a kind is its place in this text.
ALL_KINDS = "".join(KIND_NAMES)

#: How far two actions of a device may overlap, as a fraction of the last end: CUDA events count
#: milliseconds in float32, which is good for 6e-8 of a time.
OVERLAP_TOLERANCE = 1e-6

#: A mini-batch with more micro-batches is refused.
MOST_MICRO_BATCHES = 2**31 - 1


class Event(NamedTuple):
    """One action with its times.

    Attributes:
        partition: Index of the partition; for a copy, of the one that receives it.
        kind: ``F`` forward, ``R`` recompute, ``B`` backward, ``I`` gradient of the input, ``W``
            gradient of the weights, ``O`` optimizer, ``C`` copy or ``H`` launch by the host.
        micro_batch: Index of the micro-batch; 0 for the optimizer.
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


def check_events(events: Sequence[Event], devices: Sequence[int]) -> None:
    """Verify each event, and that every device computes one action at a time.

    Args:
        events: In any order.
        devices: Device of each partition.

    Raises:
        ProfileError: an event outside of the partitions, of an unknown kind or with impossible
            times, or two actions of one device at the same time.

    Complexity:
        O(n log n) for n events.
    """
    for event in events:
        _check_event(event, len(devices))
    tolerance = OVERLAP_TOLERANCE * max((event.end for event in events), default=0.0)
    previous: dict[int, Event] = {}
    for event in sorted(events, key=lambda event: event[3:]):
        if event.kind not in COMPUTE_KINDS:
            continue
        device = devices[event.partition]
        before = previous.get(device)
        if before is not None and event.start < before.end - tolerance:
            where = "partition" if before.partition == event.partition else "device"
            number = event.partition if where == "partition" else device
            raise ProfileError(
                f"{where} {number} does two things at once: {event} starts at "
                f"{event.start!r} s, {before} ends at {before.end!r} s (expected one after the "
                "other).\nFix: record one mini-batch per timeline and one worker per partition."
            )
        previous[device] = event


def _check_event(event: Event, n_partitions: int) -> None:
    partition, kind, micro_batch, start, end = event
    wrong = None
    if type(partition) is not int or not 0 <= partition < n_partitions:
        wrong = f"partition={partition!r} (expected 0..{n_partitions - 1})"
    elif not isinstance(kind, str) or kind not in KIND_NAMES:
        wrong = f"kind={kind!r} (expected one of {', '.join(KIND_NAMES)})"
    elif type(micro_batch) is not int or not 0 <= micro_batch <= MOST_MICRO_BATCHES:
        wrong = f"micro_batch={micro_batch!r} (expected an int of 0 or more)"
    elif not (_is_number(start) and _is_number(end) and 0 <= start <= end < math.inf):
        wrong = f"start={start!r}, end={end!r} (expected finite seconds, 0 <= start <= end)"
    if wrong:
        raise ProfileError(f"event {event} cannot be: {wrong}.\nFix: record the mini-batch again.")


def _is_number(value: Any) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    # A larger int is not a time, and may be too large for a float.
    return number and abs(value) < 2**63
