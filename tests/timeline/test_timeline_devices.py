"""Tests of timelines with several partitions on a device, more kinds of work, and many events."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from schedule_oracles import durations_for, schedules

from gpipebal.errors import FileFormatError, ProfileError
from gpipebal.schedule import gpipe_schedule, interleaved_schedule, order_of, zero_bubble_schedule
from gpipebal.schedule.actions import KINDS
from gpipebal.simulator import Durations, place
from gpipebal.timeline import ALL_KINDS, Event, EventTable, Timeline

#: Partitions 0 and 2 on device 0, partition 1 on device 1: of 10 s they work 7 and 2.
SHARED = Timeline(
    events=(
        Event(0, "F", 0, 0.0, 1.0),
        Event(1, "F", 0, 1.0, 2.0),
        Event(2, "F", 0, 2.0, 3.0),
        Event(2, "I", 0, 3.0, 4.0),
        Event(1, "B", 0, 4.0, 5.0),
        Event(2, "W", 0, 4.0, 6.0),
        Event(0, "B", 0, 6.0, 7.0),
        Event(0, "O", 0, 9.0, 10.0),
    ),
    n_partitions=3,
    devices=(0, 1, 0),
)


def test_sums_count_devices_and_not_partitions() -> None:
    """Idle time and imbalance are those of devices, each of which may have many partitions."""
    assert (SHARED.n_partitions, SHARED.n_devices, SHARED.placement) == (3, 2, (0, 1, 0))
    assert [SHARED.busy_time(j) for j in range(3)] == [3.0, 2.0, 4.0]
    assert SHARED.bubble_fraction == (20 - 9) / 20
    assert SHARED.imbalance == 7 / 4.5


GANTT = """\
simulated: makespan 10.0 s, bubble 55.0 % (0-9 forward, r recompute, A-J backward or input \
gradient, a-j weight gradient, # optimizer)
device 0  0.0AaaA..#
device 1  .0..A....."""


def test_text_gantt_has_a_line_per_device() -> None:
    """Parts of backwards and optimizers have signs of their own, which the headline explains."""
    assert SHARED.text_gantt(width=10) == GANTT


def test_a_host_has_a_line_of_its_own() -> None:
    """What the host launches stands below the devices, on the same axis."""
    times = Durations((1.0,), (1.0,), (2.0,), forward_launch=(1.0,), backward_launch=(1.0,))
    gantt = place(gpipe_schedule(1, 2, "never"), times).text_gantt(width=6)
    assert gantt.splitlines()[1:] == ["partition 0  01BBAA", "host         0110.."]


def test_one_device_does_one_thing_at_a_time() -> None:
    """Two partitions of one device cannot compute at once, on two devices they can."""
    events = (Event(0, "F", 0, 0.0, 2.0), Event(1, "F", 0, 1.0, 3.0))
    with pytest.raises(ProfileError, match=r"device 0 does two things at once: 1F0 starts at 1\.0"):
        Timeline(events, 2, devices=(0, 0))
    assert Timeline(events, 2).n_devices == 2


@pytest.mark.parametrize("devices", [(0,), (0, 2), (1, 1), (0, -1), (0, True), [0, 1], (0, "1")])
def test_impossible_devices_are_refused(devices: Any) -> None:
    """Each partition has one device, and devices are numbered without gaps."""
    with pytest.raises(ProfileError, match="impossible devices: devices="):
        Timeline((), 2, devices=devices)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_files_keep_devices_and_all_kinds(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """A saved timeline of any schedule comes back equal, and its tracks do not overlap."""
    schedule = data.draw(schedules())
    timeline = place(schedule, data.draw(durations_for(schedule.n_partitions)))
    path = tmp_path_factory.mktemp("timelines") / "timeline.json"
    timeline.save(path)
    assert Timeline.load(path) == timeline
    assert Timeline.load(path).devices == timeline.devices


def test_a_trace_shows_launches_and_arrows_between_parts(tmp_path: Path) -> None:
    """The host is a track, and arrows lead from input gradients to input gradients."""
    ones = (1.0,) * 2
    times = Durations(ones, ones, ones, forward_launch=ones, backward_launch=ones)
    place(zero_bubble_schedule(2, 2), times).save(tmp_path / "trace.json")
    trace = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = [e["args"]["name"] for e in trace if e["name"] == "thread_name"]
    assert names == ["host: launches", "partition 0", "partition 1"]
    arrows = sorted((e["name"], e["tid"]) for e in trace if e["ph"] == "s")
    tracks = {e["args"]["name"]: e["tid"] for e in trace if e["name"] == "thread_name"}
    first, second = tracks["partition 0"], tracks["partition 1"]
    assert arrows == [*[("forward", first)] * 2, *[("input gradient", second)] * 2]


@pytest.mark.parametrize("devices", [[0, 5], "ab", 3, [0.5, 1]])
def test_damaged_devices_in_a_file_are_refused(devices: object) -> None:
    """A file whose devices cannot be is damaged, and nothing else."""
    record = {**SHARED.to_dict(), "devices": devices}
    with pytest.raises(FileFormatError, match="timeline is damaged"):
        Timeline.from_dict(record)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_table_is_a_sequence_of_its_events(data: st.DataObject) -> None:
    """Columns and tuple are equal both ways, hash alike, and index, slice and iterate alike."""
    schedule = data.draw(schedules())
    table = place(schedule, data.draw(durations_for(schedule.n_partitions))).table
    events = tuple(table)
    assert table == events and events == table and hash(table) == hash(events)
    assert EventTable.of(events) == table and EventTable.of(table) is table
    assert [table[k] for k in range(len(table))] == list(events)
    assert tuple(table[1:-1]) == events[1:-1] and table[-1] == events[-1]
    assert table != events[:-1] and table != "events"
    assert {type(value) for value in table[0]} == {int, str, float}
    assert pickle.loads(pickle.dumps(table)) == table


def test_a_table_prints_short() -> None:
    """A few events are written out; many are counted."""
    ones = (1.0,) * 2
    assert "Event(partition=0" in repr(
        place(gpipe_schedule(1, 1), Durations(*[ones[:1]] * 3)).table
    )
    assert repr(place(gpipe_schedule(2, 50), Durations(*[ones] * 3)).table) == "<298 events>"


def test_sums_of_tuple_and_table_are_equal() -> None:
    """A timeline sums up the same whether its events are written out or columns."""
    times = Durations(*[tuple(np.linspace(0.1, 0.9, 6).tolist())] * 3)
    columns = place(interleaved_schedule(3, 6), times)
    written = Timeline(tuple(columns.events), 6, devices=columns.devices)
    for name in ("start", "makespan", "chunks", "bubble_fraction", "imbalance"):
        assert getattr(columns, name) == getattr(written, name)
    assert columns.text_gantt() == written.text_gantt()


@pytest.mark.slow
def test_a_thousand_partitions_are_simulated() -> None:
    """1,024 partitions and 4,096 micro-batches are simulated, summed up and drawn."""
    n, m = 1024, 4096
    times = Durations((1.0,) * n, (1.0,) * n, (2.0,) * n)
    for name, makespan in (("gpipe", 3.0 * (m + n - 1)), ("1f1b", 3.0 * (m + n - 1))):
        timeline = place(order_of(name, n, m), times)
        assert timeline.makespan == makespan
        assert len(timeline.events) == 2 * n * m
        assert timeline.bubble_fraction == pytest.approx((n - 1) / (m + n - 1))
        assert len(timeline.text_gantt().splitlines()) == n + 1


def test_kinds_of_schedules_and_timelines_agree() -> None:
    """A kind has the same number in tables of actions and of events, which share columns."""
    row = place(zero_bubble_schedule(1, 1), Durations((1.0,), (1.0,), (1.0,))).events
    assert [event.kind for event in row] == ["F", "I", "W"]
    assert ALL_KINDS.startswith(KINDS)


def test_a_table_of_more_partitions_is_refused() -> None:
    """Events that the simulator made are for as many partitions as it placed."""
    times = Durations((1.0, 1.0), (1.0, 1.0), (2.0, 2.0))
    placed = place(gpipe_schedule(2, 2, "never"), times)
    assert Timeline(placed.events, 3).n_partitions == 3
    with pytest.raises(ProfileError, match=r"events of other partitions: 0 to 1 \(expected 0 to 0"):
        Timeline(placed.events, 1)
