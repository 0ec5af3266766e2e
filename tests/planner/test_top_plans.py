"""The next best plans: the head of all splits, whatever is minimised, and a bound that holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, combinations, pairwise, permutations, product
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from planner.test_solve_chunks import sized

import gpipebal as gb
from gpipebal.planner import evaluate, solve, top_plans
from gpipebal.planner.posing import Posed
from gpipebal.planner.search import best, best_plans
from gpipebal.problem import Device, Rules
from gpipebal.profile import SkipProfile
from gpipebal.schedule import ALL_SCHEDULES
from gpipebal.solvers.deadline import Deadline
from gpipebal.solvers.sets.ranked import parts_without

COSTS = [3.0, 1.0, 4.0, 1.0, 5.0, 9.0, 2.0]


def every_balance(n_layers: int, n: int) -> list[list[int]]:
    """List all balances."""
    cuts = combinations(range(1, n_layers), n - 1)
    return [[b - a for a, b in pairwise((0, *cut, n_layers))] for cut in cuts]


@given(st.lists(st.integers(1, 2**4 - 1), min_size=3, max_size=5), st.data())
def test_each_other_split_is_in_one_part(places: list[int], data: st.DataObject) -> None:
    """And the split itself is in none."""
    first, *_, last = places = [1, *places, 1 << 4]
    assert (first, last) == (1, 16)

    def those_in(sets: Sequence[int]) -> list[tuple[int, ...]]:
        return list(product(*([k for k in range(5) if one >> k & 1] for one in sets)))

    every = those_in(places)
    split = data.draw(st.sampled_from(every))
    parts = [one for part in parts_without(places, split) for one in those_in(part)]
    assert sorted([split, *parts]) == every


@pytest.mark.parametrize("mode", ["never", ("always", "except_last", "never", "always")])
@pytest.mark.parametrize("schedule", ALL_SCHEDULES)
def test_every_schedule_has_next_best_plans(schedule: str, mode: Any) -> None:
    """They are the head of all balances, each of which is planned by itself."""
    profile = gb.Profile.from_costs(COSTS, chunks=4)
    asked: dict[str, Any] = {"schedule": schedule, "checkpoint": mode}
    values = []
    for balance in every_balance(7, 4):
        pin = {k: sum(k >= end for end in accumulate(balance)) for k in range(7)}
        values.append(solve(profile, 4, pin=pin, **asked).value)
    plans = top_plans(profile, 6, 4, **asked)
    assert [plan.value for plan in plans] == pytest.approx(sorted(values)[:6], rel=1e-12)
    assert len({tuple(plan.balance) for plan in plans}) == 6
    assert {plan.schedule for plan in plans} == {schedule}
    assert {plan.lower_bound for plan in plans} == {plans[0].lower_bound}
    assert plans[0].lower_bound <= min(values) * (1 + 1e-12)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_cuts_of_next_best_plans_may_move_anywhere(schedule: str) -> None:
    """How decisive a cut is has nothing to do with where the plan was searched."""
    profile = gb.Profile.from_costs(COSTS, chunks=4)
    for plan in top_plans(profile, 6, 3, schedule=schedule):
        for j, pair in enumerate(plan.sensitivity):
            for more, step in zip(pair, (-1, 1), strict=True):
                balance = plan.balance
                balance[j] += step
                balance[j + 1] -= step
                assert (more is None) == (0 in balance)
                if more is not None:
                    moved = evaluate(profile, balance, schedule=schedule)
                    assert plan.value + more == pytest.approx(moved.makespan, rel=1e-12)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("objective", ["makespan", "bottleneck", "peak_memory"])
def test_all_that_there_are_come_once_and_keep_the_rules(schedule: str, objective: Any) -> None:
    """Asked for more plans than there are, it gives each one that the rules leave."""
    profile = gb.Profile.from_costs(COSTS, saved_bytes=[7, 1, 30, 2, 9, 4, 1], chunks=3)
    rules = Rules(no_cut=[2], max_layers=4, pin={3: 1})
    asked: dict[str, Any] = {"schedule": schedule, "objective": objective}
    plans = top_plans(profile, 99, 3, checkpoint="always", rules=rules, **asked)
    kept = [one for one in every_balance(7, 3) if rules.keeps([0, *accumulate(one)])]
    assert sorted(plan.balance for plan in plans) == sorted(kept)


def test_a_cost_of_ones_own_has_next_best_plans() -> None:
    """No run is asked about twice, and what is not allowed is in no plan."""
    asked: list[tuple[int, int, int]] = []

    def cost(first: int, end: int, partition: int) -> float | None:
        asked.append((first, end, partition))
        return None if end - first == 3 else sum(COSTS[first:end]) * (partition + 1)

    plans = top_plans(gb.Profile.from_costs(COSTS), 4, 3, cost=cost)
    assert len(set(asked)) == len(asked)
    every = []
    for balance in every_balance(7, 3):
        runs = enumerate(pairwise([0, *accumulate(balance)]))
        costs = [cost(a, b, j) for j, (a, b) in runs]
        if None not in costs:
            every.append(max(one for one in costs if one is not None))
    assert [plan.value for plan in plans] == sorted(every)[:4]
    assert (plans[0].status, plans[0].objective) == ("optimal", "cost")
    assert all(plan.equal_split_value is None for plan in plans)  # it has three layers


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_under_limits_on_which_all_cuts_have_a_say(
    schedule: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Skips wait in every partition that they go past, and there are too many ways for a list."""
    monkeypatch.setattr(best, "MOST_WAYS", 5)
    random = Random(seed)
    costs = [float(random.randint(1, 9)) for _ in range(9)]
    saved = [random.randint(0, 90) for _ in costs]
    profile = gb.Profile.from_costs(costs, saved_bytes=saved, output_bytes=[9] * 9, chunks=4)
    n_storages = len(profile.storages)
    skips = tuple(SkipProfile(str(k), k, 8 - 2 * k, (n_storages + k,)) for k in range(3))
    profile = replace(profile, storages=(*profile.storages, 60, 80, 110), skips=skips)
    asked: dict[str, Any] = {"schedule": schedule, "checkpoint": "never"}
    every = [evaluate(profile, balance, **asked) for balance in every_balance(9, 4)]
    peaks = sorted(max(part.memory.total for part in one.partitions) for one in every)
    asked["memory_limit"] = limit = peaks[seed + 1]
    values = sorted(one.makespan for one in every if (one.peak_bytes or 0) <= limit)
    plans = top_plans(profile, 4, 4, **asked)
    assert all((plan.peak_bytes or 0) <= limit for plan in plans)
    assert len(plans) == len({tuple(plan.balance) for plan in plans}) <= len(values)
    for plan, value in zip(plans, values, strict=False):
        assert plan.value >= value * (1 - 1e-12)
    assert plans[0].lower_bound <= values[0] * (1 + 1e-12)
    assert plans[0].value <= solve(profile, 4, **asked).value


