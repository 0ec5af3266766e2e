"""Every argument of `solve`, against brute force over all plans."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from oracles import all_bounds
from plan_oracle import MODES, Found, all_plans, profiles

import gpipebal as gb
from gpipebal.errors import BalanceError, InfeasibleError, UnsupportedPlanError
from gpipebal.planner import evaluate, select_method, solve, top_plans
from gpipebal.problem import Device, Link, Rules, links_of, to_balance, to_bounds
from gpipebal.profile import TieProfile
from gpipebal.schedule import ALL_SCHEDULES, SCHEDULES, make_schedule
from gpipebal.simulator import durations_of, place
from gpipebal.units import format_bytes

SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large]
OBJECTIVES = ("makespan", "bottleneck")
checkpoints = st.sampled_from([*MODES, "auto"])


def least(found: list[Found], objective: str) -> Fraction:
    """Return the least value of all plans."""
    if objective == "peak_memory":
        return min(Fraction(max(one.peaks)) for one in found)
    return min(getattr(one, objective) for one in found)


def within(found: list[Found], limits: Any) -> list[Found]:
    """Keep the plans whose partitions fit the devices that run them."""
    return [
        one
        for one in found
        if all(
            limits[device] is None or peak <= limits[device]
            for peak, device in zip(one.peaks, one.order, strict=True)
        )
    ]


def check_truth(plan: gb.Plan, profile: gb.Profile) -> None:
    """Assert that a plan's own times, placed on its schedule, give its makespan."""
    times = [
        [getattr(part, name) for part in plan.partitions]
        for name in ("forward_time", "backward_time", "recompute_time")
    ]
    order = make_schedule("gpipe", plan.n_partitions, plan.chunks, plan.checkpoint)
    from gpipebal.simulator import Durations

    placed = place(
        order,
        Durations(
            forward=tuple(times[0]),
            backward=tuple(times[1]),
            recompute=tuple(times[2]),
            forward_transfer=tuple(part.receive_time for part in plan.partitions),
            backward_transfer=tuple(part.return_time for part in plan.partitions),
        ),
        overlap=plan.overlaps,
    )
    assert placed.makespan == pytest.approx(plan.makespan, rel=1e-12, abs=1e-12)
    assert plan.names == profile.names


@settings(max_examples=120, deadline=None, suppress_health_check=SLOW)
@given(profiles(largest=4), st.data())
def test_limits_and_modes_equal_brute_force(profile: gb.Profile, data: st.DataObject) -> None:
    """With limits and any modes the plan is the best that fits, or its bound is below that."""
    n = data.draw(st.integers(1, min(3, profile.n_layers)))
    chunks, checkpoint = data.draw(st.integers(1, 4)), data.draw(checkpoints)
    objective: Any = data.draw(st.sampled_from(OBJECTIVES))
    inside, shared = data.draw(st.booleans()), data.draw(st.booleans())
    options: Any = {"chunks": chunks, "checkpoint": checkpoint}
    options |= {"loss_inside": inside, "shared_memory": shared}
    everything = list(all_plans(profile, n, **options))
    peaks = sorted({peak for one in everything for peak in one.peaks})
    limits = data.draw(st.lists(st.none() | st.sampled_from(peaks), min_size=n, max_size=n))
    fitting = within(everything, limits)
    try:
        plan = solve(profile, n, objective=objective, memory_limit=limits, **options)
    except InfeasibleError as error:
        assert "\nFix: " in str(error)
        # What fits only with what may wait in it need not be found, if there are many ways.
        assert not fitting or shared or profile.skips
        return
    assert fitting
    best = float(least(fitting, objective))
    assert plan.lower_bound <= best * (1 + 1e-12)
    assert best * (1 + 1e-12) <= plan.value * (1 + 2e-12)
    for part, limit in zip(plan.partitions, limits, strict=True):
        assert part.memory_limit == limit
        assert limit is None or part.memory.total <= limit
    check_truth(plan, profile)
    if plan.status == "optimal":
        assert plan.value == pytest.approx(best, rel=1e-12)
    else:
        assert plan.notes or "always" in plan.modes or plan.method == "integer program"


