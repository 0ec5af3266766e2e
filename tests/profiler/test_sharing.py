"""Partitions that work side by side slow each other down: found in traces, and in predictions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import gpipebal as gb
from gpipebal.errors import ProfileError
from gpipebal.planner import evaluate
from gpipebal.profile import AloneShares, Profile, StepTerms
from gpipebal.profiler.trial.sharing import MOST_PRESSURE, TracedCell, overlaps, pressure
from gpipebal.profiler.trial.traces import KINDS, Traced, pressures_of
from gpipebal.schedule import CheckpointMode, gpipe_schedule, make_schedule
from gpipebal.simulator import Durations, place
from gpipebal.simulator.sharing import place_sharing
from gpipebal.timeline import Event, Timeline

TIMES = st.floats(0.0, 9.0)


def test_two_forwards_slow_each_other_down_by_hand() -> None:
    """Alone 2 seconds, beside each other 3: the picture in the module."""
    together = Durations((3.0, 3.0), (0.0, 0.0), (0.0, 0.0))
    alone = Durations((2.0, 2.0), (0.0, 0.0), (0.0, 0.0))
    order = gpipe_schedule(2, 2, "never")
    forwards = [e for e in place_sharing(order, together, alone, 2).events if e.kind == "F"]
    assert [(e.partition, e.start, e.end) for e in forwards] == [
        (0, 0.0, 2.0),
        (0, 2.0, 5.0),
        (1, 2.0, 5.0),
        (1, 5.0, 7.0),
    ]


def test_an_uneven_balance_leaves_the_machine_to_the_larger_partition() -> None:
    """What one partition does while the other waits goes on as fast as alone."""
    together = Durations((1.0, 7.0), (0.0, 0.0), (0.0, 0.0))
    alone = Durations((0.5, 3.5), (0.0, 0.0), (0.0, 0.0))
    order = gpipe_schedule(2, 4, "never")
    # 1 : 7 in work: 0.5 alone, then three forwards beside 3 of the first partition's seconds, in
    # which 1.5 of 14 are done, and the rest alone.
    assert place_sharing(order, together, alone, 2).makespan == pytest.approx(0.5 + 3.0 + 12.5)
    assert place(order, together).makespan == 29.0


def test_work_without_pressure_slows_nobody_down() -> None:
    """A forward beside a backward that presses on nothing takes as long as alone; so does it."""
    together = Durations((2.0, 2.0), (0.0, 0.0), (3.0, 3.0))
    alone = replace(together, forward=(1.0, 1.0))
    order = make_schedule("1f1b", 2, 4, "never")
    found = place_sharing(order, together, alone, 2)
    for event in found.events:
        beside = {
            other.kind
            for other in found.events
            if other.partition != event.partition
            and min(event.end, other.end) - max(event.start, other.start) > 1e-9
        }
        if event.kind == "B":
            assert event.end - event.start == pytest.approx(3.0)
        elif "F" not in beside:
            assert event.end - event.start == pytest.approx(1.0)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 3),
    st.integers(1, 5),
    st.sampled_from(["gpipe", "1f1b"]),
    st.sampled_from(["never", "except_last", "always"]),
    st.booleans(),
    st.data(),
)
def test_without_pressure_it_is_place(
    n: int, chunks: int, schedule: Any, mode: Any, pause: bool, data: st.DataObject
) -> None:
    """Equal durations give `place`'s timeline; shorter ones alone a makespan between the two."""

    def times() -> tuple[float, ...]:
        return tuple(data.draw(st.lists(TIMES, min_size=n, max_size=n)))

    durations = Durations(times(), times(), times(), no_grad_forward=times())
    order = make_schedule(schedule, n, chunks, mode)
    given_pause = 1.0 if pause and schedule == "gpipe" else None
    plain = place(order, durations, pause=given_pause)
    same = place_sharing(order, durations, durations, 2, pause=given_pause)
    assert list(same.table.starts) == pytest.approx(list(plain.table.starts), abs=1e-6)
    assert list(same.table.ends) == pytest.approx(list(plain.table.ends), abs=1e-6)
    half = {
        name: tuple(time / 2 for time in getattr(durations, name))
        for name in ("forward", "recompute", "backward", "no_grad_forward")
    }
    alone = replace(durations, **half)
    found = place_sharing(order, durations, alone, max(2, n), pause=given_pause)
    least = place(order, alone, pause=given_pause)
    assert found.makespan >= least.makespan - 1e-6
    for table in (found.table, least.table):
        assert (table.ends >= table.starts).all()


