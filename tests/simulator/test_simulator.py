"""Tests of gpipebal.simulator: drawings, the closed forms, and schedules that cannot finish."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import gpipebal.simulator
from gpipebal.errors import BalanceError, KindError, ProfileError, UnsupportedPlanError
from gpipebal.plan import PartitionPlan, Plan
from gpipebal.schedule import (
    CHECKPOINT_MODES,
    Action,
    CheckpointMode,
    Schedule,
    gpipe_schedule,
)
from gpipebal.simulator import Durations, place, simulate
from gpipebal.timeline import Event, Timeline

times = st.floats(min_value=0.0, max_value=1e3)
modes = st.sampled_from(CHECKPOINT_MODES)
chunk_counts = st.integers(min_value=1, max_value=9)


@st.composite
def durations_of(draw: st.DrawFn, elements: st.SearchStrategy[float] = times) -> Durations:
    """Draw times for one to six partitions."""
    triples = draw(st.lists(st.tuples(elements, elements, elements), min_size=1, max_size=6))
    return Durations(*zip(*triples, strict=True))


def expected_makespan(
    durations: Durations, m: int, checkpoint: CheckpointMode, pause: float | None = None
) -> float:
    """Write down the closed form of a GPipe makespan of m equal micro-batches.

    A pause is a barrier: only then does the recompute of the last micro-batch have to wait for
    the forwards of all partitions.
    """
    f, r, b = durations.forward, durations.recompute, durations.backward
    both = [b[j] + r[j] for j in range(len(f))]
    forward = sum(f) + (m - 1) * max(f)
    if checkpoint != "always":
        slowest = max(b) if checkpoint == "never" else max(both)
        return forward + (pause or 0.0) + sum(b) + (m - 1) * slowest
    corners = []
    for k in range(1, len(f) + 1):
        until = sum(f[:k]) + (m - 1) * max(f[:k]) if pause is None else forward + pause
        corners.append(until + r[k - 1] + sum(b[:k]) + (m - 1) * max(both[:k]))
    return max(corners)


def uniform(n_partitions: int, forward: int, recompute: int, backward: int) -> Durations:
    """Give every partition the same times."""
    return Durations(
        (forward,) * n_partitions, (recompute,) * n_partitions, (backward,) * n_partitions
    )


def make_plan(
    durations: Durations,
    chunks: int = 4,
    checkpoint: CheckpointMode = "never",
    schedule: str = "gpipe",
) -> Plan:
    """Make a plan with one layer per partition."""
    partitions = tuple(
        PartitionPlan((f"layer{j}",), ("",), forward, backward, recompute)
        for j, (forward, recompute, backward) in enumerate(
            zip(durations.forward, durations.recompute, durations.backward, strict=True)
        )
    )
    makespan = expected_makespan(durations, chunks, checkpoint)
    return Plan(
        partitions=partitions,
        chunks=chunks,
        rows=1,
        checkpoint=checkpoint,
        schedule=schedule,
        objective="makespan",
        value=makespan,
        lower_bound=makespan,
        status="optimal",
        method="given",
        makespan=makespan,
        bottleneck=0.0,
        provenance={"method": "costs"},
    )


def draw(timeline: Timeline) -> str:
    """Draw a timeline of whole seconds with one column per second, and keep the cells only."""
    lines = timeline.text_gantt(width=round(timeline.makespan)).splitlines()[1:]
    return "\n".join(line.split()[-1] for line in lines)


NEVER = """\
0123......DDCCBBAA
.0123...DDCCBBAA..
..0123DDCCBBAA...."""

EXCEPT_LAST = """\
012....CrBrA
.012..CrBrA.
..012CrBrA.."""

ALWAYS = """\
012r....CrBrA
.012r..CrBrA.
..012rCrBrA.."""

PAUSED = """\
01.........BBrAA
.01......BBrAA..
..01...BBrAA...."""

UNEVEN = """\
012r..............CCr....BBr....AA
.000111222rrr.CCCCrrrBBBBrrrAAAA..
....0..1..2rCCrBBrAA.............."""


@pytest.mark.parametrize(
    ("checkpoint", "chunks", "durations", "pause", "drawing"),
    [
        ("never", 4, uniform(3, 1, 1, 2), None, NEVER),
        ("except_last", 3, uniform(3, 1, 1, 1), None, EXCEPT_LAST),
        ("always", 3, uniform(3, 1, 1, 1), None, ALWAYS),
        ("except_last", 2, uniform(3, 1, 1, 2), 3.0, PAUSED),
        ("always", 3, Durations((1, 3, 1), (1, 3, 1), (2, 4, 2)), None, UNEVEN),
    ],
    ids=["never", "except_last", "always", "pause", "uneven"],
)
def test_gpipe_is_its_drawing(
    checkpoint: CheckpointMode,
    chunks: int,
    durations: Durations,
    pause: float | None,
    drawing: str,
) -> None:
    """A pipeline with whole times is placed exactly as drawn by hand, one column per second."""
    schedule = gpipe_schedule(durations.n_partitions, chunks, checkpoint)
    timeline = place(schedule, durations, pause=pause)
    assert draw(timeline) == drawing
    assert timeline.makespan == len(drawing.splitlines()[0])


def test_module_drawing_is_what_the_simulator_draws() -> None:
    """The drawing at the top of the module is the drawing of this test, so it cannot rot."""
    documented = gpipebal.simulator.__doc__ or ""
    for line in NEVER.splitlines():
        assert line in documented
    timeline = place(gpipe_schedule(3, 4, "never"), uniform(3, 1, 1, 2))
    assert timeline.bubble_fraction == 18 / 54


def test_events_stand_in_the_order_of_the_rows() -> None:
    """Every action of the schedule becomes one event, with the time that it starts and ends."""
    durations = Durations((1.0, 2.0), (0.0, 0.0), (3.0, 4.0))
    assert place(gpipe_schedule(2, 1, "never"), durations).events == (
        Event(0, "F", 0, 0.0, 1.0),
        Event(0, "B", 0, 7.0, 10.0),
        Event(1, "F", 0, 1.0, 3.0),
        Event(1, "B", 0, 3.0, 7.0),
    )


@given(durations_of(), chunk_counts, modes)
def test_makespan_equals_the_closed_form(
    durations: Durations, chunks: int, checkpoint: CheckpointMode
) -> None:
    """The makespan of GPipe is a sum of two maxima; with 'always' the largest over a corner."""
    schedule = gpipe_schedule(durations.n_partitions, chunks, checkpoint)
    expected = expected_makespan(durations, chunks, checkpoint)
    assert place(schedule, durations).makespan == pytest.approx(expected, rel=1e-12, abs=1e-300)


@given(durations_of(), chunk_counts, modes, times)
def test_makespan_with_pause_equals_the_closed_form(
    durations: Durations, chunks: int, checkpoint: CheckpointMode, pause: float
) -> None:
    """With a barrier the two phases and the pause add up."""
    schedule = gpipe_schedule(durations.n_partitions, chunks, checkpoint)
    expected = expected_makespan(durations, chunks, checkpoint, pause)
    timeline = place(schedule, durations, pause=pause)
    assert timeline.makespan == pytest.approx(expected, rel=1e-12, abs=1e-300)


@given(durations_of(st.integers(0, 50)), chunk_counts, modes)
def test_makespan_of_whole_times_is_exact(
    durations: Durations, chunks: int, checkpoint: CheckpointMode
) -> None:
    """Whole times are added without rounding, so the closed form holds to the last bit."""
    schedule = gpipe_schedule(durations.n_partitions, chunks, checkpoint)
    expected = expected_makespan(durations, chunks, checkpoint)
    assert place(schedule, durations).makespan == expected


@given(durations_of(), chunk_counts, modes, st.none() | times)
def test_every_action_starts_as_early_as_it_can(
    durations: Durations, chunks: int, checkpoint: CheckpointMode, pause: float | None
) -> None:
    """An action starts at 0, at the barrier, or in the moment that something it needs ends."""
    schedule = gpipe_schedule(durations.n_partitions, chunks, checkpoint)
    timeline = place(schedule, durations, pause=pause)
    ends = {event[:3]: event.end for event in timeline.events}
    last_forward = max(event.end for event in timeline.events if event.kind == "F")
    for row in schedule.rows:
        before = None
        for action in row:
            j, kind, i = action
            needs = [before] if before else []
            if kind == "F":
                needs += [(j - 1, "F", i)] if j else []
            else:
                needs += [(j, "F", i)]
                needs += [(j + 1, "B", i)] if kind == "B" and j + 1 < len(schedule.rows) else []
            moments = [ends[need] for need in needs]
            if pause is not None and kind != "F":
                moments.append(last_forward + pause)
            event = next(e for e in timeline.events if e[:3] == action)
            assert event.start == max(moments, default=0.0)
            before = action


@given(durations_of(), chunk_counts, modes)
def test_one_partition_is_never_idle(
    durations: Durations, chunks: int, checkpoint: CheckpointMode
) -> None:
    """A single partition waits for nobody, so its bubble is nothing but rounding."""
    alone = Durations(durations.forward[:1], durations.recompute[:1], durations.backward[:1])
    timeline = place(gpipe_schedule(1, chunks, checkpoint), alone)
    assert timeline.bubble_fraction == pytest.approx(0.0, abs=1e-12)


def test_pause_of_zero_still_is_a_barrier() -> None:
    """With a pause of 0 s a recompute waits for the last forward of the other partitions."""
    schedule = gpipe_schedule(2, 2, "always")
    assert draw(place(schedule, uniform(2, 1, 1, 1))) == "01r..BrA\n.01rBrA."
    assert draw(place(schedule, uniform(2, 1, 1, 1), pause=0.0)) == "01.r.BrA\n.01rBrA."


def test_one_forward_one_backward_is_placed() -> None:
    """A schedule that is given is placed in its own order, here 1F1B."""
    first = [Action(0, "F", 0), Action(0, "F", 1), Action(0, "B", 0), Action(0, "F", 2)]
    first += [Action(0, "B", 1), Action(0, "B", 2)]
    last = [Action(1, kind, i) for i in range(3) for kind in ("F", "B")]
    timeline = place(Schedule("1f1b", (tuple(first), tuple(last))), uniform(2, 1, 0, 1))
    assert draw(timeline) == "01.A2B.C\n.0A1B2C."


def test_forwards_alone_are_placed() -> None:
    """A forward-only schedule is one of its own, as for inference."""
    schedule = Schedule("forward", gpipe_schedule(2, 3).phase("F"))
    assert draw(place(schedule, uniform(2, 1, 0, 1))) == "012.\n.012"


def remove(schedule: Schedule, action: Action) -> Schedule:
    """Take one action out of a schedule."""
    rows = tuple(tuple(a for a in row if a != action) for row in schedule.rows)
    return Schedule(schedule.name, rows)


def test_missing_action_is_named_and_the_fix_works() -> None:
    """A schedule without an action that others need is refused, and adding it helps."""
    whole = gpipe_schedule(2, 2, "never")
    with pytest.raises(BalanceError, match="0B1 waits for 0F1, which stands in no row") as error:
        place(remove(whole, Action(0, "F", 1)), uniform(2, 1, 0, 1))
    assert "Fix: add 0F1 to its row." in str(error.value)
    assert place(whole, uniform(2, 1, 0, 1)).makespan == 6


def test_missing_action_is_the_reason_even_if_others_wait_first() -> None:
    """The error names the action whose need does not exist, not one that waits for that one."""
    schedule = remove(gpipe_schedule(3, 1, "never"), Action(2, "F", 0))
    with pytest.raises(BalanceError, match="2B0 waits for 2F0, which stands in no row"):
        place(schedule, uniform(3, 1, 0, 1))


def test_an_odd_number_of_partitions_is_not_interleaved() -> None:
    """Three partitions are two on each of no number of devices; one on each they run."""
    plan = make_plan(uniform(3, 1, 0, 2), chunks=3)
    with pytest.raises(BalanceError, match="3 partitions, 2 on each device"):
        simulate(plan, schedule="interleaved_1f1b")
    assert simulate(plan, schedule="interleaved_1f1b", devices=3).n_devices == 3


def test_circular_wait_is_refused() -> None:
    """Partitions that wait for each other end in an error and never in a hang."""
    rows = (
        (Action(0, "F", 0), Action(0, "B", 0), Action(0, "F", 1), Action(0, "B", 1)),
        (Action(1, "F", 1), Action(1, "F", 0), Action(1, "B", 0), Action(1, "B", 1)),
    )
    with pytest.raises(BalanceError, match="can never finish: 0B0 waits for 1B0, which never gets"):
        place(Schedule("crossed", rows), uniform(2, 1, 0, 1))


def test_recompute_behind_its_backward_is_refused() -> None:
    """A backward needs its recompute, so a row with the two swapped can never finish."""
    rows = ((Action(0, "F", 0), Action(0, "B", 0), Action(0, "R", 0)),)
    with pytest.raises(BalanceError, match="0B0 waits for 0R0, which never gets its turn"):
        place(Schedule("swapped", rows), uniform(1, 1, 1, 1))


def test_pause_with_a_forward_behind_a_backward_is_refused() -> None:
    """1F1B with a barrier waits for itself; without the pause, as the error says, it runs."""
    row = [Action(0, kind, i) for i in range(2) for kind in ("F", "B")]
    schedule = Schedule("1f1b", (tuple(row),))
    with pytest.raises(BalanceError, match="with a pause: 0F1 stands after 0B0") as error:
        place(schedule, uniform(1, 1, 0, 1), pause=1.0)
    assert str(error.value).endswith("Fix: pause=None.")
    assert place(schedule, uniform(1, 1, 0, 1), pause=None).makespan == 4


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ((Action(0, "F", 0), Action(0, "F", 0)), "0F0 stands there twice"),
        ((Action(1, "F", 0),), r"1F0 stands in row 0 \(expected row 1\)"),
        ((Action(0, "F", 0.5),), r"0F0\.5 has a number that is not whole"),  # type: ignore[arg-type]
        ((Action(0, "FR", 0),), r"0FR0 is of an unknown kind"),  # type: ignore[arg-type]
        ((Action(0, "", 0),), r"00 is of an unknown kind"),  # type: ignore[arg-type]
        ((Action(0, ["F"], 0),), r"0\['F'\]0 is of an unknown kind .*\nFix: "),  # type: ignore[arg-type]
        ((Action(0, "X", 0),), r"0X0 is of an unknown kind \(expected one of F, R, B, I, W\)"),  # type: ignore[arg-type]  # the kind is the point
    ],
)
def test_misplaced_action_is_refused(row: tuple[Action, ...], message: str) -> None:
    """An action stands once, in the row of its partition, and is of a known kind."""
    with pytest.raises(BalanceError, match=message):
        place(Schedule("odd", (row,)), uniform(1, 1, 1, 1))


@pytest.mark.parametrize(
    ("rows", "name"),
    [
        (3, "rows"),
        ([3], r"rows\[0\]"),
        (["0F0 0B0"], r"rows\[0\]"),
        ([[Action(0, "F", 0), (0, "B", 0)]], r"rows\[0\]\[1\]"),
    ],
)
def test_rows_without_actions_are_refused(rows: Any, name: str) -> None:
    """A plain tuple is no action: it has no names, and prints as something else."""
    with pytest.raises(KindError, match=rf"{name} is not an? .*\nFix: rows="):
        Schedule("mine", rows)


def test_rows_that_can_be_read_once_are_kept() -> None:
    """Iterators of rows or of actions are as good as tuples."""
    row = (Action(0, "F", 0), Action(0, "B", 0))
    for rows in ((iter(row),), (row for _ in range(1)), [list(row)]):
        schedule = Schedule("mine", rows)  # type: ignore[arg-type]
        assert schedule == Schedule("mine", (row,))
        assert str(schedule) == "0F0 0B0"


def test_schedule_and_durations_must_agree() -> None:
    """A schedule of two partitions cannot take the times of three."""
    with pytest.raises(BalanceError, match=r"schedule.n_partitions=2 \(expected 3"):
        place(gpipe_schedule(2, 2), uniform(3, 1, 1, 1))


@pytest.mark.parametrize(
    "pause", [-1.0, float("nan"), float("inf"), pytest.param(10**400, id="10**400"), True]
)
def test_impossible_pause_is_refused(pause: float) -> None:
    """A pause is a finite number of seconds, 0 or more."""
    with pytest.raises(ProfileError, match="time is impossible: pause="):
        place(gpipe_schedule(1, 1), uniform(1, 1, 1, 1), pause=pause)


@pytest.mark.parametrize(
    "time", [-1.0, float("nan"), float("inf"), pytest.param(10**400, id="10**400"), "1"]
)
def test_impossible_durations_are_refused(time: float) -> None:
    """A duration is a finite number of seconds, 0 or more; the error names which one is not."""
    with pytest.raises(ProfileError, match=r"time is impossible: backward\[1\]="):
        Durations((1.0, 1.0), (1.0, 1.0), (1.0, time))


def test_what_a_cell_takes_besides_its_layers_is_in_no_recompute_that_is_left_out() -> None:
    """Forwards and backwards of layers without any time are cells all the same."""
    times = Durations((1.0, 0.0), (1.0, 0.0), (2.0, 0.0)).longer_by(0.5)
    assert times == Durations((1.5, 0.5), (1.5, 0.0), (2.5, 0.5))


def test_durations_have_one_length() -> None:
    """Forward, recompute and backward times belong to the same partitions."""
    with pytest.raises(ProfileError, match=r"len\(backward\)=1 \(expected 2"):
        Durations((1.0, 1.0), (1.0, 1.0), (1.0,))


@given(durations_of(), chunk_counts, modes)
def test_simulate_reproduces_the_plan(
    durations: Durations, chunks: int, checkpoint: CheckpointMode
) -> None:
    """A plan's makespan and bubble are those of its simulated timeline."""
    plan = make_plan(durations, chunks, checkpoint)
    timeline = simulate(plan)
    assert timeline.source == "simulated"
    assert timeline.n_partitions == plan.n_partitions
    assert timeline.makespan == pytest.approx(plan.makespan, rel=1e-12, abs=1e-300)
    assert timeline.bubble_fraction == pytest.approx(plan.bubble_fraction, abs=1e-9)


