"""A schedule that is added to the table of known schedules is everywhere what its rows are."""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from oracles import all_bounds
from plan_oracle import MODES, check_every_run, profiles
from schedule_oracles import longest_paths
from torch import nn
from torch.nn.functional import mse_loss

import gpipebal as gb
from gpipebal.errors import BalanceError, UnsupportedPlanError
from gpipebal.schedule import (
    KNOWN_SCHEDULES,
    SCHEDULES,
    Action,
    Checkpoint,
    KnownSchedule,
    Order,
    Schedule,
    check_known_schedule,
    looped_bfs_schedule,
    make_schedule,
    order_of,
    recomputes_of,
    with_recomputes,
)
from gpipebal.simulator import Durations


def rounds_of(size: int) -> Callable[..., Schedule]:
    """Return a maker of rounds: some forwards, then their backwards, the last one first."""

    def make(n_partitions: int, chunks: int, checkpoint: Checkpoint = "never") -> Schedule:
        rows = []
        for j in range(n_partitions):  # j: partition
            row: list[Action] = []
            for first in range(0, chunks, size):
                own = range(first, min(chunks, first + size))
                row += [Action(j, "F", i) for i in own]
                row += [Action(j, "B", i) for i in reversed(own)]
            rows.append(tuple(row))
        return with_recomputes(Schedule("rounds", tuple(rows)), checkpoint)

    return make


