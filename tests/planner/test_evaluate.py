"""What a given balance costs, under any schedule and checkpoint modes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import gpipebal as gb
from gpipebal.errors import BalanceError, UnsupportedPlanError
from gpipebal.planner import equal_split, evaluate
from gpipebal.problem import to_balance
from gpipebal.profile import LayerProfile, StepTerms
from gpipebal.schedule import CHECKPOINT_MODES, SCHEDULES, Checkpoint, make_schedule
from gpipebal.simulator import Durations, place

modes = st.sampled_from(CHECKPOINT_MODES)
schedules = st.sampled_from(list(SCHEDULES))
#: Forward, recompute and backward of partitions of one layer each; whole, so that sums are exact.
costs = st.lists(st.tuples(*[st.integers(0, 9)] * 3), min_size=1, max_size=5)


def profile_of(costs: list[tuple[int, ...]], chunks: int = 1) -> gb.Profile:
    """Make a profile of layers with these forward, recompute and backward times."""
    forward, recompute, backward = ([float(t) for t in times] for times in zip(*costs, strict=True))
    return gb.Profile.from_costs(forward, backward, recompute=recompute, chunks=chunks)


def terms(*, loss: float, gather: float = 0.5, optimizer: float | None = 0.125) -> StepTerms:
    """Return terms of a step with a loss over the mini-batch, half of it forward."""
    whole_loss = LayerProfile("loss", "loss", loss / 2, loss / 2, loss / 2)
    return StepTerms(gather, whole_loss=whole_loss, optimizer_time=optimizer)


def draw(plan: gb.Plan) -> str:
    """Draw the simulated plan with one column per second, and keep the cells only."""
    lines = gb.simulate(plan).text_gantt(width=round(plan.makespan)).splitlines()[1:]
    return "\n".join(line.split()[-1] for line in lines)


@settings(max_examples=50)
@given(costs, st.integers(1, 6), modes, st.booleans())
def test_the_balance_of_a_solved_plan_costs_what_it_says(
    costs: list[tuple[int, ...]], chunks: int, mode: str, listed: bool
) -> None:
    """With one mode under GPipe the costs are the solver's, however the mode is given."""
    profile = replace(profile_of(costs, chunks), step=terms(loss=0.25))
    n_partitions = min(2, len(costs))
    solved = gb.solve(profile, n_partitions, checkpoint=mode)  # type: ignore[arg-type]
    checkpoint = [mode] * n_partitions if listed else mode
    plan = evaluate(profile, solved.balance, checkpoint=checkpoint)  # type: ignore[arg-type]
    for name in ("partitions", "makespan", "bottleneck", "step_time", "pause_time", "imbalance"):
        assert getattr(plan, name) == getattr(solved, name), name
    assert plan.equal_split_value == solved.equal_split_value
    assert (plan.status, plan.method, plan.objective) == ("feasible", "given", "makespan")


@settings(max_examples=100)
@given(costs, st.integers(1, 6), st.lists(modes, min_size=5, max_size=5), schedules)
def test_a_plan_is_its_simulation(
    costs: list[tuple[int, ...]], chunks: int, checkpoint: list[str], schedule: str
) -> None:
    """Makespan and bubble are those of the schedule with the recomputes that it really has."""
    n_partitions = len(costs)
    checkpoint = checkpoint[:n_partitions]
    plan = evaluate(
        profile_of(costs),
        [1] * n_partitions,
        chunks=chunks,
        checkpoint=checkpoint,  # type: ignore[arg-type]
        schedule=schedule,
    )
    order = make_schedule(schedule, n_partitions, chunks, plan.checkpoint)
    timeline = gb.simulate(plan)
    assert timeline.events == place(order, Durations.of_plan(plan)).events
    assert timeline.makespan == plan.makespan == plan.value
    assert timeline.bubble_fraction == pytest.approx(plan.bubble_fraction, abs=1e-12)
    times = [plan.micro_batch_time(j) for j in range(n_partitions)]
    assert plan.bottleneck == max(times)
    # The bound holds, and one partition, which waits for nobody, attains it.
    assert plan.lower_bound <= plan.makespan
    assert n_partitions > 1 or plan.lower_bound == plan.makespan
    assert 0.0 <= plan.gap <= 1.0


