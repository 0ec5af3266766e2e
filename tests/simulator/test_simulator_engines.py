"""Tests of how the simulator finds times: all engines against longest paths, and each other."""

from __future__ import annotations

import tracemalloc
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from schedule_oracles import (
    Cell,
    durations_for,
    first_ones,
    longest_paths,
    needs_of,
    schedules,
    seconds_of,
)

from gpipebal.errors import BalanceError, ProfileError
from gpipebal.schedule import (
    ALL_SCHEDULES,
    CHECKPOINT_MODES,
    Action,
    CheckpointMode,
    Order,
    Schedule,
    gpipe_schedule,
    one_f_one_b_schedule,
    order_of,
    with_recomputes,
)
from gpipebal.simulator import Durations, engines, place, wavefront
from gpipebal.timeline import COPY_KIND, Event, Timeline


def spans(timeline: Timeline) -> dict[Cell, tuple[float, float]]:
    """Return start and end of each action."""
    return {event[:3]: event[3:] for event in timeline.events if event.kind in "FRBIW"}


@pytest.fixture(params=["rows", "rounds"])
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Choose the engine, whatever the number of devices."""
    fewest = 10**9 if request.param == "rows" else 0
    monkeypatch.setattr(engines, "FEWEST_FOR_ROUNDS", fewest)
    return str(request.param)


@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize("overlap", [True, False])
@settings(max_examples=150, deadline=None)
@given(data=st.data(), late=st.booleans())
def test_times_are_longest_paths(data: st.DataObject, late: bool, overlap: bool) -> None:
    """Whatever schedule, placement and times: each action runs when the oracle says, to the bit."""
    schedule = data.draw(schedules())
    durations = data.draw(durations_for(schedule.n_partitions))
    if not overlap and late:
        schedule = with_recomputes(schedule, "never")
    timeline = place(schedule, durations, overlap=overlap, late_recompute=late)
    expected = longest_paths(schedule, durations, late=late, overlap=overlap)
    assert spans(timeline) == expected
    assert timeline.makespan == max(end for _, end in expected.values())


@settings(max_examples=60, deadline=None)
@given(data=st.data(), name=st.sampled_from(ALL_SCHEDULES), mode=st.sampled_from(CHECKPOINT_MODES))
def test_named_schedules_are_longest_paths(
    data: st.DataObject, name: str, mode: CheckpointMode
) -> None:
    """Orders by name, which are not looked over again, have the oracle's times too."""
    n_devices = data.draw(st.integers(1, 5))
    chunks = data.draw(st.sampled_from([1, n_devices, 2 * n_devices]))
    order = order_of(name, n_devices, chunks, mode)
    durations = data.draw(durations_for(order.n_partitions))
    expected = longest_paths(order.schedule(), durations, late=False, overlap=True)
    assert spans(place(order, durations)) == expected


@pytest.mark.parametrize("name", ["gpipe", "gpipe_in_order"])
@settings(max_examples=150, deadline=None)
@given(
    data=st.data(),
    n_partitions=st.integers(1, 5),
    chunks=st.integers(1, 6),
    pause=st.none() | st.sampled_from([0.0, 1.5]),
)
def test_wavefront_equals_the_other_engines(
    data: st.DataObject, name: str, n_partitions: int, chunks: int, pause: float | None
) -> None:
    """A wave has the times of actions one by one, with a mode for each partition."""
    modes = st.sampled_from(CHECKPOINT_MODES)
    checkpoint = data.draw(st.lists(modes, min_size=n_partitions, max_size=n_partitions))
    order = order_of(name, n_partitions, chunks, checkpoint)
    durations = data.draw(durations_for(n_partitions, more=False))
    again = data.draw(st.none() | st.just(durations.recompute))
    durations = Durations(
        durations.forward, durations.recompute, durations.backward, no_grad_forward=again
    )
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(wavefront, "FEWEST_FOR_WAVES", 1)
        assert wavefront.can_sweep(order, durations)
        by_wave = place(order, durations, pause=pause)
    by_actions = place(order.schedule(), durations, pause=pause)
    assert by_wave.events == by_actions.events


