"""Going through all that remains: what it proves is true, and it finds what is better."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product
from operator import le
from typing import Any
from unittest.mock import patch

import pytest
from examples import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from plan_oracle import profiles
from planner.test_descent import posed, skipping

import gpipebal as gb
from gpipebal.planner.assemble import peaks_of
from gpipebal.planner.execution import Way
from gpipebal.planner.plans import plan_of_way, value_of
from gpipebal.planner.posing import Posed
from gpipebal.planner.search import best, remaining
from gpipebal.planner.search.all_ways import all_ways
from gpipebal.planner.search.left_runs import LeftRuns
from gpipebal.planner.search.remaining import proven
from gpipebal.planner.search.row_peaks import RowPeaks
from gpipebal.problem import Device, Link, Problem, Rules, to_bounds
from gpipebal.problem.rules import Within
from gpipebal.schedule import CHECKPOINT_MODES
from gpipebal.solvers.deadline import NO_DEADLINE, Deadline
from gpipebal.solvers.sets.ranked import parts_without

SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
#: Simulated times of two ways to sum them up differ by less.
ROUNDING = 1e-9


def values_of(question: Posed, most: int = 2_000) -> list[tuple[float, Way]]:
    """Return the value of every way that keeps its limits, each walked through by itself."""
    ways, found = all_ways(question, most), []
    assert ways is not None
    for way in ways:
        limits = [question.problem.limits[k] for k in way.order]
        peaks = peaks_of(question.profile, way.bounds, question.execution(way))
        if all(n is None or peak.total <= n for peak, n in zip(peaks, limits, strict=True)):
            value = value_of(question, way)
            assert value is not None
            found.append((value, way))
    return sorted(found, key=lambda one: one[0])


def limited(draw: st.DrawFn, profile: gb.Profile, n: int, options: dict[str, Any]) -> Posed | None:
    """Draw a limit that some ways keep; None: there is no way."""
    peaks = [value for value, _ in values_of(posed(profile, n, **options))]
    if not peaks:
        return None
    limit = math.ceil(draw(st.sampled_from(peaks[: 1 + len(peaks) // 2])))
    objective = draw(st.sampled_from(["makespan", "bottleneck"]))
    return posed(profile, n, **{**options, "objective": objective, "memory_limit": limit})


@st.composite
def questions(draw: st.DrawFn) -> Posed | None:
    """Draw a question in which memory counts."""
    profile = draw(profiles(largest=6, shortest=draw(st.integers(0, 1))))
    n = draw(st.integers(1, min(4, profile.n_layers)))
    schedule = draw(st.sampled_from(["gpipe", "1f1b"]))
    options: dict[str, Any] = {
        "chunks": draw(st.integers(1, 5)),
        "checkpoint": draw(
            st.sampled_from([*CHECKPOINT_MODES, "auto"] if n < 4 else CHECKPOINT_MODES)
        ),
        "schedule": schedule,
        "loss_inside": schedule == "1f1b" or draw(st.booleans()),
        "shared_memory": draw(st.booleans()),
        "gradients_exist": draw(st.booleans()),
        "objective": "peak_memory",
        "max_layers": draw(st.none() | st.integers(-(-profile.n_layers // n), 6)),
    }
    if draw(st.booleans()):
        options["devices"] = [Device(slowness=draw(st.sampled_from([1, 2]))) for _ in range(n)]
        options["any_order"] = n < 4 and draw(st.booleans())
    if profile.n_layers > 1 and draw(st.booleans()):
        options["link"] = Link(bandwidth=10.0, latency=1.0, overlaps=draw(st.booleans()))
    if draw(st.booleans()):
        return posed(profile, n, **options)
    return limited(draw, profile, n, options)


def with_ways(question: Posed | None) -> tuple[Posed, list[Way]] | None:
    """Return a question with all ways to run its chain; None if there are none, or too many."""
    ways = None if question is None else all_ways(question, 2_000)
    return (question, ways) if question is not None and ways else None


#: Questions with all their ways.
WITH_WAYS = questions().map(with_ways).filter(bool)


def check_proven(question: Posed, known: list[tuple[float, Way]], data: st.DataObject) -> None:
    """From any way and no bound, the best of all that are known is found and proven."""
    start = plan_of_way(question, data.draw(st.sampled_from([way for _, way in known])))
    plan = proven(RowPeaks(question), start.with_bound(0.0), NO_DEADLINE)
    assert plan.value == pytest.approx(known[0][0], rel=ROUNDING)
    assert plan.status == "optimal"
    assert to_bounds(plan.balance) in {way.bounds for _, way in known}


@settings(max_examples=examples(60), deadline=None, suppress_health_check=SLOW)
@given(questions(), st.data())
def test_from_any_plan_and_no_bound_the_best_is_found_and_proven(
    question: Posed | None, data: st.DataObject
) -> None:
    """All ways are valued by brute force."""
    known = [] if question is None else values_of(question)
    if question is not None and known:
        check_proven(question, known, data)


@settings(max_examples=examples(60), deadline=None, suppress_health_check=SLOW)
@given(questions(), st.data())
def test_in_a_part_of_all_splits_the_best_of_that_part_is_found(
    question: Posed | None, data: st.DataObject
) -> None:
    """Where bounds have places of their own, what is left keeps to them."""
    if question is None:
        return
    known, problem = values_of(question), question.problem
    rules = problem.rules or Rules()
    places = rules.places(problem.n_layers, problem.n_partitions)
    for _ in range(data.draw(st.integers(1, 2))):
        if known:
            _, way = data.draw(st.sampled_from(known))
            parts = list(parts_without(places, way.bounds))
            places = data.draw(st.sampled_from(parts)) if parts else places
        known = [
            (value, way)
            for value, way in known
            if all(one >> place & 1 for one, place in zip(places, way.bounds, strict=True))
        ]
    if known:
        within = replace(problem, rules=Within.of(rules, places))
        check_proven(replace(question, problem=within), known, data)


@settings(max_examples=examples(60), deadline=None, suppress_health_check=SLOW)
@given(questions(), st.integers(0, 200))
def test_what_is_proven_with_few_walks_is_true(question: Posed | None, walks: int) -> None:
    """Whenever the search ends, its bound is not above the best value, and its plan fits."""
    known = [] if question is None else values_of(question)
    if not known:
        return
    assert question is not None
    start = plan_of_way(question, known[-1][1]).with_bound(0.0)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(remaining, "_MOST_WALKS", walks)
        plan = proven(RowPeaks(question), start, NO_DEADLINE)
    assert plan.lower_bound <= known[0][0] * (1 + ROUNDING)
    assert known[0][0] * (1 - ROUNDING) <= plan.value <= start.value


@settings(max_examples=examples(40), deadline=None, suppress_health_check=SLOW)
@given(WITH_WAYS, st.data())
def test_what_is_known_of_a_partition_holds_in_other_ways(
    asked: tuple[Posed, list[Way]], data: st.DataObject
) -> None:
    """Equal to the byte; and of the beginning of a way, no more than in any way that goes on so."""
    question, ways = asked
    rows, n = RowPeaks(question), question.problem.n_partitions
    free = LeftRuns(replace(question, problem=without_limits(question.problem)), ways[0].order, 1e9)
    for way in data.draw(st.lists(st.sampled_from(ways), min_size=1, max_size=30)):
        known = [rows.peak(j, way.bounds, way.modes) for j in range(n)]
        alone = peaks_of(question.profile, way.bounds, question.execution(way))
        assert known == [peak.total for peak in alone]
        for j in range(1, n):
            first = way.bounds[: j + 1]
            bounds = (*first, *free.after(first))
            least = [rows.peak(k, bounds, way.modes[:j]) for k in range(j)]
            assert all(map(le, least, known))


@settings(max_examples=examples(40), deadline=None, suppress_health_check=SLOW)
@given(WITH_WAYS, st.data())
def test_modes_are_left_out_that_fit_with_none_of_the_others(
    asked: tuple[Posed, list[Way]], data: st.DataObject
) -> None:
    """Those that are left fit in some modes of all earlier partitions, each tried by itself."""
    question, ways = asked
    rows, bounds = RowPeaks(question), data.draw(st.sampled_from(ways)).bounds
    j = data.draw(st.integers(0, question.problem.n_partitions - 1))
    some = st.sets(st.sampled_from(CHECKPOINT_MODES), min_size=1, max_size=3)
    sets = [tuple(sorted(data.draw(some))) for _ in range(j + 1)]
    peaks = {modes: rows.peak(j, bounds, modes) for modes in product(*sets)}
    most = data.draw(st.sampled_from(sorted({0, *peaks.values()})))
    left = list(sets)
    fits = [modes for modes, peak in peaks.items() if peak <= most]
    assert rows.leave_fitting(j, bounds, left, most) == bool(fits)
    if fits:
        assert list(map(set, left)) == list(map(set, zip(*fits, strict=True)))


def without_limits(problem: Problem) -> Problem:
    """Return a problem with devices that have all the memory they need."""
    devices = problem.devices and [replace(device, memory_limit=None) for device in problem.devices]
    return replace(problem, devices=devices)


@pytest.mark.parametrize("seed", range(3))
def test_gaps_of_skip_connections_are_closed(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What waits in partitions that a skip goes past is known for a whole plan only."""
    question = posed(skipping(seed), 4, schedule="1f1b", objective="peak_memory")
    plan = best.best_of(question).plan
    assert plan is not None and plan.status == "optimal"
    assert plan.value == values_of(question)[0][0]
    monkeypatch.setattr(best, "proven", lambda rows, plan, deadline, thorough: plan)
    before = best.best_of(question).plan
    assert before is not None and before.gap and before.value >= plan.value


