"""What `solve` proves, `evaluate` says of every balance, and `simulate` of the plan itself."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate, pairwise, permutations, product
from typing import Any

import pytest
from examples import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from oracles import all_bounds
from plan_oracle import MODES, profiles

import gpipebal as gb
from gpipebal.errors import BalanceError, InfeasibleError, ProfileError
from gpipebal.planner import compare_rules, equal_split, evaluate, select_method, solve, top_plans
from gpipebal.problem import Device, Link, Rules
from gpipebal.profile import LayerProfile
from gpipebal.schedule import (
    ALL_SCHEDULES,
    KNOWN_SCHEDULES,
    counted_modes,
    order_of,
    recomputes_of,
    shares_devices,
)

SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large]
#: What `evaluate` is asked too.
OF_BALANCE = ("chunks", "schedule", "loss_inside", "shared_memory", "gradients_exist", "link")

OBJECTIVES = ("makespan", "bottleneck", "peak_memory")


@st.composite
def questions(draw: st.DrawFn) -> tuple[gb.Profile, int, dict[str, Any]]:
    """Draw a chain, a number of partitions, and options of `solve` in any combination."""
    profile = draw(profiles(largest=4, shortest=1))
    n = draw(st.integers(1, min(3, profile.n_layers)))
    schedule = draw(st.sampled_from(["gpipe", "gpipe", "1f1b"]))
    options: dict[str, Any] = {
        "chunks": draw(st.integers(1, 4)),
        "schedule": schedule,
        "checkpoint": draw(
            st.sampled_from(["auto", *MODES]) | st.tuples(*[st.sampled_from(MODES)] * n)
        ),
        "objective": draw(st.sampled_from(OBJECTIVES)),
        "loss_inside": draw(st.none() | st.just(True)),
        "shared_memory": draw(st.booleans()),
        "gradients_exist": draw(st.booleans()),
    }
    if draw(st.booleans()):
        options["link"] = Link(
            draw(st.sampled_from([4.0, 64.0, float("inf")])),
            draw(st.sampled_from([0.0, 0.5, 8.0])),
            draw(st.booleans()),
        )
    if draw(st.booleans()):
        speed = st.sampled_from([1, 2, 0.5, 4])
        options["devices"] = draw(st.lists(speed, min_size=n, max_size=n))
        options["any_order"] = draw(st.booleans())
    return profile, n, options


def all_plans(profile: gb.Profile, n: int, options: dict[str, Any]) -> Iterator[gb.Plan]:
    """Evaluate every balance, with every mode and order of devices that is left open."""
    modes = [options["checkpoint"]]
    if modes == ["auto"]:
        modes = list(product(MODES, repeat=n))
    orders = list(permutations(range(n))) if options.get("any_order") else [tuple(range(n))]
    for bounds in all_bounds(profile.n_layers, n):
        for order in orders:
            for mode in modes:
                yield evaluated(profile, bounds, mode, order, options)


def evaluated(
    profile: gb.Profile, bounds: Any, checkpoint: Any, order: Any, options: dict[str, Any]
) -> gb.Plan:
    """Evaluate a balance with the options that `evaluate` has too."""
    known: dict[str, Any] = {name: options[name] for name in OF_BALANCE if name in options}
    if "devices" in options:
        known["devices"] = [options["devices"][k] for k in order]
    if "memory_limit" in options:
        known["memory_limit"] = options["memory_limit"]
    balance = [end - start for start, end in pairwise(bounds)]
    return evaluate(profile, balance, checkpoint=checkpoint, **known)


def value_of(plan: gb.Plan, objective: str) -> float:
    """Return a plan's value of an objective."""
    peak = max(part.memory.total for part in plan.partitions)
    return {"makespan": plan.makespan, "bottleneck": plan.bottleneck, "peak_memory": peak}[
        objective
    ]


def fits(plan: gb.Plan, limit: int | None) -> bool:
    """Whether every partition keeps a limit."""
    return limit is None or value_of(plan, "peak_memory") <= limit


def limit_of(plans: list[gb.Plan], tightness: float) -> int:
    """Return the peak of one of the plans: of those that need most, or, if tight, of the least."""
    peaks = sorted({value_of(plan, "peak_memory") for plan in plans})
    return int(peaks[int((len(peaks) - 1) * (1 - tightness))])


