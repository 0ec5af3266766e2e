"""Tests of schedules side by side: rows against the simulator, reasons, and profiles."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpipebal.errors import BalanceError, UnsupportedPlanError, UsageError
from gpipebal.memory import partition_memory
from gpipebal.planner import evaluate, solve
from gpipebal.problem import Link, links_of
from gpipebal.profile import LayerProfile, Profile, SkipProfile
from gpipebal.schedule import (
    ALL_SCHEDULES,
    CHECKPOINT_MODES,
    CheckpointMode,
    order_of,
    shares_devices,
)
from gpipebal.schedule_comparison import compare_schedules
from gpipebal.simulator import (
    CellBytes,
    Durations,
    HeldBytes,
    compare_durations,
    durations_of,
    held_of,
    memory_over_time,
    place,
    simulate,
)

#: The schedules whose partitions need devices of several.
SHARING = [name for name in ALL_SCHEDULES if shares_devices(name)]

#: Those of the drawing.
DRAWN = ("gpipe", "1f1b", "gpipe_in_order", "interleaved_1f1b", "zb_h1")

TABLE = """\
2 devices, 4 micro-batches, checkpoint 'never'
schedule          parts/device  makespan  bubble  imbalance  peak  run by
zb_h1                        1    13.0 s   7.7 %       1.00  24 B  torch.distributed.pipelining \
ScheduleInterleavedZeroBubble
interleaved_1f1b             2    13.5 s  11.1 %       1.00   5 B  torch.distributed.pipelining \
ScheduleInterleaved1F1B
gpipe                        1    15.0 s  20.0 %       1.00  44 B  GPipe
1f1b                         1    15.0 s  20.0 %       1.00  24 B  GPipe
gpipe_in_order               1    15.0 s  20.0 %       1.00  44 B  torch.distributed.pipelining \
ScheduleGPipe"""


def equal(n: int, forward: float, backward: float) -> Durations:
    """Give n partitions the same times."""
    return Durations((forward,) * n, (forward,) * n, (backward,) * n)


def test_the_table_is_its_drawing() -> None:
    """Printed, schedules stand below each other with what runs them, the fastest first."""
    table = compare_durations(
        {1: equal(2, 1.0, 2.0), 2: equal(4, 0.5, 1.0)},
        4,
        schedules=DRAWN,
        held={
            1: [HeldBytes(4, recorded=CellBytes(graph=10))] * 2,
            2: [HeldBytes(recorded=CellBytes(graph=1))] * 4,
        },
    )
    assert str(table) == TABLE
    assert table.best.schedule == "zb_h1"
    assert table.row("1f1b").makespan == 15.0
    with pytest.raises(UsageError, match="no such row"):
        table.row("2f2b")


@settings(max_examples=60, deadline=None)
@given(
    data=st.data(),
    n=st.integers(1, 4),
    groups=st.integers(1, 3),
    mode=st.sampled_from(CHECKPOINT_MODES),
)
def test_each_row_is_what_the_simulator_says(
    data: st.DataObject, n: int, groups: int, mode: CheckpointMode
) -> None:
    """Makespan, bubble, imbalance and peak of a row are those of its own timeline."""
    times = st.lists(st.integers(0, 9).map(float), min_size=n, max_size=n).map(tuple)
    durations = Durations(*(data.draw(times) for _ in range(3)))
    cell = CellBytes(graph=3, kept=1, backward=1)
    sizes = [HeldBytes(recorded=cell, recomputed=cell)] * n
    table = compare_durations(durations, groups * n, checkpoint=mode, held={1: sizes})
    assert {row.schedule for row in table.rows} == set(ALL_SCHEDULES) - set(SHARING)
    for row in table.rows:
        timeline = place(order_of(row.schedule, n, groups * n, mode), durations)
        assert (row.makespan, row.bubble_fraction, row.imbalance) == (
            timeline.makespan,
            timeline.bubble_fraction,
            timeline.imbalance,
        )
        assert row.peak_bytes == max(t.peak for t in memory_over_time(timeline, sizes))
    makespans = [row.makespan for row in table.rows if row.makespan is not None]
    assert makespans == sorted(makespans)


def test_a_schedule_that_does_not_fit_says_why() -> None:
    """With five micro-batches on two devices some cannot be made: they stay, with the reason."""
    table = compare_durations({1: equal(2, 1.0, 2.0), 2: equal(4, 0.5, 1.0)}, 5)
    refused = [row for row in table.rows if row.makespan is None]
    assert {row.schedule for row in refused} == {"zb_h1", "interleaved_1f1b"}
    assert table.rows[-2:] == tuple(refused)
    assert "Fix: chunks=" in refused[0].refusal
    assert refused[0].refusal in str(table)
    assert table.to_frame()["makespan"].isna().sum() == 2


def test_counts_that_do_not_fit_are_refused() -> None:
    """Partitions must be dealt out evenly, chunks be at least one, and schedules exist."""
    with pytest.raises(BalanceError, match=r"3 partitions with 2 on every device \(expected 2"):
        compare_durations({1: equal(1, 1.0, 1.0), 2: equal(3, 1.0, 1.0)}, 4)
    with pytest.raises(BalanceError, match=r"1 partition with 2 on .* \(expected 2 on 1 device\)"):
        compare_durations({2: equal(1, 1.0, 1.0)}, 4)
    with pytest.raises(BalanceError, match="chunks is too small"):
        compare_durations(equal(2, 1.0, 1.0), 0)
    for each in (0, "a"):
        with pytest.raises(BalanceError, match="partitions_per_device is"):
            compare_durations({each: equal(2, 1.0, 1.0)}, 4)  # type: ignore[dict-item]
    with pytest.raises(UnsupportedPlanError, match="'2f2b'"):
        compare_durations(equal(2, 1.0, 1.0), 4, schedules=["2f2b"])


def test_a_profile_is_cut_and_compared() -> None:
    """The same chain under all schedules: rows for one and two partitions on each device."""
    profile = Profile.from_costs([1.0] * 8, saved_bytes=[10] * 8, output_bytes=[1] * 8, chunks=4)
    table = compare_schedules(profile, 2)
    assert table.row("gpipe").makespan == (4 + 1) * 12.0
    assert table.row("zb_h1").makespan == 4 * 12.0 + 4.0
    assert table.row("interleaved_1f1b", 2).makespan == 4 * 12.0 + 6.0
    gpipe, one_f_one_b = table.row("gpipe").peak_bytes, table.row("1f1b").peak_bytes
    assert gpipe is not None and one_f_one_b is not None and gpipe > one_f_one_b > 2 * 40


def test_micro_batches_are_as_many_as_in_a_plan() -> None:
    """With more of them, each has fewer rows if their costs are known, as `solve` has it."""
    small = Profile.from_costs([1.0] * 4, rows=2, chunks=4)
    both = replace(small, other_sizes=(Profile.from_costs([3.0] * 4, rows=4),))
    for chunks in (2, 4):
        table = compare_schedules(both, 2, chunks=chunks, schedules=["gpipe"])
        plan = solve(both, 2, chunks=chunks, checkpoint="never")
        assert table.best.makespan == plan.makespan
        assert table.notes == ()
    with pytest.raises(BalanceError, match="chunks are more than the mini-batch has rows"):
        compare_schedules(both, 2, chunks=9)
    table = compare_schedules(small, 2, chunks=8, schedules=["gpipe"])
    assert "rows only" in str(table)


def test_transfers_slow_the_table_down() -> None:
    """What crosses a cut takes its bytes over the bandwidth, skip connections included."""
    profile = Profile.from_costs([1.0] * 2, output_bytes=[100, 100], chunks=1)
    free = compare_schedules(profile, 2, schedules=["gpipe"]).best.makespan
    slow = compare_schedules(profile, 2, schedules=["gpipe"], bandwidth=100.0, latency=0.5).best
    assert free == 6.0 and slow.makespan == 6.0 + 2 * 1.5
    skipping = Profile(
        profile.layers, (*profile.storages, 50), skips=(SkipProfile("skip", 0, 1, (4,)),)
    )
    both = compare_schedules(skipping, 2, schedules=["gpipe"], bandwidth=100.0).best
    assert both.makespan == 6.0 + 2 * 1.5
    late = compare_schedules(profile, 2, schedules=["gpipe"], latency=2.0).best
    assert late.makespan == 10.0


def test_layers_without_parameters_have_no_weight_gradient() -> None:
    """Zero bubble has nothing to fill with where no layer has parameters."""
    layers = tuple(LayerProfile(str(k), "ReLU", 1.0, 2.0, 1.0) for k in range(2))
    table = compare_schedules(Profile(layers, chunks=4), 2)
    assert table.row("zb_h1").makespan == table.row("1f1b").makespan == 15.0


def test_forwards_without_a_graph_count_where_they_are_known() -> None:
    """Micro-batches that are recomputed have the faster forward of the profile."""
    layers = tuple(
        LayerProfile(str(k), "Linear", 2.0, 2.0, 2.0, no_grad_forward_time=1.0) for k in range(2)
    )
    table = compare_schedules(
        Profile(layers, chunks=1), 2, checkpoint="always", schedules=["gpipe"]
    )
    # Forwards of 1 s each, the last partition's recompute, and two backwards.
    assert table.best.makespan == 1.0 + 1.0 + 2.0 + 2.0 + 2.0


def test_one_process_launches_for_all_devices_of_gpipe_alone() -> None:
    """Host times of a profile bound what `GPipe` runs, and not what has a process per device."""
    layers = tuple(
        LayerProfile(str(k), "Linear", 1.0, 1.0, 1.0, forward_host_time=1.0, backward_host_time=1.0)
        for k in range(4)
    )
    table = compare_schedules(Profile(layers, chunks=8), 4)
    # Four partitions and eight micro-batches are 64 launches of 1 s.
    assert table.row("gpipe").makespan == 64.0
    assert table.row("gpipe_in_order").makespan == 2.0 * (8 + 4 - 1)


@pytest.mark.parametrize("n_devices", [0, 5])
def test_impossible_numbers_of_devices_are_refused(n_devices: int) -> None:
    """There is at least one device, and no more than layers; the fix works."""
    profile = Profile.from_costs([1.0] * 4)
    with pytest.raises(BalanceError, match="Fix: "):
        compare_schedules(profile, n_devices)
    assert compare_schedules(profile, 4).n_devices == 4


@pytest.mark.parametrize("bandwidth", [0.0, -1.0, math.nan])
def test_impossible_bandwidths_are_refused(bandwidth: float) -> None:
    """A link moves some bytes per second."""
    with pytest.raises(BalanceError, match="bandwidth is not above 0"):
        compare_schedules(Profile.from_costs([1.0] * 2), 2, bandwidth=bandwidth)


def test_too_few_layers_to_interleave_are_said() -> None:
    """A chain as long as there are devices has no second turn: the table says so."""
    table = compare_schedules(Profile.from_costs([1.0] * 4, chunks=4), 4)
    assert {row.schedule for row in table.rows} == set(ALL_SCHEDULES)
    assert {row.schedule for row in table.rows if row.makespan is None} == set(SHARING)
    for name in SHARING:
        assert f"{name}: the chain has 4 layers for 8 partitions." in str(table)


@settings(max_examples=60, deadline=None)
@given(data=st.data(), n_layers=st.integers(1, 6))
def test_partitions_add_up_to_the_profile(data: st.DataObject, n_layers: int) -> None:
    """However a chain is cut, times add up, and a storage counts once in each partition."""
    sizes = st.lists(st.integers(0, 9), min_size=n_layers, max_size=n_layers)
    forward, saved = data.draw(sizes), data.draw(sizes)
    profile = Profile.from_costs(forward, saved_bytes=saved, output_bytes=[1] * n_layers)
    cuts = sorted(data.draw(st.sets(st.integers(1, n_layers)) | st.just(set()))) or [n_layers]
    bounds = (0, *[cut for cut in cuts if cut < n_layers], n_layers)
    durations, held = durations_of(profile, bounds), held_of(profile, bounds)
    assert durations.n_partitions == len(held) == len(bounds) - 1
    assert sum(durations.forward) == sum(forward)
    assert sum(durations.input_gradients) + sum(durations.weight_gradients) == 2 * sum(forward)
    received = len(bounds) - 2
    assert sum(size.recorded.graph for size in held) == sum(saved) + received
    assert [size.recomputed.kept for size in held] == [0] + [1] * received


@pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_peaks_are_those_of_a_plan_with_the_loss_inside(
    checkpoint: CheckpointMode, schedule: str, device_type: str
) -> None:
    """What `GPipe` runs is counted as a plan counts it, the loss too; a CPU has one memory.

    But what waits is what waits in the timeline, and not the most that may.
    """
    profile = Profile.from_costs(
        [1.0, 2.0, 1.0], saved_bytes=[10, 600, 30], output_bytes=[3, 500, 90], chunks=4
    )
    # What a layer saves of what it hands on is in one memory or in two.
    layers = tuple(replace(each, saved=(*each.saved, *each.outputs)) for each in profile.layers)
    profile = replace(profile, layers=layers, provenance={"device_type": device_type})
    row = compare_schedules(profile, 3, checkpoint=checkpoint).row(schedule)
    given: Any = {"checkpoint": checkpoint, "schedule": schedule, "loss_inside": True}
    plan = evaluate(profile, [1, 1, 1], **given)
    given |= {"chunks": 4, "shared_memory": plan.shared_memory, "timeline": simulate(plan)}
    peaks = partition_memory(profile, (0, 1, 2, 3), **given)
    assert row.peak_bytes == max(peak.total for peak in peaks)


def test_transfers_cost_what_they_cost_a_plan() -> None:
    """Nothing takes no time, and gradients that nobody wants are not sent."""
    frozen = LayerProfile("0", "Linear", 1.0, 1.0, 1.0, outputs=(0,), output_bytes=100)
    trained = [
        replace(frozen, name=str(k), outputs=(k,), parameter_bytes=8, gradient_bytes=8)
        for k in (1, 2)
    ]
    profile = Profile((frozen, *trained), storages=(100, 0, 100), chunks=2)
    table = compare_schedules(profile, 3, schedules=["gpipe"], bandwidth=100.0, latency=0.5)
    link = Link(100.0, 0.5)
    plan = evaluate(profile, [1, 1, 1], checkpoint="never", link=link)
    assert table.best.makespan == plan.makespan
    times = durations_of(profile, (0, 1, 2, 3), links=links_of(profile, link))
    assert (times.forward_transfer, times.backward_transfer) == ((0.0, 1.5, 0.0), (0.0, 0.0, 0.0))