@settings(max_examples=80, deadline=None, suppress_health_check=SLOW)
@given(profiles(largest=5), st.data())
def test_least_peak_equals_brute_force(profile: gb.Profile, data: st.DataObject) -> None:
    """The smallest peak memory, with what may wait in the plan: few plans are all seen."""
    n = data.draw(st.integers(1, min(3, profile.n_layers)))
    options: Any = {"chunks": data.draw(st.integers(1, 4)), "checkpoint": data.draw(checkpoints)}
    options |= {"loss_inside": data.draw(st.booleans()), "shared_memory": data.draw(st.booleans())}
    plan = solve(profile, n, objective="peak_memory", **options)
    best = least(list(all_plans(profile, n, **options)), "peak_memory")
    assert plan.lower_bound <= best <= plan.value
    assert plan.value == max(part.memory.total for part in plan.partitions)
    assert plan.status == ("optimal" if plan.value == plan.lower_bound else "feasible")
    if options["checkpoint"] != "auto":
        assert plan.status == "optimal"
        others = [
            evaluate(profile, to_balance(bounds), **options)
            for bounds in all_bounds(profile.n_layers, n)
        ]
        assert plan.value == min(
            max(part.memory.total for part in other.partitions) for other in others
        )
    # By as much as may wait for other partitions, and no more, it may be above the best.
    waits = sum(profile.storages) + sum(map(profile.gradients_into, range(profile.n_layers)))
    assert plan.value <= best + 2 * options["chunks"] * 4 * waits


@settings(max_examples=100, deadline=None, suppress_health_check=SLOW)
@given(profiles(largest=5), st.data())
def test_devices_and_links_equal_brute_force(profile: gb.Profile, data: st.DataObject) -> None:
    """Speeds in order or in any order, and links that overlap or not."""
    n = data.draw(st.integers(1, min(3, profile.n_layers)))
    chunks = data.draw(st.integers(1, 4))
    checkpoint = data.draw(st.sampled_from(MODES[:2]))
    objective: Any = data.draw(st.sampled_from(OBJECTIVES))
    speed = st.sampled_from([0.25, 0.5, 1, 2])
    speeds = data.draw(st.none() | st.lists(speed, min_size=n, max_size=n))
    any_order = speeds is not None and data.draw(st.booleans())
    link = None
    if data.draw(st.booleans()):
        bandwidth = data.draw(st.sampled_from([0.5, 16.0, 256.0]))
        link = Link(bandwidth, data.draw(st.sampled_from([0.0, 0.5])), data.draw(st.booleans()))
    found = list(
        all_plans(
            profile,
            n,
            chunks=chunks,
            checkpoint=checkpoint,
            speeds=speeds,
            any_order=any_order,
            link=link,
            memory=False,
        )
    )
    plan = solve(
        profile,
        n,
        chunks=chunks,
        checkpoint=checkpoint,
        objective=objective,
        devices=speeds,
        any_order=any_order,
        link=link,
    )
    best = float(least(found, objective))
    assert plan.value == plan.lower_bound == pytest.approx(best, rel=1e-12)
    assert sorted(plan.devices) == list(range(n))
    assert any_order or plan.devices == tuple(range(n))
    check_truth(plan, profile)


def test_a_plan_says_which_device_runs_what() -> None:
    """The slow device gets the light layers, wherever it stands in the list."""
    profile = gb.Profile.from_costs([8.0, 1.0, 8.0], [0.0] * 3, recompute=[0.0] * 3)
    plan = solve(profile, 3, devices=[0.25, 1, 1], any_order=True, objective="bottleneck")
    assert (plan.value, plan.devices[1]) == (8.0, 0)
    assert [part.forward_time for part in plan.partitions] == [8.0, 4.0, 8.0]
    assert "device" in str(plan).splitlines()[1]
    assert "another order" in plan.explain()


