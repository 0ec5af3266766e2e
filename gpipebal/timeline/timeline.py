"""The timeline itself: events of one mini-batch, what they add up to, and its file."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from gpipebal.argument_kinds import check_index, check_list, check_mapping, check_whole, is_word
from gpipebal.errors import KindError, ProfileError
from gpipebal.files import check_values, read_noun, write_record
from gpipebal.html import timeline_html
from gpipebal.records import (
    another_kind,
    check_missing,
    damaged,
    fields_of,
    object_of,
    path_in,
    tuple_of,
    without_header,
)
from gpipebal.timeline.chrome import Held, trace_events
from gpipebal.timeline.events import Event, check_events, kind_of
from gpipebal.timeline.table import EventTable
from gpipebal.timeline.text import draw_launches, draw_rows, legend
from gpipebal.units import count, format_percent, format_seconds

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["Source", "Timeline"]

FORMAT = "gpipebal-timeline"
#: More partitions are refused: a list of them would fill the memory.
MOST_PARTITIONS = 2**16
VERSION = 1
#: The fewest signs by which a file's values are counted: of an event in the trace, in the record.
_IN_TRACE, _IN_RECORD = 10, 6
#: Key of the exact record in a trace.
_RECORD = "gpipebal"

Source = Literal["simulated", "measured"]

SOURCES: tuple[Source, ...] = ("simulated", "measured")


@dataclass(frozen=True)
class Timeline:
    """The events of one mini-batch.

    Attributes:
        events: One `Event` per action, in any order; a tuple, or an `EventTable` where there may
            be millions.
        n_partitions: Number of partitions, including those without events.
        source: ``'simulated'`` or ``'measured'``.
        provenance: Where the times come from; JSON values.
        devices: Device of each partition, where a device has several; None: every partition has
            a device of its own.

    Example:
        >>> timeline = Timeline((Event(0, "F", 0, 0.0, 1.0), Event(1, "F", 0, 1.0, 3.0)), 2)
        >>> timeline.makespan, timeline.bubble_fraction
        (3.0, 0.5)
    """

    events: Sequence[Event]
    n_partitions: int
    source: Source = "simulated"
    provenance: Mapping[str, Any] = field(default_factory=dict)
    devices: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        # What was given may be an iterator, which is used up then, or a list, which may change
        # later, and is not equal to what a file is read as.
        if not isinstance(self.events, EventTable):
            object.__setattr__(self, "events", check_list("events", self.events))
        self.check()

    @property
    def placement(self) -> tuple[int, ...]:
        """Device of each partition."""
        return tuple(range(self.n_partitions)) if self.devices is None else self.devices

    @property
    def n_devices(self) -> int:
        """Number of devices."""
        return self.n_partitions if self.devices is None else 1 + max(self.devices)

    @property
    def tells_micro_batches(self) -> bool:
        """Whether every event is one action, and not several as in an `outline`."""
        return self.provenance.get("detail") is not False

    @cached_property
    def table(self) -> EventTable:
        """The events as columns."""
        return EventTable.of(self.events)

    @property
    def start(self) -> float:
        """Seconds at which the first event starts; 0.0 without events."""
        return self.table.span[0]

    @property
    def makespan(self) -> float:
        """Seconds from the first start to the last end; 0.0 without events."""
        start, end = self.table.span
        return end - start

    @property
    def chunks(self) -> int:
        """Number of micro-batches."""
        return 1 + int(self.table.micro_batches.max(initial=-1))

    @property
    def bubble_fraction(self) -> float:
        """Idle share of all devices' time inside the makespan; copies count as idle."""
        space = self.n_devices * self.makespan
        # Rounding can give a full timeline a negative idle time.
        return max(0.0, (space - sum(self._device_times)) / space) if space else 0.0

    @property
    def imbalance(self) -> float:
        """Largest busy time of a device over the mean one; 1.0 is perfect."""
        times = self._device_times
        return max(times) * len(times) / sum(times) if sum(times) else 1.0

    def busy_time(self, partition: int) -> float:
        """Return the seconds that a partition computes; copies do not count."""
        return self._busy_times[check_index("partition", partition, self.n_partitions)]

    @cached_property
    def _busy_times(self) -> list[float]:
        table = self.table
        times = np.where(table.computes, table.ends - table.starts, 0.0)
        busy: list[float] = np.bincount(
            table.partitions, weights=times, minlength=self.n_partitions
        ).tolist()
        return busy

    @property
    def _device_times(self) -> list[float]:
        times: list[float] = np.bincount(self.placement, weights=self._busy_times).tolist()
        return times

    def check(self) -> None:
        """Verify the invariants of a timeline.

        Raises:
            KindError: something is of another kind.
            ProfileError: no partitions, an unknown source, a device without partitions, an event
                outside of the partitions, of an unknown kind or with impossible times, or two
                actions of one device at the same time.
        """
        if type(self.n_partitions) is not int or not 1 <= self.n_partitions <= MOST_PARTITIONS:
            raise ProfileError(
                "timeline has an impossible number of partitions: "
                f"n_partitions={self.n_partitions!r} (expected 1..{MOST_PARTITIONS}).\n"
                "Fix: give the number of partitions."
            )
        if not is_word(self.source, *SOURCES):
            raise ProfileError(
                f"timeline has an unknown source: source={self.source!r:.60} "
                f"(expected one of {', '.join(map(repr, SOURCES))}).\nFix: source='measured'."
            )
        self._check_devices()
        check_mapping("provenance", self.provenance, "provenance={}")
        # A table is what the simulator makes, which places one action after the other.
        if not isinstance(self.events, EventTable):
            for k, event in enumerate(self.events):
                if not isinstance(event, Event):
                    raise KindError(
                        f"events[{k}] is not an Event: events[{k}]={event!r:.60} (expected "
                        f"{', '.join(Event._fields)}).\nFix: Event(0, 'F', 0, 0.0, 1.0), say."
                    )
            check_events(self.events, self.placement)
            return
        partitions = self.events.partitions
        if partitions.size and not 0 <= partitions.min() <= partitions.max() < self.n_partitions:
            raise ProfileError(
                "timeline has events of other partitions: "
                f"{partitions.min()} to {partitions.max()} (expected 0 to {self.n_partitions - 1}, "
                f"n_partitions={self.n_partitions}).\nFix: give the number of partitions that the "
                "events are of."
            )

    def _check_devices(self) -> None:
        devices = self.devices
        if devices is None:
            return
        known = isinstance(devices, tuple) and all(type(d) is int for d in devices)
        if (
            not known
            or len(devices) != self.n_partitions
            or set(devices) != set(range(len(set(devices))))
        ):
            raise ProfileError(
                f"timeline has impossible devices: devices={devices!r:.60} (expected a tuple of "
                f"one for each of {count(self.n_partitions, 'partition')}, numbered from 0 without "
                "gaps).\n"
                "Fix: devices=None, or the device of each partition."
            )

    def to_frame(self) -> pd.DataFrame:
        """Return one row per event, times in seconds."""
        import pandas as pd

        frame = pd.DataFrame(list(self.events), columns=list(Event._fields))
        return frame.assign(duration=frame["end"] - frame["start"])

    def to_dict(self) -> dict[str, Any]:
        """Return the timeline as JSON values."""
        shared = {} if self.devices is None else {"devices": list(self.devices)}
        return {
            "format": FORMAT,
            "version": VERSION,
            "source": self.source,
            "n_partitions": self.n_partitions,
            **shared,
            "provenance": deepcopy(dict(self.provenance)),
            "events": [list(event) for event in self.events],
        }

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> Timeline:
        """Read what `to_dict` returned, or the whole trace that `save` wrote.

        Raises:
            FileFormatError: a field is missing or unknown, or has a value it cannot have.
        """
        try:
            content = object_of(record, "record")
            if _RECORD in content or "traceEvents" in content:
                check_missing(content, "", {_RECORD: "an object"})
                content = object_of(content[_RECORD], _RECORD)
            content = without_header(content, FORMAT, VERSION)
            content = fields_of(content, "", cls, also=("provenance",))
            events = tuple_of(content["events"], "events")
            content["events"] = tuple(_event(event, k) for k, event in enumerate(events))
            content["provenance"] = deepcopy(object_of(content["provenance"], "provenance"))
            if content.get("devices") is not None:
                content["devices"] = tuple_of(content["devices"], "devices")
            return cls(**content)
        except (TypeError, ValueError) as error:
            raise damaged("timeline", error, "simulate or measure again.") from error

    def save(
        self,
        path: str | os.PathLike[str],
        beside: Sequence[Timeline] = (),
        memory: Sequence[Sequence[Held]] = (),
    ) -> None:
        """Write a Chrome trace that also holds the exact record, whole or not at all.

        In https://ui.perfetto.dev every partition is a track, with a track for its copies, and
        arrows lead from a forward to the one in the next partition, and likewise back, through
        the copy between them if there is one.

        Args:
            path: File to write; its name should end in ``.json``.
            beside: Further timelines for the same picture, such as the prediction next to a
                measurement: drawn as processes of their own; `load` does not read them.
            memory: What the devices hold over time, for this timeline and each of the further
                ones, as `gpipebal.simulator.memory_over_time` returns it. Drawn as counters.

        Raises:
            KindError: an argument is of another kind.
            FileFormatError: there are too many events for a file, a few hundred thousand.
        """
        beside = check_list("beside", beside, Timeline)
        memory = [
            check_list(f"memory[{k}]", tracks)
            for k, tracks in enumerate(check_list("memory", memory))
        ]
        for k, tracks in enumerate(memory):
            for track in tracks:
                if not all(hasattr(track, name) for name in ("device", "times", "total")):
                    raise KindError(
                        f"memory[{k}] has no tracks: it has a {type(track).__name__} (expected "
                        "what a device holds over time).\n"
                        "Fix: memory=[memory_over_time(timeline, held)]."
                    )
        n_slices = sum(len(timeline.events) for timeline in (self, *beside))
        # Millions of events would take minutes and gigabytes first.
        check_values(path, _IN_TRACE * n_slices + _IN_RECORD * len(self.events))
        trace = []
        for process, timeline in enumerate((self, *beside), start=1):
            trace += trace_events(
                timeline.events,
                timeline.n_partitions,
                process,
                f"{process} {timeline.source}",
                devices=timeline.devices,
                memory=memory[process - 1] if process <= len(memory) else (),
                numbered=timeline.tells_micro_batches,
            )
        content = {"displayTimeUnit": "ms", "traceEvents": trace, _RECORD: self.to_dict()}
        write_record(path, {"format": FORMAT, "version": VERSION, **content})

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Timeline:
        """Read a file that `save` wrote.

        Raises:
            FileFormatError: the file cannot be read, is damaged, or is of another version.
            MissingFileError: the file does not exist (a FileFormatError).
        """
        return read_noun(path, FORMAT, VERSION, cls.from_dict)

    def text_gantt(self, width: int = 100) -> str:
        """Draw one line of text per device, time from left to right, below a headline.

        A forward shows the last digit of its micro-batch, a backward the letter with that number
        (``A`` is 0, ``J`` is 9), a recompute ``r`` and idle time a dot. Where a backward is done
        in two parts, a capital letter is the input's gradient and a small one the weights'; the
        optimizer is ``#``. Copies are not drawn. A line ``host`` below shows which micro-batch
        the host is launching, if that was simulated. An `outline` is drawn by kind, without
        numbers.

        Args:
            width: Columns of the time axis. If all times are multiples of a common clock, the
                largest number up to this one that gives every clock equally many columns.

        Example:
            >>> events = (Event(0, "F", 0, 0, 1), Event(1, "F", 0, 1, 2), Event(1, "B", 0, 2, 4))
            >>> print(Timeline((*events, Event(0, "B", 0, 4, 6)), 2).text_gantt(width=6))
            simulated: makespan 6.00 s, bubble 50.0 % (0-9 forward, r recompute, A-J backward)
            partition 0  0...AA
            partition 1  .0AA..
        """
        word = "partition" if self.devices is None else "device"
        labels = [f"{word} {d:>{len(str(self.n_devices - 1))}}" for d in range(self.n_devices)]
        rows = draw_rows(
            self.table,
            self.n_devices,
            max(1, check_whole("width", width)),
            self.placement,
            numbered=self.tells_micro_batches,
        )
        launches = draw_launches(self.table, len(rows[0]))
        if launches is not None:
            labels.append("host".ljust(len(labels[0])))
            rows.append(launches)
        lines = [f"{label}  {row}" for label, row in zip(labels, rows, strict=True)]
        return "\n".join([self._headline(), *lines])

    def _repr_html_(self) -> str:
        return timeline_html(self, kind_of)

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(str(self))

    def _headline(self) -> str:
        return (
            f"{self.source}: makespan {format_seconds(self.makespan)}, "
            f"bubble {format_percent(self.bubble_fraction)} "
            f"({legend(self.table, numbered=self.tells_micro_batches)})"
        )

    def __str__(self) -> str:
        return self.text_gantt()


def _event(values: Any, number: int) -> Event:
    """Make an event from the list of its values, which are checked later."""
    where = path_in("events", number)
    found = tuple_of(values, where)
    if len(found) != len(Event._fields):
        expected = f"{len(Event._fields)} values: {', '.join(Event._fields)}"
        raise another_kind(where, values, expected, "give all of them")
    return Event(*found)
