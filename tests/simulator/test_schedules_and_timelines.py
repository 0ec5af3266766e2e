"""Schedules, timelines and what they hold: single cases that were wrong once."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import gpipebal as gb
from gpipebal.errors import BalanceError, UnsupportedPlanError
from gpipebal.memory import partition_memory
from gpipebal.planner import evaluate, solve_grid
from gpipebal.planner.execution import Execution
from gpipebal.planner.grid.replicated import last_ends
from gpipebal.planner.times import step_timeline
from gpipebal.problem import Device, Link, Links, Problem, links_of
from gpipebal.profile import TurnTimes
from gpipebal.run.workload import mean_of_squares
from gpipebal.schedule import (
    ALL_SCHEDULES,
    Action,
    Schedule,
    gpipe_schedule,
    one_f_one_b_schedule,
    order_of,
    recomputes_of,
)
from gpipebal.simulator import (
    Durations,
    compare_durations,
    durations_of,
    held_of,
    memory_over_time,
    place,
)
from gpipebal.simulator.of_profile import weight_shares
from gpipebal.timeline import Event, Timeline, outline

PROFILES = Path(__file__).resolve().parents[2] / "profiles"


@pytest.mark.parametrize("chunks", [8, 10, 20, 32])
def test_memory_over_time_is_that_of_the_planned_micro_batches(chunks: int) -> None:
    """However many there are: the loss of the mini-batch is charged once."""
    profile = gb.Profile.load(PROFILES / "gpt-6x256-64tokens-rows4-cpu.json")
    plan = gb.solve(profile, 2, chunks=chunks)
    bounds = (0, plan.balance[0], profile.n_layers)
    costs = replace(profile.at_rows(-(-32 // chunks)), chunks=chunks)
    timeline = step_timeline(costs, bounds, Execution.of(plan))
    exact = partition_memory(
        costs,
        bounds,
        chunks=chunks,
        checkpoint=plan.checkpoint,
        schedule=plan.schedule,
        loss_inside=plan.loss_inside,
        timeline=timeline,
    )
    tracks = memory_over_time(timeline, held_of(profile, plan))
    for peak, track in zip(exact, tracks, strict=True):
        assert track.peak == pytest.approx(peak.total, rel=0.01)


def test_a_weight_gradient_beside_a_whole_backward_is_refused() -> None:
    """It would be counted twice."""
    row = (Action(0, "F", 0), Action(0, "B", 0), Action(0, "W", 0))
    with pytest.raises(BalanceError, match=r"0W0 beside 0B0.*\nFix: leave out 0W0"):
        place(Schedule("mine", (row,)), Durations((1.0,), (0.0,), (2.0,)))


def test_one_replica_has_as_many_micro_batches_as_its_rows_need() -> None:
    """As `solve` has, whatever number the profile was taken with."""
    sizes = [
        replace(gb.Profile.from_costs([rows + 1.0] * 4, rows=rows), mini_batch_rows=10)
        for rows in (2, 1, 4)
    ]
    profile = replace(sizes[0], chunks=6, other_sizes=tuple(sizes[1:]))
    table = solve_grid(profile, 2, chunks="auto", checkpoint="never")
    (row,) = [row for row in table.rows if row.replicas == 1]
    alone = gb.solve(profile, 2, chunks="auto", checkpoint="never")
    assert row.plan is not None
    assert (row.plan.chunks, row.time) == (alone.chunks, alone.makespan)


def test_frozen_layers_have_no_gradients_of_weights() -> None:
    """Nothing of their backward is work that nobody waits for."""
    profile = gb.Profile.from_costs([1.0] * 3)
    layers = [
        replace(layer, kind="Linear", parameter_bytes=8, gradient_bytes=gradient)
        for layer, gradient in zip(profile.layers, (8, 0, 8), strict=True)
    ]
    assert weight_shares(replace(profile, layers=tuple(layers))) == [0.5, 0.0, 0.5]


@pytest.mark.parametrize(
    "events",
    [
        (Event(0, "C", 0, 0, 1), Event(0, "F", 0, 1, 2)),
        (Event(0, "F", 0, 1, 2), Event(0, "C", 0, 2, 4)),
        (Event(0, "C", 0, 0, 1), Event(0, "F", 0, 1, 2), Event(0, "B", 0, 3, 4)),
    ],
)
def test_an_outline_is_as_long_as_what_it_outlines(events: tuple[Event, ...]) -> None:
    """Also where a copy comes first or last."""
    whole = Timeline(events, 1)
    short = outline(whole)
    assert (short.makespan, short.bubble_fraction) == (whole.makespan, whole.bubble_fraction)
    assert short.imbalance == whole.imbalance


@pytest.mark.parametrize("overlaps", [None, False, True])
def test_last_backwards_end_as_the_simulator_has_them(overlaps: bool | None) -> None:
    """In every mode, also with recomputes that are done early, over links or without."""
    rng = random.Random(3)
    for n in (1, 2, 3, 4):
        bounds, order = tuple(range(n + 1)), tuple(range(n))
        for modes in itertools.product(("never", "except_last", "always"), repeat=n):
            forward, backward, recompute = ([rng.randint(1, 9) for _ in order] for _ in range(3))
            profile = gb.Profile.from_costs(
                forward,
                backward,
                recompute=recompute,
                output_bytes=[rng.randint(1, 9) for _ in order],
            )
            chunks = rng.randint(1, 4)
            links = None if overlaps is None else links_of(profile, Link(2.0, 0.5, overlaps))
            problem = Problem(
                forward, backward, recompute, n, chunks=chunks, checkpoint=modes, links=links
            )
            timeline = place(
                order_of("gpipe", n, chunks, modes),
                durations_of(profile, bounds, links=links),
                overlap=overlaps is not False,
            )
            ends = [
                max(e.end for e in timeline.events if e.kind == "B" and e.partition == j)
                for j in order
            ]
            assert last_ends(problem, bounds, modes, order) == pytest.approx(ends)


def test_wrong_arguments_are_no_rows_of_a_table() -> None:
    """They are refused."""
    times = Durations((1.0, 1.0), (1.0, 1.0), (1.0, 1.0))
    for wrong in ({"checkpoint": "sometimes"}, {"chunks": 2.5}, {"chunks": 0}):
        options: Any = {"chunks": 2, **wrong}
        with pytest.raises(BalanceError):
            compare_durations(times, **options)


def test_whole_floats_are_counts_everywhere() -> None:
    """As torchgpipe took them."""
    two, four = 2.0, 4.0
    assert gpipe_schedule(two, four) == gpipe_schedule(2, 4)  # type: ignore[arg-type]
    assert one_f_one_b_schedule(two, four) == one_f_one_b_schedule(2, 4)  # type: ignore[arg-type]
    for name in ALL_SCHEDULES:
        found = order_of(name, two, four)  # type: ignore[arg-type]
        assert found.schedule() == order_of(name, 2, 4).schedule()
        assert recomputes_of(name, two, four, "never") == recomputes_of(name, 2, 4, "never")  # type: ignore[arg-type]
        with pytest.raises(BalanceError, match="=0"):
            recomputes_of(name, 0, 4, "never")


def test_a_grid_takes_names_of_schedules_as_others_do() -> None:
    """And says `n_devices`, which is what it is given."""
    profile = gb.Profile.from_costs([1.0] * 4, rows=2, chunks=4)
    assert solve_grid(profile, 2, schedule="GPipe").rows == solve_grid(profile, 2).rows
    with pytest.raises(BalanceError, match="schedule='1F1B'"):
        solve_grid(profile, 2, schedule="1F1B")
    with pytest.raises(UnsupportedPlanError):
        solve_grid(profile, 2, schedule="mine")
    with pytest.raises(BalanceError, match="Fix: n_devices=1"):
        solve_grid(profile, 0)


def test_devices_beside_a_schedule_of_its_own_are_refused() -> None:
    """It has them."""
    plan = evaluate(gb.Profile.from_costs([1.0] * 4, chunks=2), [2, 2])
    with pytest.raises(BalanceError, match="has its own devices"):
        gb.simulate(plan, gpipe_schedule(2, 2), devices=1)


def test_durations_are_numbers_of_any_kind() -> None:
    """Numpy's, too, as everywhere."""
    times = Durations(np.array([1, 2]), np.zeros(2), np.array([2.0, 4.0], dtype=np.float32))  # type: ignore[arg-type]
    assert times == Durations((1, 2), (0.0, 0.0), (2.0, 4.0))
    moved = replace(times, forward_transfer=np.array([0.0, 1.0]))
    assert moved.has_transfers
    with pytest.raises(gb.GpipebalError, match=r"backward\[1\]='x'"):
        Durations((1, 2), (0, 0), (1, "x"))  # type: ignore[arg-type]


