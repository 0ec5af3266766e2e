"""Plans of searches that have no time: they fit, and their bounds hold."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import gpipebal as gb
from gpipebal.errors import BalanceError, InfeasibleError
from gpipebal.planner.posing import Posed
from gpipebal.planner.schedules import search
from gpipebal.planner.schedules.costs import ScheduleCosts
from gpipebal.planner.search import best, best_way
from gpipebal.problem import Device, Problem
from gpipebal.profile import SkipProfile
from gpipebal.solvers import Split, deadline, find, split


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from(["bottleneck", "makespan"]))
def test_devices_in_any_order(seed: int, objective: str) -> None:
    """With no time at all there is a plan, no better than the best one; its bound is no higher."""
    rng = random.Random(seed)
    profile = gb.Profile.from_costs([rng.randint(1, 50) for _ in range(12)], chunks=4)
    options = {"devices": [1, 2, 1, 3], "any_order": True, "objective": objective}
    optimum = gb.solve(profile, 4, **options)
    assert optimum.status == "optimal"
    found = gb.solve(profile, 4, time_limit=0, **options)
    assert found.lower_bound <= optimum.value <= found.value
    assert (found.status == "optimal") == (found.lower_bound == found.value)
    assert gb.solve(profile, 4, time_limit=1e9, **options).value == optimum.value


def tight(seed: int, source: int = 3, destination: int = 26, n_bytes: int = 60) -> gb.Profile:
    """Return a chain with a skip past others: how much of it may wait depends on all cuts."""
    rng = random.Random(seed)
    profile = gb.Profile.from_costs(
        [rng.randint(1, 9) for _ in range(30)],
        saved_bytes=[rng.randint(50, 100) for _ in range(30)],
        output_bytes=[*(rng.randint(20, 90) for _ in range(29)), 0],
        chunks=16,
    )
    return past_others(profile, source, destination, n_bytes)


def past_others(profile: gb.Profile, source: int, destination: int, n_bytes: int) -> gb.Profile:
    """Return the chain with a skip connection of some bytes for each micro-batch."""
    skip = SkipProfile("far", source, destination, (len(profile.storages),))
    return replace(profile, storages=(*profile.storages, n_bytes), skips=(skip,))


def test_the_least_peak_known_is_kept() -> None:
    """Out of time, the plan in hand is not given up for the first split there is."""
    profile = gb.Profile.from_costs(
        [1, 1, 9], saved_bytes=[0, 150, 100], output_bytes=[10, 50, 0], chunks=4
    )
    asked: dict[str, Any] = {"checkpoint": "never", "objective": "peak_memory"}
    least = gb.solve(profile, 2, **asked)
    late = gb.solve(profile, 2, time_limit=0, **asked)
    assert late.balance == least.balance == [2, 1]
    assert late.lower_bound <= least.value == late.value


@pytest.mark.parametrize("seed", range(4))
def test_limits_that_what_waits_decides(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Out of time no next best split is looked at, but for those with most room."""
    profile = tight(seed)
    options = {"checkpoint": "auto", "partitions": 6}
    least = gb.solve(profile, objective="peak_memory", **options).value
    tried: list[object] = []
    next_best = best._next_best
    monkeypatch.setattr(
        best, "_next_best", lambda *given: (tried.append(one) or one for one in next_best(*given))
    )
    for limit in (int(least), int(least * 1.02), int(least * 1.1)):
        tried.clear()
        found = gb.solve(profile, memory_limit=limit, time_limit=0, **options)
        assert len(tried) <= 1
        assert max(part.memory.total for part in found.partitions) <= limit
        optimum = gb.solve(profile, memory_limit=limit, **options)
        assert found.lower_bound <= optimum.value
        assert found.value >= optimum.lower_bound