@pytest.mark.parametrize("n", [2, 3, 4, 6])
@pytest.mark.parametrize("square", [0.0, 0.1, 0.3])
def test_pressure_is_found_again(n: int, square: float) -> None:
    """From the cells of a simulated step comes the pressure that it was made with."""
    alone = Durations(
        tuple(2.0 + 0.25 * j for j in range(n)), (2.0,) * n, tuple(4.0 + 0.5 * j for j in range(n))
    )
    together = replace(alone, forward=tuple(t * (1 + (n - 1) * square) for t in alone.forward))
    step = place_sharing(gpipe_schedule(n, 2 * n, "never"), together, alone, n)
    events = list(step.events)
    beside = overlaps(events, lambda kind: {"F": "forward", "B": "backward"}.get(kind))
    for kind, name, expected in (("F", "forward", square), ("B", "backward", 0.0)):
        cells = [
            TracedCell((e.end - e.start) / getattr(alone, name)[e.partition], others)
            for e, others in zip(events, beside, strict=True)
            if e.kind == kind
        ]
        found = pressure(cells, name, {})
        assert found is not None and found**2 == pytest.approx(expected, abs=1e-6)


def test_what_runs_beside_others_of_known_pressure_tells_its_own() -> None:
    """A recompute beside backwards: theirs is known, so its own follows; alone it tells nothing."""
    cells = [TracedCell(1.0 + 0.5 * 0.8, {("backward",): 1.0})]
    found = pressure(cells, "recompute", {"backward": 0.8})
    assert found == pytest.approx(0.5)
    assert pressure([TracedCell(1.0, {})], "recompute", {}) is None
    assert pressure([], "recompute", {}) is None
    assert pressure([TracedCell(99.0, {("f",): 1.0})], "f", {}) == pytest.approx(MOST_PRESSURE)


def test_overlaps_by_hand() -> None:
    """Shares are of the event's own time, by the kinds of those that worked just then."""
    events = [
        Event(0, "F", 0, 0.0, 4.0),
        Event(1, "F", 0, 1.0, 3.0),
        Event(1, "B", 0, 3.0, 5.0),
        Event(2, "F", 0, 2.0, 4.0),
        Event(2, "X", 0, 0.0, 1.0),
    ]
    found = overlaps(events, {"F": "forward", "B": "backward"}.get)
    assert found[0] == {
        ("forward",): 0.25,
        ("forward", "forward"): 0.25,
        ("backward", "forward"): 0.25,
    }
    assert found[2] == {("forward", "forward"): 0.5}


def _profile(shares: AloneShares | None) -> Profile:
    profile = Profile.from_costs([1.0, 1.0, 2.0], chunks=4)
    return replace(profile, step=StepTerms(0.0, optimizer_time=0.0, side_by_side=shares))


def test_step_times_know_what_partitions_do_to_each_other() -> None:
    """The step's timeline is placed with both durations; the makespan stays that of the layers."""
    shares = AloneShares(2, forward=0.5, no_grad_forward=0.5, recompute=1.0, backward=1.0)
    slow, fast = (
        evaluate(
            replace(_profile(s), step=replace(_profile(s).step, loss=_loss())),
            [2, 1],
            checkpoint="never",
            loss_inside=True,
        )
        for s in (None, shares)
    )
    assert slow.makespan == fast.makespan
    assert slow.step_time is not None and fast.step_time is not None
    # The first and the last forward are alone.
    assert slow.step_time - fast.step_time == pytest.approx(1.0 + 1.0)


def _loss() -> gb.profile.LayerProfile:
    return gb.profile.LayerProfile("loss", "loss", 0.0, 0.0, 0.0)


