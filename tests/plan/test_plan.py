"""Plan: its table, its figures from first principles, and that a file brings back every bit."""

from __future__ import annotations

import json
import re
from dataclasses import fields, make_dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import gpipebal as gb
from gpipebal.errors import BalanceError, FileFormatError, ProfileError
from gpipebal.plan import PartitionPlan, PeakMemory, Plan
from gpipebal.schedule import CHECKPOINT_MODES, CheckpointMode
from gpipebal.solvers import Split

TIMES = st.floats(0, 1e6, allow_nan=False)


def _plan(**changes: Any) -> Plan:
    """Return a plan of two partitions with round figures, and the given changes."""
    content: dict[str, Any] = {
        "partitions": (
            PartitionPlan(
                ("a", "b"), ("x", "y"), 1.0, 2.0, 0.5, PeakMemory(1024, 1024, optimizer=0)
            ),
            PartitionPlan(("c",), ("z",), 0.25, 1.25, 0.5, PeakMemory(activations=512)),
        ),
        "chunks": 4,
        "rows": 8,
        "checkpoint": "except_last",
        "schedule": "gpipe",
        "objective": "makespan",
        "value": 20.0,
        "lower_bound": 20.0,
        "status": "optimal",
        "method": "parametric",
        "makespan": 20.0,
        "bottleneck": 3.5,
    }
    return Plan(**{**content, **changes})


def test_a_frame_has_one_row_per_partition() -> None:
    """A plan as a table: what each partition runs, its seconds, and its bytes."""
    plan = _plan(checkpoint=("always", "never"), device_order=(1, 0))
    frame = plan.to_frame()
    first = {
        "partition": 0,
        "device": 1,
        "layers": 2,
        "first": "a",
        "last": "b",
        "checkpoint": "always",
        "recomputed": 4,
        "time": 3.5,
        "forward_time": 1.0,
        "recompute_time": 0.5,
        "parameters_bytes": 1024,
        "peak_bytes": 2048,
    }
    assert frame.iloc[0][list(first)].to_dict() == first
    for j, part in enumerate(plan.partitions):
        parts = [c for c in frame if c.endswith("_bytes") and c != "peak_bytes"]
        assert frame.loc[j, parts].fillna(0).sum() == part.memory.total == frame.peak_bytes[j]
    assert list(frame["time"]) == [plan.micro_batch_time(j) for j in range(2)]


def test_plan_derives_the_balance() -> None:
    """The balance is the number of layers of each partition; all of them are the plan's layers."""
    plan = _plan()
    assert plan.balance == [2, 1]
    assert (plan.n_partitions, plan.n_layers) == (2, 3)
    assert plan.names == ("a", "b", "c")


def test_a_balance_is_a_list_of_its_own() -> None:
    """Who changes the list that a plan or a split gave changes neither."""
    plan, found = _plan(), Split((0, 2, 5), 8, 8, "some")
    before = replace(plan), hash(found)
    plan.balance.append(3)
    found.balance[0] = 7
    assert (plan.balance, found.balance) == ([2, 1], [2, 3])
    assert (plan, hash(found)) == before


@pytest.mark.parametrize(
    ("checkpoint", "chunks", "times"),
    [
        ("always", 1, (3.5, 2.0)),
        ("except_last", 4, (3.5, 2.0)),
        # The only micro-batch is the last one: nothing is recomputed.
        ("except_last", 1, (3.0, 1.5)),
        ("never", 4, (3.0, 1.5)),
    ],
)
def test_micro_batch_time_counts_recompute_where_the_mode_does(
    checkpoint: str, chunks: int, times: tuple[float, float]
) -> None:
    """A partition's time is forward + backward, and recompute under modes that recompute."""
    plan = _plan(checkpoint=checkpoint, chunks=chunks)
    assert tuple(plan.micro_batch_time(j) for j in range(2)) == times
    assert plan.imbalance == pytest.approx(max(times) / (sum(times) / 2))


@pytest.mark.parametrize(
    ("checkpoint", "recomputed"), [("always", 4), ("except_last", 3), ("never", 0)]
)
def test_bubble_fraction_is_idle_over_all(checkpoint: str, recomputed: int) -> None:
    """Busy and idle device-time add up to partitions times makespan."""
    plan = _plan(checkpoint=checkpoint)
    busy = 4 * (3.0 + 1.5) + recomputed * (0.5 + 0.5)
    assert plan.bubble_fraction * 40.0 + busy == pytest.approx(40.0)