@settings(max_examples=examples(25), deadline=None, suppress_health_check=SLOW)
@given(questions(), st.floats(0, 1))
def test_no_balance_that_evaluate_knows_is_better(
    question: tuple[gb.Profile, int, dict[str, Any]], tightness: float
) -> None:
    """Proofs hold against every balance, mode and order, with limits too; a plan is what it says.

    Whatever is chosen, `evaluate` and `simulate` say the same of it, and of the equal split.
    """
    profile, n, options = question
    objective = options["objective"]
    everything = list(all_plans(profile, n, options))
    limit = limit_of(everything, tightness) if tightness > 0.3 else None
    options |= {} if limit is None else {"memory_limit": limit}
    values = [value_of(one, objective) for one in everything if fits(one, limit)]
    try:
        plan = solve(profile, n, **options)
    except InfeasibleError as error:
        # Of these few plans all are looked at, each in its own timeline.
        assert not values and "those that were tried" not in str(error)
        return
    least = min(values)
    assert fits(plan, limit)
    assert plan.lower_bound <= least * (1 + 1e-12)
    assert plan.value >= least * (1 - 1e-12)
    if plan.status == "optimal":
        assert plan.value == pytest.approx(least, rel=1e-12)
    bounds = (0, *[sum(plan.balance[: j + 1]) for j in range(n)])
    same = evaluated(profile, bounds, plan.modes, plan.devices, options)
    assert (plan.step_time is None) == (same.step_time is None)
    for name in ("makespan", "bottleneck", "imbalance", "bubble_fraction"):
        assert getattr(plan, name) == pytest.approx(getattr(same, name), rel=1e-12), name
    assert [part.memory for part in plan.partitions] == [part.memory for part in same.partitions]
    assert plan.value == pytest.approx(value_of(same, objective), rel=1e-12)
    assert gb.simulate(plan).makespan == pytest.approx(plan.makespan, rel=1e-12)
    equal = evaluated(profile, equal_split(profile.n_layers, n), plan.modes, plan.devices, options)
    assert plan.equal_split_value == pytest.approx(value_of(equal, objective), rel=1e-12)


@settings(max_examples=examples(30), deadline=None, suppress_health_check=SLOW)
@given(questions(), st.floats(0, 1))
def test_sensitivity_is_what_evaluate_says_of_moved_cuts(
    question: tuple[gb.Profile, int, dict[str, Any]], tightness: float
) -> None:
    """Each entry is the value with that cut moved, less the plan's; None where it breaks a limit.

    What may wait for busy neighbours counts, and schedules without a formula are simulated.
    """
    profile, n, options = question
    plan = solve(profile, n, **options)
    if tightness > 0.3:
        options["memory_limit"] = limit_of(list(all_plans(profile, n, options)), tightness)
        try:
            plan = solve(profile, n, **options)
        except InfeasibleError:
            return
    assert len(plan.sensitivity) == n - 1
    for j, pair in enumerate(plan.sensitivity):
        for more, step in zip(pair, (-1, 1), strict=True):
            balance = plan.balance
            balance[j] += step
            balance[j + 1] -= step
            if not all(balance):
                assert more is None
                continue
            bounds = (0, *accumulate(balance))
            moved = evaluated(profile, bounds, plan.modes, plan.devices, options)
            assert (more is not None) == fits(moved, options.get("memory_limit"))
            if more is not None:
                growth = value_of(moved, options["objective"]) - plan.value
                assert more == pytest.approx(growth, rel=1e-9, abs=1e-9 * plan.value)


@pytest.mark.parametrize("schedule", ALL_SCHEDULES)
def test_sensitivity_is_known_under_every_schedule(schedule: str) -> None:
    """Each move is simulated where there is no formula, and then explained."""
    costs = [float(1 + (7 * k * k) % 5) for k in range(9)]
    profile = gb.Profile.from_costs(costs, output_bytes=[2] * 9, chunks=6)
    options: dict[str, Any] = {"schedule": schedule, "checkpoint": "always", "link": Link(1.0)}
    plan = solve(profile, 4, devices=[1, 2, 1, 2], **options)
    for j, pair in enumerate(plan.sensitivity):
        for more, step in zip(pair, (-1, 1), strict=True):
            balance = plan.balance
            balance[j] += step
            balance[j + 1] -= step
            if all(balance):
                pin = {k: sum(k >= end for end in accumulate(balance)) for k in range(9)}
                moved = solve(profile, 4, devices=[1, 2, 1, 2], pin=pin, **options)
                assert more == pytest.approx(moved.makespan - plan.value, abs=1e-9 * plan.value)
                assert more is not None and (more >= 0 or plan.status == "feasible")
    assert "the least decisive" in plan.explain()