def test_shares_are_kept_and_checked() -> None:
    """A profile with shares is stored and read; impossible ones are refused."""
    shares = AloneShares(2, forward=0.5, no_grad_forward=0.6, recompute=0.7, backward=1.0)
    profile = _profile(shares)
    record = profile.to_dict()
    assert Profile.from_dict(record) == profile
    for bad in (
        {"forward": 0.0},
        {"backward": 1.5},
        {"recompute": float("nan")},
        {"n_partitions": 1},
    ):
        with pytest.raises(ProfileError, match=r"step\.side_by_side has an impossible"):
            _profile(replace(shares, **bad))
    assert profile.at_rows(7).step.side_by_side == shares


def test_a_profile_of_a_cpu_has_shares() -> None:
    """With several micro-batches and partitions the trial tells; with one of either it cannot."""
    layers = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    sample = torch.randn(256, 64)
    found: dict[tuple[int, int], Any] = {}
    for chunks, partitions in ((4, 2), (1, 2), (4, 1)):
        profile = gb.profile_model(
            layers,
            sample,
            chunks=chunks,
            partitions=partitions,
            threads=1,
            rows=(),
            timeout=0,
            progress=False,
        )
        found[chunks, partitions] = profile.step.side_by_side
    if torch.get_num_threads() > 1 or found[4, 2] is not None:
        assert found[4, 2].n_partitions == 2
    assert found[1, 2] is None and found[4, 1] is None


def _traced(
    mode: CheckpointMode, forward: float, backward: float, balance: tuple[float, ...], longer: float
) -> Traced:
    """Place a step of two partitions whose kinds of work press so; recomputes take `longer`."""

    def times(seconds: float, pressure: float) -> tuple[float, ...]:
        return tuple(seconds * part * (1 + pressure**2) for part in balance)

    together, alone = (
        Durations(times(1, f), times(longer, f), times(2, b), no_grad_forward=times(1, f))
        for f, b in ((forward, backward), (0.0, 0.0))
    )
    placed = place_sharing(make_schedule("gpipe", 2, 8, mode), together, alone, 2)
    return Traced(mode, False, 2, [(0.0, placed)])


@pytest.mark.parametrize("longer", [1.0, 1.1])
@pytest.mark.parametrize(("forward", "backward"), [(0.5, 0.0), (0.3, 0.7), (0.0, 0.4)])
def test_pressures_are_found_in_traces(forward: float, backward: float, longer: float) -> None:
    """A recompute presses as a forward does; when it takes longer for other reasons too."""
    ways = [
        _traced(mode, forward, backward, (1.0, 1.25), longer if mode == "always" else 1.0)
        for mode in ("never", "always")
    ]
    predicted = {name: (1.0, 1.25) for name in KINDS} | {"backward": (2.0, 2.5)}
    found = pressures_of(ways, predicted, dict.fromkeys(KINDS, 1.0), dict.fromkeys(KINDS, 0.0), {})
    assert set(found) == set(KINDS)
    for name, pressure_of_kind in found.items():
        expected = backward if name == "backward" else forward
        assert pressure_of_kind == pytest.approx(expected, abs=1e-6 if longer == 1.0 else 0.08)


def test_pressures_of_a_chain_that_has_no_backward() -> None:
    """Where nothing is trained there is no recompute either, and nothing is told of it."""
    way = _traced("never", 0.5, 0.0, (1.0, 1.25), 1.0)
    seconds, timeline = way.steps[0]
    forwards = Timeline([e for e in timeline.events if e.kind == "F"], 2, "measured")
    way.steps = [(seconds, forwards)]
    predicted = {name: (1.0, 1.25) for name in KINDS}
    found = pressures_of([way], predicted, {"forward": 1.0}, dict.fromkeys(KINDS, 0.0), {})
    assert found == {"forward": pytest.approx(0.5, abs=1e-6)}


def test_a_frozen_model_has_shares_of_its_forwards() -> None:
    """Layers that press on each other, and have no backward, are profiled."""
    model = nn.Sequential(*[nn.Linear(256, 256) for _ in range(6)]).requires_grad_(False)
    profile = gb.profile_model(
        model, torch.randn(512, 256), chunks=4, partitions=2, timeout=0.2, progress=False
    )
    assert {layer.backward_time for layer in profile.layers} == {0.0}
    shares = profile.step.side_by_side
    # A backward that nobody has does not press, and is not pressed.
    assert shares is None or (shares.backward == 1 and 0 < shares.forward <= 1)