def test_a_profile_of_each_type_of_device_gives_its_times() -> None:
    """One device is fast at the first layer, the other at the second."""
    one = gb.Profile.from_costs([1.0, 9.0], [0.0, 0.0])
    two = gb.Profile.from_costs([9.0, 1.0], [0.0, 0.0])
    plan = solve(one, 2, devices=[one, two], checkpoint="never")
    assert [part.forward_time for part in plan.partitions] == [1.0, 1.0]
    other = gb.Profile.from_costs([1.0], [0.0])
    with pytest.raises(
        BalanceError, match=r"profile of a device is of another chain: devices\[1\]"
    ):
        solve(one, 2, devices=[one, other])
    renamed = gb.Profile.from_costs([1.0, 9.0], names=["0", "x"])
    with pytest.raises(BalanceError, match=r"devices\[1\]: its layer 1 is 'x' \(expected '1'\)"):
        solve(one, 2, devices=[one, renamed])


def test_limits_belong_to_devices_and_move_with_them() -> None:
    """In any order the large layer goes to the device with the memory for it."""
    profile = gb.Profile.from_costs([1.0, 1.0], [1.0, 1.0], parameter_bytes=[100, 10])
    with pytest.raises(InfeasibleError):
        solve(profile, 2, memory_limit=[50, 200])
    plan = solve(profile, 2, devices=[1, 1], memory_limit=[50, 200], any_order=True)
    assert plan.devices == (1, 0)
    assert [part.memory_limit for part in plan.partitions] == [200, 50]


rules = st.fixed_dictionaries(
    {},
    optional={
        "pin": st.dictionaries(st.integers(0, 4), st.integers(0, 2), max_size=1),
        "keep_together": st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), max_size=1),
        "no_cut": st.lists(st.integers(0, 4), max_size=2),
        "max_layers": st.integers(1, 5),
        "min_layers": st.integers(1, 3),
    },
)


@settings(max_examples=100, deadline=None)
@given(rules, st.lists(st.integers(0, 9), min_size=5, max_size=5), st.booleans())
def test_rules_equal_brute_force(given_rules: Any, costs: list[int], by_name: bool) -> None:
    """Pinned layers, runs and places without cuts, and lengths of partitions, by index or name."""
    names = list("abcde")
    profile = gb.Profile.from_costs([float(c) for c in costs], names=names, chunks=2)
    found = []
    for one in all_plans(profile, 3, chunks=2, checkpoint="never", memory=False):
        cuts, bounds = set(one.bounds[1:-1]), one.bounds
        together = [
            range(min(pair) + 1, max(pair) + 1) for pair in given_rules.get("keep_together", ())
        ]
        kept = not cuts & set(given_rules.get("no_cut", ()))
        kept &= not any(cuts & set(span) for span in together)
        pins = given_rules.get("pin", {})
        kept &= all(bounds[j] <= layer < bounds[j + 1] for layer, j in pins.items())
        lengths = [b - a for a, b in pairwise(bounds)]
        kept &= max(lengths) <= given_rules.get("max_layers", 5)
        kept &= min(lengths) >= given_rules.get("min_layers", 1)
        if kept:
            found.append(one)
    options = dict(given_rules)
    if by_name:
        options["pin"] = {names[layer]: j for layer, j in options.get("pin", {}).items()}
        options["no_cut"] = [names[layer] for layer in options.get("no_cut", ())]
    if not found:
        with pytest.raises(InfeasibleError, match="rules leave no split"):
            solve(profile, 3, checkpoint="never", **options)
        return
    plan = solve(profile, 3, checkpoint="never", **options)
    assert plan.value == plan.lower_bound == float(least(found, "makespan"))
    plans = top_plans(profile, len(found) + 1, 3, checkpoint="never", **options)
    assert {to_bounds(plan.balance) for plan in plans} == {one.bounds for one in found}


