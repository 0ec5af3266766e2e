"""Requests that no plan meets: what the error says is true, and its advice works."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from plan_oracle import MODES, all_plans, profiles
from planner.test_descent import skipping
from planner.test_solve_chunks import sized

import gpipebal as gb
from gpipebal.errors import InfeasibleError
from gpipebal.planner import advice as planner_advice
from gpipebal.planner import shortage, solve, top_plans
from gpipebal.planner.search import best
from gpipebal.problem import Device
from gpipebal.profile import SkipProfile
from gpipebal.solvers.deadline import Deadline

SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large]


def apply(advice: str, options: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of `solve` with a piece of advice followed."""
    changed = dict(options)
    if advice.startswith("without "):
        del changed[advice.removeprefix("without ")]
        return changed
    return {**changed, **eval(f"dict({advice.partition(' (and ')[0]})")}


def advice_of(error: InfeasibleError) -> list[str]:
    """Return the pieces of advice in an error."""
    return str(error).split("\nFix: ")[1].rstrip(".").split("; or ")


def follow_all(profile: gb.Profile, options: dict[str, Any]) -> list[str]:
    """Follow every piece of advice by itself, and return them."""
    with pytest.raises(InfeasibleError) as raised:
        solve(profile, **options)
    pieces = advice_of(raised.value)
    for advice in pieces:
        if "=" in advice or advice.startswith("without "):
            plan = solve(profile, **apply(advice, options))
            assert all(
                part.memory_limit is None or part.memory.total <= part.memory_limit
                for part in plan.partitions
            )
    return pieces


def test_a_forward_that_takes_no_time_keeps_no_output_for_the_recompute() -> None:
    """The caller's loss is between the two: one byte less is what the error says is lacking."""
    profile = gb.Profile.from_costs([1.0, 0.0], saved_bytes=[100, 0], output_bytes=[4, 0])
    plan = solve(profile, 2, checkpoint="always", memory_limit=104)
    assert plan.partitions[0].memory.total == 104
    with pytest.raises(InfeasibleError) as raised:
        solve(profile, 2, checkpoint="always", memory_limit=103)
    assert raised.value.shortage == 1


def test_all_kinds_of_advice_are_given_and_work() -> None:
    """Another mode, more micro-batches, more partitions, more memory."""
    profile = sized([1.0] * 6, [1.0] * 6)
    pieces = follow_all(profile, {"partitions": 2, "memory_limit": 3000, "checkpoint": "never"})
    assert pieces[:3] == ["checkpoint='auto'", "checkpoint='except_last'", "checkpoint='always'"]
    pieces = follow_all(
        profile, {"partitions": 2, "memory_limit": 1450, "checkpoint": "except_last"}
    )
    assert any(re.fullmatch(r"chunks=\d+", advice) for advice in pieces)
    plain = gb.Profile.from_costs([1.0] * 6, parameter_bytes=[100] * 6)
    pieces = follow_all(plain, {"partitions": 2, "memory_limit": 500})
    assert pieces == ["partitions=3", "memory_limit=600"]
    pieces = follow_all(profile, {"partitions": 2, "memory_limit": 1000, "checkpoint": "always"})
    assert any(re.fullmatch(r"memory_limit=\d+", advice) for advice in pieces)


@pytest.mark.parametrize(
    ("limit", "changes"),
    [
        (2550, "checkpoint='auto', loss_inside=True, schedule='1f1b'"),
        (2250, "checkpoint='auto', loss_inside=True, partitions=3"),
        (1450, "checkpoint='auto', loss_inside=True, schedule='1f1b', partitions=4"),
    ],
)
def test_where_no_single_change_helps_several_do(limit: int, changes: str) -> None:
    """The mildest that help together are one piece of advice, before more memory."""
    profile = gb.Profile.from_costs(
        [1.0] * 4,
        output_bytes=[10, 10, 10, 100],
        saved_bytes=[100] * 4,
        parameter_bytes=[500] * 4,
        chunks=8,
    )
    options = {"partitions": 2, "memory_limit": limit, "checkpoint": "never"}
    train = " (and train with pipe.step)"
    assert follow_all(profile, options) == [f"{changes}{train}", "memory_limit=5090"]
    options["memory_limit"] = 1400
    assert follow_all(profile, options) == ["memory_limit=5090"]


def test_several_changes_may_be_more_micro_batches_too() -> None:
    """Smaller micro-batches need less of every partition, with a loss for each of them."""
    profile = sized([1.0] * 6, [1.0] * 6)
    options: dict[str, Any] = {"partitions": 2, "memory_limit": 650, "checkpoint": "never"}
    advice, _ = follow_all(profile, options)
    assert "loss_inside=True" in advice and "chunks=" in advice


