"""Arguments of the planner that make no sense: one error that says the fix, before any work."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

import gpipebal as gb
from gpipebal.errors import BalanceError, DeviceError, GpipebalError, KindError, ProfileError
from gpipebal.planner import evaluate, recompute_layers
from gpipebal.problem import Rules
from gpipebal.rates import DeviceRates
from gpipebal.schedule import make_schedule
from gpipebal.simulator import Durations, place

pytestmark = pytest.mark.timeout(60)

PROFILE = gb.Profile.from_costs([1.0, 2.0, 3.0], chunks=4)
PLAN = gb.solve(PROFILE, 2)
TWICE = gb.Profile.from_costs([1.0] * 3, names=["a", "a", "b"])
TWO = (torch.tensor([1, 2]), np.array([1, 2]))
anything: Any = object()

#: Calls, the error and what it says.
CALLS: dict[str, tuple[Any, type[GpipebalError], str]] = {
    "balance": (lambda: evaluate(PROFILE, 2), BalanceError, "balance=[3]"),  # type: ignore[arg-type]
    "text": (lambda: evaluate(PROFILE, "21"), BalanceError, "balance=[3]"),  # type: ignore[arg-type]
    "costs": (lambda: gb.balance_cost(3, 2), BalanceError, "balance_cost([1, 2, 3], 2)"),  # type: ignore[arg-type]
    "plan": (
        lambda: recompute_layers(PROFILE, "plan.json"),  # type: ignore[arg-type]
        KindError,
        "plan = Plan.load('plan.json')",
    ),
    "profile": (lambda: recompute_layers(PLAN, PLAN), KindError, "profile is not a Profile"),  # type: ignore[arg-type]
    "rates": (lambda: DeviceRates("own", 1e12, 1e9), DeviceError, "{'float32': 1e12}"),  # type: ignore[arg-type]
    "no list": (lambda: gb.Profile.from_costs(3), ProfileError, "not a list: forward=3"),  # type: ignore[arg-type]
    "no number": (
        lambda: gb.Profile.from_costs([anything]),
        ProfileError,
        "forward[0] is a object",
    ),
    "names": (
        lambda: gb.Profile.from_costs([1, 2], names=3),  # type: ignore[arg-type]
        ProfileError,
        "not a list: names=3",
    ),
    "chunks of costs": (
        lambda: gb.Profile.from_costs([1], chunks={}),  # type: ignore[arg-type]
        ProfileError,
        "chunks={}",
    ),
    "nothing to keep": (
        lambda: gb.solve(PROFILE, 2, keep_together=[None]),  # type: ignore[list-item]
        BalanceError,
        "keep_together=[('0', '1')]",
    ),
    "many chunks": (lambda: gb.solve(PROFILE, 2, chunks=10**30), BalanceError, "at most 1048576"),
    "many chunks of a balance": (
        lambda: evaluate(PROFILE, [1, 2], chunks=10**30),
        BalanceError,
        "at most 1048576",
    ),
    "many devices": (lambda: gb.solve_grid(PROFILE, 10**30), BalanceError, "Fix: n_devices=12"),
    "partitions of a grid": (
        lambda: gb.solve_grid(PROFILE, 4, partitions=2),
        BalanceError,
        "Fix: leave it out, or solve(profile, 2) for one number",
    ),
    "option of top_plans": (
        lambda: gb.top_plans(PROFILE, 2, 2, memory_limits=1),
        KindError,
        "no argument 'memory_limits'",
    ),
    "option of select_method": (
        lambda: gb.select_method(PROFILE, 2, chunk=2),
        KindError,
        "Fix: chunks=...",
    ),
    "option of compare_rules": (
        lambda: gb.compare_rules(PROFILE, PLAN, chunks=9),
        KindError,
        "expected one of 'devices', 'link', 'quantile'",
    ),
    "patience": (
        lambda: gb.compare_rules(PROFILE, PLAN, patience="a"),  # type: ignore[arg-type]
        BalanceError,
        "patience='a'",
    ),
    "link of replicas": (
        lambda: gb.solve_grid(PROFILE, 2, replica_link=3),  # type: ignore[arg-type]
        BalanceError,
        "replica_link=Link(bandwidth=16e9)",
    ),
    "durations": (
        lambda: gb.simulate(PLAN, durations=3),  # type: ignore[arg-type]
        KindError,
        "durations is not a Durations",
    ),
    "overlap": (lambda: gb.simulate(PLAN, overlap=3), BalanceError, "Fix: overlap=True"),  # type: ignore[arg-type]
    "bandwidth": (
        lambda: gb.compare_schedules(PROFILE, 2, bandwidth="a"),  # type: ignore[arg-type]
        BalanceError,
        "bandwidth is not above 0",
    ),
    "rules": (lambda: Rules(no_cut=3), BalanceError, "no_cut is not a list: no_cut=3"),  # type: ignore[arg-type]
    "a name of two layers": (
        lambda: gb.solve(TWICE, 2, pin={"a": 0}),
        BalanceError,
        "layers 0, 1 have it",
    ),
    "a name that no file can hold": (
        lambda: gb.Profile.from_costs([1.0], names=["\ud800"]),
        ProfileError,
        "name is not a text: names[0]='\\ud800'",
    ),
    "a flag of the profiler": (
        lambda: gb.profile_model(torch.nn.Sequential(), torch.ones(1), one_at_a_time=3),  # type: ignore[arg-type]
        BalanceError,
        "Fix: one_at_a_time=True",
    ),
    **{
        f"{type(two).__name__} of partitions": (
            lambda two=two: gb.solve(PROFILE, two),
            BalanceError,
            "partitions is not a whole number",
        )
        for two in TWO
    },
    **{
        name: (
            lambda name=name: gb.solve(PROFILE, 2, **{name: "no"}),
            BalanceError,
            f"Fix: {name}=True or {name}=False",
        )
        for name in ("any_order", "loss_inside", "shared_memory", "gradients_exist")
    },
}


@pytest.mark.parametrize("name", CALLS)
def test_what_makes_no_sense_is_refused(name: str) -> None:
    """By its own name, with what to do instead."""
    call, kind, says = CALLS[name]
    with pytest.raises(kind) as refused:
        call()
    assert says in str(refused.value)
    assert "Fix: " in str(refused.value)


@pytest.mark.parametrize("two", [torch.tensor(2), np.int64(2), 2.0, np.array(2)])
def test_numbers_of_any_kind_are_taken(two: Any) -> None:
    """Numbers of micro-batches as an array too."""
    assert gb.solve(PROFILE, two) == PLAN
    assert gb.solve(PROFILE, 2, chunks=np.array([4])) == PLAN
    assert gb.solve(PROFILE, 2, loss_inside=np.bool_(False)) == PLAN  # type: ignore[arg-type]
    for limits in (np.array([2**30, 2**31]), torch.tensor([2**30, 2**31]), np.array(2**30)):
        plan = gb.solve(PROFILE, 2, memory_limit=limits)  # type: ignore[arg-type]
        assert plan == gb.solve(PROFILE, 2, memory_limit=limits.tolist())


def test_advice_to_a_grid_is_in_its_words() -> None:
    """More partitions for a replica are more devices, and these have been seen to do."""
    profile = gb.Profile.from_costs(
        [1.0] * 8,
        saved_bytes=[100] * 8,
        parameter_bytes=[50] * 8,
        output_bytes=[1] * 8,
        rows=2,
        chunks=4,
    )
    options: Any = {"memory_limit": 500, "checkpoint": "never"}
    with pytest.raises(BalanceError) as refused:
        gb.solve_grid(profile, 4, **options)
    text = str(refused.value)
    assert "partitions=" not in text
    for replicas, devices in ((1, 8), (2, 16), (4, 12)):
        assert f"n_devices={devices}" in text
        row = next(
            row
            for row in gb.solve_grid(profile, devices, **options).rows
            if row.replicas == replicas
        )
        assert row.plan is not None


def test_costs_of_any_kind() -> None:
    """Arrays, columns of tables in their order, views and fractions are lists of numbers."""
    plain = gb.Profile.from_costs([1.0, 2.0], parameter_bytes=[4, 8], names=["a", "b"])
    column = pd.Series([1.0, 2.0], index=[1, 0])
    sizes = np.array([4, 8])
    for times in (column, {"a": 1.0, "b": 2.0}.values(), np.array([1, 2]), [Fraction(1), 2]):
        found = gb.Profile.from_costs(times, parameter_bytes=sizes, names=["a", "b"])
        assert found.layers == plain.layers
    assert gb.Profile.from_costs([1, 2], names=[0, 1]).names == ("0", "1")  # type: ignore[list-item]


def test_numbers_for_flags() -> None:
    """As files have them; other numbers are none."""
    assert gb.solve(PROFILE, 2, any_order=0, loss_inside=0) == PLAN  # type: ignore[arg-type]
    assert gb.solve(PROFILE, 2, any_order=None) == PLAN  # type: ignore[arg-type]
    with pytest.raises(BalanceError, match="neither true nor false: any_order=''"):
        gb.solve(PROFILE, 2, any_order="")  # type: ignore[arg-type]
    with pytest.raises(BalanceError, match="neither true nor false: shared_memory=2"):
        gb.solve(PROFILE, 2, shared_memory=2)  # type: ignore[arg-type]
    times = Durations.of_plan(PLAN)
    for flag in ("overlap", "late_recompute"):
        with pytest.raises(BalanceError, match=f"neither true nor false: {flag}='no'"):
            place(make_schedule("gpipe", 2, 2), times, **{flag: "no"})  # type: ignore[arg-type]
        with pytest.raises(BalanceError, match=f"neither true nor false: {flag}='no'"):
            gb.simulate(PLAN, **{flag: "no"})  # type: ignore[arg-type]
