"""Events: one action with its times, and the rules that the events of a timeline obey."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from gpipebal.errors import ProfileError
from gpipebal.records import is_quantity
from gpipebal.schedule.actions import ACTION_NAMES

__all__ = [
    "ALL_KINDS",
    "COMPUTE_KINDS",
    "COPY_KIND",
    "EVENT_KINDS",
    "KIND_NAMES",
    "LAUNCH_KIND",
    "Event",
    "EventKind",
    "check_events",
    "kind_of",
]

_DIGITS, _UPPER, _LOWER = "0123456789", "ABCDEFGHIJ", "abcdefghij"


@dataclass(frozen=True)
class EventKind:
    """What is known about one kind of event.

    Attributes:
        letter: How it is written in an event.
        name: What it is called.
        symbols: How a drawing in text shows it, by the last digit of its micro-batch; empty: it is
            not drawn there, or has a line of its own.
        of_several: The same where an event stands for several micro-batches.
        column: Which part of a bar of the HTML report it counts to; None: to none, as it runs
            beside the device's work, and is told below the table.
        track: Where a Chrome trace has it: on the track of its partition, on one beside that for
            what may overlap, or on that of the host.
        has_micro_batch: Whether it belongs to a micro-batch.

    Raises:
        ProfileError: what a device computes has no symbols or no column; or the other way round.
    """

    letter: str
    name: str
    symbols: str = ""
    of_several: str = ""
    column: Literal["forward", "recompute", "backward", "optimizer"] | None = None
    track: Literal["partition", "copies", "host"] = "partition"
    has_micro_batch: bool = True

    def __post_init__(self) -> None:
        drawn = len(self.symbols) == 10 and len(self.of_several) == 1
        if (drawn, self.column is not None) != (self.computes, self.computes):
            raise ProfileError(
                f"kind of event {self.letter!r} is half known: track={self.track!r}, "
                f"symbols={self.symbols!r}, of_several={self.of_several!r}, "
                f"column={self.column!r} (expected ten symbols, one for several micro-batches, and "
                "a column on track 'partition', and none of them on others).\n"
                "Fix: give all three, or another track."
            )

    @property
    def computes(self) -> bool:
        """Whether it keeps its device busy, one action at a time."""
        return self.track == "partition"


def _action(letter: Literal["F", "R", "B", "I", "W"], *more: Any) -> EventKind:
    return EventKind(letter, ACTION_NAMES[letter], *more)


#: Every kind of event: first the actions of a schedule, in their order there; then the optimizer's
#: step; then what runs beside the device's work: a tensor on its way into a partition, and the host
#: launching an action on a device that works asynchronously. How pictures show each of them is in
#: `gpipebal.plots`.
EVENT_KINDS: tuple[EventKind, ...] = (
    _action("F", _DIGITS, "f", "forward"),
    _action("R", "r" * 10, "r", "recompute"),
    _action("B", _UPPER, "B", "backward"),
    _action("I", _UPPER, "B", "backward"),
    _action("W", _LOWER, "w", "backward"),
    EventKind("O", "optimizer", "#" * 10, "#", "optimizer", has_micro_batch=False),
    EventKind("C", "copy", track="copies"),
    EventKind("H", "launch", track="host"),
)

_KIND_OF = {kind.letter: kind for kind in EVENT_KINDS}

#: What a device computes, one action at a time.
COMPUTE_KINDS = tuple(kind.letter for kind in EVENT_KINDS if kind.computes)

#: A tensor on its way into a partition; copies may run at the same time as the compute kinds.
COPY_KIND = "C"

#: The host launching an action on a device that works asynchronously.
LAUNCH_KIND = "H"

#: What each kind is called.
KIND_NAMES = {kind.letter: kind.name for kind in EVENT_KINDS}

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


def kind_of(letter: str) -> EventKind:
    """Return what is known about a kind of event.

    Raises:
        ProfileError: there is no such kind.

    Example:
        >>> kind_of("O").name, kind_of("C").computes
        ('optimizer', False)
    """
    if letter not in _KIND_OF:
        raise ProfileError(
            f"kind of event does not exist: kind={letter!r} (expected one of "
            f"{', '.join(KIND_NAMES)}).\nFix: record the mini-batch again."
        )
    return _KIND_OF[letter]


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
        wrong = f"partition={partition!r} (expected an int, 0..{n_partitions - 1})"
    elif not isinstance(kind, str) or kind not in KIND_NAMES:
        wrong = f"kind={kind!r} (expected one of {', '.join(KIND_NAMES)})"
    elif type(micro_batch) is not int or not 0 <= micro_batch <= MOST_MICRO_BATCHES:
        wrong = f"micro_batch={micro_batch!r} (expected an int, 0..{MOST_MICRO_BATCHES})"
    elif not (is_quantity(start) and is_quantity(end) and start <= end):
        wrong = f"start={start!r}, end={end!r} (expected finite seconds, 0 <= start <= end)"
    if wrong:
        raise ProfileError(f"event {event} cannot be: {wrong}.\nFix: record the mini-batch again.")