@pytest.mark.parametrize("n_asked", range(8))
def test_advice_is_looked_for_no_longer_than_the_time_limit(
    n_asked: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was found by then is said, and that there may be more; with enough time all is found."""
    plain = gb.Profile.from_costs([1.0] * 6, parameter_bytes=[100] * 6)
    options: dict[str, Any] = {"partitions": 2, "memory_limit": 750, "reserve": 200}
    everything = follow_all(plain, {**options, "time_limit": 60})
    assert everything == ["partitions=3", "reserve=150", "memory_limit=800"]
    # Time is up when so many changes have been asked about.
    looks = iter([False] * n_asked + [True] * 100)

    class Counted(Deadline):
        @property
        def is_up(self) -> bool:
            assert self.time_limit == 60
            return next(looks)

    monkeypatch.setattr(planner_advice, "Deadline", Counted)
    with pytest.raises(InfeasibleError) as raised:
        solve(plain, time_limit=60, **options)
    *found, late = advice_of(raised.value)
    assert late == f"more time to see what {'else ' * bool(found)}helps (time_limit=60 was given)"
    assert set(found) <= set(everything) and (found or n_asked < 1)


def test_rules_that_leave_nothing_keep_the_time_limit_too() -> None:
    """Fewer partitions are looked for one after the other."""
    profile = gb.Profile.from_costs([1.0] * 30)
    options: dict[str, Any] = {"partitions": 20, "no_cut": range(1, 30)}
    assert follow_all(profile, {**options, "time_limit": 60}) == ["without no_cut", "partitions=1"]
    with pytest.raises(InfeasibleError) as raised:
        solve(profile, time_limit=0, **options)
    assert advice_of(raised.value) == ["more time to see what helps (time_limit=0 was given)"]


def test_large_outputs_need_not_exist_together() -> None:
    """Where the outputs of a mini-batch are too much, a loss for each micro-batch is advised."""
    profile = gb.Profile.from_costs(
        [1.0] * 4, output_bytes=[10, 10, 10, 1000], saved_bytes=[10] * 4, chunks=8
    )
    options = {"partitions": 2, "memory_limit": 9000}
    assert "loss_inside=True (and train with pipe.step)" in follow_all(profile, options)
    assert "loss_inside" not in str(
        follow_all(profile, {**options, "loss_inside": True, "memory_limit": 100})
    )


def test_the_error_names_partition_and_shortage() -> None:
    """By hand: two layers of 100 bytes and their gradients, on devices of 150 bytes."""
    profile = gb.Profile.from_costs([1.0, 1.0], parameter_bytes=[100, 60])
    with pytest.raises(InfeasibleError) as raised:
        solve(profile, 2, memory_limit=150)
    assert str(raised.value) == (
        "partition 0 does not fit its device: memory_limit=150 (expected 50 B more). The closest "
        "split gives it layer 0: it needs 200 B, and 150 B may be used.\n"
        "Fix: memory_limit=200."
    )
    assert (raised.value.partition, raised.value.shortage) == (0, 50)


@pytest.mark.parametrize("limit", [125, 319])
def test_the_shortage_is_the_least_where_waiting_decides(limit: int) -> None:
    """Of few splits it is known what waits in their steps; not all that might waits there."""
    profile = gb.Profile.from_costs(
        [3, 7, 4, 5, 1],
        saved_bytes=[30, 10, 90, 0, 10],
        output_bytes=[10, 40, 50, 20, 50],
        parameter_bytes=[60, 90, 60, 50, 50],
        chunks=1,
    )
    options: dict[str, Any] = {"checkpoint": "always", "schedule": "1f1b"}
    text = r"needs 320 B(.|\n)*Fix: (.*; or )?memory_limit=320"
    with pytest.raises(InfeasibleError, match=text) as raised:
        solve(profile, 3, memory_limit=limit, **options)
    assert raised.value.shortage == 320 - limit
    assert solve(profile, 3, memory_limit=320, **options).balance == [2, 1, 2]


def test_a_reserve_counts_and_can_be_given_up() -> None:
    """What the reserve takes off is what is missing: a smaller one is advised, and suffices."""
    profile = gb.Profile.from_costs([1.0, 1.0], parameter_bytes=[2**30, 2**30])
    gpu = replace(profile, provenance={"device_type": "cuda"})
    limit = 2**31 + 2**20
    pieces = follow_all(gpu, {"partitions": 2, "memory_limit": limit})
    assert f"reserve={2**20}" in pieces
    assert pieces[-1].startswith("memory_limit=")


def test_rules_that_stand_in_the_way_are_named() -> None:
    """If dropping a rule makes room, that is advised, and works."""
    profile = gb.Profile.from_costs([1.0] * 4, parameter_bytes=[100, 10, 10, 100])
    pieces = follow_all(
        profile, {"partitions": 2, "memory_limit": 230, "no_cut": [2], "checkpoint": "never"}
    )
    assert "without no_cut" in pieces


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"partitions": 3, "no_cut": [1, 2]}, ["without no_cut", "partitions=2"]),
        ({"partitions": 2, "max_layers": 1}, ["without max_layers", "max_layers=2"]),
        (
            {"partitions": 2, "min_layers": 3},
            ["without min_layers", "min_layers=2", "partitions=1"],
        ),
        ({"partitions": 3, "pin": {0: 0, 1: 2}}, ["without pin"]),
    ],
)
def test_rules_alone_are_loosened_or_dropped(options: Any, expected: list[str]) -> None:
    """Where no memory would help, the advice is in the words of `solve`, and works."""
    profile = gb.Profile.from_costs([1.0] * 4)
    assert follow_all(profile, options) == expected


@pytest.mark.parametrize("rules", [{"min_layers": 2}, {"no_cut": [1]}])
def test_more_partitions_are_advised_where_rules_bound_their_number(rules: Any) -> None:
    """As many partitions as there are layers do not keep these rules, but fewer do, and help."""
    profile = gb.Profile.from_costs(
        [1.0] * 8, saved_bytes=[100] * 8, output_bytes=[1] * 8, chunks=4
    )
    options = {"partitions": 2, "checkpoint": "never", "memory_limit": 1000, "reserve": 0, **rules}
    assert "partitions=4" in follow_all(profile, options)


def test_advice_keeps_to_the_method() -> None:
    """A mode that the method cannot solve is not advised."""
    profile = sized([1.0] * 6, [1.0] * 6)
    options = {"partitions": 2, "memory_limit": 3000, "checkpoint": "never"}
    assert "checkpoint='always'" in follow_all(profile, options)
    pieces = follow_all(profile, {**options, "method": "set sweep"})
    assert "checkpoint='always'" not in pieces
    assert "checkpoint='except_last'" in pieces


def test_of_several_numbers_the_one_that_lacks_least_is_explained() -> None:
    """The order in which micro-batches are listed does not matter."""
    profile = sized([1.0] * 6, [1.0] * 6)
    texts = set()
    for chunks in ([2, 4, 8], [8, 4, 2], [4, 8, 2]):
        with pytest.raises(InfeasibleError) as raised:
            solve(profile, 2, chunks=chunks, memory_limit=1000)
        texts.add(str(raised.value))
        lacks = []
        for one in chunks:
            with pytest.raises(InfeasibleError) as alone:
                solve(profile, 2, chunks=one, memory_limit=1000)
            lacks.append(alone.value.shortage)
        assert raised.value.shortage == min(lacks)
    assert len(texts) == 1


def test_limits_of_devices_grow_by_what_is_missing() -> None:
    """Different limits all get what the worst one lacks."""
    profile = gb.Profile.from_costs([1.0] * 3, parameter_bytes=[100] * 3)
    pieces = follow_all(profile, {"partitions": 2, "memory_limit": [150, 300]})
    assert pieces[-1] == "memory_limit=[250, 400]"


def test_more_memory_than_any_device_has_is_no_advice() -> None:
    """Neither for the limit of all, nor for those that devices have themselves."""
    profile = gb.Profile.from_costs([1.0], parameter_bytes=[2**63 - 1], saved_bytes=[9])
    own: Any = {"devices": [Device(memory_limit=1)]}
    for limits in ({"memory_limit": 1}, own, {"memory_limit": 2, **own}):
        with pytest.raises(InfeasibleError, match=r"\nFix: a smaller model, or fewer rows"):
            solve(profile, 1, **limits)


@pytest.mark.parametrize(
    ("forward", "saved", "output", "options", "limit"),
    [
        ([9, 9, 9], [50, 0, 50], [50, 5, 0], {"partitions": 2, "chunks": 4}, 165),
        (
            [2, 9, 2, 9],
            [5, 5, 0, 50],
            [50, 5, 5, 0],
            {"partitions": 2, "chunks": 2, "checkpoint": "never"},
            80,
        ),
        (
            [2, 2, 1, 9, 9],
            [0, 50, 5, 0, 50],
            [0, 50, 50, 5, 0],
            {"partitions": 3, "chunks": 4, "checkpoint": "always"},
            165,
        ),
    ],
)
def test_the_least_limit_is_known_to_the_byte(
    forward: list[float], saved: list[int], output: list[int], options: Any, limit: int
) -> None:
    """How much may wait for neighbours follows from the layers of a partition alone."""
    profile = gb.Profile.from_costs(forward, saved_bytes=saved, output_bytes=output, chunks=4)
    options = {"schedule": "1f1b", **options}
    plan = solve(profile, memory_limit=limit, **options)
    assert plan.peak_bytes == limit and plan.status == "optimal"
    with pytest.raises(InfeasibleError, match=r"expected 1 B more.*it needs") as raised:
        solve(profile, memory_limit=limit - 1, **options)
    assert f"memory_limit={limit}." in str(raised.value)


def past_others() -> gb.Profile:
    """Return a chain with a skip connection, of which more may wait if it goes past partitions."""
    profile = gb.Profile.from_costs(
        [3, 9, 1, 4, 2], saved_bytes=[50, 0, 0, 0, 10], output_bytes=[50, 5, 50, 5, 5], chunks=4
    )
    far = SkipProfile("far", 0, 4, (len(profile.storages),))
    return replace(profile, storages=(*profile.storages, 100), skips=(far,))


def test_what_fits_with_what_may_wait_in_it_is_found() -> None:
    """One split does, and none with less; with the least that may wait in any, others would."""
    plan = solve(past_others(), 3, checkpoint="never", memory_limit=600)
    assert plan.peak_bytes == 600
    assert plan.status == "optimal" and "all plans were looked at" in plan.notes[-1]
    with pytest.raises(InfeasibleError, match="fit, but none does with what may wait in its own"):
        solve(past_others(), 3, checkpoint="never", memory_limit=599)


@pytest.mark.parametrize("below", [1, 200])
def test_the_least_peak_is_looked_for_once(below: int) -> None:
    """Its plan begins a search, is what the error describes, and fits in what it advises."""
    profile = skipping(3, n_layers=20)
    least = solve(profile, 4, objective="peak_memory", schedule="1f1b")
    asked: dict[str, Any] = {"schedule": "1f1b", "memory_limit": int(least.value) - below}
    looked = patch.object(best, "_least_peak_plan", side_effect=best._least_peak_plan)
    searched = patch.object(shortage, "best_of", side_effect=best.best_of)
    with looked as peaks, searched as searches, pytest.raises(InfeasibleError) as caught:
        solve(profile, 4, **asked)
    assert peaks.call_count == 1 and searches.call_count == 0
    assert caught.value.shortage == below
    assert f"memory_limit={int(least.value)}" in advice_of(caught.value)
    assert solve(profile, 4, **{**asked, "memory_limit": int(least.value)})


def test_of_many_splits_those_with_most_room_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where not all can be looked at, those that lack least are; else the error says so."""
    monkeypatch.setattr("gpipebal.planner.search.best.MOST_WAYS", 0)
    monkeypatch.setattr("gpipebal.planner.shortage.MOST_WAYS", 0)
    assert solve(past_others(), 3, checkpoint="never", memory_limit=600).balance
    with pytest.raises(InfeasibleError, match="but none of those tried does with what may wait"):
        solve(past_others(), 3, checkpoint="never", memory_limit=599)


@settings(max_examples=25, deadline=None, suppress_health_check=SLOW)
@given(profiles(largest=4), st.data())
def test_every_advice_is_true(profile: gb.Profile, data: st.DataObject) -> None:
    """Whatever the chain, following any piece of advice gives a plan that fits."""
    n = data.draw(st.integers(1, min(3, profile.n_layers)))
    mode = data.draw(st.sampled_from(MODES))
    options: dict[str, Any] = {
        "partitions": n,
        "chunks": data.draw(st.integers(1, 4)),
        "checkpoint": mode,
        "loss_inside": data.draw(st.booleans()),
        "shared_memory": data.draw(st.booleans()),
    }
    given_options = {name: options[name] for name in ("chunks", "checkpoint", "loss_inside")}
    plans = list(all_plans(profile, n, shared_memory=options["shared_memory"], **given_options))
    least = min(max(one.peaks) for one in plans)
    if least == 0:
        return
    options["memory_limit"] = data.draw(st.integers(0, least - 1))
    pieces = follow_all(profile, options)
    assert any("memory_limit=" in advice for advice in pieces)
    with pytest.raises(InfeasibleError):
        top_plans(profile, 2, **options)


def test_rules_and_memory_that_are_in_the_way_together_are_both_named() -> None:
    """Where no rule is the only obstacle, the fix drops them all, and more memory if it must."""
    profile = gb.Profile.from_costs([1, 1, 1], saved_bytes=[40] * 3, chunks=1)
    with pytest.raises(
        InfeasibleError, match=r"Fix: without max_layers, and memory_limit=\d+"
    ) as it:
        gb.solve(profile, 2, max_layers=1, memory_limit=10)
    (limit,) = re.findall(r"memory_limit=(\d+)", str(it.value).partition("Fix")[2])
    assert gb.solve(profile, 2, memory_limit=int(limit)).balance
    with pytest.raises(InfeasibleError, match=r"Fix: without no_cut and max_layers\."):
        gb.solve(profile, 2, max_layers=1, no_cut=[1, 2])
    assert gb.solve(profile, 2).balance