def test_rules_as_a_noun_add_to_the_others() -> None:
    """Rules may come as one noun, too; of two numbers the stricter one holds."""
    profile = gb.Profile.from_costs([1.0] * 4)
    plan = solve(profile, 2, rules=Rules(no_cut=[2]), no_cut=[1])
    assert plan.balance == [3, 1]
    steep = gb.Profile.from_costs([9.0, 1.0, 1.0, 1.0])
    assert solve(steep, 2).balance == [1, 3]
    for one, other in ((1, 2), (2, 1)):
        assert solve(steep, 2, rules=Rules(min_layers=one), min_layers=other).balance == [2, 2]
    for one, other in ((2, 3), (3, 2)):
        assert solve(steep, 2, rules=Rules(max_layers=one), max_layers=other).balance == [2, 2]
    for name in ("max_layers", "min_layers"):
        for more in ({}, {name: 2}):
            with pytest.raises(BalanceError, match=f"{name}='3'"):
                solve(profile, 2, rules=Rules(**{name: "3"}), **more)  # type: ignore[arg-type]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 9), min_size=2, max_size=6), st.integers(1, 3))
def test_any_cost_is_minimised(costs: list[int], n: int) -> None:
    """A cost that knows the partition is minimised over all splits, and proven."""
    assume(n <= len(costs))
    profile = gb.Profile.from_costs([1.0] * len(costs), chunks=2)

    def cost(first: int, end: int, partition: int) -> float | None:
        total = sum(costs[first:end]) * (partition + 1)
        return None if total == 4 else total

    values = []
    for one in all_plans(profile, n, chunks=2, checkpoint="never", memory=False):
        runs = enumerate(zip(one.bounds, one.bounds[1:], strict=False))
        found = [cost(a, b, j) for j, (a, b) in runs]
        if None not in found:
            values.append(max(c for c in found if c is not None))
    if not values:
        with pytest.raises(InfeasibleError, match="cost is None"):
            solve(profile, n, cost=cost)
        return
    plan = solve(profile, n, cost=cost)
    assert (plan.value, plan.status, plan.objective) == (min(values), "optimal", "cost")
    assert select_method(profile, n, cost=cost) == plan.method == "dense table"


def test_only_the_best_of_the_top_plans_is_said_to_be() -> None:
    """The others say how far they are from it."""
    plans = top_plans(gb.Profile.from_costs([1.0, 2.0, 3.0, 4.0], chunks=4), 3, 2)
    assert [plan.status for plan in plans] == ["optimal", "feasible", "feasible"]
    assert {plan.lower_bound for plan in plans} == {plans[0].value}
    assert "proven optimal" not in str(plans[1]) and "No other" not in plans[1].explain()


@settings(max_examples=40, deadline=None, suppress_health_check=SLOW)
@given(profiles(largest=4), st.data())
def test_top_plans_are_the_head_of_all(profile: gb.Profile, data: st.DataObject) -> None:
    """The k best plans have the k least values, and no balance twice."""
    n = data.draw(st.integers(1, min(3, profile.n_layers)))
    k, chunks = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 4))
    objective: Any = data.draw(st.sampled_from(OBJECTIVES))
    plans = top_plans(profile, k, n, chunks=chunks, objective=objective)
    found = all_plans(profile, n, chunks=chunks, checkpoint="except_last", memory=False)
    values = sorted(float(getattr(one, objective)) for one in found)
    assert [plan.value for plan in plans] == pytest.approx(values[:k])
    assert len({tuple(plan.balance) for plan in plans}) == len(plans) == min(k, len(values))
    assert plans[0].value == solve(profile, n, chunks=chunks, objective=objective).value


@settings(max_examples=80, deadline=None, suppress_health_check=SLOW)
@given(profiles(largest=5), st.data())
def test_sensitivity_is_the_difference(profile: gb.Profile, data: st.DataObject) -> None:
    """Each entry is the value of the plan with that cut moved, less the plan's."""
    n = data.draw(st.integers(1, min(4, profile.n_layers)))
    mode: Any = data.draw(st.sampled_from(MODES))
    objective: Any = data.draw(st.sampled_from(OBJECTIVES))
    plan = solve(profile, n, chunks=3, checkpoint=mode, objective=objective)
    assert len(plan.sensitivity) == n - 1
    for j, pair in enumerate(plan.sensitivity):
        for more, step in zip(pair, (-1, 1), strict=True):
            balance = plan.balance
            balance[j] += step
            balance[j + 1] -= step
            if not all(balance):
                assert more is None
                continue
            moved = evaluate(profile, balance, chunks=3, checkpoint=mode)
            value = moved.makespan if objective == "makespan" else moved.bottleneck
            assert more == pytest.approx(value - plan.value, abs=1e-9)
            assert more is not None and more >= 0


