"""What cannot be split says which partition lacks how much, and its advice is tried here."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from oracles import all_bounds
from solvers.whole_cases import whole_problems
from solvers.whole_oracle import candidates

from gpipebal.errors import InfeasibleError
from gpipebal.problem import Device, Memory, Problem, Rules, layer_memory
from gpipebal.solvers import explain_infeasible, split

TIMES: tuple[Any, ...] = ([1, 2, 3, 4], [2, 4, 6, 8], [1, 2, 3, 4])


def _tight(limit: int, checkpoint: Any = "never", **parts: Any) -> Problem:
    """Make a problem of four layers in two partitions with little memory."""
    memory = layer_memory([0] * 4, [10, 20, 30, 40], [5, 5, 5, 5], chunks=4)
    devices = [Device(memory_limit=limit)] * 2
    return Problem(*TIMES, 2, 4, checkpoint, devices=devices, memory=memory, **parts)


def test_error_names_partition_shortage_and_what_fits() -> None:
    """The text has the partition that lacks most, the bytes, and every change that helps."""
    with pytest.raises(InfeasibleError) as raised:
        split(_tight(200))
    assert str(raised.value) == (
        "partition 0 does not fit its device: memory_limit=200 (expected 240 or more, in the split "
        "that lacks least: layers 0 to 2 need 240 B, the limit is 200 B).\n"
        "Fix: checkpoint='auto'; or checkpoint='except_last'; or checkpoint='always'; or "
        "3 partitions; or 40 B more on every device (memory_limit=240)."
    )
    assert (raised.value.partition, raised.value.shortage) == (0, 40)


@pytest.mark.parametrize("checkpoint", ["auto", "except_last", "always"])
def test_suggested_modes_fit(checkpoint: str) -> None:
    """Each mode that the error suggests has a split."""
    assert split(_tight(200, checkpoint)).bounds


def test_suggested_number_of_partitions_fits() -> None:
    """As many partitions as the error suggests have a split, with devices like those there are."""
    problem = _tight(200)
    assert problem.devices is not None
    more = replace(problem, n_partitions=3, devices=[problem.devices[0]] * 3)
    assert split(more).status == "optimal"


def test_rules_that_leave_no_split_are_named() -> None:
    """Where rules are the reason, each that can be dropped or loosened is named, and that helps."""
    problem = Problem(*TIMES, 2, rules=Rules(no_cut=[2], max_layers=2))
    with pytest.raises(InfeasibleError) as raised:
        split(problem)
    assert str(raised.value) == (
        "rules leave no split into 2 partitions: 1 place without a cut, max_layers=2 (expected a "
        "split of 4 layers that keeps them).\n"
        "Fix: without no_cut; or without max_layers; or max_layers=3."
    )
    assert split(replace(problem, rules=Rules(no_cut=[2], max_layers=3))).balance == [3, 1]
    assert split(replace(problem, rules=Rules(no_cut=[2]))).status == "optimal"
    assert split(replace(problem, rules=Rules(max_layers=2))).balance == [2, 2]
    assert raised.value.partition is None


@settings(max_examples=50, deadline=None, suppress_health_check=list(HealthCheck))
@given(whole_problems(largest=5))
def test_shortage_is_the_least_and_its_advice_is_true(problem: Problem) -> None:
    """With the shortage added to every limit there is a split, and with one byte less none."""
    assume(problem.devices is not None and not any(candidates(problem)))
    error = explain_infeasible(problem)
    if error.shortage is None:
        unlimited = [replace(d, memory_limit=None) for d in problem.devices or ()]
        assert not any(candidates(replace(problem, devices=unlimited)))
        return
    for more, fits in ((error.shortage, True), (error.shortage - 1, False)):
        devices = [
            d if d.memory_limit is None else replace(d, memory_limit=d.memory_limit + more)
            for d in problem.devices or ()
        ]
        assert any(candidates(replace(problem, devices=devices))) == fits
    for mode in re.findall(r"checkpoint='(\w+)'", str(error)):
        assert any(candidates(replace(problem, checkpoint=mode)))


@pytest.mark.parametrize(
    ("size", "words"), [(1, "40 B more"), (30_775, "1.17 MiB (+1231000 bytes) more")]
)
def test_more_memory_on_devices_of_different_limits_is_told_exactly(size: int, words: str) -> None:
    """What a size in three digits leaves out might be what is lacking."""
    memory = layer_memory([0] * 4, [10 * size, 20 * size, 30 * size, 40 * size], [0] * 4, chunks=4)
    devices = [Device(memory_limit=200 * size), Device(memory_limit=120 * size)]
    problem = Problem([1] * 4, [1] * 4, [1] * 4, 2, 4, "never", devices, memory=memory)
    error = explain_infeasible(problem)
    assert f"; or {words} on every device." in str(error)
    assert error.shortage == 40 * size
    more = [Device(memory_limit=device.memory_limit + 40 * size) for device in devices]
    assert split(replace(problem, devices=more)).status == "optimal"


def test_the_partition_that_lacks_most_is_named_whatever_others_need() -> None:
    """By hand: cut behind layer 2, partition 0 needs 240 bytes and lacks 5, partition 1 160."""
    memory = layer_memory([0] * 4, [10, 20, 30, 40], [0] * 4, chunks=4)
    devices = [Device(memory_limit=235), Device(memory_limit=100)]
    error = explain_infeasible(Problem(*TIMES, 2, 4, "never", devices, memory=memory))
    assert (error.partition, error.shortage) == (1, 60)
    assert "partition 1 does not fit its device: memory_limit=100 (expected 160 or" in str(error)


def test_a_limit_that_just_fits_is_kept() -> None:
    """The split uses no more than the limit, where one byte less would not do."""
    problem = _tight(240)
    bounds = split(problem).bounds
    saved = [10, 20, 30, 40]
    peaks = [4 * sum(saved[start:end]) for start, end in pairwise(bounds)]
    least = min(
        max(4 * sum(saved[start:end]) for start, end in pairwise(one)) for one in all_bounds(4, 2)
    )
    assert max(peaks) == least == 240


@pytest.mark.parametrize("objective", ["makespan", "bottleneck", "peak_memory"])
@pytest.mark.parametrize("limit", [100, None])
@pytest.mark.parametrize("rules", [None, Rules(), Rules(max_layers=2), Rules(no_cut=[1])])
@pytest.mark.parametrize("peaks", [[1], []])
def test_rows_that_leave_out_too_much_are_named(
    peaks: list[int], rules: Rules | None, limit: int | None, objective: Any
) -> None:
    """A list of peaks may end early: that is no rule, and no error of numpy's."""
    memory = Memory(lambda first, partition, mode: peaks, alike="all")
    devices = [Device(memory_limit=limit)] * 2
    times = [1] * 3, [1] * 3, [0] * 3
    problem = Problem(*times, 2, devices=devices, memory=memory, rules=rules)
    if limit is None and objective != "peak_memory":
        assert split(problem, objective).status == "optimal"
        return
    fix = "another number of partitions; or longer rows"
    if limit and peaks and (rules is None or not rules.uncut):
        fix = "3 partitions"  # of one layer each
    with pytest.raises(InfeasibleError, match=f"^memory leaves no split.*\nFix: {fix}\\.$"):
        split(problem, objective)
