"""The best split under schedules without a closed form, against all splits simulated."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from itertools import combinations, pairwise, permutations
from typing import Any

import pytest
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st

import gpipebal as gb
from gpipebal.errors import BalanceError, UnsupportedPlanError
from gpipebal.planner.schedules import search as schedules
from gpipebal.planner.schedules.costs import ScheduleCosts
from gpipebal.planner.schedules.search import bound_of, search_schedule
from gpipebal.problem import Device, Links, Problem, Rules, layer_memory
from gpipebal.schedule import (
    ALL_SCHEDULES,
    CHECKPOINT_MODES,
    KNOWN_SCHEDULES,
    CheckpointMode,
    Order,
    order_of,
)
from gpipebal.simulator import Durations, place, weight_shares
from gpipebal.solvers import deadline

Bounds = tuple[int, ...]


@cache
def _order_of(name: str, n_devices: int, chunks: int, checkpoint: Any, each: int) -> Order:
    """Make the order once for all splits that are simulated on it."""
    return order_of(name, n_devices, chunks, checkpoint, partitions_per_device=each)


def makespan_of(problem: Problem, name: str, bounds: Bounds, each: int = 1) -> float:
    """Simulate one split, with the sums of its layers."""
    runs = list(pairwise(bounds))
    devices = problem.devices or [Device()] * len(runs)

    def times(column: Any) -> tuple[float, ...]:
        sums = [math.fsum(column[a:b]) for a, b in runs]
        return tuple(
            float(one * device.slowness) for one, device in zip(sums, devices, strict=True)
        )

    links: dict[str, Any] = {}
    if problem.links is not None:
        send, back = problem.links.forward, problem.links.backward
        cuts = bounds[1:-1]
        links["forward_transfer"] = (0.0, *(float(send[cut - 1]) for cut in cuts))
        links["backward_transfer"] = (*(float(back[cut - 1]) for cut in cuts), 0.0)
    durations = Durations(
        times(problem.forward), times(problem.recompute), times(problem.backward), **links
    )
    order = _order_of(name, len(runs) // each, problem.chunks, problem.checkpoint, each)
    overlap = problem.links is None or problem.links.overlaps
    return place(order, durations, overlap=overlap).makespan


def all_makespans(problem: Problem, name: str, each: int = 1) -> dict[Bounds, float]:
    """Simulate all splits."""
    n, k = problem.n_layers, problem.n_partitions
    splits = [(0, *cuts, n) for cuts in combinations(range(1, n), k - 1)]
    return {bounds: makespan_of(problem, name, bounds, each) for bounds in splits}


@st.composite
def questions(draw: st.DrawFn) -> tuple[Problem, str, int]:
    """Draw a problem, a schedule, and partitions per device."""
    name = draw(st.sampled_from(ALL_SCHEDULES))
    each = KNOWN_SCHEDULES[name].partitions_per_device
    n_devices = draw(st.integers(1, 3))
    n_layers = draw(st.integers(each * n_devices, 8))
    times = draw(
        st.sampled_from(
            [
                st.integers(0, 3),
                st.integers(0, 30),
                st.sampled_from([0, 1, 40]),
                st.floats(0, 1, allow_subnormal=False),
                st.sampled_from([1e-9, 1.0]),
            ]
        )
    )
    columns = [draw(st.lists(times, min_size=n_layers, max_size=n_layers)) for _ in range(3)]
    chunks = n_devices * draw(st.integers(1, 4))
    mode: Any = draw(st.sampled_from(CHECKPOINT_MODES))
    return Problem(*columns, each * n_devices, chunks, mode), name, each


@settings(max_examples=examples(150), deadline=None)
@given(questions())
def test_search_equals_brute_force(question: tuple[Problem, str, int]) -> None:
    """On chains with few splits the search is exact, and says so."""
    problem, name, each = question
    makespans = all_makespans(problem, name, each)
    found = search_schedule(problem, name)
    assert found is not None
    assert found.value == pytest.approx(makespans[found.bounds], rel=1e-12)
    assert found.value <= min(makespans.values()) * (1 + 1e-12)
    assert (found.status, found.gap) == ("optimal", 0.0)
    assert found.method in ("schedule search", "schedule enumeration")


@settings(max_examples=examples(150), deadline=None)
@given(questions())
def test_bounds_hold_for_every_split(question: tuple[Problem, str, int]) -> None:
    """No split is faster than its own bound, and the common bound is below all of these."""
    problem, name, each = question
    n = problem.n_partitions
    order = order_of(
        name,
        n // each,
        problem.chunks,
        problem.checkpoint,
        partitions_per_device=each,  # type: ignore[arg-type]
    )
    costs = ScheduleCosts(problem, order, tuple(range(n)))
    relaxed = costs.relaxed
    makespans = all_makespans(problem, name, each)
    limits = {bounds: relaxed.limit_of(bounds) for bounds in makespans}
    for bounds, makespan in makespans.items():
        assert costs.to_time(limits[bounds]) <= makespan * (1 + 1e-12)
    least, at_least = relaxed.smallest()
    assert relaxed.shared() <= least <= max(relaxed.shared(), min(limits.values()))
    assert costs.to_time(least) <= min(makespans.values()) * (1 + 1e-12)
    assert at_least in makespans
    for limit in (least, min(limits.values()), sorted(limits.values())[len(limits) // 2]):
        within = sorted(bounds for bounds, own in limits.items() if own <= limit)
        assert relaxed.splits_within(limit, 10**6) == within
        assert not within or relaxed.splits_within(limit, len(within) - 1) is None


def test_gradients_of_weights_fill_the_way_back() -> None:
    """What a device makes after its last input gradient takes no time beside the way back.

    By hand: 1 s forward, 20 s for each backward, whose half in layer 1 are weights. Of the last
    one, layer 0 makes its 20 s meanwhile: 1 + 10 + 20 + 20 s.
    """
    problem = Problem([1, 0], [20, 20], [0, 0], 2, 2, "never")
    costs = ScheduleCosts(problem, order_of("zb_h1", 2, 2), (0, 1), [0.0, 0.5])
    assert costs.makespans([(0, 1, 2)]) == [51.0]
    assert costs.to_time(costs.relaxed.shared()) <= 51.0
    assert bound_of(problem, "zb_h1", weight_share=[0.0, 0.5]) <= 51.0


def test_time_that_is_up_proves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whenever time is up, all that remains is called tried only if it was."""
    problem = Problem([5, 1, 1, 7, 2, 6], [1, 9, 2, 2, 8, 1], [0] * 6, 3, 4, "never")
    simulated: list[Bounds] = []
    asked: list[float] = []
    makespans = ScheduleCosts.makespans

    def watch(self: ScheduleCosts, splits: Sequence[Bounds]) -> list[float]:
        simulated.extend(splits)
        return makespans(self, splits)

    monkeypatch.setattr(ScheduleCosts, "makespans", watch)
    assert search_schedule(problem, "1f1b").method == "schedule enumeration"
    needed = set(simulated)
    methods = set()
    for n_in_time in range(40):
        simulated.clear()
        asked.clear()

        def clock(n_in_time: int = n_in_time) -> float:
            asked.append(0.0)
            return 0.0 if len(asked) <= n_in_time else 100.0

        monkeypatch.setattr(deadline.time, "monotonic", clock)
        found = search_schedule(problem, "1f1b", time_limit=1.0)
        assert found is not None
        methods.add(found.method)
        assert found.method == "schedule search" or set(simulated) == needed
    assert methods == {"schedule search", "schedule enumeration"}


