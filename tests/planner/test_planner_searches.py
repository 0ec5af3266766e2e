"""Searches of the planner: numbers of micro-batches, limits, and the clock in the middle."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any

import pytest

import gpipebal as gb
from gpipebal.errors import BalanceError, InfeasibleError, UnsupportedPlanError
from gpipebal.planner import evaluate, recompute_layers
from gpipebal.planner.schedules import search as schedules
from gpipebal.problem import Device, Problem
from gpipebal.simulator import held_of, memory_over_time
from gpipebal.solvers import deadline, split
from gpipebal.solvers.sets.boxes import least_makespan
from gpipebal.solvers.sets.levels import Levels
from gpipebal.solvers.sets.reachability import Search

CHAIN = gb.Profile.from_costs(
    [1.0, 2.0, 3.0, 4.0, 5.0, 6.0], chunks=4, saved_bytes=[100] * 6, output_bytes=[1] * 6
)


def sized(rows: int, seconds: float, whole: int, n_layers: int = 2) -> gb.Profile:
    """Return a chain of equal layers at one size of micro-batches."""
    return replace(gb.Profile.from_costs([seconds] * n_layers, rows=rows), mini_batch_rows=whole)


def test_all_numbers_of_micro_batches_are_tried() -> None:
    """With very many sizes between those that were measured too: optimal means best of all."""
    sizes = [sized(rows, (50 + rows) * 1e-3, 1000) for rows in (16, 8, 32)]
    profile = replace(sizes[0], chunks=64, other_sizes=tuple(sizes[1:]))
    plan = gb.solve(profile, 2, chunks="auto", checkpoint="never")
    best = min(
        gb.solve(profile, 2, chunks=chunks, checkpoint="never").value for chunks in range(32, 126)
    )
    assert plan.status == "optimal"
    assert plan.value == plan.lower_bound == best


@pytest.mark.parametrize(("own", "least"), [(5000, 350), (300, 300), (None, 350)])
def test_the_lower_of_two_limits_counts(own: int | None, least: int) -> None:
    """Of the limit for all devices, less the reserve, and that of a device."""
    plan = evaluate(
        CHAIN,
        [3, 3],
        checkpoint="never",
        memory_limit=400,
        reserve=50,
        devices=[Device(memory_limit=own), Device()],
    )
    assert [part.memory_limit for part in plan.partitions] == [least, 350]


@pytest.mark.parametrize("limit", [None, 150, 2**30])
def test_advice_on_limits_of_devices_works(limit: int | None) -> None:
    """An error names the limit that counts, and how large that of the devices would have to be."""
    options: dict[str, Any] = {"checkpoint": "never", "memory_limit": limit}
    own = [100, 200]
    with pytest.raises(InfeasibleError, match="memory_limit=100 ") as caught:
        gb.solve(CHAIN, 2, devices=[Device(memory_limit=n) for n in own], **options)
    advice = str(caught.value).split("\nFix: ")[1]
    if " and devices" in advice:
        options["memory_limit"] = int(advice.split("memory_limit=")[1].split(" and")[0])
    more = eval(advice.split("devices with memory_limit=")[1].split(", in their")[0])
    assert len(more) == 2
    plan = gb.solve(CHAIN, 2, devices=[Device(memory_limit=n) for n in more], **options)
    assert plan.status == "optimal"


def test_limits_of_devices_count_where_memory_is_not_known() -> None:
    """The error is about the memory, as for a limit for all devices."""
    with pytest.raises(UnsupportedPlanError, match="memory is not known under this schedule"):
        gb.solve(CHAIN, 2, schedule="zb_h1", devices=[Device(memory_limit=1000)] * 2)


def test_memory_over_time_knows_recomputed_layers() -> None:
    """Tracks of a plan whose layers are recomputed by themselves peak where the plan says."""
    plan = evaluate(CHAIN, [3, 3], checkpoint="never")
    chosen = recompute_layers(CHAIN, plan, memory_limit=900)
    assert chosen.plan.runs
    tracks = memory_over_time(gb.simulate(chosen.plan), held_of(CHAIN, chosen.plan))
    assert [track.peak for track in tracks] == [p.memory.total for p in chosen.plan.partitions]
    with pytest.raises(BalanceError, match=r"no rule does: plan\.runs has"):
        gb.compare_rules(CHAIN, chosen.plan)
    with pytest.raises(BalanceError, match="recomputed by themselves already"):
        recompute_layers(CHAIN, chosen.plan, memory_limit=900)
    assert recompute_layers(CHAIN, chosen.before, memory_limit=900).runs == chosen.runs


def test_select_method_names_what_runs() -> None:
    """For the largest number of micro-batches; and it refuses what solve refuses."""
    sizes = [sized(rows, time, 8, 4) for rows, time in ((4, 4.0), (2, 2.1), (8, 8.0))]
    profile = replace(sizes[0], chunks=2, other_sizes=tuple(sizes[1:]))
    found = gb.solve(profile, 2, chunks="auto")
    assert gb.select_method(profile, 2, chunks="auto") == found.method
    assert gb.select_method(profile, 2, chunks=[4, 1]) == gb.select_method(profile, 2, chunks=4)
    for ask in (gb.select_method, gb.solve):
        with pytest.raises(BalanceError, match="partitions cannot be dealt out evenly"):
            ask(CHAIN, 3, schedule="interleaved_1f1b")


def test_short_chains_that_always_recompute_are_proven() -> None:
    """By a search; what that leaves open HiGHS closes, to its tolerance."""
    only = gb.solve(
        gb.Profile.from_costs([0.1, 0.2, 0.3], chunks=4),
        3,
        checkpoint="always",
        memory_limit="1 GiB",
    )
    assert (only.balance, only.status, only.method) == ([1, 1, 1], "optimal", "box search")
    rng = random.Random(3)
    proven = 0
    for k in range(20):
        costs = [[rng.uniform(0.1, 5) for _ in range(7)] for _ in range(3)]
        devices = [Device(slowness=rng.choice([1, 1.3, 2])) for _ in range(3)]
        checkpoint: Any = "always" if k % 2 else "auto"
        problem = Problem(*costs, 3, 4, checkpoint, devices=devices)
        found, alone = (split(problem, method=one) for one in ("auto", "integer program"))
        assert alone.lower_bound <= found.value <= alone.value
        assert found.lower_bound <= alone.value
        proven += found.status == "optimal"
    assert proven >= 15


class Clock:
    """A clock that goes on by a second whenever somebody looks."""

    def __init__(self) -> None:
        self.now = 0

    def monotonic(self) -> float:
        self.now += 1
        return float(self.now)


def test_a_search_looks_at_the_clock_in_the_middle(monkeypatch: pytest.MonkeyPatch) -> None:
    """The makespan of devices in any order is given up at any time, with a valid bound."""
    rng = random.Random(1)
    costs = [[rng.randrange(1, 100) for _ in range(12)] for _ in range(3)]
    devices = [Device(slowness=1 + k / 8) for k in range(5)]
    problem = Problem(*costs, 5, 8, "never", devices=devices, any_order=True)
    monkeypatch.setattr(deadline, "time", clock := Clock())
    best = least_makespan(Search(Levels(problem)), 7, deadline.Deadline(math.inf))
    assert best is not None and best.value == best.lower_bound
    steps, gaps = clock.now, set()
    for until in range(0, steps, steps // 20):
        clock.now = 0
        found = least_makespan(Search(Levels(problem)), 7, deadline.Deadline(until))
        assert found is not None
        assert found.lower_bound <= best.value <= found.value
        assert clock.now <= until + 2  # one look begins it
        gaps.add(found.value - found.lower_bound)
    assert len(gaps) > 2


def test_a_search_under_a_schedule_looks_at_the_clock_between_splits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not only between neighbourhoods, which take as long as there are micro-batches."""
    monkeypatch.setattr(schedules, "_AT_ONCE", 1)
    monkeypatch.setattr(deadline, "time", clock := Clock())
    profile = gb.Profile.from_costs([3.0, 1.0, 4.0, 1.0, 5.0, 9.0, 2.0, 6.0], chunks=5)
    problem = Problem(**profile.layer_times, n_partitions=3, chunks=5)
    best = schedules.search_schedule(problem, "1f1b")
    assert best is not None
    for seconds in range(1, 12):
        clock.now = 0
        found = schedules.search_schedule(problem, "1f1b", time_limit=seconds)
        assert found is not None
        assert found.lower_bound <= best.value <= found.value
        assert clock.now <= seconds + 16