@pytest.mark.parametrize("chunks", range(1, 10))
def test_a_device_that_is_always_busy_has_no_bubble(chunks: int) -> None:
    """Rounding does not make it negative, as it does not in a timeline."""
    profile = gb.Profile.from_costs([0.1, 0.2], chunks=chunks)
    bubble = gb.evaluate(profile, [2]).bubble_fraction
    assert 0.0 <= bubble < 1e-12


def test_each_partition_has_its_mode() -> None:
    """Modes per partition decide each partition's time, and what all of them recompute."""
    plan = _plan(checkpoint=["never", "except_last"])
    assert plan.checkpoint == plan.modes == ("never", "except_last")
    assert _plan().modes == ("except_last", "except_last")
    assert plan.has_recomputes and plan.recomputed == (0, 3)
    assert [plan.micro_batch_time(j) for j in range(2)] == [3.0, 2.0]
    assert plan.bubble_fraction * 40.0 + 4 * (3.0 + 1.5) + 3 * 0.5 == pytest.approx(40.0)


def test_recomputes_are_those_of_the_schedule() -> None:
    """1F1B leaves out a recompute right behind its forward; the last partition does none."""
    plan = _plan(checkpoint="always", schedule="1f1b")
    assert plan.recomputed == (4, 0)
    assert [plan.micro_batch_time(j) for j in range(2)] == [3.5, 1.5]
    assert plan.bubble_fraction * 40.0 + 4 * (3.0 + 1.5) + 4 * 0.5 == pytest.approx(40.0)
    alone = _plan(checkpoint="always", schedule="1f1b", chunks=1)
    assert not alone.has_recomputes
    # Of a schedule that is not known here, the modes are all there is to go by.
    assert _plan(checkpoint="always", schedule="zigzag").recomputed == (4, 4)


def test_gap_is_relative_to_the_value() -> None:
    """The gap says how far below the value the optimum can be; a value of zero has none."""
    assert _plan(value=20.0, lower_bound=15.0, status="feasible").gap == 0.25
    assert _plan(value=0.0, lower_bound=0.0).gap == 0.0


def test_figures_of_a_plan_without_time_are_defined() -> None:
    """All-zero times divide by nothing: imbalance 1, bubble 0, and a table that prints."""
    idle = PartitionPlan(("a",), ("x",), 0.0, 0.0, 0.0)
    plan = _plan(partitions=(idle, idle), makespan=0.0, value=0.0, lower_bound=0.0)
    assert (plan.imbalance, plan.bubble_fraction) == (1.0, 0.0)
    assert "0.0 %" in str(plan)


def test_peak_memory_total_adds_every_part() -> None:
    """The total is the sum of the parts; unknown optimizer state counts as nothing."""
    assert PeakMemory(1, 2, 4, 8, 16, 32, 64).total == 127
    assert PeakMemory(1, 2, 4, None, 16, 32, 64).total == 119


def _partition(layers: list[tuple[str, str]], has_prints: bool, **more: Any) -> PartitionPlan:
    names, prints = zip(*layers, strict=True)
    return PartitionPlan(layers=names, fingerprints=prints if has_prints else (), **more)


@settings(max_examples=30)
@given(
    partitions=st.lists(
        st.builds(
            _partition,
            st.lists(st.tuples(st.text(max_size=4), st.text(max_size=4)), min_size=1, max_size=3),
            st.booleans(),
            forward_time=TIMES,
            backward_time=TIMES,
            recompute_time=TIMES,
            memory=st.builds(PeakMemory, parameters=st.integers(0, 2**50), optimizer=st.none()),
        ),
        min_size=1,
        max_size=3,
    ),
    step_time=st.none() | TIMES,
    modes=st.none() | st.lists(st.sampled_from(CHECKPOINT_MODES), min_size=3, max_size=3),
)
def test_plan_survives_a_file(
    tmp_path_factory: pytest.TempPathFactory,
    partitions: list[PartitionPlan],
    step_time: float | None,
    modes: list[CheckpointMode] | None,
) -> None:
    """Save and load give the same plan, in every bit."""
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    checkpoint = "always" if modes is None else modes[: len(partitions)]
    busy = [one.forward_time + one.backward_time + one.recompute_time for one in partitions]
    makespan = 4 * sum(busy)
    plan = _plan(
        partitions=partitions,
        checkpoint=checkpoint,
        step_time=step_time,
        provenance={"threads": 1},
        **dict.fromkeys(("value", "lower_bound", "makespan"), makespan),
        bottleneck=max(busy),
    )
    plan.save(path)
    assert Plan.load(path) == plan
    assert str(Plan.load(path)) == str(plan)