@pytest.mark.parametrize(
    ("name", "n_partitions", "is_wave"),
    [("gpipe", 2, False), ("gpipe", 63, False), ("gpipe", 64, True), ("1f1b", 64, False)],
)
def test_a_wave_is_taken_where_it_is_long(name: str, n_partitions: int, is_wave: bool) -> None:
    """A step of numpy for one or two actions takes longer than these one by one."""
    order = order_of(name, n_partitions, 3)
    assert wavefront.can_sweep(order, uniform(n_partitions)) is is_wave


def test_1f1b_with_a_pause_is_refused() -> None:
    """Its forwards and backwards take turns, so there is no place for one between them."""
    with pytest.raises(BalanceError, match="can never finish with a pause"):
        place(order_of("1f1b", 3, 5), uniform(3), pause=1.0)


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_a_device_does_one_thing_at_a_time(data: st.DataObject) -> None:
    """Actions of one device follow each other in its row's order, and links are never shared."""
    schedule = data.draw(schedules())
    durations = data.draw(durations_for(schedule.n_partitions))
    timeline = place(schedule, durations)
    found = spans(timeline)
    cells, firsts = set(found), first_ones(schedule)
    behind: dict[Cell, Cell] = {}
    for row in schedule.rows:
        for before, action in pairwise(row):
            assert found[before][1] <= found[action][0]
            behind[tuple(action)] = tuple(before)
    for cell, (start, end) in found.items():
        seconds = seconds_of(cell, cells, durations, behind.get(cell), cell in firsts)
        assert end == start + seconds
        for need in needs_of(cell, cells, schedule.n_partitions, late=False):
            assert found[need][1] <= start
    # The timeline's own check of the same events, one by one.
    Timeline(tuple(timeline.events), timeline.n_partitions, devices=timeline.devices)


def uniform(n: int, **more: float) -> Durations:
    """Give n partitions a forward, recompute and backward of one second, and more."""
    ones = (1.0,) * n
    columns: dict[str, Any] = {name: (time,) * n for name, time in more.items()}
    return Durations(ones, ones, ones, **columns)


def draw(timeline: Timeline) -> str:
    """Draw a timeline of whole seconds with one column per second, and keep the cells only."""
    lines = timeline.text_gantt(width=round(timeline.makespan)).splitlines()[1:]
    return "\n".join(line.split()[-1] for line in lines)


def test_overlapping_transfers_are_machines_of_their_own() -> None:
    """A transfer of 1 s runs beside both devices; two of 3 s queue up on one link."""
    schedule = gpipe_schedule(2, 2, "never")
    timeline = place(schedule, uniform(2, forward_transfer=1.0, backward_transfer=1.0))
    assert draw(timeline) == "01....BA\n..01BA.."
    copies = [event for event in timeline.events if event.kind == "C"]
    assert copies == [
        Event(1, "C", 0, 1.0, 2.0),
        Event(1, "C", 1, 2.0, 3.0),
        Event(0, "C", 1, 5.0, 6.0),
        Event(0, "C", 0, 6.0, 7.0),
    ]
    slow = place(schedule, uniform(2, forward_transfer=3.0))
    assert draw(slow) == "01.......BA\n....0..1BA."


def test_transfers_that_do_not_overlap_are_work_of_both() -> None:
    """The device that sends copies, then the one that receives; neither computes meanwhile."""
    timeline = place(
        gpipe_schedule(2, 2, "never"),
        uniform(2, forward_transfer=1.0, backward_transfer=1.0),
        overlap=False,
    )
    # 0F0 0-1, out to 2, 0F1 2-3, out to 4; 1: in 2-3, 1F0 3-4, in 4-5, 1F1 5-6, 1B1 6-7, out to 8.
    assert draw(timeline) == "0.1......B.A\n...0.1B.A..."
    assert Event(1, "C", 1, 4.0, 5.0) in timeline.events


def test_between_partitions_of_one_device_nothing_travels() -> None:
    """A transfer inside a device takes no time."""
    rows = (tuple(Action(j, "F", 0) for j in range(2)),)
    durations = uniform(2, forward_transfer=5.0)
    assert place(Schedule("one device", rows, (0, 0)), durations).makespan == 2.0


