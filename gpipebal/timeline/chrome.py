"""Chrome traces: a timeline as the events that Perfetto and chrome://tracing draw.

Times of a trace are microseconds. Slices of one track must not overlap, or viewers drop them, so
copies, which may overlap each other, are spread over as many tracks as that takes.

Source:
    "Trace Event Format", the Chromium project's document; events of phase M (metadata), X
    (complete slice), s and f (start and finish of an arrow).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gpipebal.timeline.events import COMPUTE_KINDS, COPY_KIND, KIND_NAMES, LAUNCH_KIND, Event

__all__ = ["trace_events"]


def trace_events(
    events: Sequence[Event], n_partitions: int, process: int, name: str
) -> list[dict[str, Any]]:
    """Return one timeline as one process of a trace.

    Args:
        events: Events of the timeline.
        n_partitions: Number of its partitions; each is a track, also without events.
        process: Number of the process, 1 or more: 0 is the idle process to some viewers.
        name: Name of the process.
    """
    trace = [
        _metadata("process_name", {"name": name}, pid=process),
        _metadata("process_sort_index", {"sort_index": process}, pid=process),
    ]
    slices: dict[tuple[int, str, int], dict[str, Any]] = {}
    for track, (track_name, members) in enumerate(_tracks(events, n_partitions), start=1):
        where = {"pid": process, "tid": track}
        trace.append(_metadata("thread_name", {"name": track_name}, **where))
        trace.append(_metadata("thread_sort_index", {"sort_index": track}, **where))
        last_end = 0
        for event in members:
            # Whole nanoseconds, so that rounding moves neighbours alike; and an overlap that a
            # timeline tolerates is cut off.
            start = max(last_end, round(event.start * 1e9))
            last_end = max(start, round(event.end * 1e9))
            trace.append(_slice(event, start, last_end, where))
            slices[event[:3]] = trace[-1]
    # Arrows stand last because a viewer must know the slices that they bind to.
    return trace + _arrows(slices)


def _metadata(name: str, content: Mapping[str, Any], **where: int) -> dict[str, Any]:
    return {"ph": "M", **where, "name": name, "args": content}


def _slice(event: Event, start: int, end: int, where: Mapping[str, int]) -> dict[str, Any]:
    return {
        "ph": "X",
        **where,
        "name": f"{event.kind}{event.micro_batch}",
        "cat": KIND_NAMES[event.kind],
        "ts": start / 1e3,
        "dur": (end - start) / 1e3,
        "args": {"partition": event.partition, "micro_batch": event.micro_batch},
    }


def _tracks(events: Sequence[Event], n_partitions: int) -> list[tuple[str, list[Event]]]:
    """Share the events out over named tracks on which none overlap, in the order to show."""
    computed: list[list[Event]] = [[] for _ in range(n_partitions)]
    copied: list[list[list[Event]]] = [[] for _ in range(n_partitions)]
    launched: list[Event] = []
    for event in sorted(events, key=lambda event: event[3:]):
        if event.kind in COMPUTE_KINDS:
            computed[event.partition].append(event)
        elif event.kind == COPY_KIND:
            lanes = copied[event.partition]
            free = next((lane for lane in lanes if lane[-1].end <= event.start), None)
            if free is None:
                lanes.append(free := [])
            free.append(event)
        elif event.kind == LAUNCH_KIND:
            launched.append(event)
    tracks = [("host: launches", launched)] if launched else []
    for j in range(n_partitions):  # j: partition
        tracks.append((f"partition {j}", computed[j]))
        tracks += [(f"partition {j}: copies in", lane) for lane in copied[j]]
    return tracks


def _arrows(slices: Mapping[tuple[int, str, int], dict[str, Any]]) -> list[dict[str, Any]]:
    """Lead an arrow from every forward and backward to the one that it makes possible."""
    arrows: list[dict[str, Any]] = []
    for (j, kind, i), source in slices.items():  # j: partition, i: micro-batch
        if kind == "F":
            target = slices.get((j + 1, "F", i))
        elif kind in "BI":
            target = slices.get((j - 1, "B", i)) or slices.get((j - 1, "I", i))
        else:
            continue
        if target is None:
            continue
        # An arrow binds to the slice around its end: it leaves from the middle, where no
        # rounding can put it into the next slice, and arrives at the start.
        for phase, end, time in (
            ("s", source, source["ts"] + source["dur"] / 2),
            ("f", target, target["ts"]),
        ):
            arrows.append(
                {
                    "ph": phase,
                    "pid": end["pid"],
                    "tid": end["tid"],
                    "name": KIND_NAMES[kind],
                    "cat": "hand-over",
                    "id": f"{source['pid']}.{j}{kind}{i}",
                    "ts": time,
                    **({"bp": "e"} if phase == "f" else {}),
                }
            )
    return arrows