def test_a_tighter_limit_and_a_slower_link_never_help() -> None:
    """Values only grow as memory shrinks, and as links get slower."""
    costs = [float(1 + (7 * k * k) % 5) for k in range(12)]
    profile = gb.Profile.from_costs(
        costs, saved_bytes=[100] * 12, output_bytes=[10] * 12, parameter_bytes=[50] * 12, chunks=4
    )
    values = []
    for limit in (4000, 2000, 1500, 1200, 1000):
        plan = solve(profile, 3, checkpoint="auto", memory_limit=limit)
        assert plan.status == "optimal"
        values.append(plan.value)
    assert values == sorted(values) and values[0] < values[-1]
    slower = [solve(profile, 3, link=Link(b)).value for b in (1e9, 100.0, 10.0, 1.0)]
    assert slower == sorted(slower) and slower[0] < slower[-1]
    free = solve(profile, 3, devices=[0.5, 1, 2], any_order=True).value
    assert all(
        free == solve(profile, 3, devices=order, any_order=True).value
        and free <= solve(profile, 3, devices=order).value
        for order in ([2, 1, 0.5], [1, 0.5, 2])
    )


def test_texts_are_sizes_and_a_gpu_keeps_a_reserve() -> None:
    """'16 GiB' is read; of a GPU's memory a part is kept free, and the plan says how much."""
    profile = gb.Profile.from_costs([1.0, 1.0])
    gpu = replace(profile, provenance={"device_type": "cuda"})
    assert solve(profile, 2, memory_limit="16 GiB").partitions[0].memory_limit == 16 * 2**30
    plan = solve(gpu, 2, memory_limit="16 GiB")
    assert plan.partitions[0].memory_limit == 16 * 2**30 - 2**29 - 16 * 2**30 // 20
    assert any(note == "Kept in reserve on a device: 1.30 GiB of 16.0 GiB." for note in plan.notes)
    own = solve(gpu, 2, memory_limit="16 GiB", reserve="1 GiB")
    assert own.partitions[1].memory_limit == 15 * 2**30
    with pytest.raises(BalanceError, match=r"reserve leaves nothing of the memory of device 0"):
        solve(gpu, 2, memory_limit="100 MiB")