def test_a_late_recompute_waits_for_the_gradient() -> None:
    """Early, a recompute runs while the gradient is on its way; late, only when it is there."""
    schedule = gpipe_schedule(2, 1, "always")
    assert draw(place(schedule, uniform(2))) == "0r..A\n.0rA."
    assert draw(place(schedule, uniform(2), late_recompute=True)) == "0...rA\n.0rA.."


def test_optimizer_steps_follow_the_last_action_of_each_device() -> None:
    """Each device steps as soon as its own gradients are complete."""
    timeline = place(gpipe_schedule(2, 1, "never"), uniform(2, optimizer=2.0))
    assert draw(timeline) == "0..A##\n.0A##."
    assert "# optimizer" in timeline.text_gantt()


def test_an_optimizer_steps_when_its_device_has_sent_the_last_gradient() -> None:
    """By hand: partition 1 goes back from 2 s to 3 s, and its device copies for 2 s more."""
    times = Durations(
        (1.0, 1.0), (0.0, 0.0), (1.0, 1.0), backward_transfer=(2.0, 0.0), optimizer=(1.0, 1.0)
    )
    for overlap, begins in ((False, 5.0), (True, 3.0)):
        events = place(gpipe_schedule(2, 1, "never"), times, overlap=overlap).events
        (step,) = [event for event in events if event.kind == "O" and event.partition == 1]
        assert (step.start, step.end) == (begins, begins + 1.0)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_copy_begins_no_earlier_than_its_value_is_there(overlap: bool) -> None:
    """Also where the two times that add up to its end are no longer these when one is taken off."""
    assert (0.1 + 0.7) - 0.7 < 0.1
    times = Durations((0.1, 0.1), (0.0, 0.0), (0.1, 0.1), forward_transfer=(0.0, 0.7))
    events = place(gpipe_schedule(2, 1, "never"), times, overlap=overlap).events
    assert min(event.start for event in events if event.kind == COPY_KIND) == 0.1


def test_forwards_that_are_recomputed_may_be_faster() -> None:
    """A forward without a graph has its own time, and the spared micro-batch has the other."""
    timeline = place(gpipe_schedule(1, 2, "except_last"), uniform(1, no_grad_forward=3.0))
    assert draw(timeline) == "0001BrA"


def test_a_host_that_is_quick_changes_nothing() -> None:
    """Launches that take no time leave all times as they are."""
    schedule = one_f_one_b_schedule(3, 5, "always")
    hosted = place(schedule, uniform(3, forward_launch=0.0, backward_launch=0.0))
    assert spans(hosted) == spans(place(schedule, uniform(3)))


def test_a_slow_host_is_the_bottleneck() -> None:
    """One process launches one action at a time: no step is shorter than all its launches."""
    schedule = gpipe_schedule(4, 8, "never")
    timeline = place(schedule, uniform(4, forward_launch=1.0, backward_launch=1.0))
    assert timeline.makespan == 64.0
    launches = sorted(e[3:] for e in timeline.events if e.kind == "H")
    assert launches == [(float(k), k + 1.0) for k in range(64)]
    host = timeline.text_gantt(width=64).splitlines()[-1]
    assert host.startswith("host") and "." not in host.split()[-1]


def test_recomputes_may_be_all_that_the_host_takes_time_for() -> None:
    """One kind of launch that is given is enough."""
    schedule = gpipe_schedule(1, 1, "always")
    times = Durations((1.0,), (1.0,), (1.0,), recompute_launch=(5.0,))
    assert place(schedule, times).makespan == 6.0


def test_a_device_begins_with_its_launch_and_ends_no_earlier() -> None:
    """Kernels run while others are launched; a device that computes longer hides the host."""
    schedule = gpipe_schedule(1, 2, "never")
    slow_device = Durations((3.0,), (0.0,), (3.0,), forward_launch=(1.0,), backward_launch=(1.0,))
    timeline = place(schedule, slow_device)
    assert [e[3:] for e in timeline.events if e.kind in "FB"] == [
        (0.0, 3.0),
        (3.0, 6.0),
        (6.0, 9.0),
        (9.0, 12.0),
    ]
    assert [e[3:] for e in timeline.events if e.kind == "H"] == [(k, k + 1) for k in range(4)]


