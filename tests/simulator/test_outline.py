"""Timelines without detail: the same figures from fewer events."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

import gpipebal as gb
from gpipebal.errors import BalanceError, ProfileError
from gpipebal.profile import Profile
from gpipebal.schedule import ALL_SCHEDULES
from gpipebal.simulator import HeldBytes, memory_over_time
from gpipebal.timeline import Event, Timeline, outline
from gpipebal.timeline.chrome import trace_events

FIGURES = ("makespan", "bubble_fraction", "imbalance", "chunks", "n_devices", "start")
times = st.floats(0.1, 10)


@given(
    costs=st.lists(times, min_size=4, max_size=9),
    pairs=st.integers(1, 4),
    schedule=st.sampled_from(ALL_SCHEDULES),
    checkpoint=st.sampled_from(("never", "except_last")),
)
def test_outline_has_the_same_figures(
    costs: list[float], pairs: int, schedule: str, checkpoint: str
) -> None:
    """Makespan, bubble, imbalance, chunks and busy times do not depend on the detail."""
    chunks = 2 * pairs  # which can be interleaved on two devices
    profile = Profile.from_costs(costs, recompute=costs)
    plan = gb.solve(profile, 4, chunks=chunks, checkpoint=checkpoint)
    whole, joined = gb.simulate(plan, schedule), gb.simulate(plan, schedule, detail=False)
    for figure in FIGURES:
        assert getattr(joined, figure) == pytest.approx(getattr(whole, figure), rel=1e-9, abs=1e-9)
    for j in range(4):
        assert joined.busy_time(j) == pytest.approx(whole.busy_time(j), rel=1e-9)
    assert len(joined.events) <= len(whole.events)
    joined_again = Timeline(tuple(joined.events), 4, devices=joined.devices)
    assert joined_again.makespan == joined.makespan  # and its events pass the checks
    assert whole.tells_micro_batches and not joined.tells_micro_batches


def test_only_work_of_one_kind_without_idle_time_is_joined() -> None:
    """Another kind, another partition of the same device, and idle time begin a new event."""
    events = (
        Event(0, "F", 0, 0.0, 1.0),
        Event(0, "F", 1, 1.0, 2.0),
        Event(1, "F", 0, 2.0, 3.0),
        Event(1, "F", 1, 3.5, 4.0),
        Event(1, "B", 1, 4.0, 5.0),
        Event(1, "C", 1, 0.0, 5.0),
    )
    joined = outline(Timeline(events, 2, devices=(0, 0)))
    assert [tuple(event) for event in joined.events] == [
        (0, "F", 1, 0.0, 2.0),
        (1, "F", 0, 2.0, 3.0),
        (1, "F", 1, 3.5, 4.0),
        (1, "B", 1, 4.0, 5.0),
    ]


def test_equal_layers_of_gpipe_leave_two_events_for_each_partition() -> None:
    """A thousand micro-batches of equal partitions are one forward and one backward of each."""
    plan = gb.solve(Profile.from_costs([1.0] * 8), 8, chunks=1000, checkpoint="never")
    joined = gb.simulate(plan, detail=False)
    assert [str(event) for event in joined.events] == [
        f"{j}{kind}999" for j in range(8) for kind in "FB"
    ]


def test_nothing_stays_nothing() -> None:
    """A timeline without events has an outline without events."""
    assert len(outline(Timeline((), 2)).events) == 0


def test_outline_cannot_tell_memory() -> None:
    """Memory over time needs to know when each micro-batch was at work; the fix works."""
    plan = gb.solve(Profile.from_costs([1.0, 2.0]), 2, chunks=3)
    sizes = [HeldBytes(), HeldBytes()]
    with pytest.raises(ProfileError, match=r"(?s)detail=False.*Fix: simulate"):
        memory_over_time(gb.simulate(plan, detail=False), sizes)
    assert len(memory_over_time(gb.simulate(plan, detail=True), sizes)) == 2


def test_detail_is_a_flag_and_is_kept_in_files(tmp_path: object) -> None:
    """What is neither true nor false is refused; a file keeps that it is an outline."""
    plan = gb.solve(Profile.from_costs([1.0, 2.0]), 2, chunks=3)
    with pytest.raises(BalanceError, match="detail"):
        gb.simulate(plan, detail="no")  # type: ignore[arg-type]
    joined = gb.simulate(plan, None, False)
    path = f"{tmp_path}/timeline.json"
    joined.save(path)
    loaded = Timeline.load(path)
    assert not loaded.tells_micro_batches
    assert dataclasses.replace(loaded, events=()) == dataclasses.replace(joined, events=())
    assert tuple(loaded.events) == tuple(joined.events)


def test_drawing_of_an_outline_shows_kinds_and_no_numbers() -> None:
    """An event that stands for several micro-batches is not drawn as one of them."""
    plan = gb.solve(Profile.from_costs([1.0, 1.0]), 2, chunks=3, checkpoint="never")
    assert gb.simulate(plan, detail=False).text_gantt(width=12).splitlines() == [
        "simulated: makespan 12.0 s, bubble 25.0 % (f forward, r recompute, B backward)",
        "partition 0  fff...BBBBBB",
        "partition 1  .fffBBBBBB..",
    ]
    split = gb.simulate(plan, "zb_h1", detail=False)
    head, *rows = split.text_gantt(width=12).splitlines()
    assert head.endswith("w weight gradient)")
    assert {symbol for row in rows for symbol in row.split()[-1]} <= set("fBw.")


def test_trace_of_an_outline_has_kinds_and_no_numbers_nor_arrows() -> None:
    """What stands for several micro-batches is not named after one, and hands nothing on."""
    joined = gb.simulate(gb.solve(Profile.from_costs([1.0, 1.0]), 2, chunks=3), detail=False)
    trace = trace_events(joined.events, 2, 1, "simulated", numbered=joined.tells_micro_batches)
    slices = [event for event in trace if event["ph"] == "X"]
    assert {event["name"] for event in slices} == {"forward", "recompute", "backward"}
    assert all(event["args"].keys() == {"partition"} for event in slices)
    assert not any(event["ph"] in "stf" for event in trace)