def test_the_search_under_a_schedule_has_what_the_first_split_leaves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where finding that one takes all the time, no cuts are moved."""
    now, n_tried = [0.0], [0]
    monkeypatch.setattr(deadline, "time", SimpleNamespace(monotonic=lambda: now[0]))
    makespans = ScheduleCosts.makespans

    def slow(*given: Any, **options: Any) -> Split | None:
        now[0] += 2.0
        return find(*given, **options)

    def count(self: ScheduleCosts, splits: Sequence[Sequence[int]]) -> list[float]:
        n_tried[0] += len(splits)
        return makespans(self, splits)

    monkeypatch.setattr(search, "find", slow)
    monkeypatch.setattr(ScheduleCosts, "makespans", count)
    problem = Problem([5, 1, 1, 7, 2, 6], [1, 9, 2, 2, 8, 1], [0] * 6, 3, 4, "never")
    assert search.search_schedule(problem, "1f1b", time_limit=3) is not None
    assert n_tried[0] > 2
    n_tried[0] = 0
    assert search.search_schedule(problem, "1f1b", time_limit=1) is not None
    assert n_tried[0] <= 2


def test_a_second_search_without_time_hides_no_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """HiGHS, say, which raises where it has found nothing yet."""
    profile, limits = tight(1, 0, 29, 300), {"checkpoint": "never", "partitions": 6}
    least = int(gb.solve(profile, objective="peak_memory", **limits).value * 1.02)
    asked: list[float | None] = []
    first = best.solved

    def once(posed: Posed, problem: Problem, time_limit: float | None) -> Split | None:
        asked.append(time_limit)
        if len(asked) > 1:
            raise BalanceError("no split was found in time")
        return first(posed, problem, time_limit)

    monkeypatch.setattr(best, "solved", once)
    found = gb.solve(profile, memory_limit=least, time_limit=5, **limits)
    assert len(asked) > 1
    assert max(part.memory.total for part in found.partitions) <= least


@pytest.mark.parametrize(
    ("seed", "checkpoint", "time_limit"), [(1, "never", 0), (2, "auto", 0), (2, "auto", None)]
)
def test_under_a_searched_schedule_the_least_peak_is_a_limit_that_fits(
    seed: int, checkpoint: str, time_limit: float | None
) -> None:
    """The plan that has it is found, with no time and with much, also if the search is named."""
    options: dict[str, Any] = {"checkpoint": checkpoint, "partitions": 6, "schedule": "1f1b"}
    least = gb.solve(tight(seed), objective="peak_memory", **options)
    options |= {"memory_limit": int(least.value), "time_limit": time_limit}
    found = gb.solve(tight(seed), **options)
    assert max(part.memory.total for part in found.partitions) <= least.value
    assert found.lower_bound <= found.value == gb.simulate(found).makespan
    assert gb.solve(tight(seed), method="schedule search", **options).value == found.value


def test_too_many_kinds_of_devices_are_no_reason_that_no_plan_fits() -> None:
    """No orders are searched for the least peak; the error is about the limits that were given."""
    rng = random.Random(4)
    profile = gb.Profile.from_costs(
        [rng.randint(1, 9) for _ in range(17)],
        saved_bytes=[rng.randint(50, 100) for _ in range(17)],
        output_bytes=[*(rng.randint(200, 900) for _ in range(16)), 0],
        chunks=8,
    )
    profile = past_others(profile, 4, 14, 200)
    devices = [Device(slowness=1 + k / 100, memory_limit=7700) for k in range(14)]
    with pytest.raises(
        InfeasibleError, match=r"some splits fit, but none .*\nFix: (.*; or )?devices with"
    ):
        gb.solve(profile, 14, devices=devices, any_order=True, checkpoint="never")


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("seconds", [10**400, Fraction(10**400), float("inf"), np.float32(50)])
def test_more_seconds_than_a_clock_counts_are_no_limit(schedule: str, seconds: Any) -> None:
    """Whatever kind of number they are."""
    profile = gb.Profile.from_costs([3.0, 1.0, 4.0, 1.0], chunks=4)
    options = {"devices": [1, 2], "any_order": True, "schedule": schedule}
    plan = gb.solve(profile, 2, **options)
    assert gb.solve(profile, 2, time_limit=seconds, **options) == plan
    problem = Problem(**profile.layer_times, n_partitions=2, chunks=4)
    assert split(problem, method="box search", time_limit=seconds).status == "optimal"
    for wrong in (-1, float("nan"), "60", True):
        with pytest.raises(BalanceError, match=r"time_limit is not a time: .*\nFix: time_limit=60"):
            split(problem, method="box search", time_limit=wrong)


def test_what_is_lacking_is_told_without_time() -> None:
    """And more memory that helps; what else might is left out."""
    question = {"checkpoint": "never", "partitions": 6, "time_limit": 0}
    with pytest.raises(InfeasibleError, match=r"partition \d does not fit") as caught:
        gb.solve(tight(0), memory_limit=200, **question)
    text = str(caught.value)
    assert text.endswith("; or more time to see what else helps (time_limit=0 was given).")
    enough = re.search(r"Fix: memory_limit=(\d+);", text)
    assert enough is not None and gb.solve(tight(0), memory_limit=int(enough[1]), **question)


def test_few_ways_are_all_tried_until_one_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the time: to say that nothing fits would be wrong."""
    profile = gb.Profile.from_costs(
        [2.0, 2.0, 6.0, 3.0, 5.0],
        saved_bytes=[37, 82, 32, 82, 9],
        output_bytes=[40, 75, 70, 85, 0],
        chunks=8,
    )
    options = {"partitions": 4, "checkpoint": "except_last"}
    least = int(gb.solve(profile, objective="peak_memory", **options).value)
    optimum = gb.solve(profile, memory_limit=least, **options)
    ticks = itertools.count(0, 100)
    monkeypatch.setattr(deadline, "time", SimpleNamespace(monotonic=lambda: float(next(ticks))))
    assert gb.solve(profile, memory_limit=least, time_limit=50, **options).value == optimum.value


