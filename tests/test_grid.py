"""Replicas of pipelines: every way to use a number of devices."""

from __future__ import annotations

from itertools import combinations, pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import gpipebal as gb
from gpipebal.errors import BalanceError
from gpipebal.planner import evaluate, solve
from gpipebal.planner.grid import all_reduce_time, solve_grid
from gpipebal.problem import Link


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


@settings(max_examples=40, deadline=None)
@given(
    costs=st.lists(st.integers(1, 9), min_size=1, max_size=6),
    data=st.data(),
    n_devices=st.integers(1, 6),
    bandwidth=st.sampled_from([0.5, 10.0, 1e6]),
)
def test_the_grid_has_the_best_of_every_factorisation(
    costs: list[int], data: st.DataObject, n_devices: int, bandwidth: float
) -> None:
    """Each row is the plan that `solve` finds for it, with the ring behind its last backwards."""
    n_layers = len(costs)
    sizes = data.draw(st.lists(st.integers(0, 50), min_size=n_layers, max_size=n_layers))
    profile = profile_of(costs, sizes)
    link = Link(bandwidth=bandwidth)
    table = solve_grid(profile, n_devices, replica_link=link, checkpoint="never")
    assert sorted(row.replicas for row in table.rows) == [
        d for d in range(1, n_devices + 1) if n_devices % d == 0
    ]
    times = [row.time for row in table.rows if row.time is not None]
    assert times == sorted(times) and table.best.time == times[0]
    for row in table.rows:
        assert row.replicas * row.partitions == n_devices
        if row.plan is None:
            assert row.partitions > n_layers and "layers for" in row.refusal
            continue
        share = -(-16 // row.replicas)
        assert row.plan.rows == 2 and row.plan.chunks == -(-share // 2)
        alone = solve(profile, row.partitions, chunks=row.plan.chunks, checkpoint="never")
        assert (row.plan.balance, row.plan.makespan) == (alone.balance, alone.makespan)
        # Micro-batches end last in partition 0; one with more parameters may still be later.
        assert row.time is not None and row.all_reduce_time is not None
        assert row.plan.makespan <= row.time <= row.plan.makespan + row.all_reduce_time
        runs = list(pairwise([0, *accumulated(row.plan.balance)]))
        longest = max(all_reduce_time(sum(sizes[a:b]), row.replicas, link) for a, b in runs)
        assert row.all_reduce_time == longest
        first = all_reduce_time(sum(sizes[: runs[0][1]]), row.replicas, link)
        assert row.time >= row.plan.makespan + first
        assert row.waiting_time == pytest.approx(row.time - row.plan.makespan)


def accumulated(balance: tuple[int, ...]) -> list[int]:
    """Return where partitions end."""
    return [sum(balance[: j + 1]) for j in range(len(balance))]


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
    with pytest.raises(KeyError):
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
