"""More memory never gives a worse plan, also where what may wait for other partitions decides."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import gpipebal as gb
from gpipebal.errors import InfeasibleError
from gpipebal.planner import solve
from gpipebal.planner.posing import pose
from gpipebal.planner.question import ask
from gpipebal.planner.runs.memory import RunMemory
from gpipebal.planner.search import lower_limits
from gpipebal.planner.search.solved import solved
from gpipebal.profile import SkipProfile

PROFILES = Path(__file__).parents[2] / "profiles"


def waiting(seed: int, n_layers: int = 60, chunks: int = 16) -> gb.Profile:
    """Return a chain of which much waits for neighbours; with a skip, nobody knows how much."""
    rng = random.Random(seed)
    profile = gb.Profile.from_costs(
        [rng.randint(1, 9) for _ in range(n_layers)],
        saved_bytes=[rng.randint(50, 100) for _ in range(n_layers)],
        output_bytes=[*(rng.randint(20, 90) for _ in range(n_layers - 1)), 0],
        chunks=chunks,
    )
    return replace(profile, skips=(SkipProfile("of nothing", 0, 1),))


@pytest.mark.parametrize(
    ("seed", "less", "more"), [(1, 1816, 1855), (3, 1757, 1800)], ids=["4770", "4737"]
)
def test_more_memory_is_no_slower(seed: int, less: int, more: int) -> None:
    """The best split under the larger limit exceeds it by what waits; another one does not."""
    profile = waiting(seed)
    slower = solve(profile, 6, memory_limit=less)
    plan = solve(profile, 6, memory_limit=more)
    assert plan.value <= slower.value
    assert max(part.memory.total for part in plan.partitions) <= more


def test_one_byte_more_of_a_stored_profile_is_no_slower() -> None:
    """The most that may wait is known beforehand: the best plan is found with what it needs."""
    profile = gb.Profile.load(PROFILES / "resnet101-64px-rows4-cpu.json")
    options: Any = {"shared_memory": False}
    first = solve(profile, 4, memory_limit=112384255, **options)
    limits = (first.peak_bytes, first.peak_bytes + 1)
    for plan in (first, *(solve(profile, 4, memory_limit=limit, **options) for limit in limits)):
        assert (plan.value, plan.status) == (first.value, "optimal")


def test_modes_that_the_bottleneck_would_not_choose_are_found() -> None:
    """Under 1F1B a limit that allows more is no slower, whichever modes slow the slowest least."""
    name = "amoebanetd-L18-D256-224px-rows16-v100-estimate.json"
    profile = gb.Profile.load(PROFILES / name)
    options: Any = {"schedule": "1f1b", "checkpoint": "auto", "reserve": 0}
    limits = (6718971321, 7838799875, 8958628428, 10078456982)
    plans = [solve(profile, 4, memory_limit=limit, **options) for limit in limits]
    assert all(more.value <= less.value for less, more in pairwise(plans))
    for mode in ("always", "except_last", ("except_last", "never", "never", "never")):
        fixed = solve(profile, 4, memory_limit=limits[-1], **{**options, "checkpoint": mode})
        assert plans[-1].value <= fixed.value


FALLING = [{}, {"checkpoint": "auto"}, {"schedule": "1f1b"}]


@pytest.mark.parametrize("options", [*FALLING, {"schedule": "1f1b", "checkpoint": "auto"}])
@pytest.mark.parametrize("seed", range(3))
def test_falling_limits_never_help(seed: int, options: Any) -> None:
    """Each limit is one byte below what the plan under the limit before it needs."""
    profile = waiting(seed, 24)
    limit, values = 10**9, list[float]()
    for _ in range(12):
        try:
            plan = solve(profile, 4, memory_limit=limit, **options)
        except InfeasibleError:
            break
        values.append(plan.value)
        limit = max(part.memory.total for part in plan.partitions) - 1
    assert len(values) > 3
    assert all(one <= other * (1 + 1e-12) for one, other in pairwise(values))


def test_lower_limits_are_those_of_partitions_that_lack(monkeypatch: pytest.MonkeyPatch) -> None:
    """By hand: each search leaves a partition that lacks less room than it had, and no other."""
    profile = waiting(2)
    ends, first = ((5, 50), (12, 56)), len(profile.storages)
    far = [SkipProfile(f"far {k}", *end, (first + k,)) for k, end in enumerate(ends)]
    profile = replace(profile, storages=(*profile.storages, 40, 40), skips=tuple(far))
    asked: list[list[int]] = []
    keeping_free = lower_limits._keeping_free

    def noted(memory: Any, kept: list[int]) -> Any:
        asked.append(list(kept))
        return keeping_free(memory, kept)

    monkeypatch.setattr(lower_limits, "_keeping_free", noted)
    solve(profile, 6, memory_limit=1941)
    assert len(asked) > 1
    assert any(0 in kept for kept in asked)
    assert all(a <= b for one, other in pairwise(asked) for a, b in zip(one, other, strict=True))
    assert all(sum(one) < sum(other) for one, other in pairwise(asked))


def test_memory_is_asked_for_once_where_the_cost_is_ones_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The peaks of all runs from a layer on are made at once."""
    asked: list[tuple[int, int]] = []
    rows = RunMemory.rows

    def counted(self: RunMemory, first: int, partition: int, mode: Any) -> Any:
        asked.append((first, partition))
        return rows(self, first, partition, mode)

    monkeypatch.setattr(RunMemory, "rows", counted)
    profile = gb.Profile.from_costs([1.0] * 12, saved_bytes=[10] * 12, chunks=2)
    question = ask(profile, 3, {"cost": lambda first, end, _: (end - first) ** 2})
    posed = pose(replace(question, limits=10**6, checkpoint="never"))
    found = solved(posed, posed.problem, None)
    assert found is not None and found.balance == [4, 4, 4]
    assert len(asked) == len(set(asked)) <= 12 * 3
