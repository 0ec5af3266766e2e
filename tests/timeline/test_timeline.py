"""Tests of gpipebal.timeline: sums, drawings, and a file that is both a trace and a record."""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpipebal import files
from gpipebal.errors import FileFormatError, ProfileError
from gpipebal.schedule import CHECKPOINT_MODES, gpipe_schedule
from gpipebal.simulator import CellBytes, Durations, HeldBytes, memory_over_time, place
from gpipebal.timeline import Event, Timeline
from gpipebal.timeline import timeline as noun
from gpipebal.timeline.chrome import trace_events

#: Two partitions, one micro-batch, a copy each way: 8 s, of which partition 0 works 5, 1 works 2.
SMALL = Timeline(
    events=(
        Event(0, "F", 0, 0.0, 1.0),
        Event(1, "C", 0, 1.0, 1.5),
        Event(1, "F", 0, 1.5, 2.5),
        Event(1, "B", 0, 2.5, 3.5),
        Event(0, "C", 0, 3.5, 4.0),
        Event(0, "R", 0, 2.0, 3.0),
        Event(0, "B", 0, 5.0, 8.0),
    ),
    n_partitions=2,
    source="measured",
    provenance={"device": "cpu", "threads": 1},
)


@st.composite
def timelines(draw: st.DrawFn) -> Timeline:
    """Draw a simulated timeline of one to four partitions, with any times."""
    times = st.floats(min_value=0.0, max_value=1e3)
    triples = draw(st.lists(st.tuples(times, times, times), min_size=1, max_size=4))
    schedule = gpipe_schedule(
        len(triples), draw(st.integers(1, 4)), draw(st.sampled_from(CHECKPOINT_MODES))
    )
    return place(schedule, Durations(*zip(*triples, strict=True)))


def test_sums_of_a_timeline() -> None:
    """Makespan, busy times, bubble and imbalance count computing only, and not copies."""
    assert SMALL.makespan == 8.0
    assert SMALL.chunks == 1
    assert [SMALL.busy_time(j) for j in range(2)] == [5.0, 2.0]
    assert SMALL.bubble_fraction == (16 - 7) / 16
    assert SMALL.imbalance == 5.0 / 3.5


def test_a_record_shares_nothing_with_its_timeline() -> None:
    """Whoever changes a record leaves the timeline as it is, and one that was made from it."""
    timeline = replace(SMALL, provenance={"flags": ["wide"]})
    record = timeline.to_dict()
    again = Timeline.from_dict(record)
    record["provenance"]["flags"].append("sparse")
    assert timeline.provenance == again.provenance == {"flags": ["wide"]}


def test_makespan_runs_from_the_first_start() -> None:
    """Time before the first event, such as a caller's own work, is not part of the makespan."""
    timeline = Timeline((Event(0, "F", 0, 10.0, 12.0), Event(0, "B", 0, 13.0, 14.0)), 1)
    assert (timeline.start, timeline.makespan, timeline.bubble_fraction) == (10.0, 4.0, 0.25)


@pytest.mark.parametrize("events", [(), (Event(0, "F", 0, 2.0, 2.0),)])
def test_timeline_without_time_divides_nothing_by_zero(events: tuple[Event, ...]) -> None:
    """No events, or events that take no time, have no bubble and a perfect balance."""
    timeline = Timeline(events, 3)
    assert (timeline.makespan, timeline.bubble_fraction, timeline.imbalance) == (0.0, 0.0, 1.0)
    assert timeline.text_gantt(5).splitlines()[1:] == [f"partition {j}  ....." for j in range(3)]


@given(timelines())
def test_fractions_stay_in_range(timeline: Timeline) -> None:
    """A bubble is a share of the whole, and no balance is better than perfect."""
    assert 0.0 <= timeline.bubble_fraction <= 1.0
    assert 1.0 - 1e-9 <= timeline.imbalance <= timeline.n_partitions + 1e-9