@settings(max_examples=examples(40), deadline=None, suppress_health_check=SLOW)
@given(questions(), st.floats(0, 1), st.integers(1, 5))
def test_top_plans_are_the_best_of_all_balances(
    question: tuple[gb.Profile, int, dict[str, Any]], tightness: float, k: int
) -> None:
    """Whatever is asked for: each balance once, in its best mode and order; and a bound for all."""
    profile, n, options = question
    everything = list(all_plans(profile, n, options))
    limit = limit_of(everything, tightness) if tightness > 0.3 else None
    options |= {} if limit is None else {"memory_limit": limit}
    best: dict[tuple[int, ...], float] = {}
    for plan in everything:
        if fits(plan, limit):
            balance, value = tuple(plan.balance), value_of(plan, options["objective"])
            best[balance] = min(value, best.get(balance, value))
    try:
        plans = top_plans(profile, k, n, **options)
    except InfeasibleError:
        assert not best
        return
    assert len({tuple(plan.balance) for plan in plans}) == len(plans)
    assert all(fits(plan, limit) for plan in plans)
    values = [plan.value for plan in plans]
    assert values == sorted(values)
    assert all(plan.value >= best[tuple(plan.balance)] * (1 - 1e-12) for plan in plans)
    if len(everything) <= 100:
        assert values == pytest.approx(sorted(best.values())[:k], rel=1e-12)
    assert values[0] <= solve(profile, n, **options).value
    assert len({plan.lower_bound for plan in plans}) == 1
    assert plans[0].lower_bound <= min(best.values()) * (1 + 1e-12)


def linear(names: str, times: list[float], weights: list[int]) -> gb.Profile:
    """Make a profile of layers of a real kind, with parameters or without."""
    layers = tuple(
        LayerProfile(
            name, "Linear", time, 2 * time, time, parameter_bytes=n_bytes, gradient_bytes=n_bytes
        )
        for name, time, n_bytes in zip(names, times, weights, strict=True)
    )
    return gb.Profile(layers, (), (), rows=1, chunks=4)


def test_parts_of_backwards_are_the_same_everywhere() -> None:
    """A layer without parameters has no gradient of weights: in value, makespan and simulation."""
    profile = linear("abcd", [3.0, 1.0, 2.0, 4.0], [0, 8, 0, 8])
    plan = solve(profile, 2, schedule="zb_h1", checkpoint="never")
    assert plan.value == plan.makespan == gb.simulate(plan).makespan
    # Half the backward of the second layer, and of the last.
    weights = [1.0, 4.0]
    plan = solve(profile, 2, schedule="zb_h1", checkpoint="never", pin={1: 0, 2: 1})
    assert [part.weight_time for part in plan.partitions] == weights
    # In one piece, these backwards let others wait for longer.
    halves = [part.backward_time / 2 for part in plan.partitions]
    assert halves != weights


def test_bottlenecks_under_1f1b_have_no_recompute_that_is_left_out() -> None:
    """The last partition turns back at once: by hand, its load is 2 per layer, not 3."""
    profile = gb.Profile.from_costs([1.0] * 5, [1.0] * 5, recompute=[1.0] * 5, chunks=4)
    plan = solve(profile, 2, schedule="1f1b", objective="bottleneck", checkpoint="always")
    assert (plan.balance, plan.value, plan.checkpoint) == ([2, 3], 6.0, "always")
    assert plan.bottleneck == 6.0 == max(plan.micro_batch_time(j) for j in range(2))
    assert plan.sensitivity == ((2.0, 3.0),)


