"""Tests of schedules as torch's CSV files: both ways, with torch's own reader and writer."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from schedule_oracles import schedules
from torch_schedules import torch_schedule

from gpipebal.errors import FileFormatError, UnsupportedPlanError
from gpipebal.schedule import (
    Schedule,
    gpipe_schedule,
    interleaved_schedule,
    make_schedule,
    one_f_one_b_schedule,
    read_torch_csv,
    with_recomputes,
    write_torch_csv,
    zero_bubble_schedule,
)
from gpipebal.simulator import Durations, place

TORCHS = [
    ("ScheduleInterleaved1F1B", 2),
    ("ScheduleInterleavedZeroBubble", 2),
    ("ScheduleLoopedBFS", 3),
    ("ScheduleZBVZeroBubble", 2),
    ("ScheduleDualPipeV", 2),
]


@pytest.mark.parametrize("form", ["compute_only", "compute_comms"])
@pytest.mark.parametrize(("class_name", "each"), TORCHS)
def test_files_that_torch_writes_are_placed(
    class_name: str, each: int, form: str, tmp_path: Path
) -> None:
    """Every multi-stage schedule of torch, with and without its transfers, has a timeline."""
    theirs = torch_schedule(class_name, 4, 8, each)
    theirs._dump_csv(str(tmp_path / "theirs.csv"), form)
    schedule = read_torch_csv(tmp_path / "theirs.csv")
    assert (schedule.name, schedule.n_devices, schedule.n_partitions) == ("theirs", 4, 4 * each)
    assert schedule.chunks == 8
    assert schedule.placement == tuple(theirs.stage_index_to_group_rank[j] for j in range(4 * each))
    ones = (1.0,) * schedule.n_partitions
    timeline = place(schedule, Durations(ones, ones, (2.0,) * schedule.n_partitions))
    work = 8 * each * 3.0
    assert work <= timeline.makespan < 2 * work


@pytest.mark.parametrize(
    "schedule",
    [
        interleaved_schedule(2, 4),
        interleaved_schedule(4, 8, partitions_per_device=3),
        zero_bubble_schedule(3, 6),
        zero_bubble_schedule(2, 4, partitions_per_device=2),
        gpipe_schedule(2, 3, "never"),
        one_f_one_b_schedule(3, 4),
    ],
    ids=lambda schedule: f"{schedule.name}-{schedule.n_partitions}",
)
def test_torch_reads_what_is_written(schedule: Schedule, tmp_path: Path) -> None:
    """Torch's own reader finds the same actions in the file, and checks that they can run."""
    write_torch_csv(schedule, tmp_path / "mine.csv")
    each = schedule.n_partitions // schedule.n_devices
    runtime = torch_schedule("_PipelineScheduleRuntime", schedule.n_devices, schedule.chunks, each)
    runtime.pipeline_order = {}
    runtime._load_csv(str(tmp_path / "mine.csv"))
    theirs = [[str(action) for action in row] for row in runtime.pipeline_order.values()]
    assert theirs == [[str(action) for action in row] for row in schedule.rows]
    assert runtime.stage_index_to_group_rank == dict(enumerate(schedule.placement))


@settings(max_examples=100, deadline=None)
@given(schedules())
def test_reading_what_was_written_gives_the_same(schedule: Schedule) -> None:
    """A schedule without recomputes comes back from its text, with its placement."""
    schedule = with_recomputes(schedule, "never")
    again = read_torch_csv(write_torch_csv(schedule) + "\n", name="drawn")
    assert again.rows == schedule.rows
    assert again.placement == schedule.placement


def test_a_schedule_of_files_may_be_the_executors() -> None:
    """Reading 1F1B gives the schedule itself, so that equality tells whether GPipe can run it."""
    schedule = one_f_one_b_schedule(3, 5)
    assert read_torch_csv(write_torch_csv(schedule), name="1f1b") == schedule