def test_what_was_not_tried_is_not_said_to_fail() -> None:
    """Of many ways to cut the chain those were tried for which there was time."""
    options = {"partitions": 6, "checkpoint": "never", "schedule": "1f1b"}
    least = int(gb.solve(tight(1), objective="peak_memory", **options).value)
    with pytest.raises(InfeasibleError, match=r"none of those tried within time_limit=0 does"):
        gb.solve(tight(1), memory_limit=least - 1, time_limit=0, **options)


@pytest.mark.parametrize("checkpoint", ["auto", "except_last", "never"])
def test_too_many_kinds_of_devices(checkpoint: str) -> None:
    """The advice that is given works, whatever was asked for."""
    rng = random.Random(1)
    profile = gb.Profile.from_costs([rng.randint(1, 9) for _ in range(75)], chunks=8)
    options = {"devices": [1 + j / 10 for j in range(14)], "checkpoint": checkpoint}
    with pytest.raises(BalanceError, match="integer program is too large") as caught:
        gb.solve(profile, 14, any_order=True, time_limit=0.3, **options)
    assert "Fix: any_order=False; or fewer layers" in str(caught.value)
    assert gb.solve(profile, 14, time_limit=0.3, **options).n_partitions == 14


def waiting_chain() -> gb.Profile:
    """Return a chain whose least peak what may wait decides, with 28 ways to cut it in three."""
    profile = gb.Profile.from_costs(
        [8.0, 3.0, 1.0, 8.0, 7.0, 9.0, 5.0, 6.0, 7.0],
        saved_bytes=[5, 3, 9, 1, 8, 2, 6, 1, 9],
        output_bytes=[18, 9, 16, 31, 23, 40, 19, 23, 38],
        chunks=20,
    )
    return past_others(profile, 0, 8, 100)


_WAITING: dict[str, Any] = {
    "schedule": "1f1b",
    "objective": "peak_memory",
    "checkpoint": "never",
}


@pytest.mark.parametrize("n_ticks", range(0, 60, 6))
def test_ways_are_valued_as_long_as_there_is_time(
    n_ticks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock is looked at before each; the bound holds, whichever were valued."""
    least = gb.solve(waiting_chain(), 3, **_WAITING)
    valued: list[object] = []
    value_of = best_way.value_of
    monkeypatch.setattr(best_way, "value_of", lambda *way: (valued.append(way), value_of(*way))[1])
    ticks = itertools.count()
    monkeypatch.setattr(deadline, "time", SimpleNamespace(monotonic=lambda: float(next(ticks))))
    found = gb.solve(waiting_chain(), 3, time_limit=n_ticks, **_WAITING)
    assert len(valued) <= n_ticks
    assert found.lower_bound <= least.value <= found.value


def test_not_all_ways_are_valued(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those whose peak is larger than the least one, even if nothing waits, are no better."""
    valued: list[object] = []
    value_of = best_way.value_of
    monkeypatch.setattr(best_way, "value_of", lambda *way: (valued.append(way), value_of(*way))[1])
    plan = gb.solve(waiting_chain(), 3, **_WAITING)
    splits = [one for one in itertools.product(range(1, 8), repeat=3) if sum(one) == 9]
    given: dict[str, Any] = {"schedule": "1f1b", "checkpoint": "never"}
    peaks = [
        max(part.memory.total for part in gb.evaluate(waiting_chain(), one, **given).partitions)
        for one in splits
    ]
    assert plan.status == "optimal" and plan.value == min(peaks)
    assert 0 < len(valued) < len(splits) == 28