def test_a_record_shares_nothing_with_its_plan() -> None:
    """Whoever changes a record leaves the plan as it is, and one that was made from it."""
    plan = _plan(provenance={"flags": ["wide"]})
    record = plan.to_dict()
    again = Plan.from_dict(record)
    record["provenance"]["flags"].append("sparse")
    assert plan.provenance == again.provenance == {"flags": ["wide"]}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"partitions": ()}, "partitions is too small: partitions=0"),
        ({"chunks": 0}, "chunks is too small: chunks=0"),
        ({"chunks": "4"}, "chunks is not a whole number: chunks='4'"),
        ({"checkpoint": "sometimes"}, "checkpoint mode does not exist: checkpoint='sometimes'"),
        ({"checkpoint": ["always", "some"]}, "checkpoint mode does not exist: checkpoint='some'"),
        ({"checkpoint": ["always"]}, r"len\(checkpoint\)=1 \(expected 2, one per partition\)"),
        (
            {"partitions": (PartitionPlan((), (), 0.0, 0.0, 0.0),)},
            "layers of partition 0 is too small: layers of partition 0=0",
        ),
    ],
)
def test_impossible_plan_is_refused(changes: dict[str, Any], message: str) -> None:
    """A plan has at least one partition, one layer in each, and one micro-batch."""
    with pytest.raises(BalanceError, match=message) as caught:
        _plan(**changes)
    assert "\nFix: " in str(caught.value)


@pytest.mark.parametrize(
    "damage",
    [
        lambda r: r.pop("chunks"),
        lambda r: r.pop("partitions"),
        lambda r: r.update(partitions=3),
        lambda r: r.update(partitions=[]),
        lambda r: r.update(checkpoint="sometimes"),
        lambda r: r.update(checkpoint=["never"]),
        lambda r: r.update(checkpoint=["never", 1]),
        lambda r: r.update(surprise=1),
        lambda r: r["partitions"][0].pop("layers"),
        lambda r: r["partitions"][0].update(memory={"surprise": 1}),
        lambda r: r["partitions"][0].update(memory=None),
    ],
)
def test_damaged_record_is_refused(damage: Any) -> None:
    """A record with a field missing, unknown, or of another type gives one clear error."""
    record = json.loads(json.dumps(_plan().to_dict()))
    damage(record)
    with pytest.raises(FileFormatError, match=r"plan is damaged: .+\nFix: solve again"):
        Plan.from_dict(record)


def test_what_a_plan_can_say_survives_a_file(tmp_path: Path) -> None:
    """Links, limits, the order of devices, sensitivity and notes come back as they were."""
    part = PartitionPlan(
        ("a",), ("x",), 1.0, 2.0, 0.5, memory_limit=2048, receive_time=0.5, return_time=0.25
    )
    plan = _plan(
        partitions=(part, part),
        checkpoint=("never", "always"),
        device_order=(1, 0),
        overlaps=False,
        sensitivity=((None, 0.5),),
        notes=("Said.",),
        equal_split_value=25.0,
    )
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    assert (plan.devices, plan.gain) == ((1, 0), pytest.approx(0.2))
    text = str(plan)
    assert all(word in text for word in ("device", "transfers", "750 ms", "limit", "Note: Said."))


def test_the_rows_of_the_mini_batch_are_known() -> None:
    """Those of the profile, if it was parted so, and else those of full micro-batches."""
    profile = gb.Profile.from_costs([1.0, 2.0], rows=4, chunks=8)
    uneven = replace(profile, mini_batch_rows=30)
    assert gb.solve(uneven, 2).mini_batch_rows == 30
    assert gb.solve(uneven, 2, chunks=4).mini_batch_rows == 16
    plan = gb.solve(uneven, 2)
    record = plan.to_dict()
    assert Plan.from_dict(record) == plan
    for rows in (0, 33, 2.0, "30"):
        with pytest.raises(FileFormatError, match="mini_batch_rows"):
            Plan.from_dict({**record, "mini_batch_rows": rows})