def test_a_device_ends_no_earlier_than_it_was_told_all() -> None:
    """By hand: kernels of 1 s that the host takes 3 s to launch."""
    times = Durations((1.0,), (0.0,), (1.0,), forward_launch=(3.0,), backward_launch=(3.0,))
    timeline = place(gpipe_schedule(1, 1, "never"), times)
    assert [e[3:] for e in timeline.events if e.kind in "FB"] == [(0.0, 3.0), (3.0, 6.0)]


def test_who_can_go_on_first_is_launched_first() -> None:
    """By hand: partition 1 waits for what it needs, and asks when that is launched, at 1 s.

    So does partition 0 for its next one, and comes first of two that ask at one time.
    """
    times = uniform(2, forward_launch=1.0, backward_launch=1.0)
    events = place(gpipe_schedule(2, 2, "never"), times).events
    launches = sorted((e.start, e.partition) for e in events if e.kind == "H")
    assert [partition for _, partition in launches] == [0, 0, 1, 1, 1, 0, 1, 0]


@settings(max_examples=60, deadline=None)
@given(data=st.data(), launch=st.floats(0.0, 10.0))
def test_a_host_only_delays(data: st.DataObject, launch: float) -> None:
    """With a host nothing starts earlier, the host never does two things, and all is bounded."""
    schedule = data.draw(schedules())
    durations = data.draw(durations_for(schedule.n_partitions, more=False))
    n = schedule.n_partitions
    columns = (durations.forward, durations.recompute, durations.backward)
    hosted = Durations(*columns, forward_launch=(launch,) * n, backward_launch=(launch,) * n)
    free, bound = spans(place(schedule, durations)), place(schedule, hosted)
    for cell, (start, _) in spans(bound).items():
        assert start >= free[cell][0]
    launches = sorted(e[3:] for e in bound.events if e.kind == "H")
    assert all(before[1] <= after[0] for before, after in pairwise(launches))
    assert bound.makespan >= sum(end - start for start, end in launches) * (1 - 1e-12)


@pytest.mark.usefixtures("engine")
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_schedule_without_one_action_is_refused(data: st.DataObject) -> None:
    """Whatever action is missing that others need, the error names it; nothing hangs."""
    schedule = data.draw(schedules())
    cells = {tuple(action) for row in schedule.rows for action in row}
    n = schedule.n_partitions
    needed = {need for cell in cells for need in needs_of(cell, cells, n, late=False)}
    needed = {cell for cell in needed if cell[1] not in "RW"}
    if not needed:
        return
    lost = data.draw(st.sampled_from(sorted(needed)))
    rows = tuple(tuple(a for a in row if a != lost) for row in schedule.rows)
    with pytest.raises(BalanceError, match=r"in no row|misplaced") as error:
        place(Schedule("broken", rows, schedule.devices), uniform(n))
    assert "Fix: " in str(error.value)


@pytest.mark.usefixtures("engine")
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_a_shuffled_schedule_is_placed_or_refused(data: st.DataObject) -> None:
    """Rows in any order either run as the longest paths say, or are refused as never finishing."""
    schedule = data.draw(schedules())
    rows = tuple(tuple(data.draw(st.permutations(row))) for row in schedule.rows)
    shuffled = Schedule("shuffled", rows, schedule.devices)
    durations = uniform(schedule.n_partitions)
    try:
        timeline = place(shuffled, durations)
    except BalanceError as error:
        assert "can never finish" in str(error)
        with pytest.raises(RecursionError):
            longest_paths(shuffled, durations, late=False, overlap=True)
    else:
        assert spans(timeline) == longest_paths(shuffled, durations, late=False, overlap=True)