@given(
    st.sampled_from(ALL_SCHEDULES),
    st.integers(1, 4),
    st.integers(1, 6),
    st.lists(st.sampled_from(MODES), min_size=8, max_size=8),
)
def test_recomputes_are_counted_as_the_order_has_them(
    name: str, n_devices: int, chunks: int, modes: list[Any]
) -> None:
    """For every schedule, as many as there are R in the row of each partition."""
    each = KNOWN_SCHEDULES[name].partitions_per_device
    own = modes[: each * n_devices]
    try:
        schedule = order_of(name, n_devices, chunks, own, partitions_per_device=each).schedule()
    except BalanceError:
        return
    actions = [action for row in schedule.rows for action in row]
    counts = [
        sum(action.kind == "R" and action.partition == j for action in actions)
        for j in range(len(own))
    ]
    found = recomputes_of(name, n_devices, chunks, own, partitions_per_device=each)
    assert list(found) == counts
    assert [mode != "never" for mode in counted_modes(own, found)] == list(map(bool, counts))


def test_a_choice_of_numbers_under_1f1b_is_bounded_by_1f1b() -> None:
    """GPipe's makespan is not a bound there: forward and backward maxima need not come together.

    By hand, with two layers of (10, 1) and (1, 10): 1F1B takes 11 for each micro-batch.
    """
    small = gb.Profile.from_costs([2.5, 0.25], [0.25, 2.5], rows=1, chunks=4)
    both = gb.Profile.from_costs([10.0, 1.0], [1.0, 10.0], rows=4, chunks=1)
    sized = replace(both, mini_batch_rows=4, other_sizes=(replace(small, mini_batch_rows=4),))
    options: dict[str, Any] = {"schedule": "1f1b", "checkpoint": "never"}
    plan = solve(sized, 2, chunks=[1, 2, 4], **options)
    each = {chunks: solve(sized, 2, chunks=chunks, **options).value for chunks in (1, 2, 4)}
    assert plan.value == min(each.values())


def test_numbers_that_a_schedule_cannot_have_are_left_out() -> None:
    """ZB-H1 on two devices cannot have five micro-batches; 'auto' chooses among the others."""
    big = gb.Profile.from_costs([5.0] * 4, rows=5, chunks=1)
    one = gb.Profile.from_costs([1.0] * 4, rows=1, chunks=5)
    sized = replace(big, mini_batch_rows=5, other_sizes=(replace(one, mini_batch_rows=5),))
    plan = solve(sized, 2, chunks="auto", schedule="zb_h1", checkpoint="never")
    assert plan.chunks == 3
    with pytest.raises(BalanceError, match="do not part into 2 equal groups"):
        solve(sized, 2, chunks=[3, 5], schedule="zb_h1", checkpoint="never")


def test_a_quantile_counts_for_the_profiles_of_devices() -> None:
    """By hand: a device's own profile moves as the chain's does."""
    plain = gb.Profile.from_costs([1.0] * 4, [1.0] * 4)
    shaky = replace(
        plain, layers=tuple(replace(layer, forward_spread=0.2) for layer in plain.layers)
    )
    plan = solve(plain, 2, devices=[shaky, shaky], quantile=0.75, checkpoint="never")
    assert [part.forward_time for part in plan.partitions] == pytest.approx([2.2, 2.2])


def test_profiles_of_devices_are_of_as_many_rows() -> None:
    """Another size of micro-batch is refused, or taken from the sizes that a profile knows."""
    large = gb.Profile.from_costs([4.0, 4.0], rows=4, chunks=2)
    small = gb.Profile.from_costs([1.0, 1.0], rows=1, chunks=8)
    with pytest.raises(BalanceError, match=r"devices\[1\].rows=1 \(expected 4") as raised:
        solve(large, 2, devices=[1, small])
    assert "\nFix: profile the model with micro-batches of 4 rows" in str(raised.value)
    other = replace(large, layers=tuple(replace(one, forward_time=2.0) for one in large.layers))
    both = replace(small, mini_batch_rows=8, other_sizes=(replace(other, mini_batch_rows=8),))
    plan = solve(large, 2, devices=[1, both])
    assert [part.forward_time for part in plan.partitions] == [4.0, 2.0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"devices": [1, 1e-320]}, r"device is not usable: devices\[1\]=1e-320"),
        ({"devices": [1, Device(slowness=1e308)]}, "times are too large to be added"),
        ({"link": Link(1.0, 1e308)}, "times are too large to be added"),
        ({"cost": lambda *_: 10**400}, "cost of a run is not a number"),
        ({"cost": lambda *_: "dear"}, "cost of a run is not a number"),
        ({"rules": Rules(max_layers="three")}, "max_layers is not a whole number"),
        ({"rules": {"no_cut": [1]}}, "rules"),
        ({"reserve": 5}, "reserve is taken off a limit, and there is none: reserve=5"),
        ({"time_limit": -1}, "time_limit is not a time: time_limit=-1"),
        ({"time_limit": float("nan")}, "time_limit is not a time"),
        ({"time_limit": "soon"}, "time_limit is not a time"),
        (
            {"method": "bisection", "schedule": "1f1b"},
            "method does not apply where schedule='1f1b'",
        ),
        ({"method": "bisection", "cost": lambda *_: 1}, "method does not apply where cost"),
    ],
)
def test_what_has_no_effect_or_no_limit_is_refused(options: Any, message: str) -> None:
    """What would be ignored, or cannot be added up, is named, with a fix."""
    profile = gb.Profile.from_costs([10.0, 1.0], output_bytes=[10, 10])
    with pytest.raises(gb.GpipebalError, match=message) as raised:
        solve(profile, 2, **options)
    assert "\nFix: " in str(raised.value)