def test_an_upper_quantile_moves_layers_away_from_shaky_ones() -> None:
    """A layer whose time varies counts for more, and the plan says that it did."""
    profile = gb.Profile.from_costs([2.0, 2.0, 2.0, 2.0], [0.0] * 4, recompute=[0.0] * 4)
    shaky = replace(profile.layers[3], forward_spread=4.0)
    shaky_profile = replace(profile, layers=(*profile.layers[:3], shaky))
    assert solve(shaky_profile, 2).balance == [2, 2]
    plan = solve(shaky_profile, 2, quantile=0.9)
    assert plan.balance == [3, 1]
    assert plan.notes == ("Times are upper quantiles (0.9) of the measured spread, not medians.",)
    assert solve(profile, 2, quantile=0.5).notes == ()
    with pytest.raises(BalanceError, match=r"quantile is out of range: quantile=1"):
        solve(profile, 2, quantile=1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"devices": [1]}, r"len\(devices\)=1 \(expected partitions=2\)"),
        ({"devices": [1, -1]}, r"device is not usable: devices\[1\]=-1"),
        ({"any_order": True}, "devices may change places, but there are none"),
        ({"memory_limit": "lots"}, "memory_limit is not readable: memory_limit='lots'"),
        ({"memory_limit": [1]}, r"len\(memory_limit\)=1 \(expected partitions=2\)"),
        ({"memory_limit": -1}, "memory_limit is not a number of bytes"),
        ({"link": 16e9}, "link is not valid: link=16000000000.0"),
        ({"pin": {"head": 1}}, "pin has 'head'"),
        ({"no_cut": [9]}, "no_cut has 9"),
        ({"max_layers": 0}, "max_layers is too small"),
        ({"min_layers": 0}, "min_layers is too small"),
        ({"chunks": []}, "chunks leave no choice"),
        ({"chunks": "auto"}, None),
        ({"chunks": [1, 2], "objective": "bottleneck"}, None),
        ({"checkpoint": ["never"]}, r"len\(checkpoint\)=1 \(expected 2"),
        ({"cost": lambda *_: 1, "checkpoint": "auto"}, "cost of runs leaves nothing else open"),
        ({"cost": lambda *_: -1}, "cost of a run is negative"),
        ({"cost": "makespan"}, "cost cannot be called: cost='makespan'.*\n.*objective='makespan'"),
        ({"cost": lambda layer: 1}, "cost cannot be called: too many positional arguments"),
        ({"devices": 2}, r"devices are not a list: devices=2.*\n.*devices=\[1\] \* 2"),
        ({"devices": "cuda"}, "devices are not a list: devices='cuda'"),
        ({"quantile": "high"}, "quantile is out of range"),
    ],
)
def test_what_makes_no_sense_is_refused(options: Any, message: str | None) -> None:
    """Each bad argument is named, with a fix."""
    with pytest.raises(gb.GpipebalError, match=message) as raised:
        solve(gb.Profile.from_costs([1.0, 1.0]), 2, **options)
    assert "\nFix: " in str(raised.value)


@pytest.mark.parametrize(
    ("options", "right"),
    [
        ({"keep_together": ("b", "d")}, {"keep_together": [("b", "d")]}),
        ({"keep_together": ["b", "d"]}, {"keep_together": [("b", "d")]}),
        ({"keep_together": (1, 3)}, {"keep_together": [(1, 3)]}),
        ({"keep_together": "bd"}, {"keep_together": [("a", "b")]}),
        ({"keep_together": [("b", "d"), "c"]}, {"keep_together": [("a", "b")]}),
        ({"keep_together": 3}, {"keep_together": [("a", "b")]}),
        ({"no_cut": "d"}, {"no_cut": ["d"]}),
        ({"no_cut": 2}, {"no_cut": [2]}),
        ({"pin": [("b", 1)]}, {"pin": {"a": 0}}),
    ],
    ids=repr,
)
def test_one_layer_is_not_read_as_a_list(options: Any, right: dict[str, Any]) -> None:
    """A rule in the wrong form is refused, not read letter by letter; the fix is accepted."""
    profile = gb.Profile.from_costs([3, 1, 4, 1, 5], names=list("abcde"))
    with pytest.raises(BalanceError, match="has the wrong form") as raised:
        solve(profile, 2, **options)
    (name, value), fix = *right.items(), str(raised.value).partition("\nFix: ")[2]
    assert fix == f"{name}={value!r}."
    assert solve(profile, 2, **right).n_partitions == 2


def test_more_partitions_than_layers_name_the_argument() -> None:
    """The fix has the argument as it is called here."""
    profile = gb.Profile.from_costs([1.0] * 7)
    for verb in (solve, lambda profile, n: top_plans(profile, 1, n), select_method):
        with pytest.raises(BalanceError, match=r" partitions=8 .*\n?.*\nFix: partitions=7, or"):
            verb(profile, 8)


def test_tied_layers_that_fill_the_chain_have_another_way() -> None:
    """Where tied parameters span all layers, the advice is not just to drop the rule."""
    profile = gb.Profile.from_costs([1.0] * 4, parameter_bytes=[8] * 4)
    tied = replace(profile, ties=(TieProfile((0, 3), 8, 8),))
    for one, is_tied in ((profile, False), (tied, True)):
        with pytest.raises(InfeasibleError, match="without keep_together") as raised:
            solve(one, 2, keep_together=[(0, 3)])
        assert ("may be on one device" in str(raised.value)) == is_tied