MIXED = """\
012r...CrBrA
.012r.CrBrA.
..012CBA...."""

ONE_F_ONE_B = """\
012r.A3rBr.CrD
.01rA2rB3rCrD.
..0A1B2C.3D..."""


@pytest.mark.parametrize(
    ("schedule", "checkpoint", "chunks", "drawing", "bound"),
    [
        ("gpipe", ("always", "always", "never"), 3, MIXED, 11.0),
        ("1f1b", "always", 4, ONE_F_ONE_B, 14.0),
    ],
)
def test_plans_are_their_drawings(
    schedule: str, checkpoint: Checkpoint, chunks: int, drawing: str, bound: float
) -> None:
    """Plans with a mode per partition, or under 1F1B, are placed as drawn by hand.

    Partition 1 works 9 (or 12) seconds, after one of partition 0 and before another one.
    """
    plan = evaluate(
        profile_of([(1, 1, 1)] * 3),
        [1, 1, 1],
        chunks=chunks,
        checkpoint=checkpoint,
        schedule=schedule,
    )
    assert draw(plan) == drawing
    assert plan.makespan == len(drawing.splitlines()[0])
    assert plan.lower_bound == bound


def test_a_pause_under_1f1b_is_refused_and_the_fix_works() -> None:
    """Under 1F1B there is no moment when all forwards are done and no backward is."""
    plan = evaluate(profile_of([(1, 0, 1)] * 2), [1, 1], chunks=4, schedule="1f1b")
    with pytest.raises(BalanceError, match="with a pause: 0F2 stands after 0B0") as error:
        gb.simulate(plan, pause=1.0)
    assert str(error.value).endswith("Fix: pause=None.")
    assert gb.simulate(plan, pause=None).makespan == 10


def test_the_timeline_says_which_modes() -> None:
    """A simulated timeline keeps schedule and modes as JSON values."""
    profile = profile_of([(1, 1, 1)] * 2, chunks=3)
    plan = evaluate(profile, [1, 1], checkpoint=("always", "never"), schedule="1f1b")
    provenance = gb.simulate(plan).provenance
    assert (provenance["schedule"], provenance["chunks"]) == ("1f1b", 3)
    assert provenance["checkpoint"] == ["always", "never"]


def test_step_under_1f1b_has_the_loss_inside() -> None:
    """The last partition takes its share of the loss with each micro-batch; nobody gathers.

    Two partitions, 4 micro-batches, forward 1 and backward 2: (4 + 1) * 3 s. A loss of 8 s adds 1 s
    to each forward and backward of the last partition, which then works 4 * 5 s.
    """
    profile = gb.Profile.from_costs([1.0, 1.0], [2.0, 2.0], chunks=4)
    options = {"checkpoint": "never", "schedule": "1f1b"}
    plan = evaluate(profile, [1, 1], **options)  # type: ignore[arg-type]
    assert (plan.makespan, plan.lower_bound, plan.step_time) == (15.0, 15.0, None)
    timed = replace(profile, step=terms(loss=8.0, gather=100.0, optimizer=0.5))
    plan = evaluate(timed, [1, 1], **options)  # type: ignore[arg-type]
    assert (plan.makespan, plan.pause_time) == (15.0, None)
    assert plan.step_time == 1 + 4 * 5 + 2 + 0.5
    # Twice the micro-batches are twice the rows, and twice the loss.
    assert evaluate(timed, [1, 1], chunks=8, **options).step_time == 1 + 8 * 5 + 2 + 0.5  # type: ignore[arg-type]
    bare = replace(profile, step=terms(loss=8.0, gather=100.0, optimizer=None))
    assert evaluate(bare, [1, 1], **options).step_time is None  # type: ignore[arg-type]


