"""Errors of the planner: arguments that must be refused, and fixes that help."""

from __future__ import annotations

import math
import warnings
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

import gpipebal as gb
from gpipebal.errors import (
    BalanceError,
    FileFormatError,
    GpipebalError,
    InfeasibleError,
    KindError,
    ProfileError,
)
from gpipebal.plan import Plan
from gpipebal.planner import recompute_layers

PROFILE = gb.Profile.from_costs([1.0, 2.0, 3.0, 4.0, 5.0, 6.0], chunks=4, saved_bytes=[100] * 6)
PLAN = gb.solve(PROFILE, 2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"checkpoint": [["never"], ["never"]]}, r"checkpoint=\['never'\]"),
        ({"chunks": 4.0}, "impossible value: chunks=4.0"),
        ({"chunks": True}, "chunks"),
        ({"lower_bound": 1.0}, "not proven optimal: status='optimal', lower_bound=1.0"),
        ({"rows": 0}, "rows=0"),
        ({"rows": 2**70}, "impossible value: rows="),
    ],
)
def test_a_damaged_plan_is_not_read(changes: dict[str, Any], message: str) -> None:
    """What would fail later, or print what is not so."""
    with pytest.raises(FileFormatError, match=message):
        Plan.from_dict({**PLAN.to_dict(), **changes})


def test_a_proof_may_be_rounded() -> None:
    """A bound that differs from the value by the rounding of sums is still a proof."""
    near = PLAN.value * (1 - 1e-12)
    assert Plan.from_dict({**PLAN.to_dict(), "lower_bound": near}).status == "optimal"


@pytest.mark.parametrize(
    ("make", "fix"),
    [
        (lambda: gb.solve(gb.Profile.from_costs([3e18] * 2), 1), "give times in seconds"),
        (
            lambda: gb.solve(gb.Profile.from_costs([1.0] * 2), 2, devices=[1e300, 1e-300]),
            "speeds of devices near 1",
        ),
        (
            lambda: gb.solve(gb.Profile.from_costs([1.0] * 2, parameter_bytes=[2**62] * 2), 1),
            "give sizes in bytes",
        ),
    ],
)
def test_costs_of_another_unit_get_a_fix(make: Any, fix: str) -> None:
    """Sums that are no seconds or bytes are due to the unit, and solving again is no help."""
    with pytest.raises(ProfileError, match="too large") as error:
        make()
    assert fix in str(error.value).partition("\nFix: ")[2]


@pytest.mark.parametrize(
    ("n_layers", "rows", "n_devices", "nearest"), [(2, 2, 3, 2), (3, 2, 5, 4), (2, 3, 5, 4)]
)
def test_a_grid_says_which_number_works(
    n_layers: int, rows: int, n_devices: int, nearest: int
) -> None:
    """Where the devices cannot be parted into replicas and partitions."""
    profile = gb.Profile.from_costs([1.0] * n_layers, chunks=rows)
    with pytest.raises(BalanceError, match="no number of replicas has a plan") as error:
        gb.solve_grid(profile, n_devices)
    assert str(error.value).partition("\nFix: ")[2].startswith(f"n_devices={nearest}; or ")
    assert gb.solve_grid(profile, nearest).best.plan is not None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"chunks": []}, "^chunks leave no choice"),
        ({"chunks": "many"}, "^chunks is not a whole number"),
        ({"time_limit": -1}, "^time_limit is not a time"),
        ({"method": "guess"}, "^method does not solve this problem"),
        ({"memory_limit": 10, "reserve": 20}, "^reserve leaves nothing"),
        (
            {"memory_limit": np.array([900, 800])},
            r"^option is one for all .*memory_limit=\[900, 800",
        ),
        ({"devices": np.array([1, 1])}, "^option does not apply to a grid: devices="),
        ({"any_order": True}, "^option does not apply to a grid: any_order=True"),
    ],
)
def test_a_bad_option_of_a_grid_is_told_once(options: dict[str, Any], message: str) -> None:
    """As `solve` tells it, and not for every number of replicas."""
    with pytest.raises(BalanceError, match=message) as error:
        gb.solve_grid(PROFILE, 2, **options)
    assert str(error.value).count("Fix: ") == 1