@settings(max_examples=examples(80), deadline=None)
@given(questions())
def test_search_alone_keeps_what_it_says(question: tuple[Problem, str, int]) -> None:
    """With one trial it is the start and a bound that holds; with more it is never worse."""
    problem, name, each = question
    least = min(all_makespans(problem, name, each).values())
    few = search_schedule(problem, name, most_trials=1)
    assert few is not None
    more = search_schedule(problem, name, most_trials=5)
    assert more is not None
    assert few.lower_bound <= least * (1 + 1e-12) and more.lower_bound <= least * (1 + 1e-12)
    assert few.value >= more.value >= more.lower_bound
    assert (few.status == "optimal") == (few.value == few.lower_bound)


@settings(max_examples=examples(60), deadline=None)
@given(st.data(), st.sampled_from(["1f1b", "zb_h1"]))
def test_devices_links_and_rules_are_kept(data: st.DataObject, name: str) -> None:
    """With unequal devices, links, memory limits and rules it is the best of what is allowed."""
    n_layers, n = data.draw(st.integers(3, 7)), 3
    times = st.lists(st.integers(0, 9), min_size=n_layers, max_size=n_layers)
    forward, backward, weights = (data.draw(times) for _ in range(3))
    cuts = st.lists(st.integers(0, 4), min_size=n_layers - 1, max_size=n_layers - 1)
    slowness = st.sampled_from([1, 2, 0.5])
    limit = data.draw(st.sampled_from([None, sum(weights) // 2 + 1]))
    problem = Problem(
        forward,
        backward,
        forward,
        n,
        chunks=3 * data.draw(st.integers(1, 3)),
        checkpoint="never",
        devices=[Device(data.draw(slowness), memory_limit=limit) for _ in range(n)],
        links=Links(data.draw(cuts), data.draw(cuts), data.draw(st.booleans())),
        memory=layer_memory(weights, [0] * n_layers, [0] * n_layers, chunks=1),
        rules=Rules(no_cut=data.draw(st.sets(st.integers(1, n_layers - 1), max_size=1))),
    )
    assert problem.rules is not None
    allowed = {
        bounds: makespan
        for bounds, makespan in all_makespans(problem, name).items()
        if not problem.rules.uncut.intersection(bounds[1:-1])
        and all(limit is None or sum(weights[a:b]) <= limit for a, b in pairwise(bounds))
    }
    if not allowed:
        assert search_schedule(problem, name) is None
        return
    found = search_schedule(problem, name)
    assert found is not None
    assert found.value == pytest.approx(allowed[found.bounds], rel=1e-12)
    assert found.value <= min(allowed.values()) * (1 + 1e-12)
    assert found.status == "optimal"


def test_the_place_of_the_slowest_partition_counts() -> None:
    """By hand: of two splits with the same bottleneck the one with it in front is faster.

    The last partition works all the time but for the first forward and the last backward of the
    one before it: of 2 s each if that is the fast one, after 8 times 6 s. The other way round
    partition 0 works 48 s, and waits 1 s for each of the first backward's two neighbours.
    """
    problem = Problem([2, 1, 2], [2, 1, 2], [0] * 3, 2, 8, "never")
    assert all_makespans(problem, "1f1b") == {(0, 1, 3): 52.0, (0, 2, 3): 50.0}
    assert problem.bottleneck((0, 1, 3)) == problem.bottleneck((0, 2, 3))
    found = search_schedule(problem, "1f1b")
    assert found is not None
    assert found.bounds == (0, 2, 3)


def test_the_same_question_has_the_same_answer() -> None:
    """A search that is not exhaustive is deterministic, and finds what no single move improves."""
    profile = gb.Profile.from_costs([1.0 + (7 * k % 11) for k in range(60)], chunks=24)
    times = [layer.forward_time for layer in profile.layers]
    problem = Problem(times, [2 * t for t in times], times, 6, 24, "never")
    first = search_schedule(problem, "interleaved_1f1b", most_trials=400)
    assert first is not None
    assert first == search_schedule(problem, "interleaved_1f1b", most_trials=400)
    assert first.status == "feasible" and 0 < first.gap < 0.2
    start = gb.solvers.split(problem, "bottleneck")
    assert first.value <= makespan_of(problem, "interleaved_1f1b", start.bounds, 2)


def test_time_limit_ends_the_search() -> None:
    """Without any time the best of the first trials comes back, with a bound."""
    times = [1.0 + (7 * k % 11) for k in range(60)]
    problem = Problem(times, times, times, 8, 16, "never")
    found = search_schedule(problem, "interleaved_1f1b", time_limit=0.0)
    assert found is not None
    assert found.status == "feasible"
    assert found.lower_bound <= search_schedule(problem, "interleaved_1f1b").value <= found.value


def test_open_orders_are_those_of_the_start() -> None:
    """Devices in any order come from the least bottleneck; the bound holds for all orders."""
    devices = [Device(2), Device(1), Device(1)]
    problem = Problem([1, 2, 3, 1], [2, 4, 6, 2], [0] * 4, 3, 6, "never", devices, any_order=True)
    found = search_schedule(problem, "1f1b")
    assert found is not None
    orders = [(0, 1, 2), (1, 0, 2), (1, 2, 0)]
    least = min(
        min(
            all_makespans(
                Problem(
                    [1, 2, 3, 1], [2, 4, 6, 2], [0] * 4, 3, 6, "never", [devices[d] for d in order]
                ),
                "1f1b",
            ).values()
        )
        for order in orders
    )
    assert found.lower_bound <= least
    assert sorted(found.order) == [0, 1, 2]


def test_weight_shares_go_by_parameters() -> None:
    """Layers without parameters have no gradient of weights; given costs alone have half."""
    assert weight_shares(gb.Profile.from_costs([1.0, 2.0])) == [0.5, 0.5]
    problem = Problem([1] * 4, [2] * 4, [0] * 4, 2, 4, "never")
    none = search_schedule(problem, "zb_h1", weight_share=[0.0] * 4)
    assert none is not None
    half = search_schedule(problem, "zb_h1")
    assert half is not None
    assert half.value < none.value


def test_impossible_requests() -> None:
    """An unknown schedule, and partitions that cannot be dealt out, are refused with a fix."""
    problem = Problem([1] * 4, [2] * 4, [0] * 4, 3, 4, "never")
    with pytest.raises(UnsupportedPlanError, match=r"schedule='zigzag'.*\n?.*Fix: "):
        search_schedule(problem, "zigzag")
    with pytest.raises(BalanceError, match=r"3 partitions, 2 on each device") as error:
        search_schedule(problem, "interleaved_1f1b")
    assert str(error.value).endswith("Fix: 4 partitions, or schedule='1f1b'.")


def test_limits_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """With fewer trials than splits that remain, nothing is claimed to be proven."""
    times = [(7 * k) % 11 + 1 for k in range(24)]
    problem = Problem(times, times, times, 6, 12, "never")
    counted, placed = list[int](), ScheduleCosts.makespans

    def counting(self: ScheduleCosts, splits: Any, *more: Any) -> Any:
        counted.append(len(splits))
        return placed(self, splits, *more)

    monkeypatch.setattr(ScheduleCosts, "makespans", counting)
    for limit in (200, 2000):
        monkeypatch.setattr(schedules, "MOST_TRIALS", limit)
        counted.clear()
        found = search_schedule(problem, "interleaved_1f1b")
        assert found is not None
        assert found.status == "feasible" and found.method == "schedule search"
        assert limit / 2 <= sum(counted) <= limit


@settings(max_examples=60, deadline=None)
@given(st.data(), st.sampled_from(["1f1b", "zb_h1"]), st.sampled_from(CHECKPOINT_MODES))
def test_an_open_order_of_devices_is_no_slower_than_any_that_is_given(
    data: st.DataObject, name: str, mode: CheckpointMode
) -> None:
    """All orders are searched where they are few; the bound is one on all of them."""
    n = data.draw(st.integers(2, 3))
    times = data.draw(st.lists(st.integers(1, 6), min_size=n, max_size=6))
    devices = data.draw(st.lists(st.sampled_from([0.5, 1.0, 2.0, 3.0]), min_size=n, max_size=n))
    profile = gb.Profile.from_costs(times, chunks=3)
    plan = gb.solve(profile, n, schedule=name, checkpoint=mode, devices=devices, any_order=True)
    given_orders = [
        gb.solve(profile, n, schedule=name, checkpoint=mode, devices=[devices[k] for k in order])
        for order in permutations(range(n))
    ]
    least = min(one.value for one in given_orders)
    assert plan.value == pytest.approx(least, rel=1e-12)
    assert plan.lower_bound <= least * (1 + 1e-12)
    if name == "1f1b":  # others only torch runs
        again = [devices[k] for k in plan.devices]
        fixed = gb.evaluate(profile, plan.balance, schedule=name, checkpoint=mode, devices=again)
        assert fixed.makespan == plan.makespan


def test_an_open_order_of_many_devices_is_no_slower_than_the_one_that_is_given() -> None:
    """Where orders are many, the one that was given is searched too."""
    profile = gb.Profile.from_costs([2.0, 1.0, 3.0, 1.0, 2.0, 4.0, 1.0], chunks=4)
    devices = [1.0, 1.1, 1.2, 1.3, 1.4]
    given = gb.solve(profile, 5, schedule="1f1b", devices=devices)
    free = gb.solve(profile, 5, schedule="1f1b", devices=devices, any_order=True)
    assert free.value <= given.value and free.lower_bound <= given.lower_bound
    assert sorted(free.devices) == [0, 1, 2, 3, 4]