def test_the_loss_inside_takes_its_own_times() -> None:
    """A measured loss over a micro-batch adds its forward and its backward, not halves of both.

    Forwards of 1 s and backwards of 2 s, and behind the last a loss of 1 s forward and 3 s back:
    1 s until the last partition begins, 4 times (2 + 5) s in it, 2 s back. The caller's, over
    the mini-batch, stands between the phases: 5 s, 0.5 s of gather and 9 s of loss, 10 s.
    """
    profile = gb.Profile.from_costs([1.0, 1.0], [2.0, 2.0], chunks=4)
    loss = LayerProfile("loss", "loss", 1.0, 3.0, 1.0)
    whole = LayerProfile("loss", "loss", 4.0, 5.0, 4.0)
    profile = replace(profile, step=StepTerms(0.5, loss, whole, optimizer_time=0.25))
    for schedule in SCHEDULES:
        inside = evaluate(profile, [1, 1], checkpoint="never", schedule=schedule, loss_inside=True)
        assert (inside.step_time, inside.pause_time) == (1 + 4 * 7 + 2 + 0.25, None)
        assert inside.loss_inside and inside.makespan == 15.0
    callers = evaluate(profile, [1, 1], checkpoint="never")
    assert (callers.step_time, callers.pause_time) == (5 + 9.5 + 10 + 0.25, 9.5)
    assert not callers.loss_inside
    no: Any
    for no in (False, 0, np.bool_(False)):
        with pytest.raises(BalanceError, match="cannot compute the loss under this") as error:
            evaluate(profile, [1, 1], schedule="1f1b", loss_inside=no)
        assert str(error.value).endswith("Fix: loss_inside=None.")


def test_the_callers_loss_may_be_known_by_the_micro_batch_alone() -> None:
    """Then it goes by their number; the gather, known of the mini-batch, by the rows."""
    loss = LayerProfile("loss", "loss", 1.0, 3.0, 1.0)
    profile = gb.Profile.from_costs([1.0, 1.0], [2.0, 2.0], chunks=4)
    profile = replace(profile, step=StepTerms(0.5, loss, optimizer_time=0.25))
    for chunks, pause in ((4, 16.5), (8, 33.0)):
        plan = evaluate(profile, [1, 1], chunks=chunks, checkpoint="never")
        assert (plan.pause_time, plan.step_time) == (pause, plan.makespan + pause + 0.25)


@pytest.mark.parametrize("inside", [False, True])
def test_one_host_that_launches_for_all_bounds_the_step(inside: bool) -> None:
    """Where launches take as long as the work, partitions do not help; the layers alone overlap."""
    launches = {"forward_host_time": 1.0, "backward_host_time": 1.0}
    known = [LayerProfile(str(k), "Linear", 1.0, 1.0, 1.0, **launches) for k in range(4)]
    loss = LayerProfile("loss", "loss", 0.0, 0.0, 0.0, forward_host_time=0.5)
    step = StepTerms(0.0, loss, replace(loss, forward_host_time=None), optimizer_time=0.0)
    profile = gb.Profile(tuple(known), chunks=8, step=step)
    plan = evaluate(profile, [1] * 4, checkpoint="never", loss_inside=inside)
    # Four partitions, eight micro-batches, forward and backward; and the loss.
    assert plan.step_time == 4 * 8 * 2 * 1.0 + (8 * 0.5 if inside else 0.0)
    assert plan.makespan == 2.0 * (8 + 4 - 1)
    # A profile that knows no host has none.
    none = [replace(x, forward_host_time=None, backward_host_time=None) for x in (*known, loss)]
    profile = replace(profile, layers=tuple(none[:4]), step=replace(step, loss=none[4]))
    assert evaluate(profile, [1] * 4, checkpoint="never").step_time == plan.makespan