def test_a_shorter_search_raises_the_bound() -> None:
    """If there are too many ways for the plan's value, lower goals are tried."""
    question = posed(skipping(1, n_layers=20), 5, schedule="1f1b", objective="peak_memory")
    start = plan_of_way(question, Way((0, 4, 8, 12, 16, 20), ("except_last",) * 5, (0, 1, 2, 3, 4)))
    found = []
    for walks in (0, 40, 4_000):
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(remaining, "_MOST_WALKS", walks)
            found.append(proven(RowPeaks(question), start, NO_DEADLINE))
    none, some, all_of_them = found
    assert none == start
    assert 0 < some.lower_bound < all_of_them.lower_bound == all_of_them.value <= some.value


@pytest.mark.parametrize("seed", range(4))
def test_a_search_that_was_broken_off_goes_on_where_it_ended(seed: int) -> None:
    """It finds what it would have found at once, and looks at no beginning twice."""
    question = posed(skipping(seed, n_layers=20), 5, schedule="1f1b", objective="peak_memory")
    start = plan_of_way(question, Way((0, 4, 8, 12, 16, 20), ("except_last",) * 5, (0, 1, 2, 3, 4)))
    plans, looks, narrowed = [], [], remaining._Going._narrowed
    for shares in ((1,), (0.01, 1)):
        as_it_is = patch.object(remaining._Going, "_narrowed", autospec=True, side_effect=narrowed)
        with patch.object(remaining, "_SHARES", shares), as_it_is as looked_at:
            plans.append(proven(RowPeaks(question), start, NO_DEADLINE))
        looks.append([call.args[1] for call in looked_at.call_args_list])
    assert plans[0] == plans[1] and plans[0].status == "optimal"
    assert len(set(looks[1])) == len(looks[1]) <= len(looks[0])


