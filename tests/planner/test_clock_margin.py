"""What waits for neighbours that are slower than predicted: a plan counts a margin of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from plan_oracle import MODES

import gpipebal as gb
from gpipebal.memory import partition_memory
from gpipebal.memory.cell import Cell
from gpipebal.memory.waiting import Waiting
from gpipebal.planner.assemble import CLOCK_MARGIN
from gpipebal.planner.execution import Execution
from gpipebal.planner.times import order_for, step_timeline
from gpipebal.profile import SkipProfile
from gpipebal.schedule import SCHEDULES, order_of
from gpipebal.schedule.actions import B, F
from gpipebal.simulator import Durations, durations_of, place
from gpipebal.timeline import Timeline

SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large]


def slower(
    profile: gb.Profile, which: int, factor: float, schedule: str, mode: str, pause: float | None
) -> Timeline:
    """Place the step of a chain, a layer in each partition, of which one is slower."""
    n = profile.n_layers
    times = durations_of(profile, range(n + 1))
    factors = [factor if j == which else 1.0 for j in range(n)]

    def scaled(name: str) -> tuple[float, ...]:
        return tuple(a * b for a, b in zip(getattr(times, name), factors, strict=True))

    times = Durations(*(scaled(name) for name in ("forward", "recompute", "backward")))
    return place(order_for(schedule, n, profile.chunks, mode), times, pause=pause)


def test_a_skip_for_a_late_partition_by_hand() -> None:
    """Partition 0 starts a forward each second, and partition 2 each 1.6 s, if it is behind.

    While partition 0 computes its last output, eighth of eight, it has stashed seven times, and
    partition 2 has begun four forwards: at 2, 3.6, 5.2 and 6.8 s. As predicted, it has begun five
    and takes the sixth at that moment.
    """
    profile = gb.Profile.from_costs([1.0] * 3, parameter_bytes=[4] * 3, chunks=8)
    skip = SkipProfile("far", 0, 2, (len(profile.storages),))
    profile = replace(profile, storages=(*profile.storages, 100), skips=(skip,))
    clock = step_timeline(profile, range(4), Execution(8, "never", loss_inside=True))
    cells = [Cell(profile, j, j + 1, None, False) for j in range(3)]
    order = order_for("gpipe", 3, 8, "never")
    assert pytest.approx(0.6) == CLOCK_MARGIN
    exact, late, later = (
        Waiting(cells, order, clock, margin).of_row(0)[:8] for margin in (0.0, CLOCK_MARGIN, 9.0)
    )
    assert exact == [0, 100, *[200] * 6]
    assert late == [0, 100, *[200] * 3, *[300] * 3]
    # Then partition 1 does not go on, and so partition 0 does not either.
    assert later == [0, 100, 200, 200, *[300] * 4]


def test_neighbours_make_one_wait_however_late_they_are() -> None:
    """By hand: while a partition makes an output or a gradient one is left to take, and not two."""
    profile = gb.Profile.from_costs(
        [1.0, 1.0], output_bytes=[100, 0], parameter_bytes=[4, 4], chunks=8
    )
    clock = step_timeline(profile, (0, 1, 2), Execution(8, "never", loss_inside=True))
    cells = [Cell(profile, j, j + 1, None, False) for j in range(2)]
    order = order_for("gpipe", 2, 8, "never")
    for margin in (0.0, CLOCK_MARGIN, 9.0):
        waiting = Waiting(cells, order, clock, margin)
        assert waiting.of_row(0)[:8] == [0, *[100] * 7]
        assert waiting.of_row(1)[8:] == [0, *[100] * 7]


def test_what_is_for_a_partition_that_waits_for_room_waits_too() -> None:
    """By hand: a partition that is fast enough takes nothing while it waits for a slow one.

    Partition 1 starts a forward every 2 s, and partition 2 takes each output at once, until two of
    its own wait: partition 3 takes the second one at 4 + 8 s, or 4 + 12.8 s if it is late. Before
    that partition 2 does not start its fourth forward, which the timeline has at 9 s. Partition 1
    starts its fifth one at 10 s. Gradients of the opposite chain are the same.
    """
    for times, which in (([2.0, 1.0, 1.0, 8.0], 1), ([8.0, 1.0, 1.0, 2.0], 2)):
        profile = gb.Profile.from_costs(
            times, output_bytes=[100] * 3 + [0], parameter_bytes=[4] * 4, chunks=8
        )
        clock = step_timeline(profile, range(5), Execution(8, "never", loss_inside=True))
        cells = [Cell(profile, j, j + 1, None, False) for j in range(4)]
        order = order_for("gpipe", 4, 8, "never")
        actions = slice(8) if which == 1 else slice(8, None)
        exact, late = (
            Waiting(cells, order, clock, margin).of_row(which)[actions]
            for margin in (0.0, CLOCK_MARGIN)
        )
        assert exact == [0] * 8
        assert late == [0] * 4 + [100] * 4


@settings(max_examples=150, deadline=None, suppress_health_check=SLOW)
@given(
    st.lists(st.floats(0.7, 1.3), min_size=2, max_size=5),
    st.sampled_from([4, 8, 16]),
    st.sampled_from(sorted(SCHEDULES)),
    st.sampled_from(MODES),
    st.booleans(),
    st.floats(0.0, CLOCK_MARGIN),
    st.data(),
)
def test_neighbours_of_a_slow_partition_hold_no_more_than_planned(
    times: list[float],
    chunks: int,
    schedule: str,
    mode: Any,
    inside: bool,
    more: float,
    data: st.DataObject,
) -> None:
    """Whichever partition is slower, by as much as the margin or less, in whatever schedule."""
    n = len(times)
    which = data.draw(st.integers(0, n - 1))
    saved = data.draw(st.lists(st.sampled_from([0, 10, 200]), min_size=n, max_size=n))
    profile = gb.Profile.from_costs(
        times, output_bytes=[100] * n, parameter_bytes=[4] * n, saved_bytes=saved, chunks=chunks
    )
    inside = inside or schedule == "1f1b"
    pause = None if inside else 0.0
    options: Any = {
        "chunks": chunks,
        "checkpoint": mode,
        "schedule": schedule,
        "loss_inside": inside,
    }
    clock = slower(profile, which, 1.0 + more, schedule, mode, pause)
    held = partition_memory(profile, range(n + 1), timeline=clock, **options)
    plan = gb.evaluate(profile, [1] * n, **options)
    for j in (which - 1, which + 1):
        if 0 <= j < n:
            assert held[j].total <= plan.partitions[j].memory.total


@settings(max_examples=50, deadline=None, suppress_health_check=SLOW)
@given(
    st.lists(st.floats(0.9, 1.1), min_size=2, max_size=4),
    st.sampled_from(sorted(SCHEDULES)),
    st.sampled_from(MODES),
    st.floats(0.0, 5.0),
)
def test_no_margin_makes_more_wait_than_the_order_lets(
    times: list[float], schedule: str, mode: Any, margin: float
) -> None:
    """However slow a partition may be, no more waits for it than others could make meanwhile."""
    assume(max(times) > 0)
    profile = gb.Profile.from_costs(
        times, output_bytes=[100] * len(times), parameter_bytes=[4] * len(times), chunks=6
    )
    bounds = range(len(times) + 1)
    options: Any = {"chunks": 6, "checkpoint": mode, "schedule": schedule, "loss_inside": True}
    clock = step_timeline(profile, bounds, Execution(**options))
    nominal, late = (
        partition_memory(profile, bounds, timeline=clock, margin=each, **options)
        for each in (0.0, margin)
    )
    most = partition_memory(profile, bounds, latest=True, **options)
    for low, peak, high in zip(nominal, late, most, strict=True):
        assert low.total <= peak.total <= high.total


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("mode", ["never", "except_last", "always"])
@pytest.mark.parametrize(("n", "chunks"), [(1, 3), (2, 2), (3, 5), (5, 3)])
def test_what_must_have_ended_before_an_action(
    schedule: str, mode: Any, n: int, chunks: int
) -> None:
    """Of every other partition, however far: as following all needs back tells."""
    order = order_of(schedule, n, chunks, mode)
    columns = (order.partitions, order.kinds, order.micro_batches)
    actions = list(zip(*(column.tolist() for column in columns), strict=True))
    before: dict[tuple[int, int, int], set[tuple[int, int, int]]] = {}

    def all_before(action: tuple[int, int, int]) -> set[tuple[int, int, int]]:
        if action not in before:
            j, kind, i = action
            row = [one for one in actions if one[0] == j]
            direct = row[: row.index(action)][-1:]
            direct += [(j - 1, F, i)] if kind == F and j else []
            direct += [(j + 1, B, i)] if kind == B and j < n - 1 else []
            before[action] = set(direct).union(*map(all_before, direct))
        return before[action]

    waiting = Waiting([], order, None)
    for j in range(n):
        row = [one for one in actions if one[0] == j]
        for other in set(range(n)) - {j}:
            found = waiting._ended_before(j, other).tolist()
            assert found == [sum(k == other for k, _, _ in all_before(one)) for one in row]
