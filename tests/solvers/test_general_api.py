"""What can be asked of the general solvers, how they are chosen, and what they promise."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from types import SimpleNamespace
from typing import Any

import pytest
import scipy.optimize
from hypothesis import given, settings
from oracles import brute_force
from scipy.optimize import milp
from solvers.test_pareto import problems
from solvers.whole_cases import memory_of

from gpipebal.errors import BalanceError, InfeasibleError
from gpipebal.problem import Device, Links, Problem, Rules, layer_memory
from gpipebal.solvers import iter_best_splits, select_method, split
from gpipebal.solvers.filling import paths
from gpipebal.solvers.filling.always import solve_makespan_always

CHAIN: tuple[Any, ...] = ([1, 2, 3, 4], [2, 4, 6, 8], [1, 2, 3, 4])
LINKS = Links([1, 2, 3], [1, 2, 3])
TWO_KINDS = [Device(), Device(slowness=2)]
MEMORY = layer_memory([1] * 4, [1] * 4, [1] * 4, chunks=4)
#: What `scipy.optimize.milp` returns where HiGHS gave up because of its own arithmetic.
FAILED = SimpleNamespace(status=4, x=None, get=lambda name: None)


@pytest.mark.parametrize(
    ("parts", "objective", "method"),
    [
        ({"rules": Rules(no_cut=[2])}, "makespan", "set sweep"),
        ({"rules": Rules(no_cut=[2])}, "bottleneck", "set bisection"),
        ({"checkpoint": "auto"}, "makespan", "set sweep"),
        ({"checkpoint": ["never", "except_last"]}, "makespan", "set sweep"),
        ({"devices": [Device(slowness=3)] * 2}, "makespan", "set sweep"),
        ({"links": LINKS}, "makespan", "box search"),
        ({"links": LINKS}, "bottleneck", "set bisection"),
        ({"devices": TWO_KINDS}, "makespan", "box search"),
        ({"devices": TWO_KINDS, "any_order": True}, "makespan", "box search"),
        ({"checkpoint": ["never", "always"]}, "makespan", "box search"),
        ({"checkpoint": "always", "links": LINKS}, "makespan", "box search"),
        ({"checkpoint": "always", "links": LINKS}, "bottleneck", "set bisection"),
        ({"memory": MEMORY}, "peak_memory", "peak bisection"),
    ],
)
def test_select_method_names_what_split_runs(
    parts: dict[str, Any], objective: Any, method: str
) -> None:
    """The algorithm is known beforehand, and is the one that ran."""
    problem = Problem(*CHAIN, **{"n_partitions": 2, "chunks": 4, **parts})
    assert select_method(problem, objective) == method
    assert split(problem, objective).method == method
    assert split(problem, objective, method) == split(problem, objective)


def test_devices_of_many_kinds_in_any_order_go_to_the_integer_program() -> None:
    """Where there would be too many states, the choice is known beforehand too."""
    devices = [Device(slowness=1 + k / 8) for k in range(13)]
    times = [1] * 14
    problem = Problem(times, times, times, 13, 2, devices=devices, any_order=True)
    assert select_method(problem) == "integer program"
    assert select_method(replace(problem, any_order=False)) == "box search"


def test_integer_program_orders_many_different_devices() -> None:
    """Thirteen devices of as many kinds: the split is allowed, and its bound holds."""
    devices = [Device(slowness=1 + k / 8) for k in range(13)]
    problem = Problem([1] * 14, [0] * 14, [0] * 14, 13, 1, devices=devices, any_order=True)
    found = split(problem, "bottleneck", time_limit=20)
    # Some partition has two layers, and the fastest device should have it.
    assert problem.bottleneck(found.bounds, found.modes, found.order) == found.value == 2.5
    assert sorted(found.order) == list(range(13))
    assert found.lower_bound <= 2.5


def test_box_search_keeps_the_best_split_that_it_met_on_the_way() -> None:
    """A split that is met while a box is tightened counts, though the box then holds others."""
    links = Links([0] * 5, [0, 0, 0, 0, 0.5], overlaps=False)
    zeros, modes = [0] * 6, ["never", "except_last"]
    problem = Problem(zeros, zeros, [0, 0, 0, 1, 1, 0], 2, 2, modes, links=links)
    assert split(problem).value == 1 == problem.makespan((0, 4, 6))


def test_time_limit_returns_the_best_so_far_with_its_bound() -> None:
    """Without time there is still a split that is allowed, and a bound below its value."""
    times = [1 + (37 * k * k) % 11 for k in range(60)]
    links = Links([(k * k) % 7 for k in range(59)], [(k * k) % 5 for k in range(59)])
    devices = [Device(slowness=1 + j % 3) for j in range(6)]
    problem = Problem(times, times, times, 6, 4, devices=devices, links=links)
    hurried, best = split(problem, time_limit=0), split(problem)
    assert best.status == "optimal"
    assert hurried.lower_bound <= best.value <= hurried.value
    assert hurried.value == problem.makespan(hurried.bounds)
    assert 0 <= hurried.gap < 1


def test_integer_program_keeps_its_time_limit() -> None:
    """HiGHS is stopped, and what is known by then is returned with its bound."""
    times = [1 + (37 * k * k) % 11 for k in range(24)]
    problem = Problem(times, times, times, 5, 4, ["always", "never"] * 2 + ["always"])
    found = split(problem, method="integer program", time_limit=0.2)
    assert found.lower_bound <= found.value == problem.makespan(found.bounds, found.modes)


@pytest.mark.parametrize(
    ("time_limit", "is_whole", "most"), [(0.1, False, 0.1), (60.0, True, 59.95), (None, True, None)]
)
def test_highs_is_given_what_it_can_do_before_it_looks_at_the_clock(
    time_limit: float | None, is_whole: bool, most: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With too little time it is the relaxation, whose bound holds; else there is a reserve."""
    times = [1 + (37 * k * k) % 11 for k in range(9)]
    devices = [Device(slowness=1 + j / 8) for j in range(3)]
    problem = Problem(times, times, times, 3, 4, "never", devices, any_order=True)
    asked: list[dict[str, Any]] = []

    def note(*arguments: Any, **options: Any) -> Any:
        asked.append(options)
        return milp(*arguments, **options)

    monkeypatch.setattr("scipy.optimize.milp", note)
    monkeypatch.setattr("gpipebal.solvers.integer_program._BETWEEN_LOOKS", 1e-3)
    found = split(problem, method="integer program", time_limit=time_limit)
    least = split(problem).value
    assert 0 < found.lower_bound <= least <= found.value
    assert found.value == problem.makespan(found.bounds, found.modes, found.order)
    assert len(asked) == 1 and asked[0]["integrality"].any() == is_whole
    assert most is None or asked[0]["options"]["time_limit"] < most
    assert not is_whole or found.value == least


