"""What it costs to turn from forwards to backwards: found in traces, and in predictions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import gpipebal as gb
from gpipebal.errors import FileFormatError, ProfileError
from gpipebal.planner.execution import Execution
from gpipebal.planner.times import step_timeline
from gpipebal.profile import Profile, SideBySide, StepTerms, TurnTimes
from gpipebal.profiler.correct import correct
from gpipebal.profiler.findings import Trial, read_trial
from gpipebal.profiler.traces import KINDS, Traced, turn_factors, turned
from gpipebal.schedule import CheckpointMode, make_schedule, order_of
from gpipebal.simulator import Durations, place
from gpipebal.timeline import Event, Timeline

#: How many times as long cells take behind other work.
FACTORS = {"forward": 1.25, "no_grad_forward": 1.5, "recompute": 0.875, "backward": 0.75}


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
    """Each partition by itself; what is no cell does not count."""
    events = [
        Event(0, "F", 0, 0.0, 1.0),
        Event(1, "F", 0, 1.0, 2.0),
        Event(0, "copy", 1, 1.0, 1.5),
        Event(0, "F", 1, 1.5, 2.0),
        Event(1, "B", 0, 2.0, 3.0),
        Event(0, "B", 0, 3.0, 4.0),
        Event(0, "B", 1, 4.0, 5.0),
    ]
    assert turned(events) == [True, True, False, False, True, True, False]
    assert turned(events[::-1]) == [False, True, True, False, False, True, True]


def traced(mode: CheckpointMode, parts: tuple[float, ...], inside: bool = False) -> Traced:
    """Place a step whose cells cost turns."""
    times = Durations(*([*parts] for _ in range(3)), no_grad_forward=parts)  # type: ignore[arg-type]  # sequences do
    times = times.turning(FACTORS)
    placed = place(make_schedule("gpipe", len(parts), 4, mode), times, pause=0.0)
    return Traced(mode, inside, len(parts), [(placed.makespan, placed)])


def test_factors_are_found_in_traces() -> None:
    """Steps in one partition tell all four; what has nothing to be compared with is 1."""
    ways = [traced("never", (3.0,)), traced("always", (3.0,))]
    found = turn_factors(ways)
    assert found is not None and found == pytest.approx(FACTORS)
    assert turn_factors([traced("never", (3.0,))]) == pytest.approx(
        {**FACTORS, "no_grad_forward": 1.0, "recompute": 1.0}
    )
    assert turn_factors([]) is None
    assert turn_factors([traced("never", (3.0,), inside=True)]) is None


def test_a_trial_tells_turns_from_slow_layers() -> None:
    """Cells that take as long as their layers, but for turns, leave the layers as they are."""
    profile = Profile.from_costs([1.0, 2.0], [1.0, 2.0])
    layers = tuple(
        replace(layer, no_grad_forward_time=layer.forward_time) for layer in profile.layers
    )
    profile = replace(profile, layers=layers, chunks=4, mini_batch_rows=4)
    ways = [traced(mode, parts) for parts in ((1.0, 2.0), (3.0,)) for mode in ("never", "always")]
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
    trial = Trial((1, 1), 4, 3, factors, 0.0, 0.0, 0.0, None, FACTORS)
    return correct(Profile.from_costs([1.0, 3.0], [2.0, 6.0], rows=rows), trial)


def test_turns_are_kept_in_seconds_of_the_corrected_chain() -> None:
    """They are those of the whole chain, and stay what they are at other rows."""
    profile = corrected(rows=4)
    assert profile.step.turns == TurnTimes(2.0, 4.0, -1.0, -4.0)
    half = profile.at_rows(2)
    assert half.step.turns == profile.step.turns
    first, second = (
        cells_of(step_timeline(each, (0, 1, 2), Execution(2, "never")))[0][2]
        for each in (profile, half)
    )
    # The first layer has a quarter of the work: 2 seconds, or 1, and half a second for the turn.
    assert (first, second) == pytest.approx((2.5, 1.5))


def test_turns_beside_others() -> None:
    """A cell that turns takes longer alone, too."""
    profile = corrected()
    shares = SideBySide(2, 0.5, 0.5, 0.5, 0.5)
    profile = profile.with_step(replace(profile.step, side_by_side=shares))
    cells = cells_of(step_timeline(profile, (0, 1, 2), Execution(1, "never")))
    assert cells == [("F", 0, pytest.approx(1.25)), ("B", 0, pytest.approx(1.5))]


def test_turns_longer_than_the_work_itself() -> None:
    """At few rows a turn may seem to take more than the work: no time is below zero."""
    profile = corrected().with_step(StepTerms(turns=TurnTimes(80.0, 80.0, 80.0, -80.0)))
    for mode in ("never", "always"):
        cells = cells_of(step_timeline(profile, (0, 1, 2), Execution(2, mode)))
        assert all(seconds > 0 for _, _, seconds in cells)


def test_turns_in_files() -> None:
    """They are kept; older files know none; values that are none are refused."""
    profile = corrected()
    record = profile.to_dict()
    assert Profile.from_dict(record) == profile
    old = {**record, "version": 7}
    with pytest.raises(FileFormatError, match="unknown field: 'turns'"):
        Profile.from_dict(old)
    step = {name: value for name, value in record["step"].items() if name != "turns"}
    assert Profile.from_dict({**old, "step": step}).step.turns is None
    for bad in (float("nan"), float("-inf"), "1", True, 10**400):
        turns = replace(profile.step.turns or TurnTimes(), backward=bad)  # type: ignore[arg-type]  # the test
        with pytest.raises(ProfileError, match=r"step\.turns has an impossible value: backward"):
            profile.with_step(replace(profile.step, turns=turns))
        with pytest.raises(FileFormatError):
            Profile.from_dict({**record, "step": {**record["step"], "turns": vars(turns)}})


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