def test_a_file_has_every_field() -> None:
    """A field that is missing is not taken for what it would be if nothing were special."""
    for place in ("", "partitions[1]", "partitions[1].memory"):
        for name in _at(_plan().to_dict(), place):
            record = json.loads(json.dumps(_plan().to_dict()))
            del _at(record, place)[name]
            message = "of another format" if name in ("format", "version") else f"missing '{place}"
            with pytest.raises(FileFormatError, match=f"{re.escape(message)}.*{name}"):
                Plan.from_dict(record)


def _at(record: dict[str, Any], place: str) -> dict[str, Any]:
    """Return the record, its second partition, or that partition's memory."""
    for key in re.findall(r"\w+", place):
        record = record[int(key) if key.isdigit() else key]  # type: ignore[index]
    return record


@pytest.mark.parametrize(
    "changes",
    [
        {"device_order": (0, 0)},
        {"device_order": (0, 1.0)},
        {"overlaps": 1},
        {"sensitivity": ((1.0,),)},
        {"sensitivity": ((1.0, "much"),)},
        {"sensitivity": ((1.0, 1.0), (1.0, 1.0))},
        {"notes": (3,)},
        {"value": float("nan")},
        {"partitions": (PartitionPlan(("a",), (), 0.0, 0.0, 0.0, memory_limit=1.5),)},  # type: ignore[arg-type]
        {"partitions": (PartitionPlan(("a",), (), 0.0, 0.0, 0.0, receive_time=-1.0),)},
        {"partitions": (PartitionPlan(("a", "b"), ("x",), 0.0, 0.0, 0.0),)},
        {"partitions": (PartitionPlan(("a",), (), 0.0, 1.0, 0.0, weight_time=5.0),)},
    ],
)
def test_impossible_values_are_refused(changes: dict[str, Any]) -> None:
    """An order that is none, growth that is not a number, or a limit that is not a size."""
    with pytest.raises(ProfileError, match="has an impossible value"):
        _plan(**changes)


def test_values_have_the_unit_of_the_objective() -> None:
    """Peak memory is told in bytes, a cost of the caller's as a plain number."""
    peak = _plan(objective="peak_memory", value=2048, lower_bound=9, status="feasible")
    assert "peak_memory 2.00 KiB" in str(peak)
    assert "cost 12.5 (proven optimal)" in str(
        _plan(objective="cost", value=12.5, lower_bound=12.5)
    )


def test_newer_file_is_refused(tmp_path: Path) -> None:
    """A plan of a later format is not guessed at."""
    path = tmp_path / "plan.json"
    path.write_text(json.dumps({**_plan().to_dict(), "version": 99}))
    with pytest.raises(FileFormatError, match="newer format: version=99"):
        Plan.load(path)


@pytest.mark.parametrize("version", [1, 7])
def test_a_file_from_before_the_first_release_is_refused(version: int, tmp_path: Path) -> None:
    """It is not read as what it is not, and the error says how to get one that can be read."""
    path = tmp_path / "plan.json"
    path.write_text(json.dumps({**_plan().to_dict(), "version": version}))
    message = rf"before the first release: version={version} \(.* 8\)\.\nFix: solve again"
    with pytest.raises(FileFormatError, match=message):
        Plan.load(path)
    with pytest.raises(
        FileFormatError, match=rf"version={version} \(expected .*, 8\)\.\nFix: solve"
    ):
        Plan.from_dict({**_plan().to_dict(), "version": version})


TABLE = """\
3 layers on 2 partitions, 4 micro-batches of 8 rows, checkpoint='except_last': balance=[2, 1], \
makespan 20.0 s (proven optimal)
partition  layers          forward  backward  recompute  peak memory   share
        0       2  a .. b   1.00 s    2.00 s     500 ms     2.00 KiB  63.6 %
        1       1  c        250 ms    1.25 s     500 ms        512 B  36.4 %
makespan 20.0 s; training step 21.0 s; bubble 47.5 %; imbalance 1.273; \
20.0 % below the split into equally many layers"""


def test_plan_prints_as_a_table() -> None:
    """Printing a plan shows partitions, layers by name, times, peak memory and share."""
    assert str(_plan(step_time=21.0, equal_split_value=25.0)) == TABLE