def test_what_is_found_below_a_lower_goal_and_proven_ends_the_search() -> None:
    """If nothing is below a goal but a plan that was found, that is the best one."""
    through, answers, n_ended = remaining._Going.through, list[Any](), 0

    def noted(going: Any, orders: Any, goal: float, share: float, goes_on: bool) -> Any:
        answers.append((*through(going, orders, goal, share, goes_on), goes_on))
        return answers[-1][:2]

    way = Way((0, 4, 8, 12, 16), ("except_last",) * 4, (0, 1, 2, 3))
    for seed in range(12):
        question = posed(skipping(seed), 4, schedule="1f1b", objective="peak_memory")
        answers.clear()
        with (
            patch.object(remaining, "_SHARES", (0.001, *(1 / 2,) * 5, 1)),
            patch.object(remaining._Going, "through", noted),
        ):
            plan = proven(RowPeaks(question), plan_of_way(question, way), NO_DEADLINE)
        assert plan.status == "optimal"
        ends = [better is not None and is_done for better, is_done, _ in answers]
        assert not any(ends[:-1])
        n_ended += ends[-1] and not answers[-1][2]
    assert n_ended


def test_without_time_or_a_gap_or_an_objective_nothing_is_looked_at() -> None:
    """The plan that was given is returned."""
    question = posed(skipping(0), 4, schedule="1f1b", objective="peak_memory")
    start = plan_of_way(question, Way((0, 4, 8, 12, 16), ("except_last",) * 4, (0, 1, 2, 3)))
    assert start.gap
    assert proven(RowPeaks(question), start, Deadline(0.0)) == start
    known = start.with_bound(start.value)
    assert proven(RowPeaks(question), known, NO_DEADLINE) is known
    own = posed(skipping(0), 4, cost=lambda first, end, partition: end - first, memory_limit=10**6)
    start = plan_of_way(own, Way((0, 4, 8, 12, 16), ("except_last",) * 4, (0, 1, 2, 3)))
    assert proven(RowPeaks(own), start, NO_DEADLINE) is start


def test_the_runs_that_are_left_lead_on_to_the_last_layer() -> None:
    """Runs of three layers or more are too long for the goal, so there are no short others."""
    profile = gb.Profile.from_costs([1.0] * 6, chunks=4)
    asked: Any = {"objective": "bottleneck", "memory_limit": 10**6, "checkpoint": "never"}
    question = posed(profile, 3, **asked)
    left = LeftRuns(question, (0, 1, 2), question.problem.bottleneck((0, 2, 4, 6)) + 0.5)
    assert [left.ends[j]["never"][2 * j] for j in range(3)] == [1 << 2, 1 << 4, 1 << 6]
    assert left.ends[0]["never"][1:] == [0] * 5
    assert left.after((0,)) == (2, 4, 6) and left.after((0, 2)) == (4, 6)
