"""Chrome traces: a timeline as the events that Perfetto and chrome://tracing draw.

Times of a trace are microseconds. Slices of one track must not overlap, or viewers drop them, so
copies, which may overlap each other, are spread over as many tracks as that takes. An arrow leads
from a cell to the cell that it makes possible, through the copy between them if there is one.

Source:
    "Trace Event Format", the Chromium project's document; events of phase M (metadata), X
    (complete slice), s, t and f (start, step and finish of an arrow), C (counter).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from gpipebal.timeline.events import COPY_KIND, KIND_NAMES, Event, kind_of

__all__ = ["Held", "trace_events"]


class Held(Protocol):
    """What a device holds over time, as `gpipebal.simulator.MemoryTrack` tells it."""

    @property
    def device(self) -> int:
        """Index of the device."""

    @property
    def times(self) -> Iterable[float]:
        """Seconds at which something changes, in ascending order."""

    @property
    def total(self) -> Iterable[int]:
        """Bytes from each of these times on."""


def trace_events(
    events: Sequence[Event],
    n_partitions: int,
    process: int,
    name: str,
    *,
    devices: Sequence[int] | None = None,
    memory: Sequence[Held] = (),
    numbered: bool = True,
) -> list[dict[str, Any]]:
    """Return one timeline as one process of a trace.

    Args:
        events: Events of the timeline.
        n_partitions: Number of its partitions; each is a track, also without events.
        process: Number of the process, 1 or more: 0 is the idle process to some viewers.
        name: Name of the process.
        devices: Device of each partition, where a device has several; None: one each.
        memory: What each device holds over time; a counter of each is drawn below the tracks.
        numbered: Whether every event is of one micro-batch: otherwise no numbers and arrows are
            drawn.
    """
    trace = [
        _metadata("process_name", {"name": name}, pid=process),
        _metadata("process_sort_index", {"sort_index": process}, pid=process),
    ]
    slices: dict[tuple[int, str, int], dict[str, Any]] = {}
    # One on the way forward and one on the way back: two copies into a partition per micro-batch.
    copies: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for track, (track_name, members) in enumerate(_tracks(events, n_partitions, devices), start=1):
        where = {"pid": process, "tid": track}
        trace.append(_metadata("thread_name", {"name": track_name}, **where))
        trace.append(_metadata("thread_sort_index", {"sort_index": track}, **where))
        last_end = 0
        for event in members:
            # Whole nanoseconds, so that rounding moves neighbours alike; and an overlap that a
            # timeline tolerates is cut off.
            start = max(last_end, round(event.start * 1e9))
            last_end = max(start, round(event.end * 1e9))
            trace.append(_slice(event, start, last_end, where, numbered=numbered))
            if not numbered:
                continue
            if event.kind == COPY_KIND:
                copies.setdefault((event.partition, event.micro_batch), []).append(trace[-1])
            else:
                slices[event[:3]] = trace[-1]
    # Arrows come last because a viewer must know the slices that they bind to.
    return [*trace, *_counters(memory, process, devices), *_arrows(slices, copies)]


def _metadata(name: str, content: Mapping[str, Any], **where: int) -> dict[str, Any]:
    return {"ph": "M", **where, "name": name, "args": content}


def _slice(
    event: Event, start: int, end: int, where: Mapping[str, int], *, numbered: bool
) -> dict[str, Any]:
    number = {"micro_batch": event.micro_batch} if numbered else {}
    return {
        "ph": "X",
        **where,
        "name": f"{event.kind}{event.micro_batch}" if numbered else KIND_NAMES[event.kind],
        "cat": KIND_NAMES[event.kind],
        "ts": start / 1e3,
        "dur": (end - start) / 1e3,
        "args": {"partition": event.partition, **number},
    }


def _tracks(
    events: Sequence[Event], n_partitions: int, devices: Sequence[int] | None
) -> list[tuple[str, list[Event]]]:
    """Share the events out over named tracks on which none overlap, in the order to show."""
    computed: list[list[Event]] = [[] for _ in range(n_partitions)]
    copied: list[list[list[Event]]] = [[] for _ in range(n_partitions)]
    launched: list[Event] = []
    for event in sorted(events, key=lambda event: event[3:]):
        track = kind_of(event.kind).track
        if track == "partition":
            computed[event.partition].append(event)
        elif track == "host":
            launched.append(event)
        else:
            lanes = copied[event.partition]
            free = next((lane for lane in lanes if lane[-1].end <= event.start), None)
            if free is None:
                lanes.append(free := [])
            free.append(event)
    tracks = [("host: launches", launched)] if launched else []
    for j in range(n_partitions):  # j: partition
        where = "" if devices is None else f" (device {devices[j]})"
        tracks.append((f"partition {j}{where}", computed[j]))
        tracks += [(f"partition {j}: copies in", lane) for lane in copied[j]]
    return tracks


def _counters(
    memory: Sequence[Held], process: int, devices: Sequence[int] | None
) -> list[dict[str, Any]]:
    """Return the bytes of every device at each time at which they change."""
    word = "partition" if devices is None else "device"
    counters = []
    for track in memory:
        before = None
        for time, size in zip(track.times, track.total, strict=True):
            if size != before:
                counters.append(
                    {
                        "ph": "C",
                        "pid": process,
                        "name": f"memory of {word} {track.device}",
                        "ts": round(float(time) * 1e9) / 1e3,
                        "args": {"bytes": int(size)},
                    }
                )
            before = size
    return counters


def _arrows(
    slices: Mapping[tuple[int, str, int], dict[str, Any]],
    copies: Mapping[tuple[int, int], Sequence[dict[str, Any]]],
) -> list[dict[str, Any]]:
    """Lead an arrow from every forward and backward to the one that it makes possible."""
    arrows: list[dict[str, Any]] = []
    n_arrows = 0
    for (j, kind, i), source in slices.items():  # j: partition, i: micro-batch
        if kind == "F":
            to = j + 1
            target = slices.get((to, "F", i))
        elif kind in "BI":
            to = j - 1
            target = slices.get((to, "B", i)) or slices.get((to, "I", i))
        else:
            continue
        if target is None:
            continue
        # An arrow binds to the slice around its end: it leaves from the middle, where no
        # rounding can put it into the next slice, and arrives at the start.
        points = [("s", source, _middle(source)), ("f", target, target["ts"])]
        copy = _copy_between(source, target, copies.get((to, i), ()))
        if copy is not None:
            points.insert(1, ("t", copy, _middle(copy)))
        # Perfetto drops an arrow whose id is anything else than hexadecimal digits, or a number.
        identity = f"{source['pid']:x}{n_arrows:08x}"
        n_arrows += 1
        for phase, end, time in points:
            arrows.append(
                {
                    "ph": phase,
                    "pid": end["pid"],
                    "tid": end["tid"],
                    "name": KIND_NAMES[kind],
                    "cat": "hand-over",
                    "id": identity,
                    "ts": time,
                    **({"bp": "e"} if phase == "f" else {}),
                }
            )
    return arrows


def _copy_between(
    source: Mapping[str, Any], target: Mapping[str, Any], copies: Sequence[dict[str, Any]]
) -> dict[str, Any] | None:
    """Return the copy that starts after one slice and ends before another, if there is one."""
    made, used = _middle(source), target["ts"]
    # A nanosecond may be lost in rounding at each end.
    return next((c for c in copies if made <= c["ts"] and c["ts"] + c["dur"] <= used + 0.002), None)


def _middle(piece: Mapping[str, Any]) -> float:
    middle: float = piece["ts"] + piece["dur"] / 2
    return middle