MIXED = """\
3 layers on 2 partitions, 4 micro-batches of 8 rows, schedule='1f1b', checkpoint by partition: \
balance=[2, 1], makespan 20.0 s (within 10.0 %)
partition  layers          checkpoint  forward  backward  recompute  peak memory   share
        0       2  a .. b      always   1.00 s    2.00 s     500 ms     2.00 KiB  70.0 %
        1       1  c            never   250 ms    1.25 s          -        512 B  30.0 %
makespan 20.0 s; bubble 50.0 %; imbalance 1.400; \
25.0 % above the split into equally many layers, which breaks a limit or a rule"""


#: What else a step has.
_REST = (
    "the way to the workers and back, what actions take besides their layers, "
    "and forwards without a graph (if slower)"
)


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        (
            {"pause_time": 2.0, "optimizer_time": 5.0},
            f"loss and joining the outputs 2.00 s; optimizer 5.00 s; {_REST} 3.00 s.",
        ),
        (
            {"loss_inside": True, "optimizer_time": 5.0},
            f"optimizer 5.00 s; loss, {_REST} 5.00 s.",
        ),
        # The optimizer was not measured.
        ({"pause_time": 10.0}, "loss and joining the outputs 10.0 s."),
        ({}, f"optimizer, {_REST} 10.0 s."),
        # Every forward has a graph.
        (
            {"checkpoint": "never", "loss_inside": True, "optimizer_time": 5.0},
            "optimizer 5.00 s; loss, the way to the workers and back, "
            "and what actions take besides their layers 5.00 s.",
        ),
    ],
)
def test_a_step_far_above_the_makespan_names_its_parts(changes: Any, parts: str) -> None:
    """With their times; a step that is a little longer explains itself."""
    plan = _plan(step_time=30.0, **changes)
    line = "The training step, 30.0 s, has more than the makespan, which is of the layers alone: "
    assert f"{line}{parts}" in str(plan).splitlines()
    assert f"{line}{parts}" in plan.explain().splitlines()
    assert "has more than the makespan" not in str(_plan(step_time=25.0, **changes))


def test_what_may_wait_is_said_beside_the_peak() -> None:
    """A step in which less waits needs less; a hundredth is not worth a word."""
    parts = _plan().partitions
    for waiting, is_said in ((1024, True), (10, False)):
        memory = PeakMemory(1024, 1024, optimizer=0, waiting=waiting)
        text = _plan(partitions=(replace(parts[0], memory=memory), parts[1])).explain()
        said = f"{gb.units.format_bytes(waiting)} of that is for values that may have to wait"
        assert (said in text) == is_said


def test_the_optimizer_of_a_plan_is_the_profiles() -> None:
    """A step that it makes long is explained by it, also after a plan was saved."""
    profile = replace(
        gb.Profile.from_costs([1.0, 1.0]),
        step=gb.profile.StepTerms(gather_time=0.0, optimizer_time=9.0),
    )
    plan = gb.solve(profile, 2)
    assert gb.Plan.from_dict(plan.to_dict()).optimizer_time == 9.0


def test_a_plan_like_the_equal_split_says_so_in_both_texts() -> None:
    """It used to be 0.0 % below in one of them."""
    plan = _plan(equal_split_value=20.0)
    assert str(plan).endswith("; as much as the split into equally many layers")
    assert "would give as much: 20.0 s." in plan.explain()


@pytest.mark.parametrize(
    ("schedule", "how"), [("gpipe", "a formula"), ("1f1b", "a simulation of '1f1b'")]
)
def test_a_plan_says_how_its_makespan_was_found(schedule: str, how: str) -> None:
    """Under GPipe in closed form, under any other schedule by simulation."""
    plan = gb.solve(gb.Profile.from_costs([1.0, 2.0, 3.0]), 2, chunks=4, schedule=schedule)
    assert re.search(rf"\nThe makespan, \S+ s, comes from {how}\.\n", plan.explain())


def test_plan_with_modes_prints_them() -> None:
    """A table with a mode per partition has a column for it; another schedule is named."""
    plan = _plan(
        checkpoint=["always", "never"],
        schedule="1f1b",
        status="feasible",
        lower_bound=18.0,
        equal_split_value=16.0,
    )
    assert str(plan) == MIXED
    # Modes that are all the same need no column.
    same = _plan(checkpoint=["except_last"] * 2, step_time=21.0, equal_split_value=25.0)
    assert str(same) == TABLE


