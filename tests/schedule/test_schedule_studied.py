"""Tests of schedules that can be simulated only: torch's own orders, drawings, closed forms."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from schedule_oracles import needs_of
from torch_schedules import torch_rows

import gpipebal as gb
import gpipebal.schedule.studied
from gpipebal.errors import BalanceError, UnsupportedPlanError
from gpipebal.schedule import (
    ALL_SCHEDULES,
    CHECKPOINT_MODES,
    KNOWN_SCHEDULES,
    SCHEDULES,
    Action,
    CheckpointMode,
    KnownSchedule,
    Order,
    Schedule,
    check_schedule,
    gpipe_in_order_schedule,
    gpipe_schedule,
    interleaved_schedule,
    looped_bfs_schedule,
    make_schedule,
    one_f_one_b_schedule,
    order_of,
    with_recomputes,
    zero_bubble_schedule,
)
from gpipebal.simulator import Durations, place

counts = st.integers(1, 6)
modes = st.sampled_from(CHECKPOINT_MODES)


def rows_of(schedule: Schedule) -> list[list[str]]:
    """Write the actions of each device as torch does."""
    return [[str(action) for action in row] for row in schedule.rows]


SHAPES = [(n, m) for n in (1, 2, 3, 4, 8) for m in (1, 2, 3, 4, 5, 8, 12, 16, 24)]


@pytest.mark.parametrize(("n_devices", "chunks"), SHAPES)
def test_gpipe_in_order_is_torchs(n_devices: int, chunks: int) -> None:
    """GPipe with the first micro-batch first is torch's ScheduleGPipe."""
    mine = rows_of(gpipe_in_order_schedule(n_devices, chunks))
    assert mine == torch_rows("ScheduleGPipe", n_devices, chunks)


@pytest.mark.parametrize(("n_devices", "chunks"), [s for s in SHAPES if s[1] >= s[0]])
def test_1f1b_is_torchs(n_devices: int, chunks: int) -> None:
    """1F1B is torch's Schedule1F1B, where torch draws what it runs.

    The drawing of torch 2.13 numbers the forwards of its last row from 1 instead of 0.
    """
    mine = rows_of(one_f_one_b_schedule(n_devices, chunks))
    theirs = torch_rows("Schedule1F1B", n_devices, chunks)
    assert mine[:-1] == theirs[:-1]
    shifted = [
        f"{n_devices - 1}F{int(text.split('F')[1]) + 1}" if "F" in text else text
        for text in mine[-1]
    ]
    assert theirs[-1] in (mine[-1], shifted)