def test_an_input_gradient_without_weight_gradient_is_refused() -> None:
    """Half a backward would leave parameters without gradients; both halves are fine."""
    row = (Action(0, "F", 0), Action(0, "I", 0))
    with pytest.raises(BalanceError, match=r"0I0 has no 0W0.*\n?.*add 0W0"):
        place(Schedule("half", (row,)), uniform(1))
    assert place(Schedule("whole", ((*row, Action(0, "W", 0)),)), uniform(1)).makespan == 2.0


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ((Action(0, "F", 0), Action(0, "I", 0), Action(0, "B", 0)), "whole and in parts"),
        ((Action(0, "F", -1),), "impossible micro-batch"),
        ((Action(0, "F", 2**31),), r"impossible micro-batch \(expected 0\.\.2147483647\)"),
        ((Action(2, "F", 0),), r"unknown partition \(expected 0..1\)"),
    ],
)
def test_impossible_rows_are_refused(row: tuple[Action, ...], message: str) -> None:
    """What no device can run is named."""
    with pytest.raises(BalanceError, match=message):
        place(Schedule("odd", (row,), (0, 0)), uniform(2))


def test_micro_batches_far_apart_are_placed() -> None:
    """A schedule may number its micro-batches as it likes, without a table of all numbers."""
    row = (Action(0, "F", 2**30), Action(0, "B", 2**30))
    tracemalloc.start()
    try:
        timeline = place(Schedule("sparse", (row,)), uniform(1))
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()
    assert (timeline.makespan, timeline.chunks) == (2.0, 2**30 + 1)


@pytest.mark.parametrize("order", [order_of("gpipe", 2, 2), gpipe_schedule(2, 2)])
def test_times_too_large_to_be_added_are_refused(order: Order | Schedule) -> None:
    """Infinite sums are an error and not a timeline, or a wrong reason."""
    huge = (1e308,) * 2
    with pytest.raises(ProfileError, match="too large to be added"):
        place(order, Durations(huge, huge, huge))


def test_pause_on_an_order_without_phases_is_refused() -> None:
    """1F1B as columns is refused with a pause as it is as rows."""
    with pytest.raises(BalanceError, match="with a pause: 0F1 stands after 0B0"):
        place(order_of("1f1b", 1, 2), uniform(1), pause=1.0)


@pytest.mark.parametrize(("mode", "n"), [("always", 40), ("except_last", 100), ("never", 40)])
@pytest.mark.parametrize("name", ALL_SCHEDULES)
def test_many_devices_are_placed(name: str, mode: CheckpointMode, n: int) -> None:
    """They go through numpy, with the times of the same rows one by one."""
    assert n >= engines.FEWEST_FOR_ROUNDS
    order = order_of(name, n, n, mode)
    rng = [((7 * j) % 11) / 8 for j in range(order.n_partitions)]
    durations = Durations(tuple(rng), tuple(rng[::-1]), tuple(time + 1 for time in rng))
    by_rounds = place(order, durations)
    engines_before = engines.FEWEST_FOR_ROUNDS
    engines.FEWEST_FOR_ROUNDS = 10**9
    try:
        assert place(order.schedule(), durations).events == by_rounds.events
    finally:
        engines.FEWEST_FOR_ROUNDS = engines_before


@pytest.mark.parametrize("mode", CHECKPOINT_MODES)
def test_large_pipelines_equal_the_closed_forms(mode: CheckpointMode) -> None:
    """200 uneven partitions and 500 micro-batches of GPipe take what the closed forms say."""
    n, m = 200, 500
    f, r, b = ([((k * j) % 101) / 7 for j in range(1, n + 1)] for k in (37, 53, 71))
    made = place(order_of("gpipe", n, m, mode), Durations(tuple(f), tuple(r), tuple(b))).makespan
    forward = sum(f) + (m - 1) * max(f)
    both = [x + y for x, y in zip(r, b, strict=True)]
    expected = forward + sum(b) + (m - 1) * max(b if mode == "never" else both)
    if mode == "always":
        expected = max(
            sum(f[:k]) + (m - 1) * max(f[:k]) + r[k - 1] + sum(b[:k]) + (m - 1) * max(both[:k])
            for k in range(1, n + 1)
        )
    assert made == pytest.approx(expected, rel=1e-12)