def test_to_frame_has_one_row_per_event() -> None:
    """The frame holds the events as they are, and how long each took."""
    frame = SMALL.to_frame()
    assert list(frame.columns) == ["partition", "kind", "micro_batch", "start", "end", "duration"]
    assert len(frame) == len(SMALL.events)
    assert frame["duration"].tolist() == [1.0, 0.5, 1.0, 1.0, 0.5, 1.0, 3.0]
    assert frame.groupby("kind")["duration"].sum().to_dict() == {"B": 4, "C": 1, "F": 2, "R": 1}


def test_to_frame_of_no_events_has_the_same_columns() -> None:
    """A timeline without events makes an empty frame that can be worked with."""
    frame = Timeline((), 1).to_frame()
    assert list(frame.columns) == list(SMALL.to_frame().columns)
    assert frame.empty


GANTT = """\
measured: makespan 8.00 s, bubble 56.2 % (0-9 forward, r recompute, A-J backward)
partition 0  00..rr....AAAAAA
partition 1  ...00AA........."""


def test_text_gantt_is_its_drawing() -> None:
    """A drawing shows a letter where a partition computes and a dot where it does not."""
    assert SMALL.text_gantt(width=16) == GANTT


@pytest.mark.parametrize(("width", "columns"), [(16, 16), (31, 16), (32, 32), (100, 96)])
def test_text_gantt_draws_a_common_clock_evenly(width: int, columns: int) -> None:
    """All times are multiples of half a second, so each gets equally many columns."""
    for narrow, wide in zip(
        GANTT.splitlines()[1:], SMALL.text_gantt(width).splitlines()[1:], strict=True
    ):
        cells = narrow.removeprefix("partition 0  ").removeprefix("partition 1  ")
        assert wide.split()[-1] == "".join(cell * (columns // 16) for cell in cells)


def test_text_gantt_without_a_common_clock_uses_the_whole_width() -> None:
    """Times that share no clock are drawn to the nearest column."""
    timeline = Timeline((Event(0, "F", 0, 0, math.e), Event(0, "B", 0, math.pi, 10)), 1)
    assert timeline.text_gantt(10).splitlines()[1] == "partition 0  000AAAAAAA"
    assert timeline.text_gantt(40).splitlines()[1].count(".") == 2


def test_text_gantt_has_one_axis_for_host_and_partitions() -> None:
    """The line of launches is as long as the others, though launches alone share a clock."""
    events = (
        Event(0, "H", 0, 0.0, 1.0),
        Event(0, "F", 0, 0.0, 1.2345678),
        Event(0, "H", 1, 1.0, 2.0),
        Event(0, "F", 1, 1.2345678, 2.4691356),
        Event(0, "B", 1, 2.4691356, 3.0),
    )
    _, work, host = Timeline(events, 1).text_gantt(100).splitlines()
    assert len(work) == len(host)
    assert host.split()[-1].index("1") == 33  # a third of 100 columns


def test_text_gantt_shows_last_digits() -> None:
    """Micro-batch 12 is drawn as 2, its backward as C; labels of partitions are aligned."""
    events = (Event(0, "F", 12, 0, 1), Event(0, "B", 12, 1, 2), Event(10, "B", 9, 1, 2))
    lines = Timeline(events, 11).text_gantt(2).splitlines()
    assert lines[1] == "partition  0  2C"
    assert lines[11] == "partition 10  .J"


def test_str_is_a_gantt_of_a_hundred_columns() -> None:
    """Printing a timeline draws it, at most a hundred columns wide."""
    assert str(SMALL) == SMALL.text_gantt(width=100)


@given(timelines(), st.integers(-1, 150))
def test_text_gantt_fits_its_width(timeline: Timeline, width: int) -> None:
    """Every line has the same number of columns: the width, or less by less than a half."""
    lines = timeline.text_gantt(width).splitlines()[1:]
    lengths = {len(line.split()[-1]) for line in lines}
    assert len(lines) == timeline.n_partitions
    assert len(lengths) == 1
    assert max(1, width) / 2 < lengths.pop() <= max(1, width)


@given(timelines())
def test_dict_round_trip_is_exact(timeline: Timeline) -> None:
    """Written to JSON text and read back, every float keeps every bit."""
    assert Timeline.from_dict(json.loads(json.dumps(timeline.to_dict()))) == timeline


def test_events_of_any_kind_of_list_are_kept_as_they_were(tmp_path: Path) -> None:
    """A list that grows later is not looked at again, nor is an iterator used up."""
    events = [Event(0, "F", 0, 0.0, 1.0), Event(0, "B", 0, 1.0, 3.0)]
    timeline, of_iterator = Timeline(events, 1), Timeline(iter(events), 1)  # type: ignore[arg-type]
    events.append(Event(0, "F", 0, 0.0, 9.0))
    for one in (timeline, of_iterator):
        assert (len(one.events), one.makespan) == (2, 3.0)
        one.save(tmp_path / "timeline.json")
        assert Timeline.load(tmp_path / "timeline.json") == one


def test_file_round_trip_is_exact(tmp_path: Path) -> None:
    """What was saved is loaded; timelines saved beside it are not part of that."""
    predicted = place(gpipe_schedule(2, 3), Durations((0.1, 0.2), (0.1, 0.2), (0.3, 1 / 3)))
    SMALL.save(tmp_path / "timeline.json", beside=[predicted])
    assert Timeline.load(tmp_path / "timeline.json") == SMALL
    predicted.save(tmp_path / "predicted.json")
    assert Timeline.load(tmp_path / "predicted.json") == predicted


def trace_of(timeline: Timeline, path: Path, *beside: Timeline) -> dict[str, Any]:
    """Save a timeline and read the whole file as any viewer would."""
    timeline.save(path, beside=beside)
    return json.loads(path.read_text(encoding="utf-8"))


def test_file_starts_with_format_and_version(tmp_path: Path) -> None:
    """A saved timeline says first what it is, as every file of gpipebal does."""
    trace = trace_of(SMALL, tmp_path / "timeline.json")
    assert list(trace) == ["format", "version", "displayTimeUnit", "traceEvents", "gpipebal"]
    assert (trace["format"], trace["version"]) == ("gpipebal-timeline", 1)
    assert trace["displayTimeUnit"] == "ms"
    assert trace["gpipebal"] == json.loads(json.dumps(SMALL.to_dict()))


def test_trace_names_and_orders_its_tracks(tmp_path: Path) -> None:
    """Every partition is a track, its copies a track below it, every timeline a process."""
    predicted = Timeline((Event(0, "F", 0, 0.0, 1.0),), 2)
    events = trace_of(SMALL, tmp_path / "timeline.json", predicted)["traceEvents"]
    names = [
        (e["pid"], e.get("tid"), e["args"]["name"])
        for e in events
        if e["ph"] == "M" and e["name"].endswith("_name")
    ]
    assert names == [
        (1, None, "1 measured"),
        (1, 1, "partition 0"),
        (1, 2, "partition 0: copies in"),
        (1, 3, "partition 1"),
        (1, 4, "partition 1: copies in"),
        (2, None, "2 simulated"),
        (2, 1, "partition 0"),
        (2, 2, "partition 1"),
    ]
    orders = [e for e in events if e["ph"] == "M" and e["name"].endswith("_sort_index")]
    assert [e["args"]["sort_index"] for e in orders] == [1, 1, 2, 3, 4, 2, 1, 2]


def test_trace_holds_every_event_in_microseconds(tmp_path: Path) -> None:
    """An event is a complete slice with its name, kind, place and times."""
    events = trace_of(SMALL, tmp_path / "timeline.json")["traceEvents"]
    slices = [event for event in events if event["ph"] == "X"]
    assert len(slices) == len(SMALL.events)
    assert slices[1] == {
        "ph": "X",
        "pid": 1,
        "tid": 1,
        "name": "R0",
        "cat": "recompute",
        "ts": 2e6,
        "dur": 1e6,
        "args": {"partition": 0, "micro_batch": 0},
    }


def test_trace_draws_the_hand_overs(tmp_path: Path) -> None:
    """Arrows lead from a forward to the next partition's and from a backward to the one before."""
    timeline = place(gpipe_schedule(3, 2, "always"), Durations((1,) * 3, (1,) * 3, (2,) * 3))
    events = trace_of(timeline, tmp_path / "timeline.json")["traceEvents"]
    arrows: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for event in events:
        if event["ph"] in ("s", "f"):
            arrows[event["id"]].append(event)
    ends = sorted((start["name"], start["tid"], end["tid"]) for start, end in arrows.values())
    assert ends == [
        ("backward", 2, 1),
        ("backward", 2, 1),
        ("backward", 3, 2),
        ("backward", 3, 2),
        ("forward", 1, 2),
        ("forward", 1, 2),
        ("forward", 2, 3),
        ("forward", 2, 3),
    ]
    # Perfetto drops arrows with other names.
    assert all(re.fullmatch("[0-9a-f]+", name) for name in arrows)
    for start, finish in arrows.values():
        assert (start["ph"], finish["ph"]) == ("s", "f")
        assert start["ts"] <= finish["ts"]
        assert "bp" not in start
        assert finish["bp"] == "e"
        assert start["name"] == finish["name"]
    last = max(arrows.values(), key=lambda points: points[0]["ts"])
    assert [point["ts"] for point in last] == [11e6, 12e6]


@given(timelines())
def test_slices_of_a_track_never_overlap(timeline: Timeline) -> None:
    """In whole nanoseconds, as viewers count, a slice starts no earlier than the last one ends."""
    copies = [event._replace(kind="C") for event in timeline.events if event.kind != "R"]
    shifted = [event._replace(start=event.start / 2) for event in copies]
    whole = Timeline((*timeline.events, *copies, *shifted), timeline.n_partitions)
    ends: dict[int, int] = {}
    for event in trace_events(whole.events, whole.n_partitions, 1, "name"):
        if event["ph"] == "X":
            start, duration = round(event["ts"] * 1e3), round(event["dur"] * 1e3)
            assert start >= ends.get(event["tid"], 0)
            ends[event["tid"]] = start + duration


def test_tolerated_overlap_is_cut_off_in_the_trace(tmp_path: Path) -> None:
    """What a coarse clock lets overlap is drawn one after the other, and recorded as it was."""
    timeline = Timeline((Event(0, "F", 0, 0.0, 1.0), Event(0, "B", 0, 0.9999995, 2.0)), 1)
    trace = trace_of(timeline, tmp_path / "timeline.json")
    slices = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert [(e["ts"], e["dur"]) for e in slices] == [(0.0, 1e6), (1e6, 1e6)]
    assert Timeline.load(tmp_path / "timeline.json") == timeline


def test_a_trace_too_large_to_be_read_is_refused_before_it_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its slices alone would be too many; nothing is refused that could be read back."""
    durations = Durations((1.0, 2.0), (1.0, 2.0), (2.0, 4.0))
    timeline = place(gpipe_schedule(2, 16, "always"), durations)
    path = tmp_path / "timeline.json"
    timeline.save(path, [timeline])
    text = path.read_text(encoding="utf-8")
    n_values = files._count_values(text)
    monkeypatch.setattr(files, "MAX_VALUES", n_values)
    timeline.save(path, [timeline])
    monkeypatch.setattr(files, "MAX_VALUES", n_values // 3)
    monkeypatch.setattr(noun, "trace_events", pytest.fail)
    with pytest.raises(FileFormatError, match=r"read back: more than \d+ values.*\n.*no-detail"):
        timeline.save(path, [timeline])
    assert path.read_text(encoding="utf-8") == text


@pytest.mark.parametrize(
    ("event", "message"),
    [
        (Event(2, "F", 0, 0.0, 1.0), r"event 2F0 .* partition=2 \(expected an int, 0\.\.1\)"),
        (Event(-1, "F", 0, 0.0, 1.0), "partition=-1"),
        (Event(True, "F", 0, 0.0, 1.0), "partition=True"),
        (Event(1.0, "F", 0, 0.0, 1.0), r"partition=1\.0 \(expected an int"),  # type: ignore[arg-type]
        (Event(0, "X", 0, 0.0, 1.0), r"kind='X' \(expected one of F, R, B, I, W, O, C, H\)"),
        (Event(0, "F", 2**31, 0.0, 1.0), r"micro_batch=2147483648 \(expected .*0\.\.2147483647\)"),
        (Event(0, "F", -1, 0.0, 1.0), r"micro_batch=-1 \(expected an int, 0\.\."),
        (Event(0, "F", 0, 2.0, 1.0), r"start=2\.0, end=1\.0 \(expected .* 0 <= start <= end\)"),
        (Event(0, "F", 0, -1.0, 1.0), r"start=-1\.0"),
        (Event(0, "F", 0, 0.0, math.inf), "end=inf"),
        (Event(0, "F", 0, math.nan, 1.0), "start=nan"),
        (Event(0, "F", 0, "0", 1.0), "start='0'"),  # type: ignore[arg-type]  # the point
    ],
)
def test_impossible_event_is_refused(event: Event, message: str) -> None:
    """An event lies in a partition, is of a known kind, and has finite times in order."""
    with pytest.raises(ProfileError, match=message):
        Timeline((event,), 2)


@pytest.mark.parametrize("n_partitions", [0, -1, True, 1.0, None])
def test_number_of_partitions_is_a_count(n_partitions: Any) -> None:
    """A timeline has at least one partition."""
    with pytest.raises(ProfileError, match="impossible number of partitions: n_partitions="):
        Timeline((), n_partitions)


def test_unknown_source_is_refused() -> None:
    """A timeline is simulated or measured, and the error says so."""
    with pytest.raises(ProfileError, match=r"source='guessed' .*'simulated', 'measured'"):
        Timeline((), 1, "guessed")  # type: ignore[arg-type]  # the source is the point


def test_partition_does_one_thing_at_a_time() -> None:
    """Two actions of one partition may touch but not overlap; the error names both."""
    events = (Event(0, "F", 0, 0.0, 1.0), Event(0, "F", 1, 1.0, 2.0), Event(0, "B", 1, 1.5, 3.0))
    Timeline(events[:2], 1)
    with pytest.raises(ProfileError, match=r"0B1 starts at 1\.5 s, 0F1 ends at 2\.0 s"):
        Timeline(events, 1)


def test_copies_may_overlap_everything() -> None:
    """Copies run beside the work of a partition and beside each other."""
    events = (Event(0, "F", 0, 0.0, 2.0), Event(0, "C", 1, 0.5, 1.5), Event(0, "C", 2, 1.0, 3.0))
    assert Timeline(events, 1).busy_time(0) == 2.0


def saved(tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    """Save a timeline, and give its path and content, to damage it."""
    path = tmp_path / "timeline.json"
    return path, trace_of(SMALL, path)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda record: record["gpipebal"].pop("events"), "is damaged: missing 'events'"),
        (lambda record: record.pop("gpipebal"), "is damaged: missing 'gpipebal'"),
        (lambda record: record.update(gpipebal=[1]), r"is damaged: .* gpipebal=\[1\] \(expected"),
        (lambda record: record["gpipebal"].update(colour="red"), "is damaged: .*'colour'"),
        (lambda record: record["gpipebal"].update(n_partitions=1), "is damaged: event 1C0 cannot"),
        (lambda record: record["gpipebal"].update(provenance=3), "is damaged: "),
        (lambda record: record["gpipebal"]["events"].append([0, "F"]), "is damaged: "),
        (lambda record: record["gpipebal"]["events"].append(None), "is damaged: "),
        (lambda record: record.update(version=2), r"newer format: version=2 \(.* 1\)"),
        (lambda record: record.update(version="1"), "no readable version"),
        (lambda record: record.update(format="gpipebal-plan"), "is not a gpipebal-timeline file"),
    ],
)
def test_damaged_file_is_refused(tmp_path: Path, damage: Any, message: str) -> None:
    """A file that is not what was saved is refused in one line and a fix, never misread."""
    path, record = saved(tmp_path)
    damage(record)
    path.write_text(json.dumps(record), encoding="utf-8")
    with pytest.raises(FileFormatError, match=message) as error:
        Timeline.load(path)
    what, fix = str(error.value).splitlines()
    assert what
    assert fix.startswith("Fix: ")


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"traceEvents": []}', '{"format": NaN}', "\x00", '"text"']
)
def test_foreign_file_is_refused(tmp_path: Path, text: str) -> None:
    """A text that is not a saved timeline, even another program's trace, is refused."""
    path = tmp_path / "foreign.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(FileFormatError, match=r"foreign\.json"):
        Timeline.load(path)


def test_missing_file_is_refused(tmp_path: Path) -> None:
    """A path without a file is an error of the same type and a FileNotFoundError."""
    with pytest.raises(FileFormatError, match=r"nowhere\.json cannot be read") as caught:
        Timeline.load(tmp_path / "nowhere.json")
    assert isinstance(caught.value, FileNotFoundError)


def test_trace_leads_arrows_through_copies(tmp_path: Path) -> None:
    """Where a hand-over has a copy, the arrow passes it, on the way there and on the way back."""
    times = Durations(
        (1.0,) * 2, (1.0,) * 2, (2.0,) * 2, forward_transfer=(0.0, 0.5), backward_transfer=(0.5, 0)
    )
    timeline = place(gpipe_schedule(2, 2, "never"), times)
    events = trace_of(timeline, tmp_path / "timeline.json")["traceEvents"]
    slices = [event for event in events if event["ph"] == "X"]
    arrows: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for event in events:
        if event["ph"] in ("s", "t", "f"):
            arrows[event["id"]].append(event)
    assert sorted(points[0]["name"] for points in arrows.values()) == [
        *["backward"] * 2,
        *["forward"] * 2,
    ]
    for points in arrows.values():
        assert [point["ph"] for point in points] == ["s", "t", "f"]
        assert [point["ts"] for point in points] == sorted(point["ts"] for point in points)
        (copy,) = [
            piece
            for piece in slices
            if piece["tid"] == points[1]["tid"]
            and piece["ts"] <= points[1]["ts"] <= piece["ts"] + piece["dur"]
        ]
        assert copy["cat"] == "copy"


def test_trace_counts_memory(tmp_path: Path) -> None:
    """What devices hold is a counter for each, in microseconds and bytes, for every timeline."""
    timeline = place(gpipe_schedule(2, 2, "never"), Durations((1,) * 2, (1,) * 2, (2,) * 2))
    sizes = [HeldBytes(5, recorded=CellBytes(graph=10)), HeldBytes(recorded=CellBytes(graph=7))]
    tracks = memory_over_time(timeline, sizes)
    path = tmp_path / "timeline.json"
    timeline.save(path, beside=[timeline], memory=[tracks, tracks])
    events = json.loads(path.read_text())["traceEvents"]
    counters = [event for event in events if event["ph"] == "C"]
    assert {(event["pid"], event["name"]) for event in counters} == {
        (pid, f"memory of partition {j}") for pid in (1, 2) for j in (0, 1)
    }
    first = [e for e in counters if e["pid"] == 1 and e["name"].endswith("0")]
    assert max(event["args"]["bytes"] for event in first) == tracks[0].peak == 25
    sizes = [event["args"]["bytes"] for event in first]
    assert all(a != b for a, b in pairwise(sizes))
    assert all(event["ts"] <= 1e6 * timeline.makespan for event in counters)
    assert Timeline.load(path) == timeline


def test_tracks_of_memory_may_come_from_an_iterator(tmp_path: Path) -> None:
    """They are drawn, and not used up by the check."""
    timeline = place(gpipe_schedule(1, 2, "never"), Durations((1,), (1,), (2,)))
    tracks = memory_over_time(timeline, [HeldBytes(5, recorded=CellBytes(graph=10))])
    for name, one in (("list", tracks), ("iterator", iter(tracks))):
        timeline.save(tmp_path / name, memory=[one])  # type: ignore[list-item]
    assert (tmp_path / "list").read_text() == (tmp_path / "iterator").read_text()