@pytest.mark.parametrize("each", [1, 2, 3])
@pytest.mark.parametrize(
    ("n_devices", "chunks"), [s for s in SHAPES if s[1] % max(1, s[1] // s[0]) == 0]
)
def test_interleaved_and_zero_bubble_are_torchs(n_devices: int, chunks: int, each: int) -> None:
    """Interleaved 1F1B and zero bubble are torch's, with one to three partitions per device."""
    mine = interleaved_schedule(n_devices, chunks, partitions_per_device=each)
    assert rows_of(mine) == torch_rows("ScheduleInterleaved1F1B", n_devices, chunks, each)
    mine = zero_bubble_schedule(n_devices, chunks, partitions_per_device=each)
    assert rows_of(mine) == torch_rows("ScheduleInterleavedZeroBubble", n_devices, chunks, each)


#: What torch's classes run under each name; 1F1B has a test of its own, as torch draws it wrongly.
OF_TORCH = [known for known in KNOWN_SCHEDULES.values() if known.torch and known.name != "1f1b"]


@pytest.mark.parametrize("known", OF_TORCH, ids=lambda known: known.name)
def test_records_name_the_class_of_torch_that_runs_them(known: KnownSchedule) -> None:
    """The rows of every schedule with a class of torch are those of that class."""
    each = known.partitions_per_device
    mine = known.schedule(4, 8, "never")
    assert rows_of(mine) == torch_rows(str(known.torch), 4, 8, each)
    assert mine.n_partitions == 4 * each


@pytest.mark.parametrize("each", [1, 2, 3])
@pytest.mark.parametrize(("n_devices", "chunks"), SHAPES)
def test_looped_bfs_is_torchs(n_devices: int, chunks: int, each: int) -> None:
    """Breadth first is torch's, for any number of micro-batches; with one partition each, GPipe."""
    mine = looped_bfs_schedule(n_devices, chunks, partitions_per_device=each)
    assert rows_of(mine) == torch_rows("ScheduleLoopedBFS", n_devices, chunks, each)
    if each == 1:
        assert mine.rows == gpipe_schedule(n_devices, chunks, "never").rows


@pytest.mark.parametrize(("n_devices", "chunks"), [(2, 5), (3, 7), (4, 9)])
def test_chunks_that_torch_refuses_are_refused_and_the_fix_works(
    n_devices: int, chunks: int
) -> None:
    """Where torch raises for the number of micro-batches, so do we, with one that works."""
    with pytest.raises(ValueError, match="multiple of the number of rounds"):
        torch_rows("ScheduleInterleaved1F1B", n_devices, chunks, 2)
    with pytest.raises(BalanceError, match="do not part into") as error:
        interleaved_schedule(n_devices, chunks)
    fits = int(str(error.value).rsplit("chunks=", 1)[1].rstrip("."))
    assert abs(fits - chunks) <= 2
    assert interleaved_schedule(n_devices, fits).chunks == fits


@settings(max_examples=200, deadline=None)
@given(name=st.sampled_from(ALL_SCHEDULES), n=counts, m=counts, each=st.integers(1, 3), mode=modes)
def test_every_action_once_and_behind_what_it_needs(
    name: str, n: int, m: int, each: int, mode: CheckpointMode
) -> None:
    """Each partition runs each micro-batch once in each direction, all gradients included."""
    known = KNOWN_SCHEDULES[name]
    each = each if known.takes_several else 1
    m *= n  # such numbers always part into groups
    schedule = known.schedule(n, m, mode, partitions_per_device=each)
    assert schedule.name == name
    assert (schedule.n_devices, schedule.n_partitions, schedule.chunks) == (n, n * each, m)
    cells = [tuple(action) for row in schedule.rows for action in row]
    assert len(cells) == len(set(cells))
    backward = ["I", "W"] if known.is_in_parts else ["B"]
    expected = {(j, k, i) for j in range(n * each) for i in range(m) for k in ["F", *backward]}
    assert {cell for cell in cells if cell[1] != "R"} == expected
    for d, row in enumerate(schedule.rows):
        seen: set[Any] = set()
        for action in row:
            assert schedule.placement[action.partition] == d
            needs = needs_of(action, set(cells), n * each, late=False)
            assert seen.issuperset(need for need in needs if need[0] == action.partition)
            seen.add(action)
    ones = (1.0,) * n * each
    assert place(schedule, Durations(ones, ones, ones)).n_devices == n


@settings(max_examples=200, deadline=None)
@given(data=st.data(), n=counts, m=st.integers(1, 9), name=st.sampled_from(ALL_SCHEDULES))
def test_columns_are_the_rows(data: st.DataObject, n: int, m: int, name: str) -> None:
    """`order_of` makes, as columns, exactly the rows that the schedule's own function makes."""
    m = m if name in SCHEDULES else m * n
    each = KNOWN_SCHEDULES[name].partitions_per_device
    checkpoint = data.draw(modes | st.lists(modes, min_size=n * each, max_size=n * each))
    rows = KNOWN_SCHEDULES[name].schedule(n, m, checkpoint)
    order = order_of(name, n, m, checkpoint)
    assert order.schedule() == rows
    again = Order.of(rows)
    for column in ("offsets", "partitions", "kinds", "micro_batches", "devices"):
        assert getattr(order, column).tolist() == getattr(again, column).tolist()


@given(n=counts, m=counts, mode=modes)
def test_recomputes_are_those_of_1f1b(n: int, m: int, mode: CheckpointMode) -> None:
    """Adding recomputes to 1F1B without any gives 1F1B with them, also on top of others."""
    made = one_f_one_b_schedule(n, m, mode)
    assert with_recomputes(one_f_one_b_schedule(n, m), mode) == made
    assert with_recomputes(one_f_one_b_schedule(n, m, "always"), mode) == made


def draw(schedule: Schedule, forward: float, backward: float) -> str:
    """Draw a schedule with whole times, one column per second; parts of a backward are halves."""
    n = schedule.n_partitions
    timeline = place(schedule, Durations((forward,) * n, (forward,) * n, (backward,) * n))
    lines = timeline.text_gantt(width=round(timeline.makespan)).splitlines()[1:]
    return "\n".join(line.split()[-1] for line in lines)


INTERLEAVED = """\
01012A3B2A3B.C.DCD
.010A1B2A3B2C3DCD."""


def test_interleaved_is_its_drawing() -> None:
    """Two devices with two partitions each: a micro-batch visits each device twice."""
    assert draw(interleaved_schedule(2, 4), 1, 1) == INTERLEAVED


BREADTH_FIRST = """\
0101..BABA
.0101BABA."""


def test_looped_bfs_is_its_drawing() -> None:
    """Both micro-batches go through a device's first partition before they go through its next."""
    assert draw(looped_bfs_schedule(2, 2), 1, 1) == BREADTH_FIRST


def test_module_drawing_is_what_the_simulator_draws() -> None:
    """The drawing at the top of the module is the drawing of this test, so it cannot rot."""
    drawing = draw(zero_bubble_schedule(3, 4), 1, 2)
    documented = gpipebal.schedule.studied.__doc__ or ""
    for d, line in enumerate(drawing.splitlines()):
        assert f"device {d}  {line}" in documented
    assert f"{len(drawing.splitlines()[0])} clocks" in documented


@settings(max_examples=60, deadline=None)
@given(n=counts, groups=st.integers(1, 3), f=st.integers(1, 5), b=st.integers(1, 5))
def test_bubbles_of_equal_partitions(n: int, groups: int, f: int, b: int) -> None:
    """Equal partitions idle as published: 1F1B (n-1)(f+b), interleaved by v, ZB-H1 (n-1)(f+b-w).

    Source: Narayanan et al. 2021, section 2.2; Qi et al. 2024, table 1, where b and w are the two
    parts of the backward, equal here.
    """
    m, w = groups * n, b
    times = Durations((f,) * n, (f,) * n, (b + w,) * n)
    assert place(one_f_one_b_schedule(n, m), times).makespan == (m + n - 1) * (f + b + w)
    # Breadth first goes round the devices in smaller steps too.
    halves = Durations((f / 2,) * 2 * n, (f / 2,) * 2 * n, ((b + w) / 2,) * 2 * n)
    made = place(interleaved_schedule(n, m), halves).makespan
    assert made == pytest.approx(m * (f + b + w) + (n - 1) * (f + b + w) / 2)
    made = place(looped_bfs_schedule(n, m), halves).makespan
    assert made == pytest.approx(m * (f + b + w) + (n - 1) * (f + b + w) / 2)
    if f == b:
        made = place(zero_bubble_schedule(n, m), times).makespan
        assert made == m * (f + b + w) + (n - 1) * (f + b - w)


#: Schedules that `GPipe` does not run.
STUDIED = [name for name in ALL_SCHEDULES if name not in SCHEDULES]


@pytest.mark.parametrize("name", STUDIED)
def test_the_executor_refuses_what_only_torch_runs(name: str) -> None:
    """GPipe and `make_schedule` name what runs such a schedule; the simulator takes it."""
    with pytest.raises(UnsupportedPlanError, match=r"torch\.distributed\.pipelining") as error:
        check_schedule(name)
    assert str(KNOWN_SCHEDULES[name].torch) in str(error.value)
    with pytest.raises(UnsupportedPlanError, match=name):
        make_schedule(name, 2, 2)
    assert name not in SCHEDULES
    profile = gb.Profile.from_costs([1.0] * 4, chunks=4)
    plan = gb.solve(profile, 2)
    assert gb.simulate(plan, name).n_partitions == 2


def test_unknown_names_are_refused() -> None:
    """A name that nobody knows is refused with those that exist."""
    with pytest.raises(UnsupportedPlanError, match=r"'2f2b' \(expected one of .*'zb_h1'"):
        order_of("2f2b", 2, 2)


def test_names_are_taken_as_people_write_them() -> None:
    """Capitals, dashes and spaces do not matter."""
    made, same = order_of("Interleaved 1F1B", 2, 4), order_of("interleaved_1f1b", 2, 4)
    assert made.schedule() == same.schedule()
    assert made.name == "interleaved_1f1b"


SINGLE = [name for name in ALL_SCHEDULES if not KNOWN_SCHEDULES[name].takes_several]


@pytest.mark.parametrize("name", SINGLE)
def test_several_partitions_per_device_need_a_schedule_for_them(name: str) -> None:
    """What goes round once has one partition per device; the fix names what goes round more."""
    with pytest.raises(BalanceError, match="interleaved_1f1b"):
        order_of(name, 2, 2, partitions_per_device=2)
    assert order_of("interleaved_1f1b", 2, 2, partitions_per_device=2).n_partitions == 4


@pytest.mark.parametrize("bad", [0, -1])
@pytest.mark.parametrize("name", STUDIED)
def test_counts_below_one_are_refused(name: str, bad: int) -> None:
    """There is at least one device, one micro-batch, one partition on each device."""
    for arguments in ((bad, 1), (1, bad)):
        with pytest.raises(BalanceError, match=r"1 or more"):
            order_of(name, *arguments)
    with pytest.raises(BalanceError, match=r"partitions_per_device"):
        order_of(name, 1, 1, partitions_per_device=bad)


def test_a_schedule_knows_its_devices() -> None:
    """Without placement every row is a partition; with one, rows and partitions differ."""
    row: Sequence[Action] = (Action(0, "F", 0),)
    assert Schedule("one", (tuple(row),)).placement == (0,)
    made = interleaved_schedule(2, 2)
    assert (made.n_devices, made.n_partitions, made.placement) == (2, 4, (0, 1, 0, 1))
