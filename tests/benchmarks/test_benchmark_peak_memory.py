"""benchmarks/peak_memory: its tables say what its file holds, and its clock is what it says."""

from __future__ import annotations

from benchmark_files import assert_in_readme, folder_of, script_of, stored

from gpipebal.timeline import Event, Timeline

folder_of("peak_memory")

import peak_memory_tables as tables  # noqa: E402


def test_what_neighbours_take_while_an_action_runs_may_be_gone_at_its_start() -> None:
    """Events beside an own action come before it; those in a gap, and own ones, stay."""
    taken_earlier = script_of("peak_memory")._taken_earlier
    # Partition 0 works from 0 to 2 and from 6 to 8, partition 1 meanwhile and in between.
    events = [
        Event(0, "F", 0, 0.0, 2.0),
        Event(0, "F", 1, 6.0, 8.0),
        Event(1, "F", 0, 3.0, 4.0),
        Event(1, "F", 1, 7.0, 9.0),
    ]
    table = taken_earlier(Timeline(events, 2, "measured"), 0).table
    found = {
        (int(j), int(i)): (start, end)
        for j, i, start, end in zip(
            table.partitions, table.micro_batches, table.starts, table.ends, strict=True
        )
    }
    assert found == {(0, 0): (0, 2), (0, 1): (6, 8), (1, 0): (3, 4), (1, 1): (5, 9)}


def test_a_count_is_between_what_its_clock_allows() -> None:
    """With the goal's leeway at both ends, and not beyond it."""
    counted = [960, 975, 1500, 2040, 2100]
    row = {
        "taken": [1000] * 5,
        "predicted": [{"total": 2000}] * 5,
        "counted": counted,
    }
    assert tables.within_clock(row) == [False, True, True, True, False]


def test_the_benchmarks_tables_are_its_results() -> None:
    """The README of the stored counts says what `results.json` holds, and nothing else."""
    assert_in_readme("peak_memory", tables.blocks(stored("peak_memory")))
