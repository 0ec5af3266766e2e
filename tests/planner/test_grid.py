"""Replicas of pipelines: every way to use a number of devices."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate, combinations, pairwise, product
from typing import Any

import pytest
from examples import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from plan_oracle import MODES
from solvers.whole_cases import whole_problems

import gpipebal as gb
from gpipebal.errors import BalanceError, UsageError
from gpipebal.planner import equal_split, evaluate, solve
from gpipebal.planner.grid.grid import GridRow, solve_grid
from gpipebal.planner.grid.replicated import all_reduce_time, last_ends
from gpipebal.problem import Link, Problem, Rules, to_bounds
from gpipebal.profile import TieProfile

SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large]


def profile_of(costs: list[int], sizes: list[int], rows: int = 2, chunks: int = 8) -> gb.Profile:
    """Make a profile of one size."""
    return gb.Profile.from_costs(
        [float(cost) for cost in costs], parameter_bytes=sizes, rows=rows, chunks=chunks
    )


def test_a_ring_sends_every_part_twice() -> None:
    """Of d parts each replica sends d - 1 to add them up, and d - 1 sums; each has a latency."""
    link = Link(bandwidth=10.0, latency=0.25)
    assert all_reduce_time(300, 3, link) == 4 * (0.25 + 100 / 10.0)
    assert all_reduce_time(300, 1, link) == 0.0
    assert all_reduce_time(300, 3, None) == 0.0
    assert all_reduce_time(0, 3, link) == 0.0


def time_of(plan: gb.Plan, sizes: list[int], replicas: int, ring: Link | None) -> float:
    """Add gradients up behind the last backward of every partition in the plan's own timeline."""
    table = gb.simulate(plan).table
    return max(
        float(table.ends[(table.partitions == j) & table.of_kind("FRB")].max())
        + all_reduce_time(sum(sizes[a:b]), replicas, ring)
        for j, (a, b) in enumerate(pairwise([0, *accumulate(plan.balance)]))
    )


def balances(n_layers: int, n_partitions: int) -> Iterator[list[int]]:
    """Enumerate all balances."""
    for cuts in combinations(range(1, n_layers), n_partitions - 1):
        yield [b - a for a, b in pairwise([0, *cuts, n_layers])]