@pytest.fixture(params=[1, 2, 3])
def size(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Add a schedule that GPipe runs, with rounds of so many micro-batches, and nothing else."""
    made: int = request.param
    record = KnownSchedule("rounds", rounds_of(made), is_ours=True, also=("bymadeupname",))
    monkeypatch.setitem(KNOWN_SCHEDULES, "rounds", record)
    return made


def makespan_of(schedule: Schedule, forward: list[float], backward: list[float]) -> float:
    """Find the makespan as the longest path through the actions."""
    times = Durations(tuple(forward), tuple(forward), tuple(backward))
    return max(end for _, end in longest_paths(schedule, times, late=False, overlap=True).values())


def test_the_table_knows_it(size: int) -> None:
    """Its names, what runs it, its order and its recomputes follow from the record."""
    assert check_known_schedule("By made-up name") == "rounds"
    assert "rounds" in SCHEDULES
    assert KNOWN_SCHEDULES["rounds"].run_by == "GPipe"
    for mode in MODES:
        rows = rounds_of(size)(3, 4, mode)
        assert make_schedule("rounds", 3, 4, mode) == rows
        order = order_of("rounds", 3, 4, mode)
        assert order.schedule() == rows
        assert order.partitions.tolist() == Order.of(rows).partitions.tolist()
        again = [sum(action.kind == "R" for action in row) for row in rows.rows]
        assert list(recomputes_of("rounds", 3, 4, mode)) == again


@pytest.mark.parametrize("mode", MODES)
def test_solve_and_simulate_place_its_rows(size: int, mode: Any) -> None:
    """The plan is the best of all splits, by an oracle that walks through the rows."""
    costs = [3.0, 1.0, 4.0, 1.0, 5.0]
    profile = gb.Profile.from_costs(costs, chunks=4)
    plan = gb.solve(profile, 3, schedule="rounds", checkpoint=mode)
    makespans = {}
    for bounds in all_bounds(len(costs), 3):
        sums = [sum(costs[a:b]) for a, b in pairwise(bounds)]
        rows = rounds_of(size)(3, 4, mode)
        makespans[bounds] = makespan_of(rows, sums, [2 * time for time in sums])
    assert plan.status == "optimal"
    assert plan.makespan == plan.value == min(makespans.values())
    assert gb.simulate(plan).makespan == plan.makespan
    assert gb.evaluate(
        profile, plan.balance, schedule="rounds", checkpoint=mode
    ).makespan == pytest.approx(plan.makespan)
    table = gb.compare_schedules(profile, 3, checkpoint=mode, schedules=["rounds", "gpipe"])
    assert table.row("rounds").run_by == "GPipe"


def test_memory_is_what_its_rows_have_in_flight(size: int) -> None:
    """Of graphs alone: the bytes of one micro-batch, as often as the row has it in flight."""
    saved = [100, 110, 130, 170]
    profile = gb.Profile.from_costs([1.0] * 4, saved_bytes=saved, chunks=4)
    plan = gb.solve(profile, 2, schedule="rounds", checkpoint="never", memory_limit="1 MiB")
    for j, part in enumerate(plan.partitions):
        in_flight = most = 0
        for action in rounds_of(size)(2, 4).rows[j]:
            in_flight += {"F": 1, "B": -1}[action.kind]
            most = max(most, in_flight)
        first = sum(plan.balance[:j])
        assert most == size
        assert part.memory.activations == most * sum(saved[first : first + plan.balance[j]])
    least = gb.solve(profile, 2, schedule="rounds", checkpoint="never", objective="peak_memory")
    assert least.peak_bytes == least.value <= (plan.peak_bytes or 0)


@settings(
    max_examples=30,
    deadline=None,
    suppress_health_check=[
        HealthCheck.too_slow,
        HealthCheck.data_too_large,
        HealthCheck.function_scoped_fixture,
    ],
)
@given(profiles(), st.integers(1, 5), st.sampled_from(MODES), st.booleans(), st.booleans())
def test_every_run_needs_what_its_partition_does(
    size: int, profile: gb.Profile, chunks: int, mode: Any, shared: bool, exist: bool
) -> None:
    """Runs of layers under any rows: equal to the byte, and bounded for every clock."""
    given: Any = {"chunks": chunks, "loss_inside": True, "shared_memory": shared}
    given |= {"schedule": "rounds", "gradients_exist": exist}
    check_every_run(profile, mode, given)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("mode", MODES)
def test_a_step_runs_its_rows(size: int, mode: Any) -> None:
    """Workers run the actions in the order of the rows, and the gradients are the plain ones."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh()).double()
    pipe = gb.GPipe(copy.deepcopy(plain), [1, 3], chunks=4, checkpoint=mode)
    inputs, target = (torch.randn(8, 4, dtype=torch.float64) for _ in range(2))
    with gb.trace(pipe) as recorder:
        pipe.step(inputs, target=target, loss_fn=mse_loss, schedule="rounds")
    mse_loss(plain(inputs), target).backward()
    for mine, theirs in zip(pipe.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)
    found: list[list[str]] = [[], []]
    for event in sorted(recorder.timeline.events, key=lambda event: event.start):
        if event.kind in "FRB":
            found[event.partition].append(str(event))
    assert found == [[str(action) for action in row] for row in rounds_of(size)(2, 4, mode).rows]


def test_a_schedule_that_nothing_runs_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is planned and simulated; its memory is refused, and GPipe does not run it."""
    monkeypatch.setitem(KNOWN_SCHEDULES, "rounds", KnownSchedule("rounds", rounds_of(2)))
    profile = gb.Profile.from_costs([1.0] * 4, saved_bytes=[100] * 4, chunks=4)
    plan = gb.solve(profile, 2, schedule="rounds", checkpoint="never")
    assert plan.makespan == makespan_of(rounds_of(2)(2, 4), [2.0, 2.0], [4.0, 4.0])
    assert plan.peak_bytes is None
    assert KNOWN_SCHEDULES["rounds"].run_by == "nothing"
    with pytest.raises(UnsupportedPlanError, match="memory is not known"):
        gb.solve(profile, 2, schedule="rounds", memory_limit="1 MiB")
    with pytest.raises(UnsupportedPlanError, match="run by nothing known here"):
        make_schedule("rounds", 2, 4)


@pytest.mark.parametrize(
    "wrong",
    [
        {"is_ours": True, "is_in_parts": True},
        {"is_ours": True, "takes_several": True},
        {"partitions_per_device": 2},
    ],
)
def test_records_that_contradict_themselves_are_refused(wrong: dict[str, Any]) -> None:
    """GPipe cannot run backwards in parts or several partitions per device."""
    with pytest.raises(UnsupportedPlanError, match="Fix:"):
        KnownSchedule("rounds", rounds_of(2), **wrong)


def test_three_partitions_on_each_device_follow_from_the_record(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Plans, devices, comparison and messages take the number from the record."""
    record = KnownSchedule(
        "threes", looped_bfs_schedule, partitions_per_device=3, takes_several=True
    )
    monkeypatch.setitem(KNOWN_SCHEDULES, "threes", record)
    profile = gb.Profile.from_costs([1.0] * 7, chunks=2)
    asked: dict[str, Any] = {"schedule": "threes", "checkpoint": "never"}
    plan = gb.solve(profile, 6, devices=[1, 2] * 3, **asked)
    assert (plan.n_devices, plan.devices) == (2, (0, 1) * 3)
    assert gb.simulate(plan).makespan == plan.makespan
    with pytest.raises(BalanceError, match=r"3 on each device .*multiple of 3\)\.\nFix: 9 part"):
        gb.solve(profile, 7, **asked)
    with pytest.raises(BalanceError, match=r"devices\[1\] and devices\[5\] differ .* 3 times"):
        gb.solve(profile, 6, devices=[1, 2, 1, 2, 1, 1], **asked)
    with pytest.raises(BalanceError, match="where each runs 3 partitions"):
        gb.solve(profile, 6, devices=[1, 2] * 3, any_order=True, **asked)
    table = gb.compare_schedules(
        profile, 2, schedules=["threes"], partitions_per_device=3, checkpoint="never"
    )
    assert [(row.partitions_per_device, row.run_by) for row in table.rows] == [(3, "nothing")]
