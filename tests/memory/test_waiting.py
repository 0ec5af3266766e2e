"""What waits for neighbours: a plan counts as much as there may be, whatever the timing."""

from __future__ import annotations

import random
from dataclasses import replace
from math import inf
from typing import Any

import numpy as np
import pytest
from examples import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from plan_oracle import MODES, profiles

import gpipebal as gb
from gpipebal.memory import partition_memory
from gpipebal.memory.cell import Cell
from gpipebal.memory.waiting import Waiting
from gpipebal.planner.execution import Execution
from gpipebal.planner.times import order_for, step_timeline
from gpipebal.profile import LayerProfile, SkipProfile
from gpipebal.schedule import MOST_WAITING, SCHEDULES, Action, Order, order_of
from gpipebal.schedule.actions import B, F
from gpipebal.timeline import EventTable, Timeline

SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large]


def test_a_skip_for_a_partition_that_is_behind_by_hand() -> None:
    """Partition 2 takes at once what partition 0 has stashed two forwards ago.

    If it is late, partition 1 makes two outputs more for it, and partition 0 two more for that one.
    So four stashed values may wait, three while partition 0 makes another one.
    """
    profile = gb.Profile.from_costs([1.0] * 3, parameter_bytes=[4] * 3, chunks=8)
    skip = SkipProfile("far", 0, 2, (len(profile.storages),))
    profile = replace(profile, storages=(*profile.storages, 100), skips=(skip,))
    clock = step_timeline(profile, range(4), Execution(8, "never", loss_inside=True))
    cells = [Cell(profile, j, j + 1, None, False) for j in range(3)]
    order = order_for("gpipe", 3, 8, "never")
    exact, most = (Waiting(cells, order, one).of_row(0)[:8] for one in (clock, None))
    assert exact == [0, 100, *[200] * 6]
    assert most == [0, 100, 200, *[300] * 5]


def test_while_a_partition_makes_one_another_one_waits() -> None:
    """By hand: one output or gradient is left to take while the next one is made, and not two."""
    profile = gb.Profile.from_costs(
        [1.0, 1.0], output_bytes=[100, 0], parameter_bytes=[4, 4], chunks=8
    )
    cells = [Cell(profile, j, j + 1, None, False) for j in range(2)]
    order = order_for("gpipe", 2, 8, "never")
    waiting = Waiting(cells, order, None)
    assert waiting.of_row(0)[:8] == [0, *[100] * 7]
    assert waiting.of_row(1)[8:] == [0, *[100] * 7]


def test_who_is_fast_enough_takes_everything_at_once_by_the_clock() -> None:
    """By hand: partition 1 starts a forward every 2 s, and partition 2 takes each output at once.

    In fact partition 2 waits for room, because partition 3 is slow; then an output waits for it.
    """
    for times, which in (([2.0, 1.0, 1.0, 8.0], 1), ([8.0, 1.0, 1.0, 2.0], 2)):
        profile = gb.Profile.from_costs(
            times, output_bytes=[100] * 3 + [0], parameter_bytes=[4] * 4, chunks=8
        )
        clock = step_timeline(profile, range(5), Execution(8, "never", loss_inside=True))
        cells = [Cell(profile, j, j + 1, None, False) for j in range(4)]
        order = order_for("gpipe", 4, 8, "never")
        actions = slice(8) if which == 1 else slice(8, None)
        exact, most = (Waiting(cells, order, one).of_row(which)[actions] for one in (clock, None))
        assert exact == [0] * 8
        assert most == [0] + [100] * 7