def test_out_of_time_the_first_plan_is_that_of_solve() -> None:
    """Nothing else is searched, and the bound says so."""
    profile = gb.Profile.from_costs([float(1 + k * k % 7) for k in range(40)], chunks=16)
    for schedule in ("gpipe", "1f1b"):
        plan = solve(profile, 6, schedule=schedule, time_limit=0)
        plans = top_plans(profile, 3, 6, schedule=schedule, time_limit=0)
        assert [one.balance for one in plans] == [plan.balance]
        assert plans[0].lower_bound <= plan.value


def test_after_the_first_plan_all_searches_share_one_time_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also those for other numbers of micro-batches, which come when it is their turn."""
    given: list[tuple[int, float | None]] = []

    def noting(posed: Posed, *, thorough: bool = True) -> best.Best:
        given.append((posed.chunks, posed.question.time_limit))
        return best.best_of(posed, thorough=thorough)

    class AlmostUp(Deadline):
        left = 7.0

    monkeypatch.setattr(best_plans, "best_of", noting)
    monkeypatch.setattr(best_plans, "Deadline", AlmostUp)
    profile = sized([1.0, 2.0, 1.0, 3.0], [1.0] * 4)
    plans = top_plans(profile, 9, 2, chunks=[4, 8, 16], time_limit=99.0)
    assert [plan.chunks for plan in plans[:3]] == [4, 8, 4]
    assert given[0] == (4, 99.0) and {(8, 7.0), (16, 7.0)} < {*given}
    assert {limit for _, limit in given[1:]} == {7.0}


def test_devices_of_many_kinds_in_any_order_have_next_best_plans() -> None:
    """HiGHS searches each part, and no balance comes twice."""
    profile = gb.Profile.from_costs([float(1 + k * k % 7) for k in range(14)], chunks=1)
    asked: dict[str, Any] = {"objective": "bottleneck", "any_order": True}
    asked["devices"] = [Device(slowness=1 + k / 8) for k in range(13)]
    plans = top_plans(profile, 3, 13, **asked)
    assert {plan.method for plan in plans} == {"integer program"}
    assert len({tuple(plan.balance) for plan in plans}) == 3
    assert plans[0].lower_bound <= plans[0].value <= plans[-1].value


def test_a_plan_whose_cuts_may_be_better_in_another_order_is_not_proven() -> None:
    """There are too many orders for all to be searched; the only cuts leave nothing else."""
    profile = gb.Profile.from_costs([8.0, 6.0, 5.0, 3.0, 3.0], chunks=8)
    asked: dict[str, Any] = {"schedule": "1f1b", "checkpoint": "always"}
    speeds = [1, 2, 3, 4, 5]
    plans = top_plans(profile, 2, 5, devices=speeds, any_order=True, **asked)
    assert [plan.balance for plan in plans] == [[1] * 5]
    orders = permutations(speeds)
    values = [evaluate(profile, [1] * 5, devices=order, **asked).makespan for order in orders]
    assert plans[0].lower_bound <= min(values)