def test_link_and_device_are_checked_where_they_are_made() -> None:
    """A link has a bandwidth above 0 and a latency that is a time."""
    for wrong in ((0.0,), (1.0, -1.0), (1.0, 0.0, 2)):
        with pytest.raises(BalanceError, match="\nFix: "):
            Link(*wrong)  # type: ignore[arg-type]
    assert Link(100.0, 1.0).seconds(50) == 1.5
    assert Link(100.0, 1.0).seconds(0) == 0.0


def test_a_given_balance_that_exceeds_its_limit_is_marked() -> None:
    """It is what was asked for, and the texts say what it lacks."""
    mib = 2**20
    profile = gb.Profile.from_costs([1.0] * 4, saved_bytes=[100 * mib] * 4, chunks=4)
    plan = gb.evaluate(profile, [1, 3], checkpoint="never", memory_limit=[900 * mib, 200 * mib])
    fits, lacks = [part.memory.total for part in plan.partitions]
    assert fits <= 900 * mib and lacks > 200 * mib
    assert "! 200 MiB" in str(plan) and "! 900 MiB" not in str(plan)
    assert "! 1 partition of 2 needs more memory than the limit allows." in str(plan)
    assert f"it lacks {format_bytes(lacks - 200 * mib)}, the most of all" in plan.explain()
    assert "no other has less room" not in plan.explain()


def test_texts_of_a_file_do_not_steer_a_terminal() -> None:
    """Notes and the method are printed as names are."""
    plan = replace(
        gb.solve(gb.Profile.from_costs([1.0, 2.0]), 2),
        notes=("\x1b[2Jhi\nNote: not mine",),
        method="\x1b]0;x\x07",
    )
    for text in (str(plan), plan.explain()):
        assert "\x1b" not in text and "\nNote: not mine" not in text and "hi" in text


def test_explain_says_what_limits_the_plan() -> None:
    """The explanation names the objective, the proof, the slowest partition, and the memory."""
    profile = gb.Profile.from_costs([1.0, 2.0, 3.0, 4.0], saved_bytes=[10] * 4, chunks=4)
    text = solve(profile, 2, memory_limit=1000).explain()
    for part in (
        "4 layers are cut into 2 partitions",
        "as small as possible: 102 s. No other plan is better",
        "Partition 0 is the slowest",
        "below",
        "may use 1000 B",
        "The cheapest move of the cut after partition 0: one layer to the",
    ):
        assert part in text
    assert "The balance was given" in evaluate(profile, [2, 2]).explain()


def test_explain_tells_cuts_apart() -> None:
    """A cut is as decisive as its cheaper move, so no cut is both the least and the most."""
    profile = gb.Profile.from_costs([1.0] * 6)
    plan = replace(
        solve(profile, 3), value=10.0, lower_bound=10.0, sensitivity=((1.0, 100.0), (50.0, None))
    )
    assert plan.explain().splitlines()[-1] == (
        "Of all cuts, the one after partition 0 is the least decisive: one layer to the left adds "
        "1.00 s (10.0 %). The most decisive is the one after partition 1: one layer to the left "
        "adds 50.0 s (500.0 %)."
    )
    better = replace(plan, sensitivity=((-1.0, None), (None, 0.0)))
    assert "partition 0 is the least decisive: one layer to the left takes off 1.00 s" in (
        better.explain()
    )


def test_durations_know_devices_and_links() -> None:
    """Slow devices take longer, and transfers stand at the cuts."""
    profile = gb.Profile.from_costs([1.0, 1.0], output_bytes=[10, 0])
    devices = [Device(), Device(slowness=3)]
    times = durations_of(profile, (0, 1, 2), devices=devices, links=links_of(profile, Link(5.0)))
    assert times.forward == (1.0, 3.0)
    assert (times.forward_transfer, times.backward_transfer) == ((0.0, 2.0), (2.0, 0.0))