def test_recomputes_are_left_out_only_on_request() -> None:
    """Torch has no action for a recompute: it is refused, or left to the backward."""
    schedule = gpipe_schedule(1, 2, "always")
    with pytest.raises(UnsupportedPlanError, match=r"no recomputes: action=0R1.*\n.*late=True"):
        write_torch_csv(schedule)
    text = write_torch_csv(schedule, late=True)
    assert text == "0F0,0F1,0B1,0B0\n"
    assert with_recomputes(read_torch_csv(text, name="gpipe"), "always").rows[0][2:] == (
        (0, "B", 1),
        (0, "R", 0),
        (0, "B", 0),
    )


def test_forward_and_backward_in_one_cell_are_read_one_after_the_other() -> None:
    """What torch may overlap takes as long as both; waiting and moving tell nothing."""
    text = "0UNSHARD,0F0,,0F1,(1F0;0B1)OVERLAP_F_B,1SEND_B0,0REDUCE_GRAD\n"
    assert str(read_torch_csv(text)) == "0F0 0F1 1F0 0B1"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0,zero\n", r"line 1, cell 2: cell is not an action: cell='zero'"),
        ("0F0,0G1\n", r"cell='0G1' \(expected one such as 2F0 or 1B3\)"),
        ("0F0\n1F0,0B0\n", r"line 2, cell 2: partition 0 stands in line 1 already"),
        ("0F0,2F0\n", r"partition 1 is in no line, but partition 2 is"),
        ("\n\n", r"has no actions"),
        ("0F0,(1F0;x)OVERLAP_F_B\n", r"cell is not an action"),
        ("0F" + "9" * 5000 + ",\n", r"cell is not an action: cell='0F9{38}'"),
        ("0F0,1F\n", r"cell='1F'"),
        ("0F0,0B0\n\n1F0,1B0\n", r"line 2, cell 1: device 1 does nothing"),
        ("0F0," + "1" * 200_000, r"schedule is not CSV: field larger than field limit"),
    ],
)
def test_damaged_files_are_refused(text: str, message: str) -> None:
    """The error names line and cell and what stands there."""
    with pytest.raises(FileFormatError, match=message) as error:
        read_torch_csv(text)
    assert "Fix: " in str(error.value)
    assert len(str(error.value)) < 300


def test_files_are_written_whole_with_their_folder(tmp_path: Path) -> None:
    """A folder that does not exist is made, and what is not an ordinary file is left alone."""
    path = tmp_path / "new" / "schedule.csv"
    text = write_torch_csv(make_schedule("1f1b", 2, 3, "never"), path)
    assert path.read_text() == text
    assert [one.name for one in path.parent.iterdir()] == [path.name]
    with pytest.raises(FileFormatError, match="cannot be written"):
        write_torch_csv(make_schedule("1f1b", 2, 3, "never"), tmp_path)


def test_files_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    """No such file, and a file that is not a text, are one clear error."""
    (tmp_path / "binary.csv").write_bytes(b"\xff\xfe\x00")
    for name in ("binary.csv", "missing.csv"):
        with pytest.raises(FileFormatError, match=f"cannot be read: .*{name}") as caught:
            read_torch_csv(tmp_path / name)
        assert isinstance(caught.value, FileNotFoundError) == (name == "missing.csv")


@settings(max_examples=200, deadline=None)
@given(st.text(alphabet="0123FBIWR,;()\n x", max_size=60))
def test_any_text_is_a_schedule_or_an_error(text: str) -> None:
    """Whatever stands in a file, nothing but FileFormatError comes of it."""
    try:
        schedule = read_torch_csv(text + "\n")
    except FileFormatError:
        return
    assert schedule.n_partitions == len(schedule.placement)


def test_a_mark_in_front_of_the_text_is_no_cell(tmp_path: Path) -> None:
    """Spreadsheets write one."""
    path = tmp_path / "schedule.csv"
    path.write_text("0F0,0B0\n", encoding="utf-8-sig")
    assert read_torch_csv(path) == read_torch_csv("0F0,0B0\n", name="schedule")
