"""Tests of memory over time: drawings, the known peaks of schedules, and a slow count."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from schedule_oracles import durations_for, schedules

import gpipebal.simulator.tracks
from gpipebal.errors import ProfileError
from gpipebal.memory.loss import AroundLoss
from gpipebal.memory.waiting import Stream
from gpipebal.schedule import (
    Order,
    Schedule,
    gpipe_schedule,
    interleaved_schedule,
    one_f_one_b_schedule,
    order_of,
    zero_bubble_schedule,
)
from gpipebal.simulator import (
    CellBytes,
    Durations,
    HeldBytes,
    MemoryTrack,
    memory_over_time,
    place,
)
from gpipebal.simulator.tracks import HELD_KINDS
from gpipebal.timeline import Event, Timeline

counts = st.integers(1, 6)


def uniform(n: int) -> Durations:
    """Give n partitions a forward, recompute and backward of one second."""
    ones = (1.0,) * n
    return Durations(ones, ones, ones)


def alike(fixed: int = 0, **cell: Any) -> HeldBytes:
    """Make sizes that are the same whether or not a micro-batch is recomputed."""
    return HeldBytes(fixed, recorded=CellBytes(**cell), recomputed=CellBytes(**cell))


def tracks_of(
    schedule: Schedule | Order, size: HeldBytes, durations: Durations | None = None
) -> tuple[MemoryTrack, ...]:
    """Follow a schedule whose partitions are all of one size."""
    n = schedule.n_partitions
    timeline = place(schedule, durations or uniform(n))
    return memory_over_time(timeline, [size] * n)


def test_module_drawing_is_what_is_found() -> None:
    """The numbers at the top of the module are those of this test, so they cannot rot."""
    tracks = tracks_of(one_f_one_b_schedule(2, 3), alike(graph=1))
    numbers = "".join(str(tracks[0].at(second + 0.5)["graphs"]) for second in range(8))
    documented = gpipebal.simulator.tracks.__doc__ or ""
    assert f"    #              {numbers}\n" in documented
    assert "    # partition 0  01.A2B.C\n" in documented


@given(n=counts, m=counts)
def test_peaks_of_graphs_are_the_known_ones(n: int, m: int) -> None:
    """GPipe keeps m graphs, or m - 1 inputs and a graph; 1F1B min(m, n - j); ZB-H1 at most n."""
    size = alike(graph=100, kept=7)

    def peaks(schedule: Schedule | Order, times: Durations | None = None) -> list[int]:
        tracks = tracks_of(schedule, alike(graph=100), times)
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
    (track,) = tracks_of(zero_bubble_schedule(1, 1), alike(graph=100, weights=30))
    # F takes 1 s, I and W half a second each.
    seen = [(track.at(t)["graphs"], track.at(t)["weights"]) for t in (0.5, 1.25, 1.75, 2.0)]
    assert seen == [(100, 0), (100, 0), (0, 30), (0, 0)]


def test_what_is_made_for_others_waits_with_its_maker() -> None:
    """An output waits until the forward that takes it begins, a gradient until the backward."""
    durations = Durations((1.0, 3.0), (0.0, 0.0), (1.0, 4.0))
    timeline = place(gpipe_schedule(2, 3, "never"), durations)
    up, down = (Stream(kind, taker, 10, 0) for kind, taker in (("F", 1), ("B", 0)))
    tracks = memory_over_time(timeline, [HeldBytes(streams=[up]), HeldBytes(streams=[down])])
    # Partition 1 works on micro-batch 0 while 1 and 2 come: it takes them at 4 s and at 7 s.
    waiting = [tracks[0].at(second + 0.5)["waiting"] for second in range(8)]
    assert waiting == [0, 0, 10, 20, 10, 10, 10, 0]
    # Nobody is busy when a gradient comes: it is taken as soon as it is there.
    assert (tracks[1].peak, tracks[1].held["waiting"].max()) == (10, 10)
    assert set(tracks[1].total[tracks[1].total > 0].tolist()) == {10}
    assert not any(tracks[1].at(second + 0.5)["waiting"] for second in range(22))


def test_some_streams_are_of_recomputed_micro_batches_only() -> None:
    """Bytes go by whether the maker's micro-batch is recomputed; some exist if the taker's is."""
    durations = Durations((1.0, 3.0), (1.0, 1.0), (1.0, 1.0))
    timeline = place(gpipe_schedule(2, 3, "except_last"), durations)

    def waits(stream: Stream) -> list[int]:
        track = memory_over_time(timeline, [HeldBytes(streams=[stream]), HeldBytes()])[0]
        return [track.at(second + 0.5)["waiting"] for second in range(7)]

    assert waits(Stream("F", 1, 100, 10)) == [0, 0, 10, 110, 100, 100, 100]
    assert waits(Stream("F", 1, 100, 10, only_if_recomputed=True)) == [0, 0, 10, 10, 0, 0, 0]
    assert waits(Stream("F", 1, 100, 10, only_if_recomputed=False)) == [0, 0, 0, 100, 100, 100, 100]


def test_gradients_of_parameters_come_with_the_first_backward() -> None:
    """They are part of what it needs while it runs, and there from its end on."""
    size = HeldBytes(gradients=50, recorded=CellBytes(first_backward=60, backward=7))
    (track,) = tracks_of(gpipe_schedule(1, 2, "never"), size)
    assert [sum(track.at(second + 0.5).values()) for second in range(4)] == [0, 0, 60, 57]
    assert (track.held["gradients"][-1], track.total[-1]) == (50, 50)
    # Where a backward is done in two parts, the first makes none.
    (track,) = tracks_of(zero_bubble_schedule(1, 1), HeldBytes(gradients=50))
    assert [track.at(t)["gradients"] for t in (1.25, 1.75, 2.0)] == [0, 0, 50]


def test_the_callers_loss_stands_between_the_phases() -> None:
    """Outputs add up; behind the last forward is the most; then what stays; then what is left."""
    size = HeldBytes(recorded=CellBytes(output=10), around=AroundLoss(70, 33, 0, 21))
    (track,) = memory_over_time(place(gpipe_schedule(1, 3, "never"), uniform(1), pause=2.0), [size])
    seen = [track.at(second + 0.5)["outputs"] for second in range(8)]
    assert seen == [0, 10, 20, 70, 70, 33, 33, 33]
    assert (track.peak, track.peak_time, track.total[-1]) == (70, 3.0, 21)
    # Without a pause it takes no time, and is the highest moment all the same.
    (track,) = tracks_of(gpipe_schedule(1, 3, "never"), size)
    assert (track.peak, track.at(3.5)["outputs"]) == (70, 33)
    # Behind a forward without a backward nothing comes: the loss is still being computed.
    forwards = Timeline(tuple(Event(0, "F", i, 1.0 * i, 1.0 * i + 1) for i in range(3)), 1)
    assert memory_over_time(forwards, [size])[0].total.tolist()[-1] == 70


def test_fixed_bytes_are_there_all_the_time() -> None:
    """Parameters of all partitions of a device are held from the first moment to the last."""
    tracks = tracks_of(interleaved_schedule(2, 2), alike(fixed=50))
    assert [track.partitions for track in tracks] == [(0, 2), (1, 3)]
    assert all(set(track.total.tolist()) == {100} for track in tracks)


def test_passing_needs_end_with_their_action() -> None:
    """The largest need of an action counts while it runs, and not for the next."""
    (track,) = tracks_of(
        gpipe_schedule(1, 1, "never"),
        alike(graph=10, forward=3, first_backward=8),
    )
    assert (track.at(0.5)["transient"], track.at(1.0)["transient"]) == (3, 8)
    assert (track.peak, track.peak_time) == (18, 1.0)
    assert str(track) == "device 0: peak 18 B (10 B graphs, 8 B transient)"


def slowly(timeline: Timeline, sizes: list[HeldBytes], time: float) -> list[int]:
    """Count what the partitions hold in the middle of nowhere, cell by cell."""
    spans = {event[:3]: event[3:] for event in timeline.events if event.kind in "FRBIW"}
    cells = set(spans)
    held = [size.fixed for size in sizes]
    never = (float("inf"),) * 2

    def end_of_first_gradient(j: int) -> float:
        return min(spans[cell][1] for cell in cells if cell[0] == j and cell[1] in "BW")

    for j, size in enumerate(sizes):
        if size.gradients_exist or end_of_first_gradient(j) <= time:
            held[j] += size.gradients
    for j, i in {(j, i) for j, _, i in cells}:
        recomputed = (j, "R", i) in cells
        size = sizes[j].recomputed if recomputed else sizes[j].recorded
        ends = {kind: spans.get((j, kind, i), never) for kind in "FRBIW"}
        graph_from = ends["R" if recomputed else "F"][0]
        graph_to = min(ends["B"][1], ends["I"][1])
        if recomputed and ends["F"][0] <= time < ends["R"][0]:
            held[j] += size.kept
        if graph_from <= time < graph_to:
            held[j] += size.graph
        if ends["I"][1] <= time < ends["W"][1]:
            held[j] += size.graph if size.weights is None else size.weights
        back = "B" if (j, "B", i) in cells else "I"
        first = float("-inf") if sizes[j].gradients_exist else end_of_first_gradient(j)
        for kind, need in (
            ("F", size.forward),
            ("R", size.recompute),
            *(
                (kind, size.first_backward if start < first else size.backward)
                for kind, (start, _) in ((kind, ends[kind]) for kind in (back, "W"))
            ),
        ):
            if ends[kind][0] <= time < ends[kind][1]:
                held[j] += need
        for stream in sizes[j].streams:
            taker_again = (stream.taker, "R", i) in cells
            made, taken = (
                spans.get((of, "IB"[(of, "B", i) in cells] if stream.kind == "B" else "F", i))
                for of in (j, stream.taker)
            )
            assert made is not None and taken is not None
            exists = stream.only_if_recomputed in (None, taker_again)
            if exists and made[1] <= time < taken[0]:
                held[j] += stream.n_bytes_recomputed if recomputed else stream.n_bytes
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

    def cell() -> CellBytes:
        names = ("kept", "graph", "forward", "recompute", "first_backward", "backward")
        sizes = {name: data.draw(number) for name in names}
        return CellBytes(**sizes, weights=data.draw(st.none() | number))

    def streams(j: int) -> list[Stream]:
        beside: list[tuple[Any, int]] = [("F", j + 1)] if j + 1 < n else []
        beside += [("B", j - 1)] if j else []
        which = st.sampled_from([None, True, False])
        return [
            Stream(*to, data.draw(number), data.draw(number), data.draw(which)) for to in beside
        ]

    sizes = [
        HeldBytes(
            data.draw(number),
            data.draw(number),
            cell(),
            cell(),
            streams(j),
            gradients_exist=data.draw(st.booleans()),
        )
        for j in range(n)
    ]
    tracks = memory_over_time(timeline, sizes)
    times = sorted({time for event in timeline.events for time in event[3:]})
    for before, after in pairwise(times):
        middle = (before + after) / 2
        # What is taken next to nothing after somebody starts may as well be late.
        if middle - before > 1e-8 * timeline.makespan:
            counted = slowly(timeline, sizes, middle)
            assert [sum(track.at(middle).values()) for track in tracks] == counted
    for d, track in enumerate(tracks):
        here = [size for size, device in zip(sizes, schedule.placement, strict=True) if device == d]
        assert all((track.held[kind] >= 0).all() for kind in HELD_KINDS)
        # In the end everything has been given back, but for the gradients of the parameters.
        exist = sum(size.gradients for size in here if size.gradients_exist)
        assert track.total[0] == exist + sum(size.fixed for size in here)
        assert track.total[-1] == sum(size.fixed + size.gradients for size in here)
        assert (track.times[1:] >= track.times[:-1]).all()


def test_a_measured_timeline_in_any_order_has_a_track_too() -> None:
    """Events of a recorder come as they come, with copies between; the track is the same."""
    simulated = place(order_of("1f1b", 3, 4), uniform(3))
    copies = [Event(1, "C", i, 1.0 * i, 1.0 * i) for i in range(4)]
    measured = Timeline((*reversed(tuple(simulated.events)), *copies), 3, "measured")
    sizes = [alike(graph=3, kept=1)] * 3
    for mine, theirs in zip(
        memory_over_time(measured, sizes), memory_over_time(simulated, sizes), strict=True
    ):
        assert mine.times.tolist() == theirs.times.tolist()
        assert mine.total.tolist() == theirs.total.tolist()


def test_to_frame_has_one_row_per_change() -> None:
    """The frame holds device, time, each kind and the total."""
    (track,) = tracks_of(gpipe_schedule(1, 1, "never"), alike(graph=10, fixed=1))
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
    with pytest.raises(ProfileError, match="size is impossible: graph="):
        CellBytes(graph=bad)
    with pytest.raises(ProfileError, match="size is impossible: fixed="):
        HeldBytes(fixed=bad)


def test_sizes_and_partitions_must_agree() -> None:
    """One size per partition, neither more nor fewer."""
    timeline = place(gpipe_schedule(2, 1), uniform(2))
    with pytest.raises(ProfileError, match=r"len\(sizes\)=1 \(expected 2"):
        memory_over_time(timeline, [HeldBytes()])