def test_simulate_says_what_it_simulated() -> None:
    """The timeline keeps the plan's shape and where its costs came from, for its file."""
    timeline = simulate(make_plan(uniform(2, 1, 1, 1), 3, "always"), pause=0.5)
    assert timeline.provenance == {
        "schedule": "gpipe",
        "pause": 0.5,
        "balance": [1, 1],
        "chunks": 3,
        "checkpoint": "always",
        "costs": {"method": "costs"},
    }


def test_simulate_takes_another_schedule() -> None:
    """A given schedule replaces the plan's own order and checkpoint mode."""
    plan = make_plan(uniform(2, 1, 1, 1), 2, "never")
    assert simulate(plan, gpipe_schedule(2, 2, "always")) != simulate(plan)


def test_simulate_refuses_a_schedule_it_cannot_build() -> None:
    """A plan for another schedule is refused with what there is; giving the order helps."""
    plan = make_plan(uniform(2, 1, 1, 1), schedule="zigzag")
    with pytest.raises(UnsupportedPlanError, match=r"'zigzag' \(expected one of 'gpipe', "):
        simulate(plan)
    assert simulate(plan, gpipe_schedule(2, 4, "never")).makespan == 10


def test_simulate_handles_a_large_pipeline() -> None:
    """64 partitions and 1024 micro-batches are placed, and their makespan is the closed form."""
    durations = Durations(tuple(range(64)), (1,) * 64, tuple(range(64, 0, -1)))
    timeline = place(gpipe_schedule(64, 1024, "except_last"), durations)
    assert timeline.makespan == expected_makespan(durations, 1024, "except_last")