def test_the_next_best_plans_have_their_own_methods() -> None:
    """A method is that of one search, and the searches differ; the advice works."""
    profile = gb.Profile.from_costs([1.0, 2.0, 3.0])
    with pytest.raises(BalanceError, match="does not apply to the next best plans") as raised:
        top_plans(profile, 2, 2, method="set sweep")
    advice = str(raised.value).split("\nFix: ")[1].rstrip(".")
    assert len(top_plans(profile, 2, 2, **eval(f"dict({advice})"))) == 2


def test_the_named_method_of_a_search_is_taken() -> None:
    """What `select_method` tells may be asked for by its name."""
    profile = gb.Profile.from_costs([1.0, 2.0, 3.0], chunks=4)
    for options in ({"schedule": "1f1b"}, {"cost": lambda start, end, j: end - start}):
        name = select_method(profile, 2, **options)  # type: ignore[arg-type]
        assert solve(profile, 2, method=name, **options).status == "optimal"  # type: ignore[arg-type]


@pytest.mark.parametrize("schedule", ALL_SCHEDULES)
def test_rules_of_thumb_keep_schedule_devices_and_link(schedule: str) -> None:
    """Under every schedule, the plan's own row costs what the plan does."""
    profile = gb.Profile.from_costs([1.0, 2.0, 3.0, 4.0], output_bytes=[10] * 4, chunks=4)
    devices = [2, 2] if shares_devices(schedule) else [1, 2]
    around: dict[str, Any] = {"devices": devices, "link": Link(bandwidth=10.0, overlaps=False)}
    plan = solve(profile, 2, checkpoint="never", schedule=schedule, **around)
    table = compare_rules(profile, plan, **around)
    assert table.row("equal layers").makespan == pytest.approx(plan.equal_split_value)
    with pytest.raises(ProfileError, match="plan has other costs than the profile"):
        compare_rules(profile, plan)


def test_devices_of_too_many_kinds_are_refused_for_the_peak() -> None:
    """Any order of thirteen different devices is more than can be searched; the advice works."""
    profile = gb.Profile.from_costs([1.0] * 14, parameter_bytes=[1] * 14)
    devices = [Device(slowness=1 + k / 8, memory_limit=100 + k) for k in range(13)]
    options: dict[str, Any] = {"devices": devices, "objective": "peak_memory"}
    with pytest.raises(BalanceError, match="devices are of too many kinds") as raised:
        solve(profile, 13, any_order=True, **options)
    assert "Fix: any_order=False" in str(raised.value)
    assert solve(profile, 13, any_order=False, **options).status == "optimal"


@pytest.mark.parametrize("options", [{"memory_limit": [8, 9]}, {"checkpoint": ["never", "always"]}])
def test_a_grid_has_one_value_for_all_partitions(options: Any) -> None:
    """One for each partition makes no sense where their number varies; the advice works."""
    profile = gb.Profile.from_costs([1.0] * 4)
    with pytest.raises(BalanceError, match="option is one for all partitions") as raised:
        gb.solve_grid(profile, 2, **options)
    advice = str(raised.value).split("\nFix: ")[1].rstrip(".")
    assert gb.solve_grid(profile, 2, **eval(f"dict({advice})")).best.plan is not None
