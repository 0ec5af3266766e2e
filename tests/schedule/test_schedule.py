"""Tests of gpipebal.schedule: orders as drawings, and what every order must keep."""

from __future__ import annotations

import re
from functools import partial
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import gpipebal as gb
from gpipebal.errors import BalanceError, KindError, UnsupportedPlanError
from gpipebal.profile import Profile
from gpipebal.schedule import (
    ALL_SCHEDULES,
    CHECKPOINT_MODES,
    KNOWN_SCHEDULES,
    Action,
    CheckpointMode,
    Schedule,
    check_checkpoint,
    check_count,
    gpipe_schedule,
    is_checkpointed,
    order_of,
    partitions_on_each,
)
from gpipebal.schedule.actions import MOST_CELLS, MOST_IN_COLUMNS
from gpipebal.simulator import Durations, place

counts = st.integers(min_value=1, max_value=6)
modes = st.sampled_from(CHECKPOINT_MODES)

NEVER = """\
0F0 0F1 0F2 0B2 0B1 0B0
1F0 1F1 1F2 1B2 1B1 1B0"""

EXCEPT_LAST = """\
0F0 0F1 0F2 0B2 0R1 0B1 0R0 0B0
1F0 1F1 1F2 1B2 1R1 1B1 1R0 1B0"""

ALWAYS = """\
0F0 0F1 0F2 0R2 0B2 0R1 0B1 0R0 0B0
1F0 1F1 1F2 1R2 1B2 1R1 1B1 1R0 1B0"""


@pytest.mark.parametrize(
    ("checkpoint", "drawing"),
    [("never", NEVER), ("except_last", EXCEPT_LAST), ("always", ALWAYS)],
)
def test_gpipe_schedule_is_its_drawing(checkpoint: CheckpointMode, drawing: str) -> None:
    """All forwards come first, then all backwards from the last micro-batch to the first."""
    assert str(gpipe_schedule(2, 3, checkpoint)) == drawing


def test_gpipe_schedule_spares_the_last_micro_batch_by_default() -> None:
    """The default mode is 'except_last', as in GPipe."""
    assert gpipe_schedule(2, 3) == gpipe_schedule(2, 3, "except_last")


def test_gpipe_schedule_of_one_micro_batch_recomputes_nothing_in_except_last() -> None:
    """With one micro-batch the last one is the only one, so 'except_last' is 'never'."""
    assert gpipe_schedule(3, 1, "except_last") == gpipe_schedule(3, 1, "never")


@given(counts, counts, modes)
def test_gpipe_schedule_holds_each_action_once(
    n_partitions: int, chunks: int, checkpoint: CheckpointMode
) -> None:
    """Every partition runs each forward and backward once, and recomputes what the mode says."""
    schedule = gpipe_schedule(n_partitions, chunks, checkpoint)
    assert (schedule.name, schedule.n_partitions, schedule.chunks) == (
        "gpipe",
        n_partitions,
        chunks,
    )
    recomputed = [i for i in range(chunks) if is_checkpointed(checkpoint, i, chunks)]
    for j, row in enumerate(schedule.rows):
        expected = [Action(j, "F", i) for i in range(chunks)]
        expected += [Action(j, "B", i) for i in range(chunks)]
        expected += [Action(j, "R", i) for i in recomputed]
        assert sorted(row) == sorted(expected)


@given(counts, counts, modes)
def test_gpipe_schedule_recomputes_directly_before_the_backward(
    n_partitions: int, chunks: int, checkpoint: CheckpointMode
) -> None:
    """A recompute is followed by the backward of the same micro-batch, so one lives at a time."""
    for row in gpipe_schedule(n_partitions, chunks, checkpoint).rows:
        for before, after in pairwise(row):
            if before.kind == "R":
                assert after == Action(before.partition, "B", before.micro_batch)


@given(counts, counts, modes)
def test_phases_put_together_are_the_schedule(
    n_partitions: int, chunks: int, checkpoint: CheckpointMode
) -> None:
    """A GPipe row is its forward phase followed by its backward phase."""
    schedule = gpipe_schedule(n_partitions, chunks, checkpoint)
    halves = zip(schedule.phase("F"), schedule.phase("RB"), strict=True)
    assert tuple(forward + backward for forward, backward in halves) == schedule.rows


def test_schedule_without_rows_has_no_micro_batches() -> None:
    """An empty schedule counts no partitions and no micro-batches, and prints as nothing."""
    schedule = Schedule("empty", ())
    assert (schedule.n_partitions, schedule.chunks, str(schedule)) == (0, 0, "")


@pytest.mark.parametrize(
    ("checkpoint", "expected"),
    [("never", [False] * 4), ("except_last", [True] * 3 + [False]), ("always", [True] * 4)],
)
def test_is_checkpointed_by_mode(checkpoint: CheckpointMode, expected: list[bool]) -> None:
    """'never' keeps all activations, 'always' none, 'except_last' those of the last one."""
    assert [is_checkpointed(checkpoint, i, 4) for i in range(4)] == expected


@pytest.mark.parametrize("checkpoint", ["Always", "", None, True, "except last"])
def test_unknown_checkpoint_mode_is_refused(checkpoint: object) -> None:
    """The error shows the value and the modes there are, and its fix works."""
    with pytest.raises(BalanceError, match=r"checkpoint=.*'always', 'except_last', 'never'"):
        check_checkpoint(checkpoint)
    check_checkpoint("except_last")