def test_what_an_earlier_partition_keeps_for_its_recompute_is_no_more_for_more_micro_batches() -> (
    None
):
    """In one memory: what partition 2 hands through waits for partition 1, which is never far."""
    through = (0, 1)
    layer = LayerProfile("", "Layer", 1.0, 1.0, 1.0, gradient_bytes=4)
    layers = (
        replace(layer, outputs=through, saved=(1,)),
        replace(layer, outputs=through),
        replace(layer, outputs=(1,)),
        replace(layer, gradient_bytes=0, saved=(0,)),
    )
    named = tuple(replace(one, name=str(k)) for k, one in enumerate(layers))
    profile = gb.Profile(named, storages=(1, 100), without_gradient=(1,))
    for chunks in (4, 8, 16):
        planned = partition_memory(
            profile,
            range(5),
            chunks=chunks,
            checkpoint="always",
            loss_inside=True,
            shared_memory=True,
        )
        # Two wait, and one is at work; with the last partition are all that are to be recomputed.
        assert [peak.total // 100 for peak in planned] == [3, 2, 3, chunks]


def with_room(order: Order, seconds: dict[Action, float], *, pause: bool) -> Timeline:
    """Place actions as `GPipe` runs them, each as late after what it needs as its seconds say.

    A partition begins to make an output, or a gradient, when the neighbour has begun all but two of
    those before it.
    """
    rows = [list(row) for row in order.schedule().rows]
    made = {kind: [[a for a in row if a.kind == kind] for row in rows] for kind in "FB"}
    spans: dict[Action, tuple[float, float]] = {}
    clocks, turn = [0.0] * len(rows), 0.0
    waits_for_all = pause
    while any(rows):
        before = len(spans)
        for j, row in enumerate(rows):
            while row and not (waits_for_all and row[0].kind != "F"):
                action = row[0]
                kind, step = action.kind, -1 if action.kind == "B" else 1
                needs = [clocks[j], 0.0 if kind == "F" else turn]
                if kind != "R" and 0 <= j - step < len(rows):
                    needs.append(spans.get(action._replace(partition=j - step), (inf, inf))[1])
                if kind != "R" and 0 <= j + step < len(rows):
                    place = made[kind][j].index(action) - MOST_WAITING
                    if place >= 0:
                        taken = made[kind][j][place]._replace(partition=j + step)
                        needs.append(spans.get(taken, (inf, inf))[0])
                if max(needs) == inf:
                    break
                # A little later, so that what is taken at that moment does not count as waiting.
                begin = max(needs) + 0.001
                clocks[j] = begin + seconds[action]
                spans[row.pop(0)] = begin, clocks[j]
        if waits_for_all and all(not row or row[0].kind != "F" for row in rows):
            waits_for_all, turn = False, max(clocks)
        elif len(spans) == before:
            raise AssertionError("they wait in a circle")
    starts, ends = zip(*(spans[a] for row in order.schedule().rows for a in row), strict=True)
    columns = (order.partitions, order.kinds, order.micro_batches)
    table = EventTable(*columns, np.array(starts), np.array(ends))
    return Timeline(table, order.n_partitions, "simulated")


@settings(max_examples=examples(150), deadline=None, suppress_health_check=SLOW)
@given(
    profiles(largest=6),
    st.integers(1, 8),
    st.sampled_from(sorted(SCHEDULES)),
    st.lists(st.sampled_from(MODES), min_size=6, max_size=6),
    st.booleans(),
    st.booleans(),
    st.booleans(),
    st.randoms(use_true_random=False),
)
def test_no_timing_makes_a_partition_hold_more_than_planned(
    profile: gb.Profile,
    chunks: int,
    schedule: str,
    modes: list[Any],
    inside: bool,
    shared: bool,
    exist: bool,
    rng: random.Random,
) -> None:
    """However long each single action takes, whatever the partitions hand on and keep."""
    n = rng.randint(1, profile.n_layers)
    bounds = (0, *sorted(rng.sample(range(1, profile.n_layers), n - 1)), profile.n_layers)
    inside = inside or schedule == "1f1b"
    order = order_of(schedule, n, chunks, tuple(modes[:n]))
    actions = [action for row in order.schedule().rows for action in row]
    seconds = {action: rng.choice([0.01, 1.0, 1.3, 8.0]) for action in actions}
    options: Any = {
        "chunks": chunks,
        "checkpoint": tuple(modes[:n]),
        "schedule": schedule,
        "loss_inside": inside,
        "shared_memory": shared,
        "gradients_exist": exist,
    }
    planned = partition_memory(profile, bounds, **options)
    with pytest.MonkeyPatch.context() as patch:
        # By the clock alone.
        patch.setattr("gpipebal.memory.waiting._most", lambda stream, j: None)
        clock = with_room(order, seconds, pause=not inside)
        held = partition_memory(profile, bounds, timeline=clock, **options)
    for one, most in zip(held, planned, strict=True):
        assert one.total <= most.total


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
