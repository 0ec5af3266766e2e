"""What it costs to turn from forwards to backwards: found in traces, and in predictions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import gpipebal as gb
from gpipebal.errors import FileFormatError, ProfileError
from gpipebal.planner.execution import Execution
from gpipebal.planner.times import step_timeline
from gpipebal.profile import AloneShares, Profile, StepTerms, TurnTimes
from gpipebal.profiler.trial.correct import correct
from gpipebal.profiler.trial.findings import Trial, read_trial
from gpipebal.profiler.trial.traces import (
    FIRST,
    KINDS,
    MOST_FACTOR,
    STRAIGHT,
    TURNED,
    Traced,
    positions,
    turn_factor,
    turn_factors,
)
from gpipebal.schedule import CheckpointMode, make_schedule, order_of
from gpipebal.simulator import Durations, place
from gpipebal.timeline import Event, Timeline

#: How many times as long cells take behind other work, and as the first ones of a step.
FACTORS = {"forward": 1.25, "no_grad_forward": 1.3125, "recompute": 0.875, "backward": 0.75}
FACTORS |= {"first_forward": 1.5, "first_no_grad_forward": 2.0, "first_backward": 1.125}
#: How long a forward without a graph takes straight on, beside one with it. What turns cost is the
#: same in seconds, which is what is taken for granted of those in the middle of a step.
NO_GRAD = 0.8


def cells_of(timeline: Timeline) -> list[tuple[str, int, float]]:
    """Return kind, micro-batch and seconds of each action of the first partition."""
    return [(e.kind, e.micro_batch, e.end - e.start) for e in timeline.events if not e.partition]


def test_turns_by_hand() -> None:
    """With GPipe the first forward and the first backward are turns, with 1F1B almost all are."""
    times = Durations(
        (4.0,), (4.0,), (8.0,), forward_after_backward=(5.0,), backward_after_forward=(6.0,)
    )
    assert cells_of(place(order_of("gpipe", 1, 2, "never"), times)) == [
        ("F", 0, 5.0),
        ("F", 1, 4.0),
        ("B", 1, 6.0),
        ("B", 0, 8.0),
    ]
    assert cells_of(place(order_of("1f1b", 1, 2, "never"), times)) == [
        ("F", 0, 5.0),
        ("B", 0, 6.0),
        ("F", 1, 5.0),
        ("B", 1, 6.0),
    ]


def test_first_ones_by_hand() -> None:
    """They have times of their own, or those of other turns; a recompute is never one."""
    times = Durations(
        (4.0,),
        (9.0,),
        (8.0,),
        no_grad_forward=(2.0,),
        forward_after_backward=(5.0,),
        backward_after_forward=(6.0,),
        first_no_grad_forward=(2.5,),
        first_backward=(10.0,),
    )
    assert cells_of(place(order_of("1f1b", 1, 2, "never"), times)) == [
        ("F", 0, 5.0),
        ("B", 0, 10.0),
        ("F", 1, 5.0),
        ("B", 1, 6.0),
    ]
    assert cells_of(place(order_of("gpipe", 1, 2, "always"), times)) == [
        ("F", 0, 2.5),
        ("F", 1, 2.0),
        ("R", 1, 9.0),
        ("B", 1, 6.0),
        ("R", 0, 9.0),
        ("B", 0, 6.0),
    ]
    found = place(order_of("gpipe", 1, 1, "never"), replace(times, first_forward=(7.0,)))
    assert cells_of(found) == [("F", 0, 7.0), ("B", 0, 10.0)]


@pytest.mark.parametrize(
    ("name", "mode"),
    [("first_forward", "never"), ("first_backward", "never"), ("first_no_grad_forward", "always")],
)
def test_first_ones_alone_are_counted(name: str, mode: CheckpointMode) -> None:
    """Durations that have no other turns have these: one action takes three seconds more."""
    times = Durations((1.0,), (1.0,), (1.0,), no_grad_forward=(1.0,), **{name: (4.0,)})
    assert times.has_turns
    order = order_of("gpipe", 1, 2, mode)
    assert place(order, times).makespan == order.n_actions + 3.0


def test_each_device_has_its_first_ones() -> None:
    """Two partitions on each device share them."""
    times = Durations((1.0,) * 4, (1.0,) * 4, (1.0,) * 4).turning(
        dict.fromkeys(FACTORS, 1.0) | {"first_forward": 3.0, "first_backward": 5.0}
    )
    interleaved = order_of("interleaved_1f1b", 2, 2, "never", partitions_per_device=2)
    longer = [
        (event.kind, event.partition)
        for event in place(interleaved, times).events
        if event.end - event.start > 1
    ]
    assert sorted(longer) == [("B", 2), ("B", 3), ("F", 0), ("F", 1)]


def test_a_recompute_is_a_turn_as_a_rule() -> None:
    """Behind a forward it is given apart; backwards behind it are turns."""
    times = Durations(
        (4.0,),
        (9.0,),
        (8.0,),
        no_grad_forward=(2.0,),
        no_grad_forward_after_backward=(3.0,),
        recompute_after_forward=(7.0,),
        backward_after_forward=(6.0,),
    )
    assert cells_of(place(order_of("gpipe", 1, 2, "always"), times)) == [
        ("F", 0, 3.0),
        ("F", 1, 2.0),
        ("R", 1, 7.0),
        ("B", 1, 6.0),
        ("R", 0, 9.0),
        ("B", 0, 6.0),
    ]


def test_who_is_behind_other_work() -> None:
    """Each partition by itself; what is not a cell does not count."""
    events = [
        Event(0, "F", 0, 0.0, 1.0),
        Event(1, "F", 0, 1.0, 2.0),
        Event(0, "copy", 1, 1.0, 1.5),
        Event(0, "F", 1, 1.5, 2.0),
        Event(1, "B", 0, 2.0, 3.0),
        Event(0, "B", 0, 3.0, 4.0),
        Event(0, "B", 1, 4.0, 5.0),
    ]
    found = [FIRST, FIRST, STRAIGHT, STRAIGHT, FIRST, FIRST, STRAIGHT]
    assert positions(events) == found
    assert positions(events[::-1]) == found[::-1]
    kinds = "FBFBFRB"
    taken_in_turns = [Event(0, kind, k, k, k + 1.0) for k, kind in enumerate(kinds)]
    assert positions(taken_in_turns) == [FIRST, FIRST, TURNED, TURNED, TURNED, TURNED, TURNED]
    with_recompute = [Event(0, kind, k, k, k + 1.0) for k, kind in enumerate("FFRBRB")]
    assert positions(with_recompute) == [FIRST, STRAIGHT, TURNED, TURNED, STRAIGHT, TURNED]


@settings(max_examples=60, deadline=None)
@given(
    schedule=st.sampled_from(["gpipe", "1f1b"]),
    n_partitions=st.integers(1, 4),
    chunks=st.integers(1, 6),
    mode=st.sampled_from(["never", "except_last", "always"]),
)
def test_traces_and_predictions_mean_the_same(
    schedule: str, n_partitions: int, chunks: int, mode: CheckpointMode
) -> None:
    """The simulator gives a cell the time of the place at which a trace of it has the cell."""
    column = (1.0,) * n_partitions
    factors = {name: 1.0 + k / 16 for k, name in enumerate(FACTORS, 1)}
    times = Durations(column, column, column, column).turning(factors)
    events = place(order_of(schedule, n_partitions, chunks, mode), times).events
    recomputed = {(event.partition, event.micro_batch) for event in events if event.kind == "R"}
    for event, position in zip(events, positions(events), strict=True):
        name = {"F": "forward", "R": "recompute", "B": "backward"}[event.kind]
        if event.kind == "F" and (event.partition, event.micro_batch) in recomputed:
            name = "no_grad_forward"
        assert event.end - event.start == pytest.approx(turn_factor(factors, name, position))


def traced(
    mode: CheckpointMode,
    parts: tuple[float, ...],
    inside: bool = False,
    *,
    speeds: tuple[float, ...] = (1.0,),
    of_loss: float = 0.0,
) -> Traced:
    """Place steps whose cells cost turns, at speeds that change, and with a loss in each cell."""
    schedule = "1f1b" if inside and len(parts) == 1 else "gpipe"
    way = Traced(mode, inside, len(parts), [])
    for speed in speeds:
        column = tuple(speed * part for part in parts)
        times = Durations(column, column, column, tuple(NO_GRAD * time for time in column))
        times = times.turning(FACTORS).longer_by(of_loss)
        pause = None if inside else 0.0
        placed = place(make_schedule(schedule, len(parts), 4, mode), times, pause=pause)
        way.steps.append((placed.makespan, placed))
    return way


def test_factors_are_found_in_traces() -> None:
    """Steps in one partition tell all of them, though every step runs at another speed."""
    speeds = (1.0, 3.0, 1.5, 0.5)
    ways = [traced(mode, (3.0,), speeds=speeds) for mode in ("never", "always")]
    in_turns = traced("never", (3.0,), inside=True, speeds=speeds, of_loss=0.25)
    found = turn_factors([*ways, in_turns], {"forward": 0.25, "backward": 0.25})
    assert found == pytest.approx(FACTORS)


def test_factors_of_what_is_not_in_the_traces() -> None:
    """What has nothing to be compared with is as what is next to it, or makes no difference."""
    never, always = traced("never", (3.0,)), traced("always", (3.0,))
    found = turn_factors([never])
    assert found == pytest.approx(
        dict.fromkeys(FACTORS, 1.0)
        | {name: FACTORS["first_forward"] for name in ("forward", "first_forward")}
        | {name: FACTORS["first_backward"] for name in ("backward", "first_backward")}
        | {"no_grad_forward": FACTORS["first_forward"]}
    )
    # Forwards without a graph alone: what those with one take is not known.
    found = turn_factors([always])
    assert found is not None and set(found) == set(FACTORS)
    assert found["no_grad_forward"] == 1.0 and found["first_no_grad_forward"] == pytest.approx(2.0)
    assert turn_factors([]) is None
    assert turn_factors([traced("never", (3.0,), inside=True)]) is None


def test_turns_of_cells_that_are_mostly_loss() -> None:
    """They are not believed: they are as the first ones are. Factors stay within reason."""
    never = traced("never", (3.0,))
    in_turns = traced("never", (3.0,), inside=True, of_loss=2.0)
    found = turn_factors([never, in_turns], {"forward": 2.0, "backward": 0.5})
    assert found is not None
    assert found["forward"] == found["first_forward"] == pytest.approx(1.5)
    assert found["backward"] == pytest.approx(0.75 + 1.5 / 3.0)
    found = turn_factors([never, traced("never", (3.0,), inside=True, of_loss=30.0)])
    assert found is not None and found["forward"] == found["backward"] == MOST_FACTOR


def test_a_factor_is_that_of_a_position() -> None:
    """Behind its own kind a cell takes as long as it takes."""
    assert turn_factor(FACTORS, "forward", STRAIGHT) == turn_factor(None, "forward", FIRST) == 1.0
    assert turn_factor(FACTORS, "backward", TURNED) == 0.75
    assert turn_factor(FACTORS, "backward", FIRST) == 1.125


def test_a_trial_tells_turns_from_slow_layers() -> None:
    """Cells that take as long as their layers, but for turns, leave the layers as they are."""
    profile = Profile.from_costs([1.0, 2.0], [1.0, 2.0])
    layers = tuple(
        replace(layer, no_grad_forward_time=NO_GRAD * layer.forward_time)
        for layer in profile.layers
    )
    profile = replace(profile, layers=layers, chunks=4, mini_batch_rows=4)
    ways = [traced(mode, parts) for parts in ((1.0, 2.0), (3.0,)) for mode in ("never", "always")]
    ways += [traced("never", parts, inside=True) for parts in ((1.0, 2.0), (3.0,))]
    found = read_trial(profile, (1, 1), 4, 1, ways, dict.fromkeys(KINDS, 0.0))
    assert found.turns == pytest.approx(FACTORS)
    assert found.factors == pytest.approx(dict.fromkeys(KINDS, 1.0))
    assert found.alone == pytest.approx(dict.fromkeys(KINDS, 1.0))
    assert found.cell_overhead_time == pytest.approx(0.0, abs=1e-9)
    # And what is predicted from that is what was traced.
    after = correct(profile, found)
    for mode in ("never", "always"):
        placed = step_timeline(after, (0, 1, 2), Execution(4, mode))
        assert placed.makespan == pytest.approx(traced(mode, (1.0, 2.0)).steps[0][0])


def corrected(rows: int = 1) -> Profile:
    """A profile of two layers whose trial told of turns."""
    factors = dict.fromkeys(KINDS, 2.0)
    trial = Trial([1, 1], 4, 3, factors, 0.0, 0.0, 0.0, None, FACTORS)
    return correct(Profile.from_costs([1.0, 3.0], [2.0, 6.0], rows=rows), trial)


def test_turns_are_kept_in_seconds_of_the_corrected_chain() -> None:
    """They are those of the whole chain, and stay what they are at other rows."""
    profile = corrected(rows=4)
    assert profile.step.turns == TurnTimes(2.0, 2.5, -1.0, -4.0, 4.0, 8.0, 2.0)
    half = profile.at_rows(2)
    assert half.step.turns == profile.step.turns
    first, second = (
        cells_of(step_timeline(each, (0, 1, 2), Execution(2, "never")))[0][2]
        for each in (profile, half)
    )
    # The first layer has a quarter of the work: 2 seconds, or 1, and a second as the first one.
    assert (first, second) == pytest.approx((3.0, 2.0))


def test_turns_beside_others() -> None:
    """A cell that turns takes longer alone, too."""
    profile = corrected()
    shares = AloneShares(2, 0.5, 0.5, 0.5, 0.5)
    profile = replace(profile, step=replace(profile.step, side_by_side=shares))
    cells = cells_of(step_timeline(profile, (0, 1, 2), Execution(1, "never")))
    assert cells == [("F", 0, pytest.approx(1.5)), ("B", 0, pytest.approx(2.25))]


def test_turns_longer_than_the_work_itself() -> None:
    """At few rows a turn may seem to take more than the work: no time is below zero."""
    turns = TurnTimes(80.0, 80.0, 80.0, -80.0, -80.0, 80.0, -80.0)
    profile = replace(corrected(), step=StepTerms(turns=turns))
    for mode, schedule in (("never", "gpipe"), ("always", "gpipe"), ("never", "1f1b")):
        execution = Execution(2, mode, schedule, loss_inside=schedule == "1f1b")
        cells = cells_of(step_timeline(profile, (0, 1, 2), execution))
        assert all(seconds > 0 for _, _, seconds in cells)


def test_turns_in_files() -> None:
    """They are kept; values that are none are refused."""
    profile = corrected()
    record = profile.to_dict()
    assert Profile.from_dict(record) == profile
    with pytest.raises(FileFormatError, match=r"missing 'step\.turns\.no_grad_forward'"):
        Profile.from_dict({**record, "step": {**record["step"], "turns": {"forward": 1.0}}})
    untold = {**record["step"], "turns": None}
    assert Profile.from_dict({**record, "step": untold}).step.turns is None
    for bad in (float("nan"), float("-inf"), "1", True, 10**400):
        wrong = replace(profile.step.turns or TurnTimes(), backward=bad)  # type: ignore[arg-type]  # the test
        with pytest.raises(ProfileError, match=r"step\.turns has an impossible value: backward"):
            replace(profile, step=replace(profile.step, turns=wrong))
        with pytest.raises(FileFormatError):
            Profile.from_dict({**record, "step": {**record["step"], "turns": vars(wrong)}})


@pytest.mark.parametrize(("chunks", "known"), [(1, False), (3, True)])
@pytest.mark.parametrize("partitions", [1, 2])
def test_a_profile_has_turns_where_there_are_any(chunks: int, known: bool, partitions: int) -> None:
    """With one micro-batch every cell is a turn: nothing tells them from others."""
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    options: dict[str, Any] = {"partitions": partitions, "threads": 1, "timeout": 0, "rows": ()}
    profile = gb.profile_model(model, torch.ones(6, 8), chunks=chunks, progress=False, **options)
    assert not any("not tried" in flag for flag in profile.provenance["flags"])
    assert (profile.step.turns is not None) is known
    assert Profile.from_dict(profile.to_dict()) == profile