@pytest.mark.parametrize(
    ("overlaps", "slowest", "waits"),
    [
        (False, "Partition 2 is the slowest, with 24.0 s for a micro-batch", "partition"),
        (True, "The link between partitions 1 and 2 is the slowest, with 20.0 s", "link"),
    ],
)
def test_the_slowest_is_what_the_bottleneck_is_of(overlaps: bool, slowest: str, waits: str) -> None:
    """By hand: partition 2 works for 4 s, and 100 bytes take 10 s on their way, and back."""
    costs = [3.0, 1.0, 1.0, 1.0]
    profile = gb.Profile.from_costs(costs, costs, output_bytes=[0, 100, 0, 0], chunks=4)
    link = gb.problem.Link(10.0, overlaps=overlaps)
    plan = gb.evaluate(profile, [1, 1, 2], link=link, checkpoint="never")
    assert plan.bottleneck == (20.0 if overlaps else 24.0)
    text = plan.explain()
    assert slowest in text and ("(4.00 s of work and 20.0 s of copies)" in text) is not overlaps
    assert "Devices are idle or copying for" in text and f"waits for the slowest {waits}." in text
    # The table's shares are of the work alone, as its columns and `imbalance` say.
    assert "share of work\n" in str(plan) and "imbalance 1.500 without transfers;" in str(plan)


def test_a_plan_with_the_loss_inside_says_how_to_train() -> None:
    """Its memory and times are those of `GPipe.step`, not of a loss that the caller computes."""
    inside = _plan(loss_inside=True)
    assert "rows, loss inside (train with pipe.step), checkpoint='except_last'" in str(inside)
    assert "The last partition computes the loss" in inside.explain()
    # Only torch runs this schedule, and it has its own step.
    for other in (_plan(), _plan(loss_inside=True, schedule="zb_h1")):
        assert "pipe.step" not in str(other) + other.explain()


def test_plan_says_what_it_does_not_know() -> None:
    """A plan that is not proven shows its gap, and one without optimizer state says so."""
    bare = PartitionPlan(("a",), ("x",), 1.0, 1.0, 1.0, PeakMemory(parameters=8))
    text = str(_plan(partitions=(bare,), value=20.0, lower_bound=15.0, status="feasible"))
    assert "(within 25.0 %)" in text
    assert text.endswith("does not count optimizer state: it was not given to the profiler.")
    flags = ["the optimizer's time and state are not known: a step of LBFGS calls the model"]
    given = _plan(partitions=(bare,), value=20.0, provenance={"flags": flags})
    assert str(given).endswith("does not count optimizer state: it is not known.")
    assert "optimizer state: it is not known." in given.explain()


@pytest.mark.parametrize("bound", [5, 5.0, np.float32(5), np.int64(5), Fraction(5)])
def test_bounds_are_numbers_of_any_kind(bound: Any) -> None:
    """And what is above the value is the value."""
    plan = gb.solve(gb.Profile.from_costs([3, 1, 4], chunks=4), 2)
    found = plan.with_bound(bound)
    assert found.lower_bound == 5 and type(found.lower_bound) in (int, float)
    assert found.status == "feasible" and gb.Plan.from_dict(found.to_dict()) == found
    assert plan.with_bound(10**400).status == "optimal"
    for wrong in (-1, np.float32("nan"), True):
        with pytest.raises(
            BalanceError, match=r"lower_bound is not a bound: .*\nFix: lower_bound="
        ):
            plan.with_bound(wrong)


def test_quantities_of_a_subclass_are_checked_too() -> None:
    """Also where its module evaluates annotations, which those of the package are not."""
    plan = gb.solve(gb.Profile.from_costs([1.0, 2.0]), 2)
    known = {item.name: getattr(plan, item.name) for item in fields(plan)}
    own: list[Any] = [("energy", float, 0.0), ("optimizer_time", float | None, None)]
    kind: Any = make_dataclass("Own", own, bases=(Plan,), frozen=True)
    assert kind(**known, energy=2.0).energy == 2.0
    for name in ("energy", "optimizer_time"):
        with pytest.raises(ProfileError, match=f"impossible value: {name}=-1.0"):
            kind(**{**known, name: -1.0})
