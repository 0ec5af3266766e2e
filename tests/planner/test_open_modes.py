"""Checkpoint modes that a search under a schedule chooses, against all modes of all splits."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate, pairwise, product
from typing import Any

import pytest
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from planner.test_schedule_search import all_makespans, makespan_of

import gpipebal as gb
from gpipebal.planner.schedules.search import search_schedule
from gpipebal.problem import Device, Links, Memory, Problem
from gpipebal.profile import SkipProfile
from gpipebal.schedule import CHECKPOINT_MODES, CheckpointMode


@settings(max_examples=examples(80), deadline=None)
@given(st.data(), st.sampled_from(["1f1b", "zb_h1"]))
def test_open_modes_under_limits_are_the_best_for_each_split(
    data: st.DataObject, name: str
) -> None:
    """Against all splits in all modes: the least makespan of what fits, and its proof."""
    n_layers, n = data.draw(st.integers(3, 6)), 3
    columns = st.lists(st.integers(0, 9), min_size=n_layers, max_size=n_layers)
    forward, backward, recompute, saved = (data.draw(columns) for _ in range(4))
    kept = {"never": 4, "except_last": 2, "always": 1}

    def rows(first: int, partition: int, mode: CheckpointMode) -> list[int]:
        return [kept[mode] * size for size in accumulate(saved[first:])]

    limits = data.draw(st.lists(st.integers(0, 60), min_size=n, max_size=n))
    devices = [Device(data.draw(st.sampled_from([1, 2])), memory_limit=one) for one in limits]
    chunks = 3 * data.draw(st.integers(1, 2))
    links = data.draw(st.sampled_from([None, Links([2] * (n_layers - 1), [1] * (n_layers - 1))]))
    problem = Problem(
        forward, backward, recompute, n, chunks, "auto", devices, links=links, memory=Memory(rows)
    )
    values = [
        makespan
        for modes in product(CHECKPOINT_MODES, repeat=n)
        for bounds, makespan in all_makespans(replace(problem, checkpoint=modes), name).items()
        if all(
            kept[mode] * sum(saved[a:b]) <= limit
            for (a, b), mode, limit in zip(pairwise(bounds), modes, limits, strict=True)
        )
    ]
    found = search_schedule(problem, name)
    if not values:
        assert found is None
        return
    assert found is not None
    own = makespan_of(replace(problem, checkpoint=found.modes), name, found.bounds)
    assert found.value == pytest.approx(own, rel=1e-12)
    assert found.value == pytest.approx(min(values), rel=1e-12)
    assert (found.status, found.gap) == ("optimal", 0.0)
    for (a, b), mode, limit in zip(pairwise(found.bounds), found.modes, limits, strict=True):
        assert kept[mode] * sum(saved[a:b]) <= limit


@pytest.mark.parametrize(("name", "limit"), [("1f1b", None), ("1f1b", 10**9), ("zb_h1", None)])
def test_open_modes_are_no_slower_than_the_fastest(name: str, limit: int | None) -> None:
    """Where everything fits without a recompute, the plan is that of 'never', with its proof."""
    times = [6.0, 5.0, 4.0, 6.0, 2.0, 9.0, 3.0, 1.0, 9.0, 5.0]
    profile = gb.Profile.from_costs(times, saved_bytes=[5] * 10, chunks=4)
    options: Any = {"schedule": name, "devices": [1, 0.5, 2, 2], "memory_limit": limit}
    fixed = gb.solve(profile, 4, checkpoint="never", **options)
    free = gb.solve(profile, 4, checkpoint="auto", **options)
    assert (free.balance, free.modes) == (fixed.balance, fixed.modes)
    assert (free.value, free.lower_bound) == (fixed.value, fixed.lower_bound)
    assert free.status == "optimal"


def test_open_modes_are_no_worse_than_one_mode_where_waiting_decides() -> None:
    """Of the many ways with open modes only those that may be better are looked at."""
    profile = gb.Profile.from_costs(
        [2, 2, 4, 9, 9, 1, 2],
        saved_bytes=[10, 0, 50, 50, 50, 50, 0],
        output_bytes=[50, 5, 50, 5, 5, 5, 5],
        chunks=4,
    )
    far = SkipProfile("far", 0, 6, (len(profile.storages),))
    profile = replace(profile, storages=(*profile.storages, 100), skips=(far,))
    fixed = gb.solve(profile, 4, checkpoint="always", memory_limit=480)
    free = gb.solve(profile, 4, checkpoint="auto", memory_limit=480)
    assert free.value <= fixed.value
    assert free.status == "optimal" and free.peak_bytes <= 480


@pytest.mark.parametrize(
    ("costs", "options", "modes"),
    [
        (
            {
                "forward": [3.0, 4.0, 3.0, 4.0],
                "saved_bytes": [47, 44, 37, 29],
                "output_bytes": [14, 14, 26, 17],
                "chunks": 2,
            },
            {"memory_limit": 192, "objective": "bottleneck"},
            ("always", "except_last"),
        ),
        (
            {
                "forward": [5.0, 1.0, 4.0],
                "saved_bytes": [47, 30, 40],
                "output_bytes": [28, 17, 14],
                "chunks": 4,
            },
            {"memory_limit": [233, None]},
            ("except_last", "never"),
        ),
    ],
)
def test_of_equally_good_modes_the_fastest_that_fit(
    costs: dict[str, Any], options: dict[str, Any], modes: tuple[CheckpointMode, ...]
) -> None:
    """Where what waits decides: modes that do not count for the objective are no slower."""
    plan = gb.solve(gb.Profile.from_costs(**costs), 2, checkpoint="auto", **options)
    assert (plan.modes, plan.status) == (modes, "optimal")


@settings(max_examples=examples(60), deadline=None)
@given(st.data())
def test_no_partition_has_a_faster_mode_that_fits(data: st.DataObject) -> None:
    """Whatever decides: with one in any partition the plan exceeds a limit or is worse."""
    n_layers, n = data.draw(st.integers(3, 10)), data.draw(st.integers(2, 3))
    columns = st.lists(st.integers(1, 60), min_size=n_layers, max_size=n_layers)
    times, saved, outputs = (data.draw(columns) for _ in range(3))
    chunks = data.draw(st.integers(1, 4))
    profile = gb.Profile.from_costs(times, saved_bytes=saved, output_bytes=outputs, chunks=chunks)
    asked: Any = {"schedule": data.draw(st.sampled_from(["gpipe", "1f1b"]))}
    least = gb.solve(profile, n, checkpoint="auto", objective="peak_memory", **asked)
    asked["memory_limit"] = int(least.value * data.draw(st.sampled_from([1, 1.1, 1.3, 2])))
    name = data.draw(st.sampled_from(["makespan", "bottleneck"]))
    plan = gb.solve(profile, n, checkpoint="auto", objective=name, **asked)
    for j, mode in enumerate(plan.modes):
        for faster in CHECKPOINT_MODES[CHECKPOINT_MODES.index(mode) + 1 :]:
            modes = [*plan.modes[:j], faster, *plan.modes[j + 1 :]]
            other = gb.evaluate(profile, plan.balance, checkpoint=modes, **asked)
            fits = all(part.memory.total <= asked["memory_limit"] for part in other.partitions)
            assert not fits or getattr(other, name) > plan.value