@pytest.mark.parametrize("name", ["memory_limit", "reserve"])
def test_what_is_said_instead_of_too_many_bytes_works(name: str) -> None:
    """For a limit, and for what is kept free of one: without it there would be another one."""
    options: dict[str, Any] = {"memory_limit": 2**40, name: 2**63}
    with pytest.raises(BalanceError, match=f"^{name} is more than any device has") as error:
        gb.solve(PROFILE, 2, **options)
    advised = str(error.value).partition(f"\nFix: {name}=")[2].split()[0]
    assert gb.solve(PROFILE, 2, **{**options, name: int(advised)})


def test_an_unknown_option_of_a_grid_is_named() -> None:
    """As by the verbs beside it."""
    with pytest.raises(KindError, match="solve_grid has no argument 'memory'") as error:
        gb.solve_grid(PROFILE, 2, memory=1)  # type: ignore[call-arg]
    assert "Fix: memory_limit=" in str(error.value)


def test_a_grid_takes_arrays_and_iterators() -> None:
    """Numbers of micro-batches from numpy; rules that can be gone through once; no wish."""
    assert gb.solve_grid(PROFILE, 2, chunks=np.array([2, 4]), any_order=False).rows
    assert gb.solve_grid(PROFILE, 2, memory_limit=np.array(2**20)).rows  # type: ignore[arg-type]
    table = gb.solve_grid(PROFILE, 4, no_cut=iter([3, 5]))
    assert table == gb.solve_grid(PROFILE, 4, no_cut=[3, 5])


def test_a_grid_without_memory_still_says_what_lacks() -> None:
    """A limit that nothing fits is infeasible, with the limit that would do."""
    with pytest.raises(InfeasibleError, match=r"\nFix: memory_limit=100\.$"):
        gb.solve_grid(PROFILE, 6, memory_limit=10)


@pytest.mark.parametrize(
    ("given", "plain"),
    [
        ({"no_cut": np.array([3, 4])}, {"no_cut": [3, 4]}),
        ({"keep_together": np.array([[3, 5]])}, {"keep_together": [(3, 5)]}),
        ({"pin": {np.int64(3): 0}}, {"pin": {3: 0}}),
    ],
)
def test_rules_take_numbers_of_numpy(given: dict[str, Any], plain: dict[str, Any]) -> None:
    """Layers by their index, in arrays or one by one."""
    assert gb.solve(PROFILE, 2, **given) == gb.solve(PROFILE, 2, **plain)


@pytest.mark.parametrize(
    ("given", "fix"),
    [
        ({"no_cut": np.int64(3)}, "no_cut=[3]."),
        ({"no_cut": np.array(3)}, "no_cut=[3]."),
        ({"keep_together": np.array([3, 5])}, "keep_together=[(3, 5)]."),
    ],
)
def test_rules_of_a_wrong_form_are_refused(given: dict[str, Any], fix: str) -> None:
    """One number where a list is expected, whatever kind it is of."""
    with pytest.raises(BalanceError, match="has the wrong form") as error:
        gb.solve(PROFILE, 2, **given)
    assert str(error.value).endswith(f"Fix: {fix}")


