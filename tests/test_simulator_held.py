"""Tests of memory over time: drawings, the known peaks of schedules, and a slow count."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from schedule_oracles import durations_for, needs_of, schedules

import gpipebal.simulator.held
from gpipebal.errors import ProfileError
from gpipebal.schedule import (
    Order,
    Schedule,
    gpipe_schedule,
    interleaved_schedule,
    one_f_one_b_schedule,
    order_of,
    zero_bubble_schedule,
)
from gpipebal.simulator import Durations, HeldBytes, MemoryTrack, memory_over_time, place
from gpipebal.simulator.held import HELD_KINDS
from gpipebal.timeline import Event, Timeline

counts = st.integers(1, 6)


def uniform(n: int) -> Durations:
    """Give n partitions a forward, recompute and backward of one second."""
    ones = (1.0,) * n
    return Durations(ones, ones, ones)


def tracks_of(
    schedule: Schedule | Order, size: HeldBytes, durations: Durations | None = None
) -> tuple[MemoryTrack, ...]:
    """Follow a schedule whose partitions are all of one size."""
    n = schedule.n_partitions
    timeline = place(schedule, durations or uniform(n))
    return memory_over_time(timeline, [size] * n)


def test_module_drawing_is_what_is_found() -> None:
    """The numbers at the top of the module are those of this test, so they cannot rot."""
    tracks = tracks_of(one_f_one_b_schedule(2, 3), HeldBytes(saved=1))
    numbers = "".join(str(tracks[0].at(second + 0.5)["graphs"]) for second in range(8))
    documented = gpipebal.simulator.held.__doc__ or ""
    assert f"    #              {numbers}\n" in documented
    assert "    # partition 0  01.A2B.C\n" in documented


@given(n=counts, m=counts)
def test_peaks_of_graphs_are_the_known_ones(n: int, m: int) -> None:
    """GPipe keeps m graphs, or m - 1 inputs and a graph; 1F1B min(m, n - j); ZB-H1 at most n."""
    size = HeldBytes(saved=100, input=7)

    def peaks(schedule: Schedule | Order, times: Durations | None = None) -> list[int]:
        tracks = tracks_of(schedule, HeldBytes(saved=100), times)
        return [track.peak for track in tracks]

    assert peaks(gpipe_schedule(n, m, "never")) == [100 * m] * n
    inputs = [track.at_peak for track in tracks_of(gpipe_schedule(n, m, "always"), size)]
    assert [(held["inputs"], held["graphs"]) for held in inputs] == [(7 * (m - 1), 100)] * n
    assert peaks(one_f_one_b_schedule(n, m)) == [100 * min(m, n - j) for j in range(n)]
    assert max(peaks(zero_bubble_schedule(n, m * n))) <= 100 * n
    interleaved = peaks(interleaved_schedule(n, m * n))
    assert interleaved[0] <= 100 * (n + 2 * (n - 1) + 1)


def test_what_a_weight_gradient_needs_is_held_until_then() -> None:
    """After the input's gradient a part stays, and goes with the weights' gradient."""
    (track,) = tracks_of(zero_bubble_schedule(1, 1), HeldBytes(saved=100, weights=30))
    # F takes 1 s, I and W half a second each.
    seen = [(track.at(t)["graphs"], track.at(t)["weights"]) for t in (0.5, 1.25, 1.75, 2.0)]
    assert seen == [(100, 0), (100, 0), (0, 30), (0, 0)]


def test_what_was_handed_in_waits() -> None:
    """An input waits until its forward starts, a gradient until its backward, and counts once."""
    durations = Durations((1.0, 3.0), (0.0, 0.0), (1.0, 1.0))
    tracks = tracks_of(gpipe_schedule(2, 3, "never"), HeldBytes(input=10, gradient=5), durations)
    # Partition 1 is at work on micro-batch 0 while 1 and 2 arrive at 2 s and 3 s.
    waiting = [tracks[1].at(second + 0.5)["waiting"] for second in range(8)]
    assert waiting == [0, 0, 10, 20, 10, 10, 10, 0]
    assert tracks[0].peak == 5
    assert max(tracks[0].held["transient"]) == 5
    assert max(tracks[0].held["waiting"]) == 5


def test_fixed_bytes_are_there_all_the_time() -> None:
    """Parameters of all partitions of a device are held from the first moment to the last."""
    tracks = tracks_of(interleaved_schedule(2, 2), HeldBytes(fixed=50))
    assert [track.partitions for track in tracks] == [(0, 2), (1, 3)]
    assert all(set(track.total.tolist()) == {100} for track in tracks)


def test_passing_needs_end_with_their_action() -> None:
    """The largest need of an action counts while it runs, and not for the next."""
    (track,) = tracks_of(
        gpipe_schedule(1, 1, "never"),
        HeldBytes(saved=10, forward_transient=3, backward_transient=8),
    )
    assert (track.at(0.5)["transient"], track.at(1.0)["transient"]) == (3, 8)
    assert (track.peak, track.peak_time) == (18, 1.0)
    assert str(track) == "device 0: peak 18 B (10 B graphs, 8 B transient)"


def slowly(timeline: Timeline, sizes: list[HeldBytes], time: float) -> list[int]:
    """Count what the partitions hold in the middle of nowhere, cell by cell."""
    spans = {event[:3]: event[3:] for event in timeline.events if event.kind in "FRBIW"}
    cells = set(spans)
    held = [size.fixed for size in sizes]
    n = len(sizes)
    for j, i in {(j, i) for j, _, i in cells}:
        size = sizes[j]
        ends = {kind: spans.get((j, kind, i), (float("inf"),) * 2) for kind in "FRBIW"}
        again = (j, "R", i) in cells
        graph_from = ends["R" if again else "F"][0]
        graph_to = min(ends["B"][1], ends["I"][1])
        if again and ends["F"][0] <= time < ends["R"][0]:
            held[j] += size.input
        if graph_from <= time < graph_to:
            held[j] += size.saved
        if ends["I"][1] <= time < ends["W"][1]:
            held[j] += size.saved if size.weights is None else size.weights
        back = "B" if (j, "B", i) in cells else "I"
        if j < n - 1 and ends[back][0] <= time < ends[back][1]:
            held[j] += size.gradient
        for kind, transient in (
            ("F", size.forward_transient),
            ("R", size.forward_transient),
            (back, size.backward_transient),
            ("W", size.backward_transient),
        ):
            if ends[kind][0] <= time < ends[kind][1]:
                held[j] += transient
        for kind, waits in (("F", size.input), (back, size.gradient)):
            for need in needs_of((j, kind, i), cells, n, late=False):
                if need[0] != j and spans[need][1] <= time < ends[kind][0]:
                    held[j] += waits
    devices = [0] * timeline.n_devices
    for j, total in enumerate(held):
        devices[timeline.placement[j]] += total
    return devices


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_tracks_equal_a_slow_count(data: st.DataObject) -> None:
    """At any time that is nobody's start or end, each device holds what counting cells gives."""
    schedule = data.draw(schedules())
    n = schedule.n_partitions
    timeline = place(schedule, data.draw(durations_for(n)))
    number = st.integers(0, 9)
    sizes = [
        HeldBytes(*(data.draw(number) for _ in range(4)), data.draw(st.none() | number), 2, 3)
        for _ in range(n)
    ]
    tracks = memory_over_time(timeline, sizes)
    times = sorted({time for event in timeline.events for time in event[3:]})
    for before, after in pairwise(times):
        middle = (before + after) / 2
        if before < middle < after:
            counted = slowly(timeline, sizes, middle)
            assert [sum(track.at(middle).values()) for track in tracks] == counted
    for d, track in enumerate(tracks):
        fixed = sum(sizes[j].fixed for j in range(n) if schedule.placement[j] == d)
        assert all((track.held[kind] >= 0).all() for kind in HELD_KINDS)
        # In the end everything has been given back.
        assert track.total[0] == track.total[-1] == fixed
        assert (track.times[1:] >= track.times[:-1]).all()