def test_an_integer_program_without_time_does_not_call_a_problem_infeasible(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where HiGHS ends before it has any split, nobody knows whether there is one."""
    devices = [Device(memory_limit=10), Device(memory_limit=100)]
    memory = layer_memory([60, 1], [0, 0], [0, 0], chunks=2)
    problem = Problem(
        [1, 1], [1, 1], [0, 0], 2, 2, "never", devices=devices, any_order=True, memory=memory
    )
    assert split(problem, method="integer program").order == (1, 0)
    late = SimpleNamespace(x=None, status=1, get=lambda name: None)
    monkeypatch.setattr("scipy.optimize.milp", lambda *_, **__: late)
    with pytest.raises(BalanceError, match="no split was found in time: time_limit=0") as raised:
        split(problem, method="integer program", time_limit=0)
    assert not isinstance(raised.value, InfeasibleError)
    assert "\nFix: a larger time_limit" in str(raised.value)
    # Nor does it speak of time where HiGHS failed for other reasons.
    monkeypatch.setattr("scipy.optimize.milp", lambda *_, **__: FAILED)
    with pytest.raises(BalanceError, match="no split was found: HiGHS gave up") as raised:
        split(problem, method="integer program", time_limit=60)
    assert not isinstance(raised.value, InfeasibleError)


@pytest.mark.parametrize("largest", [10**9, 1e9])
def test_integer_program_bound_holds_where_the_first_split_is_far_off(largest: float) -> None:
    """A first split a thousand million times too slow spoils neither the value nor its bound."""
    other = Device(1, None, [0, 0], [0, 0], [0, 0])
    problem = Problem(
        [0, 0], [0, 1], [largest, 0], 2, 1, "always", devices=[Device(), other], any_order=True
    )
    found = split(problem)
    assert found.value == 1
    assert 1 - 1e-5 <= found.lower_bound <= 1


def test_an_integer_program_that_is_too_large_is_refused() -> None:
    """More runs than HiGHS is asked to choose from are refused before it is asked."""
    times = [1] * 400
    problem = Problem(times, times, times, 6, 4, ["always", *["never"] * 5])
    assert select_method(problem) == "box search"
    with pytest.raises(BalanceError, match=r"is too large: more than \d+ runs") as raised:
        split(problem, method="integer program")
    assert "\nFix: method='auto'; or fewer layers" in str(raised.value)
    assert split(problem).method == "box search"


def test_order_names_each_device_once() -> None:
    """In any order, the slow device gets the light layers, and each device one partition."""
    problem = Problem(
        [8, 1, 8],
        [0] * 3,
        [0] * 3,
        3,
        1,
        devices=[Device(slowness=4), Device(), Device()],
        any_order=True,
    )
    found = split(problem, "bottleneck")
    assert (found.value, found.order[1]) == (8, 0)
    assert sorted(found.order) == [0, 1, 2]


def test_many_equal_devices_in_any_order_are_few_states() -> None:
    """Eight and eight devices of two kinds are solved exactly; any order is no worse than one."""
    times = [1 + (37 * k * k) % 11 for k in range(48)]
    devices = [Device(), Device(slowness=2)] * 8
    problem = Problem(times, times, times, 16, 4, devices=devices, any_order=True)
    free = split(problem, "bottleneck")
    fixed = split(replace(problem, any_order=False), "bottleneck")
    assert free.status == "optimal"
    assert free.value <= fixed.value
    assert problem.bottleneck(free.bounds, free.modes, free.order) == free.value


def test_peak_memory_names_each_device_once() -> None:
    """Devices whose limits differ are still told apart where the least peak is below both."""
    devices = [Device(memory_limit=50), Device(memory_limit=90)]
    problem = Problem(*CHAIN, 2, 4, devices=devices, memory=MEMORY, any_order=True)
    assert sorted(split(problem, "peak_memory").order) == [0, 1]


@pytest.mark.parametrize("failures", [0, 1])
def test_a_program_that_highs_fails_at_is_tried_at_another_scale(
    failures: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """HiGHS ends some programs of very long and very short times with an error of its own."""
    failed: list[bool] = []

    def fail(*arguments: Any, **options: Any) -> Any:
        if len(failed) < failures:
            failed.append(True)
            return FAILED
        return milp(*arguments, **options)

    monkeypatch.setattr(scipy.optimize, "milp", fail)
    problem = Problem(
        (0, 25, 4),
        (10**9, 0, 1),
        (10**9, 0, 0),
        3,
        chunks=4,
        checkpoint=("except_last", "always", "never"),
        devices=[Device()] * 3,
        links=Links((1, 2), (0, 0), overlaps=False),
    )
    found = split(problem, "makespan", "integer program")
    assert found.value == 7_000_000_120
    assert (1 - 2e-6) * found.value <= found.lower_bound <= found.value
    monkeypatch.setattr(scipy.optimize, "milp", lambda *_, **__: FAILED)
    assert split(problem, "makespan", "integer program").lower_bound == 0


def test_modes_are_chosen_only_where_memory_demands_it() -> None:
    """With room for all graphs nothing is recomputed; with less, no more than must be."""
    times = [4, 4, 4, 4]
    modes = []
    for limit in (400, 250, 130):
        memory = layer_memory([0] * 4, [10, 10, 50, 50], [1] * 4, chunks=4)
        devices = [Device(memory_limit=limit)] * 2
        problem = Problem(times, times, times, 2, 4, "auto", devices=devices, memory=memory)
        modes.append(split(problem).modes)
    assert modes == [("never", "never"), ("never", "except_last"), ("never", "except_last")]


def test_recomputing_all_is_chosen_only_where_nothing_else_fits() -> None:
    """A partition whose last graph does not fit beside the rest recomputes that one too."""
    need = {"never": 9, "except_last": 8, "always": 5}
    memory = memory_of(lambda first, end, j, mode: need[mode] * (end - first), 4, "all")
    for limit, mode in ((18, "never"), (16, "except_last"), (10, "always")):
        devices = [Device(memory_limit=limit)] * 2
        problem = Problem([4] * 4, [8] * 4, [4] * 4, 2, 4, "auto", devices=devices, memory=memory)
        found = split(problem)
        assert (found.modes, found.status, found.balance) == ((mode,) * 2, "optimal", [2, 2])
    # Sums: 4 * 12, 3 times a forward and a backward with recompute, and the last recompute.
    assert found.value == 48 + 3 * (8 + 24) + 8


def test_what_has_no_next_best_is_refused() -> None:
    """Where no solver can be asked again, the error says so, and its fix works."""
    problem = Problem(*CHAIN, 2, 4, "always")
    with pytest.raises(BalanceError, match=r"next best splits cannot be found: .*'always'"):
        iter_best_splits(problem)
    peaks = replace(problem, memory=memory_of(lambda first, end, j, mode: 1, 3, "all"))
    with pytest.raises(BalanceError, match=r"Fix: objective='bottleneck'\.$"):
        iter_best_splits(peaks, "peak_memory")
    assert len(list(islice(iter_best_splits(problem, "bottleneck"), 2))) == 2
    assert len(list(iter_best_splits(replace(problem, checkpoint="except_last")))) == 3


@settings(max_examples=150, deadline=None)
@given(problems())
def test_without_squares_value_and_bottleneck_stay_exact(problem: Problem) -> None:
    """Where evenness would cost too much, makespan and bottleneck are still the least."""
    value, bounds = brute_force(problem, "makespan")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(paths, "_MOST_LABELS", 0)
        found = solve_makespan_always(problem)
    assert found.value == problem.exact_makespan(found.bounds) == value * problem.scale
    assert problem.exact_bottleneck(found.bounds) == problem.exact_bottleneck(bounds)


def test_the_greedy_trap_is_none() -> None:
    """A slow device between fast ones: filling the first one up leaves it too much."""
    devices = [Device(), Device(slowness=10), Device()]
    problem = Problem([1, 1, 100, 1], [0] * 4, [0] * 4, 3, devices=devices)
    found = split(problem, "bottleneck")
    assert (found.value, found.balance) == (101, [1, 1, 2])


def test_links_that_overlap_limit_and_are_no_partition_time() -> None:
    """By hand: all splits that keep the link's 17 are as good; those of layers are ranked."""
    links = Links([0, 17, 0], [0, 0, 0], overlaps=True)
    zeros = [0] * 4
    problem = Problem([1, 2, 4, 9], zeros, zeros, 3, 1, "never", links=links)
    # With the cut behind layer 1, the value is 17; without it there is (0, 1, 3, 4) with 9.
    assert split(problem, "bottleneck").bounds == (0, 1, 3, 4)
    links = Links([17, 17, 17, 17], [0] * 4, overlaps=True)
    problem = Problem([1, 2, 4, 3, 9], [0] * 5, [0] * 5, 3, 1, "never", links=links)
    found = split(problem, "bottleneck")
    assert (found.value, found.bounds, found.method) == (17, (0, 2, 4, 5), "set bisection")