def test_durations_refuse_devices_and_links_of_other_chains() -> None:
    """Times for other layers or cuts used to be added up as far as they went."""
    profile = gb.Profile.from_costs([1.0] * 3)
    short = Device(1, None, [1.0], [1.0], [1.0])
    with pytest.raises(BalanceError, match=r"times of devices\[1\] are too many or too few: 1"):
        durations_of(profile, (0, 2, 3), devices=[Device(), short])
    for links in (Links([1.0], [1.0]), Links([1.0] * 3, [1.0] * 3)):
        with pytest.raises(BalanceError, match=r"forward times of links .* \(expected 2, one per"):
            durations_of(profile, (0, 2, 3), links=links)
    with pytest.raises(BalanceError, match=r"len\(devices\)=1 \(expected n_partitions=2"):
        durations_of(profile, (0, 2, 3), devices=[Device()])


def test_the_default_loss_of_halves_is_finite() -> None:
    """Sums of squares are larger than halves can be."""
    output = torch.full((1000,), 100.0, dtype=torch.float16, requires_grad=True)
    loss = mean_of_squares(output)
    assert loss.item() == pytest.approx(1e4)


def test_schedules_are_compared_with_what_turns_cost() -> None:
    """1F1B turns with every micro-batch, GPipe once; other devices turn otherwise."""
    profile = gb.Profile.from_costs([1.0] * 4, [1.0] * 4, chunks=8)
    names = ["gpipe", "1f1b"]
    plain = gb.compare_schedules(profile, 2, schedules=names)
    turns = TurnTimes(
        forward=1.0,
        no_grad_forward=0.0,
        recompute=0.0,
        backward=0.0,
        first_forward=0.0,
        first_no_grad_forward=0.0,
        first_backward=0.0,
    )
    turning = replace(profile, step=replace(profile.step, turns=turns))
    times = {row.schedule: row.makespan for row in plain.rows}
    turned = {
        row.schedule: row.makespan for row in gb.compare_schedules(turning, 2, schedules=names).rows
    }
    assert times["gpipe"] == times["1f1b"] == turned["gpipe"]
    assert turned["1f1b"] is not None and times["1f1b"] is not None
    assert turned["1f1b"] > times["1f1b"]
    linked = gb.compare_schedules(turning, 2, schedules=names, latency=1e-9)
    assert {row.schedule: row.makespan for row in linked.rows} == pytest.approx(times)