@pytest.mark.parametrize("kind", [Fraction, np.float32, np.float64, np.int8])
def test_costs_may_be_numbers_of_any_kind(kind: Any) -> None:
    """They become a plan like that of plain numbers, without a warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plan = gb.solve(PROFILE, 2, cost=lambda first, end, _: kind(end - first))
    assert plan == gb.solve(PROFILE, 2, cost=lambda first, end, _: end - first)
    assert Plan.from_dict(plan.to_dict()) == plan
    thirds = gb.solve(PROFILE, 2, cost=lambda first, end, _: Fraction(1, 3))
    assert thirds.value == 1 / 3


@pytest.mark.parametrize("huge", [10**400, Fraction(10**400), True, "1"])
def test_costs_that_no_float_can_be_are_refused(huge: Any) -> None:
    """Whatever kind they are of."""
    with pytest.raises(BalanceError, match="cost of a run is not a number"):
        gb.solve(PROFILE, 2, cost=lambda first, end, _: huge)


@pytest.mark.parametrize("answer", [-1, math.nan, "dear", 10**400, None])
def test_nobody_asks_what_forbidden_runs_cost(answer: Any) -> None:
    """Not even for the split into equally many layers, which rules may forbid."""

    def cost(first: int, end: int, partition: int) -> Any:
        return answer if 3 in (first, end) else end - first

    plan = gb.solve(PROFILE, 2, cost=cost, no_cut=[3])
    assert (plan.value, plan.equal_split_value) == (4.0, None)
    if answer is not None:
        with pytest.raises(BalanceError, match="cost of a run is"):
            gb.solve(PROFILE, 2, cost=cost)


def test_a_cost_is_one_however_it_is_made() -> None:
    """An object that can be called may be empty as a list is."""

    class Costs(dict[int, int]):
        def __call__(self, first: int, end: int, partition: int) -> int:
            return self.get(partition, end - first)

    with pytest.raises(BalanceError, match="method does not apply where cost is given"):
        gb.solve(PROFILE, 2, cost=Costs(), method="set sweep")


def test_devices_of_a_simulation_are_a_count() -> None:
    """A float that is a whole number is one; a text is not."""
    plan = gb.solve(PROFILE, 4)
    found = gb.simulate(plan, "interleaved_1f1b", devices=2.0)  # type: ignore[arg-type]
    assert found.makespan == gb.simulate(plan, "interleaved_1f1b", devices=2).makespan
    for devices in ("2", 0, 1.5):
        with pytest.raises(BalanceError, match="devices is"):
            gb.simulate(plan, "interleaved_1f1b", devices=devices)  # type: ignore[arg-type]


def test_counts_of_compared_schedules_are_counts() -> None:
    """One or several, of any kind of whole number."""
    plain = gb.compare_schedules(PROFILE, 2, partitions_per_device=[2, 3])
    assert gb.compare_schedules(PROFILE, 2, partitions_per_device=np.array([2, 3])) == plain
    one = gb.compare_schedules(PROFILE, 2)
    for each in (2.0, np.int64(2), np.array(2)):
        assert gb.compare_schedules(PROFILE, 2.0, partitions_per_device=each) == one  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"partitions_per_device": "2"}, "partitions_per_device is not a whole number"),
        ({"schedules": []}, "schedules leave nothing to compare"),
        ({"chunks": 2**21, "schedules": ("gpipe",)}, "too many micro-batches: chunks=2097152"),
        ({"checkpoint": ["always", "never"]}, "several checkpoint modes are given"),
    ],
)
def test_bad_arguments_of_compared_schedules(options: dict[str, Any], message: str) -> None:
    """They are refused at once, with a fix."""
    with pytest.raises(BalanceError, match=message) as error:
        gb.compare_schedules(PROFILE, 1, **options)
    assert "\nFix: " in str(error.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"memory_limit": 10**6, "time_limit": "x"}, "time_limit is not a time"),
        ({"memory_limit": 10**6, "time_limit": -1}, "time_limit is not a time"),
        ({"memory_limit": 10**6, "time_limit": float("nan")}, "time_limit is not a time"),
        ({"reserve": "1 MiB"}, "reserve is taken off a limit, and none is given"),
        ({"memory_limit": 10**6, "devices": 3}, "devices are not a list"),
    ],
)
def test_bad_arguments_of_layers_to_recompute(options: dict[str, Any], message: str) -> None:
    """As `solve` refuses them."""
    plan = gb.evaluate(PROFILE, [3, 3], checkpoint="never", memory_limit=10**6)
    with pytest.raises(GpipebalError, match=message) as error:
        recompute_layers(PROFILE, plan, **options)
    assert "\nFix: " in str(error.value)
    assert recompute_layers(PROFILE, plan, time_limit=np.float32(2)).status == "optimal"  # type: ignore[arg-type]