@settings(max_examples=examples(60), deadline=None, suppress_health_check=SLOW)
@given(
    costs=st.lists(st.integers(0, 9), min_size=1, max_size=6),
    data=st.data(),
    n_devices=st.integers(1, 6),
    bandwidth=st.sampled_from([0.5, 3.0, 10.0, 1e6]),
    checkpoint=st.sampled_from(["never", "except_last", "always", "auto"]),
)
def test_each_row_is_the_best_of_all_balances(
    costs: list[int], data: st.DataObject, n_devices: int, bandwidth: float, checkpoint: Any
) -> None:
    """No balance adds its gradients up before a row's bound; a row that is optimal is the best."""
    n_layers = len(costs)
    numbers = st.lists(st.integers(0, 50), min_size=n_layers, max_size=n_layers)
    sizes = data.draw(numbers)
    profile = gb.Profile.from_costs(
        [float(cost) for cost in costs],
        parameter_bytes=sizes,
        saved_bytes=data.draw(numbers),
        output_bytes=data.draw(numbers),
        rows=2,
        chunks=data.draw(st.sampled_from([1, 2, 8])),
    )
    ring = Link(bandwidth, data.draw(st.sampled_from([0.0, 0.5])))
    limit = data.draw(st.none() | st.integers(100, 1000))
    options: dict[str, Any] = {"memory_limit": limit}
    if data.draw(st.booleans()):
        options["link"] = Link(20.0, overlaps=data.draw(st.booleans()))
    rules: dict[str, Any] = {}
    if data.draw(st.booleans()):
        rules["no_cut"] = [data.draw(st.integers(0, n_layers - 1))]
    if data.draw(st.booleans()):
        rules["max_layers"] = data.draw(st.integers(1, n_layers))
    if data.draw(st.booleans()):
        rules["min_layers"] = data.draw(st.integers(1, 3))
    given = {"replica_link": ring, "checkpoint": checkpoint, **rules, **options}
    try:
        table = solve_grid(profile, n_devices, **given)
    except BalanceError:
        assert limit is not None or n_layers < n_devices or rules
        return
    assert sorted(row.replicas for row in table.rows) == [
        d for d in range(1, n_devices + 1) if n_devices % d == 0
    ]
    times = [row.time for row in table.rows if row.time is not None]
    assert times == sorted(times) and table.best.time == times[0]
    for row in table.rows:
        assert row.replicas * row.partitions == n_devices
        if row.plan is None:
            too_many = row.partitions > n_layers or row.replicas > profile.mini_batch_rows
            assert too_many or limit or rules
            assert (row.status, row.gap) == (None, None)
            continue
        share = -(-profile.mini_batch_rows // row.replicas)
        chunks = row.plan.chunks
        assert row.plan.rows == min(2, share) and chunks == -(-share // row.plan.rows)
        sized = profile.at_rows(row.plan.rows, mini_batch_rows=share)
        modes = [checkpoint]
        if checkpoint == "auto":
            # Without a limit nothing is recomputed.
            modes = list(product(MODES, repeat=row.partitions)) if limit else ["never"]
        least = min(
            time_of(plan, sizes, row.replicas, ring)
            for balance in balances(n_layers, row.partitions)
            if Rules(**rules).keeps(to_bounds(balance))
            for mode in modes
            for plan in [evaluate(sized, balance, checkpoint=mode, **options)]
            if all(part.memory.total <= (limit or 1e9) for part in plan.partitions)
        )
        check_row(row, sizes, ring, least)
        assert all(part.memory.total <= (limit or 1e9) for part in row.plan.partitions)
        assert row.status == "optimal" or checkpoint in ("always", "auto") or limit


def check_row(row: GridRow, sizes: list[int], ring: Link, least: float) -> None:
    """Assert that a row says the truth about itself, and about the least time of all."""
    assert row.plan is not None and row.time is not None and row.lower_bound is not None
    assert row.time == pytest.approx(time_of(row.plan, sizes, row.replicas, ring))
    assert row.lower_bound <= least * (1 + 1e-9) <= row.time * (1 + 2e-9)
    assert row.gap is not None and (row.gap == 0) == (row.status == "optimal")
    if row.status == "optimal":
        assert row.time == pytest.approx(least)
    additions = [
        all_reduce_time(sum(sizes[a:b]), row.replicas, ring)
        for a, b in pairwise([0, *accumulate(row.plan.balance)])
    ]
    assert row.all_reduce_time == max(additions)
    assert row.waiting_time == pytest.approx(row.time - row.plan.makespan)


def test_another_split_may_add_up_earlier() -> None:
    """By hand: the last layer's gradients are added up while the first partition goes on."""
    sizes = [0, 0, 0, 200]
    profile = profile_of([1, 1, 4, 1], sizes, rows=1, chunks=4)
    ring = Link(bandwidth=10.0)
    row = solve_grid(profile, 4, replica_link=ring, checkpoint="never").row(2)
    alone = solve(profile.at_rows(1, mini_batch_rows=2), 2, checkpoint="never")
    assert row.plan is not None and row.time is not None
    assert alone.balance == [2, 2] and row.plan.balance == [3, 1]
    assert (row.time, row.status, row.gap) == (time_of(row.plan, sizes, 2, ring), "optimal", 0)
    assert row.time < time_of(alone, sizes, 2, ring)
    assert row.plan.makespan > alone.makespan and row.plan.status == "feasible"
    assert "until all replicas have added up" in row.plan.notes[-1]


def test_what_was_not_looked_at_leaves_a_gap() -> None:
    """With a time limit cuts are only moved, and the bound is that of the makespan."""
    profile = profile_of([1, 1, 4, 1], [0, 0, 0, 200], rows=1, chunks=4)
    options: dict[str, Any] = {"replica_link": Link(bandwidth=10.0), "checkpoint": "never"}
    best = solve_grid(profile, 4, **options).row(2)
    row = solve_grid(profile, 4, time_limit=100.0, **options).row(2)
    assert row.time is not None and (row.time, best.status) == (best.time, "optimal")
    assert (row.status, row.lower_bound) == ("feasible", 36)
    assert row.gap == (row.time - 36) / row.time


@settings(max_examples=examples(100), deadline=None, suppress_health_check=SLOW)
@given(whole_problems())
def test_the_first_partition_ends_with_the_makespan(problem: Problem) -> None:
    """Whatever devices and links: no partition ends after the first one, and that is the end."""
    bounds = equal_split(problem.n_layers, problem.n_partitions)
    modes = problem.costs.modes(["always"] * problem.n_partitions)
    order = tuple(range(problem.n_partitions))
    ends = last_ends(problem, bounds, modes, order)
    assert max(ends) == ends[0] == problem.makespan(bounds, modes, order)


def test_the_best_way_is_the_best_of_all() -> None:
    """Of all factorisations and all balances, none is faster than the best row without a ring."""
    profile = profile_of([3, 1, 4, 1, 5, 2], [1] * 6, rows=1, chunks=12)
    table = solve_grid(profile, 4, checkpoint="never")
    least = min(
        evaluate(profile, balance, chunks=12 // replicas, checkpoint="never").makespan
        for replicas, partitions in ((1, 4), (2, 2), (4, 1))
        for cuts in combinations(range(1, 6), partitions - 1)
        for balance in [[b - a for a, b in pairwise([0, *cuts, 6])]]
    )
    assert table.best.time == least


@pytest.mark.parametrize(("bandwidth", "replicas"), [(1e9, 4), (30.0, 1)])
def test_a_slow_network_asks_for_fewer_replicas(bandwidth: float, replicas: int) -> None:
    """With a fast ring replicas have no bubble; with a slow one a pipeline moves less."""
    profile = profile_of([1] * 8, [100] * 8)
    table = solve_grid(profile, 4, replica_link=Link(bandwidth=bandwidth), checkpoint="never")
    assert table.best.replicas == replicas


def test_numbers_of_micro_batches_are_tried() -> None:
    """'auto' is as good as the best single number, and a number is kept."""
    sizes = [
        gb.Profile.from_costs([0.5 + rows] * 4, rows=rows, chunks=16 // rows) for rows in (1, 4, 16)
    ]
    profile = gb.Profile(
        **{**vars(sizes[1]), "other_sizes": (sizes[0], sizes[2])}  # type: ignore[arg-type]
    )
    every = {
        chunks: solve_grid(profile, 2, chunks=chunks, checkpoint="never") for chunks in range(1, 17)
    }
    best = solve_grid(profile, 2, chunks="auto", checkpoint="never")
    for replicas in (1, 2):
        times = [table.row(replicas).time or 0.0 for table in every.values()]
        assert best.row(replicas).time == min(times)
    plan = every[4].row(2).plan
    assert plan is not None and (plan.chunks, plan.rows) == (4, 2)


def test_memory_rules_out_replicas() -> None:
    """Where the whole model does not fit on a device, only pipelines do, and the table says why."""
    profile = profile_of([1] * 4, [100] * 4)
    table = solve_grid(profile, 4, checkpoint="never", memory_limit=450)
    assert table.row(4).plan is None and "memory" in table.row(4).refusal
    assert table.row(2).plan is not None
    assert "4 x 1: " in str(table)
    with pytest.raises(BalanceError, match=r"no number of replicas has a plan") as error:
        solve_grid(profile, 4, checkpoint="never", memory_limit=50)
    assert "1 x 4: " in str(error.value)


def taken(advice: str, profile: gb.Profile, n_devices: int, options: dict[str, Any]) -> GridRow:
    """Change the arguments as an advice says; return the best row."""
    options = dict(options)
    for name, value in re.findall(r"(\w+)=(\d+)", advice):
        options[name] = int(value)
    for names in re.findall(r"without (\w+(?: and \w+)*)", advice):
        for name in names.split(" and "):
            del options[name]
    for rows in re.findall(r"a mini-batch of (\d+) rows?", advice):
        profile = replace(profile, mini_batch_rows=int(rows))
    return solve_grid(profile, options.pop("n_devices", n_devices), **options).best


def test_a_grid_is_advised_no_other_schedule() -> None:
    """Where `solve` would have a plan with it, a grid has none."""
    profile = gb.Profile.from_costs(
        [1.0] * 4,
        output_bytes=[10, 10, 10, 100],
        saved_bytes=[100] * 4,
        parameter_bytes=[500] * 4,
        chunks=8,
    )
    options: dict[str, Any] = {"checkpoint": "never", "memory_limit": 1450}
    with pytest.raises(BalanceError, match="schedule='1f1b'"):
        solve(profile, 1, **options)
    with pytest.raises(BalanceError) as error:
        solve_grid(profile, 1, **options)
    assert "schedule" not in str(error.value)
    assert str(error.value).rpartition("Fix: ")[2].startswith("memory_limit=")


@pytest.mark.parametrize(
    ("limit", "fix"),
    [
        (8, ["n_devices=12, and memory_limit=20, and method='auto'"]),
        (60, ["n_devices=12, and method='auto'"]),
    ],
)
def test_a_method_that_knows_no_limit_hides_no_advice(limit: int, fix: list[str]) -> None:
    """It is in the way of every number of devices, and may not be all that is."""
    profile = profile_of([1] * 6, [10] * 6, rows=1, chunks=5)
    options: dict[str, Any] = {
        "checkpoint": "never",
        "memory_limit": limit,
        "method": "bisection",
    }
    with pytest.raises(BalanceError) as error:
        solve_grid(profile, 13, **options)
    advice = str(error.value).rpartition("Fix: ")[2].rstrip(".").split("; or ")
    assert advice[:1] == fix
    for one in advice:
        assert taken(one, profile, 13, {**options, "method": "auto"}).plan is not None


@settings(max_examples=examples(100), deadline=None, suppress_health_check=SLOW)
@given(sizes=st.lists(st.integers(1, 50), min_size=1, max_size=6), data=st.data())
def test_advice_works_when_it_is_taken(sizes: list[int], data: st.DataObject) -> None:
    """Each alternative that an error names has a plan, also under rules and a memory limit."""
    n_layers, rows = len(sizes), data.draw(st.integers(1, 6))
    profile = gb.Profile.from_costs([1.0] * n_layers, parameter_bytes=sizes, chunks=rows)
    layer = st.integers(0, n_layers - 1)
    given = {
        "keep_together": st.tuples(layer, layer).map(lambda pair: [pair]),
        "no_cut": layer.map(lambda one: [one]),
        "max_layers": st.integers(1, n_layers),
        "min_layers": st.integers(1, 3),
        "memory_limit": st.integers(20, 200),
    }
    options = {name: data.draw(value) for name, value in given.items() if data.draw(st.booleans())}
    n_devices = data.draw(st.integers(1, n_layers * rows + 5))  # a few too many, too
    options["checkpoint"] = "never"
    try:
        solve_grid(profile, n_devices, **options)
    except BalanceError as error:
        for advice in str(error).rpartition("Fix: ")[2].split("; or "):
            assert taken(advice, profile, n_devices, options).plan is not None, advice


@pytest.mark.parametrize(
    ("rules", "fix"),
    [
        ({}, "n_devices=12; or a mini-batch of 13 rows."),
        ({"keep_together": [(0, 4)]}, "n_devices=10; or a mini-batch of 13 rows."),
        ({"max_layers": 1}, "n_devices=12."),
        ({"memory_limit": 8}, "n_devices=12, and memory_limit=20."),
    ],
)
def test_advised_devices_keep_the_rules(rules: dict[str, Any], fix: str) -> None:
    """13 devices make no pipelines of six layers for five rows: other numbers do."""
    profile = profile_of([1] * 6, [10] * 6, rows=1, chunks=5)
    with pytest.raises(BalanceError) as error:
        solve_grid(profile, 13, checkpoint="never", **rules)
    assert str(error.value).rpartition("Fix: ")[2] == fix
    options = {"checkpoint": "never", **rules}
    for advice in fix.split("; or "):
        assert taken(advice, profile, 13, options).plan is not None


@pytest.mark.parametrize(
    ("rules", "fix"),
    [
        ({}, "n_devices=12; or a mini-batch of 13 rows."),
        ({"keep_together": [(0, 1)]}, "n_devices=8; or a mini-batch of 13 rows."),
    ],
)
def test_too_many_devices_are_advised_like_others(rules: dict[str, Any], fix: str) -> None:
    """Not every smaller number can be used: 11 devices are refused as well."""
    profile = profile_of([1] * 3, [0] * 3, rows=1, chunks=4)
    with pytest.raises(BalanceError, match="more than the mini-batch can use") as error:
        solve_grid(profile, 13, checkpoint="never", **rules)
    assert str(error.value).rpartition("Fix: ")[2] == fix
    for advice in fix.split("; or "):
        assert taken(advice, profile, 13, {"checkpoint": "never", **rules}).plan is not None


def test_the_table_is_printed_and_a_frame() -> None:
    """Printed, it has a line per way, the fastest first; as a frame, a row."""
    table = solve_grid(profile_of([1] * 4, [0] * 4), 2, checkpoint="never")
    lines = str(table).splitlines()
    assert lines[0] == "2 devices, mini-batch of 16 rows"
    assert lines[2].split()[:6] == ["2", "1", "4", "of", "2", "rows"]
    assert len(lines) == 4
    frame = table.to_frame()
    assert list(frame["replicas"]) == [2, 1]
    assert list(frame["chunks"]) == [4, 8]
    with pytest.raises(UsageError, match="no such row"):
        table.row(3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n_devices": 0}, "devices is too small"),
        ({"n_devices": 2, "devices": [1, 2]}, r"devices=\[1, 2\]"),
        ({"n_devices": 2, "pin": {0: 1}}, "pin="),
        ({"n_devices": 2, "objective": "bottleneck"}, "objective='bottleneck'"),
        ({"n_devices": 2, "schedule": "1f1b"}, "schedule='1f1b'"),
        ({"n_devices": 2, "chunks": 0}, "chunks is too small"),
    ],
)
def test_impossible_requests(options: dict[str, Any], message: str) -> None:
    """What makes no sense, or is about single partitions, is refused with a fix."""
    with pytest.raises(BalanceError, match=message) as error:
        solve_grid(profile_of([1] * 4, [0] * 4), **options)
    assert "\nFix: " in str(error.value)


def test_gradients_of_a_tied_parameter_are_added_up_once() -> None:
    """Wherever the cuts are: its sum is in the partition of its first layer."""
    profile = gb.Profile.from_costs([1.0] * 4, parameter_bytes=[100, 0, 0, 0], rows=2, chunks=4)
    layers = list(profile.layers)
    layers[3] = replace(layers[3], gradient_bytes=100)
    tied = replace(profile, layers=tuple(layers), ties=(TieProfile((0, 3), 100, 100),))
    for n_devices, partitions in ((2, 1), (4, 2), (8, 4)):
        table = solve_grid(tied, n_devices, replica_link=Link(100.0), checkpoint="never")
        (row,) = (row for row in table.rows if row.partitions == partitions)
        # Of a ring of two, each sends half of 100 bytes twice.
        assert row.all_reduce_time == 1.0
    found = solve(tied, 1, schedule="zb_h1", checkpoint="never").partitions[0].memory
    assert found.gradients == 100


def test_quantiles_are_taken_before_rows_are_chosen() -> None:
    """A grid of one device answers as `solve` does, at any number of micro-batches."""

    def shaky(profile: gb.Profile, spread: float) -> gb.Profile:
        layers = (
            replace(layer, forward_spread=spread, backward_spread=spread)
            for layer in profile.layers
        )
        return replace(profile, layers=tuple(layers))

    other = shaky(gb.Profile.from_costs([1.9], rows=8), 0.1)
    profile = shaky(gb.Profile.from_costs([1.0], rows=4, chunks=2), 2.0)
    profile = replace(profile, mini_batch_rows=8, other_sizes=(other,))
    for chunks in (1, 2, 4):
        plan = solve(profile, 1, chunks=chunks, quantile=0.9, checkpoint="never")
        found = solve_grid(profile, 1, chunks=chunks, quantile=0.9, checkpoint="never").best.plan
        assert found is not None
        assert found.makespan == plan.makespan
        assert found.notes[0] == plan.notes[0]


def test_nothing_is_recomputed_where_nothing_limits_memory() -> None:
    """Of equally fast ways the one without recomputes, though only the additions decide."""
    profile = gb.Profile.from_costs(
        [2.0, 7.0, 8.0, 5.0], parameter_bytes=[10, 100, 900, 900], rows=2, chunks=2
    )
    table = gb.solve_grid(profile, 6, replica_link=Link(100.0), checkpoint="auto")
    for row in table.rows:
        assert row.plan is None or set(row.plan.modes) == {"never"}