@settings(max_examples=40, deadline=None, suppress_health_check=SLOW)
@given(profiles(largest=5, shortest=1), st.data())
def test_other_schedules_are_searched_and_bounded(profile: gb.Profile, data: st.DataObject) -> None:
    """Under 1F1B the plan is what its simulation says, and no split is below its bound."""
    n = data.draw(st.integers(1, min(3, profile.n_layers)))
    chunks, mode = data.draw(st.integers(1, 5)), data.draw(st.sampled_from(MODES))
    plan = solve(profile, n, chunks=chunks, checkpoint=mode, schedule="1f1b")
    assert (plan.schedule, plan.loss_inside) == ("1f1b", True)
    assert gb.simulate(plan).makespan == pytest.approx(plan.makespan, rel=1e-12)
    assert select_method(profile, n, schedule="1f1b") == "schedule search"
    options: Any = {"chunks": chunks, "checkpoint": mode, "schedule": "1f1b"}
    for bounds in all_bounds(profile.n_layers, n):
        other = evaluate(profile, [b - a for a, b in pairwise(bounds)], **options)
        assert plan.lower_bound <= other.makespan * (1 + 1e-12)
        peaks = [part.memory.total for part in other.partitions]
        if plan.status == "optimal":
            assert plan.value <= other.makespan * (1 + 1e-12)
    limit = max(peaks)
    try:
        limited = solve(profile, n, memory_limit=limit, **options)
    except InfeasibleError:
        return
    assert max(part.memory.total for part in limited.partitions) <= limit


def test_schedules_that_only_torch_runs_are_planned_too() -> None:
    """Interleaved and zero-bubble plans have a makespan, and say that memory is not predicted."""
    profile = gb.Profile.from_costs([1.0] * 8, parameter_bytes=[10] * 8, chunks=8)
    for schedule in set(ALL_SCHEDULES).difference(SCHEDULES):
        plan = solve(profile, 4, schedule=schedule, checkpoint="never")
        assert gb.simulate(plan).makespan == pytest.approx(plan.makespan)
        assert "no more is predicted" in plan.notes[-1]
        assert gb.simulate(plan).bubble_fraction == pytest.approx(plan.bubble_fraction, abs=1e-9)
        with pytest.raises(UnsupportedPlanError, match="memory is not known under this schedule"):
            solve(profile, 4, schedule=schedule, memory_limit=100)


def test_a_better_equal_split_is_said_to_break_a_limit() -> None:
    """Of the best plan that is allowed, and not of one that the caller chose or that is second."""
    profile = gb.Profile.from_costs([5, 1, 1, 5, 1, 1], saved_bytes=[1, 10, 1, 1, 1, 1], chunks=4)
    best = gb.solve(profile, 2, checkpoint="never", memory_limit=47)
    assert best.status == "optimal" and best.gain is not None and best.gain < 0
    others = [gb.evaluate(profile, [1, 5]), gb.top_plans(profile, 2, 2)[1]]
    for plan, is_told in [(best, True), *((plan, False) for plan in others)]:
        assert plan.gain is not None and plan.gain < 0
        assert ("equally many layers, which breaks a limit" in str(plan)) is is_told
        assert ("which is less, but breaks a limit" in plan.explain()) is is_told


def test_a_better_equal_split_breaks_a_rule_whatever_gap_is_left() -> None:
    """It is below the bound that no plan is below, which proves it without an optimal plan."""
    profile = gb.Profile.from_costs(
        [0.1, 0.1, 0.6, 0.1], [0.0, 0.9, 0.1, 0.3], recompute=[18.1, 0.3, 27.3, 6.2], chunks=2
    )
    plan = gb.solve(profile, 3, checkpoint="always", no_cut=[2])
    late = plan.with_bound(plan.lower_bound * 0.999999)
    assert late.status == "feasible" and late.equal_split_value == pytest.approx(57.1)
    for one in (plan, late):
        assert "which is less, but breaks a limit or a rule" in one.explain()
        assert "which breaks a limit or a rule" in str(one)
    assert "breaks" not in plan.with_bound(57.0).explain()
