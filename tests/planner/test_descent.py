"""Plans where what waits decides: no small change makes them better, and what is said is true."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import gpipebal as gb
from gpipebal.errors import InfeasibleError
from gpipebal.memory import partition_memory
from gpipebal.memory.partitions import cells_of, memory_of_cells
from gpipebal.planner.execution import Way
from gpipebal.planner.plans import fits, plan_of_way
from gpipebal.planner.posing import Posed, pose
from gpipebal.planner.question import Options, ask
from gpipebal.planner.search import best, descent
from gpipebal.planner.search.descent import Descent
from gpipebal.problem import to_bounds
from gpipebal.profile import SkipProfile
from gpipebal.schedule import CHECKPOINT_MODES, KNOWN_SCHEDULES, order_of
from gpipebal.solvers.deadline import NO_DEADLINE, Deadline

PROFILES = Path(__file__).parents[2] / "profiles"


def skipping(seed: int, n_layers: int = 16, n_skips: int = 3) -> gb.Profile:
    """Make a chain with skips past others, whose waiting depends on all cuts."""
    rng = random.Random(seed)
    profile = gb.Profile.from_costs(
        [rng.randint(1, 9) for _ in range(n_layers)],
        saved_bytes=[rng.choice([10, 80, 200]) for _ in range(n_layers)],
        output_bytes=[rng.choice([5, 20, 60]) for _ in range(n_layers)],
        parameter_bytes=[rng.choice([4, 40]) for _ in range(n_layers)],
        chunks=8,
    )
    storages, skips = list(profile.storages), []
    for k in range(n_skips):
        source = rng.randrange(n_layers - 3)
        destination = rng.randrange(source + 2, n_layers)
        skips.append(SkipProfile(f"skip {k}", source, destination, (len(storages),)))
        storages.append(rng.choice([10, 50, 150]))
    return replace(profile, storages=tuple(storages), skips=tuple(skips))


def posed(profile: gb.Profile, n_partitions: int, **options: Any) -> Posed:
    """Pose a question."""
    return pose(ask(profile, n_partitions, Options(**options)))


def changed(plan: gb.Plan) -> Iterator[tuple[list[int], tuple[str, ...]]]:
    """Yield balances and modes that differ from a plan's by one cut or one mode."""
    bounds, modes = to_bounds(plan.balance), plan.modes
    for k in range(1, len(bounds) - 1):
        for cut in range(bounds[k - 1] + 1, bounds[k + 1]):
            moved = (*bounds[:k], cut, *bounds[k + 1 :])
            yield [b - a for a, b in pairwise(moved)], modes
    for j in range(len(modes)):
        for mode in CHECKPOINT_MODES:
            yield plan.balance, (*modes[:j], mode, *modes[j + 1 :])


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("seed", range(4))
def test_no_change_of_a_plan_has_a_lower_peak(seed: int, schedule: str) -> None:
    """Each change is evaluated by itself, without what the search knows."""
    profile = skipping(seed)
    options: dict[str, Any] = {"chunks": 8, "schedule": schedule}
    plan = gb.solve(profile, 4, objective="peak_memory", checkpoint="auto", **options)
    for balance, modes in changed(plan):
        other = gb.evaluate(profile, balance, checkpoint=modes, **options)
        assert max(part.memory.total for part in other.partitions) >= plan.value


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("seed", range(4))
def test_no_change_of_a_plan_that_fits_is_faster(seed: int, schedule: str) -> None:
    """Under a limit between the least peak and that of the fastest plan."""
    profile = skipping(seed)
    options: dict[str, Any] = {"chunks": 8, "schedule": schedule}
    free = gb.solve(profile, 4, checkpoint="auto", **options)
    least = gb.solve(profile, 4, objective="peak_memory", checkpoint="auto", **options).value
    limit = int(least + (free.peak_bytes - least) // 4)
    plan = gb.solve(profile, 4, checkpoint="auto", memory_limit=limit, reserve=0, **options)
    assert plan.peak_bytes <= limit
    for balance, modes in changed(plan):
        other = gb.evaluate(profile, balance, checkpoint=modes, **options)
        assert other.peak_bytes > limit or other.value >= plan.value * (1 - 1e-12)


@pytest.mark.parametrize("checkpoint", ["never", "except_last", "auto"])
@pytest.mark.parametrize("seed", range(3))
def test_what_is_found_by_peak_is_found_under_that_limit(seed: int, checkpoint: str) -> None:
    """And where one byte is lacking, the error says so."""
    options: dict[str, Any] = {"chunks": 8, "schedule": "1f1b", "checkpoint": checkpoint}
    profile = skipping(seed, 24)
    least = int(gb.solve(profile, 5, objective="peak_memory", **options).value)
    plan = gb.solve(profile, 5, memory_limit=least, reserve=0, **options)
    assert plan.peak_bytes <= least
    with pytest.raises(InfeasibleError, match=r"expected 1 B more") as caught:
        gb.solve(profile, 5, memory_limit=least - 1, reserve=0, **options)
    assert caught.value.shortage == 1
    assert re.search(rf"Fix: .*memory_limit={least}\b", str(caught.value))


@pytest.mark.parametrize("kind", ["one", "each", "own"])
def test_the_last_search_begins_at_the_least_peak(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the limits are of; no change of the plan that is found is faster."""
    options: dict[str, Any] = {"chunks": 8, "schedule": "1f1b", "checkpoint": "auto"}
    profile = skipping(2, 24)
    least = int(gb.solve(profile, 5, objective="peak_memory", **options).value)
    limits = [least + 9, least, least, least, least]
    given: dict[str, dict[str, Any]] = {
        "one": {"memory_limit": least, "reserve": 0},
        "each": {"memory_limit": limits, "reserve": 0},
        "own": {"devices": [gb.Device(memory_limit=limit) for limit in limits]},
    }
    descended, questions = best._descended, list[Posed]()

    def later(asked: Posed, *others: Any) -> gb.Plan | None:
        """Find nothing at first, as if all other searches had been in vain."""
        questions.append(asked)
        return None if len(questions) == 1 else descended(asked, *others)

    monkeypatch.setattr(best, "_descended", later)
    monkeypatch.setattr(best, "_next_best", lambda *_: iter(()))
    plan = gb.solve(profile, 5, **given[kind], **options)
    assert any("least peak" in note for note in plan.notes)
    most = [part.memory_limit for part in plan.partitions]
    for balance, modes in changed(plan):
        other = gb.evaluate(profile, balance, **{**options, "checkpoint": modes})
        peaks = [part.memory.total for part in other.partitions]
        is_over = any(peak > limit for peak, limit in zip(peaks, most, strict=True) if limit)
        assert is_over or other.value >= plan.value * (1 - 1e-12)


def test_bytes_kept_free_are_no_part_of_a_bound() -> None:
    """Searches under lower limits for the least peak have higher bounds, which may be wrong."""
    profile = skipping(6, 20, 5)
    options: dict[str, Any] = {"schedule": "1f1b", "checkpoint": "always", "chunks": 8}
    options["objective"] = "peak_memory"
    free = gb.solve(profile, 4, **options)
    limit = int(free.lower_bound) + 100
    plan = gb.solve(profile, 4, memory_limit=limit, reserve=0, **options)
    assert plan.lower_bound == free.lower_bound


def test_the_shortage_is_the_same_whoever_has_the_limit() -> None:
    """A limit for all, or one that each device has of its own."""
    options: dict[str, Any] = {"chunks": 8, "schedule": "1f1b", "checkpoint": "except_last"}
    profile = skipping(0, 24)
    least = int(gb.solve(profile, 5, objective="peak_memory", **options).value)
    own = [gb.Device(memory_limit=least - 1)] * 5
    with pytest.raises(InfeasibleError, match=r"expected 1 B more") as caught:
        gb.solve(profile, 5, devices=own, **options)
    assert caught.value.shortage == 1


def test_a_measured_u_net_is_planned_no_worse_than_all_its_splits() -> None:
    """Where only all 1,771 splits would tell the least peak, it comes close."""
    profile = gb.Profile.load(PROFILES / "prediction-u-net-rows4-cpu.json")
    options: dict[str, Any] = {"chunks": 8, "schedule": "1f1b", "checkpoint": "except_last"}
    # The least of all, found by going through them.
    assert gb.solve(profile, 4, objective="peak_memory", **options).value <= 3353116 * 1.02


@pytest.mark.parametrize("seed", range(3))
def test_a_standing_is_that_of_the_plan(seed: int) -> None:
    """Cells that were described for other ways give the same peaks."""
    rng = random.Random(seed)
    profile = skipping(seed)
    asked = posed(profile, 4, schedule="1f1b", checkpoint="auto", memory_limit=1)
    search = Descent(asked)
    for _ in range(20):
        cuts = sorted(rng.sample(range(1, 16), 3))
        modes = tuple(rng.choice(CHECKPOINT_MODES) for _ in range(4))
        way = Way((0, *cuts, 16), modes, (0, 1, 2, 3))
        balance = [b - a for a, b in pairwise(way.bounds)]
        plan = gb.evaluate(profile, balance, checkpoint=modes, schedule="1f1b", chunks=8)
        standing = search._standing(way, search._peaks(way))
        assert standing is not None
        assert standing.value == pytest.approx(plan.value, rel=1e-12)
        in_order = sorted((part.memory.total - 1 for part in plan.partitions), reverse=True)
        assert list(standing.over) == in_order


@pytest.mark.parametrize("schedule", [*KNOWN_SCHEDULES])
def test_no_makespan_is_below_its_bound(schedule: str) -> None:
    """Under every schedule, for any cuts and modes."""
    rng = random.Random(len(schedule))
    profile = skipping(1)
    asked = posed(profile, 4, schedule=schedule, chunks=8)
    search = Descent(asked)
    for _ in range(20):
        cuts = sorted(rng.sample(range(1, 16), 3))
        way = Way((0, *cuts, 16), asked.problem.costs.modes(None), (0, 1, 2, 3))
        standing = search._standing(way, [])
        assert standing is not None
        assert search._least_makespan(way) <= standing.value * (1 + 1e-12)


def test_cells_can_be_used_again() -> None:
    """What a cell has been asked under one schedule does not change its answers under another."""
    profile, bounds = skipping(2), (0, 5, 9, 16)
    cells = cells_of(profile, bounds, True, False)
    for schedule, mode, exist in (
        ("1f1b", "never", False),
        ("gpipe", "always", True),
        ("1f1b", "except_last", True),
        ("1f1b", "never", False),
    ):
        known = memory_of_cells(cells, order_of(schedule, 3, 8, mode), gradients_exist=exist)
        assert known == partition_memory(
            profile,
            bounds,
            chunks=8,
            checkpoint=mode,
            schedule=schedule,
            loss_inside=True,
            gradients_exist=exist,
        )


def test_a_search_ends_when_it_has_walked_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """It then returns the best that it has found."""
    asked = posed(skipping(0, 40), 5, schedule="1f1b", objective="peak_memory")
    start = Way((0, 2, 4, 6, 8, 40), ("except_last",) * 5, (0, 1, 2, 3, 4))
    whole = Descent(asked).from_here(start, NO_DEADLINE)
    monkeypatch.setattr(descent, "_MOST_WALKS", 20)
    short = Descent(asked).from_here(start, NO_DEADLINE)
    assert whole is not None
    assert short is not None
    assert whole.standing < short.standing


def test_each_plan_is_given_better_modes(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many have been asked about before."""
    profile = skipping(2, 40, 6)
    options: dict[str, Any] = {"chunks": 8, "checkpoint": "auto", "reserve": 0}
    way = Way((0, 6, 12, 20, 28, 34, 40), ("never",) * 6, tuple(range(6)))
    roomy = plan_of_way(posed(profile, 6, memory_limit=1 << 40, **options), way)
    asked = posed(profile, 6, memory_limit=roomy.peak_bytes - 1, **options)
    plan = plan_of_way(asked, way)
    monkeypatch.setattr(descent, "_MOST_WALKS", 60)
    search = Descent(asked)
    others = [search.with_better_modes(plan) for _ in range(10)]
    assert all(fits(other) for other in others)
    assert len({other.modes for other in others}) == 1


def test_a_cost_of_ones_own_is_asked_for_once() -> None:
    """It may take long; and a run that rules forbid is not asked about."""
    asked: list[tuple[int, int, int]] = []

    def cost(first: int, end: int, partition: int) -> int:
        asked.append((first, end, partition))
        return (end - first) ** 2

    question = posed(skipping(0), 4, cost=cost, memory_limit=1 << 40, no_cut=[5])
    start = Way((0, 1, 2, 3, 16), ("never",) * 4, (0, 1, 2, 3))
    found = Descent(question).from_here(start, NO_DEADLINE)
    assert found is not None
    assert found.standing.value < 13**2
    assert len(asked) == len(set(asked)) > 16
    assert all(5 not in run[:2] for run in asked)


def test_a_way_that_fits_is_good_enough_when_time_is_up() -> None:
    """One that does not is changed whatever the time."""
    options: dict[str, Any] = {"schedule": "1f1b", "checkpoint": "never"}
    start = Way((0, 1, 2, 3, 16), ("never",) * 4, (0, 1, 2, 3))
    late = Deadline(0)
    for limit, is_changed in ((1 << 40, False), (1000, True)):
        question = posed(skipping(0), 4, memory_limit=limit, reserve=0, **options)
        found = Descent(question).from_here(start, late)
        assert found is not None
        assert (found.way != start) is is_changed