def test_a_measured_timeline_in_any_order_has_a_track_too() -> None:
    """Events of a recorder come as they come, with copies between; the track is the same."""
    simulated = place(order_of("1f1b", 3, 4), uniform(3))
    copies = [Event(1, "C", i, 1.0 * i, 1.0 * i) for i in range(4)]
    measured = Timeline((*reversed(tuple(simulated.events)), *copies), 3, "measured")
    sizes = [HeldBytes(saved=3, input=1, gradient=1)] * 3
    for mine, theirs in zip(
        memory_over_time(measured, sizes), memory_over_time(simulated, sizes), strict=True
    ):
        assert mine.times.tolist() == theirs.times.tolist()
        assert mine.total.tolist() == theirs.total.tolist()


def test_to_frame_has_one_row_per_change() -> None:
    """The frame holds device, time, each kind and the total."""
    (track,) = tracks_of(gpipe_schedule(1, 1, "never"), HeldBytes(saved=10, fixed=1))
    frame = track.to_frame()
    assert list(frame.columns) == ["device", "time", *HELD_KINDS, "total"]
    assert frame["total"].tolist() == [1, 11, 11, 11, 1]


def test_a_timeline_without_actions_holds_what_is_fixed() -> None:
    """Without actions there is one moment, and nothing but fixed bytes."""
    (track,) = memory_over_time(Timeline((), 1), [HeldBytes(fixed=5)])
    assert (track.peak, track.peak_time, track.times.tolist()) == (5, 0.0, [0.0])


@pytest.mark.parametrize("bad", [-1, 1.5, True, 2**62, None])
def test_impossible_sizes_are_refused(bad: Any) -> None:
    """Bytes are whole numbers, 0 or more; the error names the field."""
    with pytest.raises(ProfileError, match="size is impossible: saved="):
        HeldBytes(saved=bad)


def test_sizes_and_partitions_must_agree() -> None:
    """One size per partition, neither more nor fewer."""
    timeline = place(gpipe_schedule(2, 1), uniform(2))
    with pytest.raises(ProfileError, match=r"len\(sizes\)=1 \(expected 2"):
        memory_over_time(timeline, [HeldBytes()])