def test_forwards_without_a_graph_shorten_the_step_but_not_the_makespan() -> None:
    """Micro-batches that are recomputed take the time of a forward without a graph, if known.

    Forwards of 2 s, recomputes of 2 s, backwards of 3 s, three micro-batches: always recomputed
    (3 + 1) forwards; of half a second without a graph, the forwards end at 2 s instead of 8 s.
    """
    profile = replace(
        profile_of([(2, 2, 3)] * 2, 3), step=terms(loss=1.0, gather=0.0, optimizer=0.0)
    )
    before = evaluate(profile, [1, 1], checkpoint="always")
    layers = tuple(replace(layer, no_grad_forward_time=0.5) for layer in profile.layers)
    profile = replace(profile, layers=layers)
    after = evaluate(profile, [1, 1], checkpoint="always")
    assert before.step_time is not None and after.step_time is not None
    assert after.makespan == before.makespan
    assert before.step_time - after.step_time == 8 - 2
    never = evaluate(profile, [1, 1], checkpoint="never")
    assert never.step_time == 8 + 1 + 4 * 3


def test_an_evaluated_plan_goes_into_a_file(tmp_path: object) -> None:
    """A plan with modes and schedule comes back from its file as it was."""
    plan = evaluate(
        profile_of([(1, 1, 1)] * 3), [1, 2], checkpoint=["always", "never"], schedule="1f1b"
    )
    path = f"{tmp_path}/plan.json"
    plan.save(path)
    assert gb.Plan.load(path) == plan
    assert gb.Plan.load(path).modes == ("always", "never")


def test_an_unequal_balance_is_said_to_cost_more() -> None:
    """A balance worse than the equal split says so in the table: 26 s against 20 s."""
    plan = evaluate(profile_of([(1, 1, 1)] * 4), [3, 1], checkpoint="never", chunks=4)
    assert (plan.value, plan.equal_split_value) == (26.0, 20.0)
    assert "30.0 % above the split into equally many layers" in str(plan)


@given(st.lists(st.integers(1, 4), min_size=1, max_size=5), st.integers(1, 12))
def test_a_balance_must_fit(balance: list[int], n_layers: int) -> None:
    """A balance that does not add up to the layers is refused, and the fix does."""
    profile = gb.Profile.from_costs([1.0] * n_layers)
    if sum(balance) == n_layers:
        assert evaluate(profile, balance).balance == list(balance)
        return
    with pytest.raises(BalanceError, match=r"balance does not fit the profile") as error:
        evaluate(profile, balance)
    fix = str(error.value).split("balance=")[-1].rstrip(".")
    n_partitions = min(len(balance), n_layers)
    assert eval(fix) == to_balance(equal_split(n_layers, n_partitions))
    assert evaluate(profile, eval(fix)).n_partitions == n_partitions


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"balance": [0, 2]}, BalanceError, r"balance\[0\] is too small"),
        ({"balance": ["2"]}, BalanceError, r"balance\[0\] is not a whole number"),
        ({"balance": []}, BalanceError, r"sum\(balance\)=0"),
        ({"chunks": 0}, BalanceError, "chunks is too small"),
        ({"checkpoint": "some"}, BalanceError, "checkpoint='some'"),
        ({"checkpoint": ["never"]}, BalanceError, r"len\(checkpoint\)=1 \(expected 2"),
        ({"schedule": "zigzag"}, UnsupportedPlanError, "schedule='zigzag'"),
    ],
)
def test_impossible_requests(
    options: dict[str, object], error: type[Exception], message: str
) -> None:
    """An impossible request names the argument, the rule and a fix."""
    with pytest.raises(error, match=message) as caught:
        evaluate(gb.Profile.from_costs([1.0, 1.0]), **{"balance": [1, 1], **options})  # type: ignore[arg-type]
    assert "\nFix: " in str(caught.value)


def test_an_equal_split_has_no_empty_partition() -> None:
    """More partitions than layers are refused, as everywhere."""
    assert equal_split(3, 3) == (0, 1, 2, 3)
    with pytest.raises(BalanceError, match="fewer layers than partitions: n_partitions=3"):
        equal_split(2, 3)