def test_gpipe_schedule_refuses_an_unknown_checkpoint_mode() -> None:
    """A mode that does not exist never makes a schedule."""
    with pytest.raises(BalanceError, match="checkpoint mode does not exist: checkpoint='most'"):
        gpipe_schedule(2, 2, "most")  # type: ignore[arg-type]  # the mode is the point


@pytest.mark.parametrize(("n_partitions", "chunks"), [(0, 1), (1, 0), (-1, 2), (2, -3)])
def test_gpipe_schedule_refuses_counts_below_one(n_partitions: int, chunks: int) -> None:
    """A schedule has at least one partition and one micro-batch."""
    with pytest.raises(BalanceError, match=r"is too small: (partitions|chunks)=.*1 or more"):
        gpipe_schedule(n_partitions, chunks)


@pytest.mark.parametrize(
    ("n_devices", "chunks"), [(2, 10**30), (10**30, 2), (1, 10**10), (10**6, 10**6)]
)
@pytest.mark.parametrize("name", ALL_SCHEDULES)
def test_schedules_that_no_memory_holds_are_refused(name: str, n_devices: int, chunks: int) -> None:
    """Before a list of so many actions is made."""
    for order in (KNOWN_SCHEDULES[name].schedule, partial(order_of, name)):
        with pytest.raises(
            BalanceError, match=r"schedule is too large: chunks=.*\nFix: "
        ) as raised:
            order(n_devices, chunks, "never")
        fits = re.search(r"Fix: chunks=(\d+)", str(raised.value))
        if fits is not None:
            most = int(fits[1]) * n_devices * partitions_on_each(name, 2 * n_devices)
            assert MOST_CELLS - 2 * n_devices < most <= MOST_IN_COLUMNS


@pytest.mark.parametrize("value", [1, 7, 3.0, True + 1])
def test_check_count_takes_whole_numbers(value: object) -> None:
    """An int and a float that is whole are counts, and come back as an int."""
    count = check_count("chunks", value)
    assert count == value
    assert type(count) is int


@pytest.mark.parametrize("value", [1.5, "2", None, True, float("nan"), float("inf"), [1]])
def test_check_count_refuses_what_is_no_whole_number(value: object) -> None:
    """A fraction, a text, a bool or nothing is not a count; the error shows the value."""
    with pytest.raises(BalanceError, match="chunks is not a whole number: chunks="):
        check_count("chunks", value)


def test_action_is_written_as_partition_kind_micro_batch() -> None:
    """An action is read as it is spoken: partition 1, forward, micro-batch 3."""
    assert str(Action(1, "F", 3)) == "1F3"


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("GPipe", "gpipe"),
        ("1F1B", "1f1b"),
        ("Interleaved1F1B", "interleaved_1f1b"),
        ("interleaved", "interleaved_1f1b"),
        ("interleaved-1f1b", "interleaved_1f1b"),
        ("ZB-H1", "zb_h1"),
        ("zero_bubble", "zb_h1"),
        ("zero-bubble", "zb_h1"),
    ],
)
def test_schedules_are_known_as_people_write_them(written: str, meant: str) -> None:
    """Solving, simulating and comparing take other spellings, and say the name of this library."""
    profile = Profile.from_costs([1.0, 2.0, 3.0, 4.0], chunks=4)
    plan = gb.solve(profile, 2, schedule=written, checkpoint="never")
    assert plan == gb.solve(profile, 2, schedule=meant, checkpoint="never")
    assert plan.schedule == meant
    assert gb.simulate(plan, written) == gb.simulate(plan, meant)
    table = gb.compare_schedules(profile, 2, schedules=[written])
    assert {row.schedule for row in table.rows} == {meant}


def test_pipeline_takes_other_spellings_of_what_it_runs() -> None:
    """A pipeline's schedule is kept under its own name; of others it says who runs them."""
    pipe = gb.GPipe(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)), [1, 1], chunks=2)
    pipe.schedule = "1F1B"
    assert pipe.schedule == "1f1b"
    loss = pipe.step(torch.ones(4, 2), loss_fn=torch.mean, schedule="GPipe")
    assert loss == pipe.step(torch.ones(4, 2), loss_fn=torch.mean)
    with pytest.raises(UnsupportedPlanError, match=r"'zb_h1' is run by torch.distributed"):
        pipe.step(torch.ones(4, 2), loss_fn=torch.mean, schedule="zero-bubble")


def test_devices_of_a_schedule_are_those_of_its_rows() -> None:
    """Each row belongs to one, and each partition to a row; any list of whole numbers is taken."""
    cells = ((0, "F"), (1, "F"), (1, "B"), (0, "B"))
    row = tuple(Action(j, kind, 0) for j, kind in cells)  # type: ignore[arg-type]
    durations = Durations((1.0, 2.0), (0.0, 0.0), (3.0, 4.0))
    schedule = Schedule("mine", (row,), devices=iter([np.int64(0), 0]))  # type: ignore[arg-type]
    assert schedule == Schedule("mine", (row,), devices=(0, 0))
    assert place(schedule, durations).makespan == 10.0
    for rows, devices in (((row, ()), (0, 0)), ((row,), (0, 1)), ((row, (), ()), (0, 2))):
        with pytest.raises(BalanceError, match=r"other devices than rows: devices=\(0, .\)"):
            place(Schedule("mine", rows, devices), durations)
    for wrong in (3, (0, "a")):
        with pytest.raises(KindError, match="devices"):
            Schedule("mine", (row,), devices=wrong)  # type: ignore[arg-type]
