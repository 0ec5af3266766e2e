"""Which layers to recompute inside partitions, against trying all runs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from estimate_models import Apply
from estimated import estimate_profile
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from nothing_waits import peaks_without_waiting
from plan_oracle import holding_its_output, profiles
from torch import Tensor, nn

import gpipebal as gb
from gpipebal.errors import BalanceError, InfeasibleError
from gpipebal.memory.cell import Cell
from gpipebal.memory.loss import loss_of_micro_batch
from gpipebal.memory.recomputed_runs import leaves_input, with_runs
from gpipebal.pipeline import with_recompute
from gpipebal.planner import recompute_layers
from gpipebal.planner.recompute.network import partition_network
from gpipebal.planner.recompute.ways import choices_of
from gpipebal.planner.runs.moments import moments_of
from gpipebal.problem import to_bounds
from gpipebal.profile import LayerProfile, SkipProfile
from gpipebal.schedule import order_of
from gpipebal.solvers.knapsack.knapsack import cheapest, lowest
from gpipebal.solvers.knapsack.network import Arc, Ceiling, Network

MiB = 2**20


def all_runs(profile: gb.Profile, first: int, end: int) -> Iterator[tuple[range, ...]]:
    """Enumerate all ways to recompute runs of a partition's layers."""
    skipping = {layer for skip in profile.skips for layer in (skip.source, skip.destination)}
    if first == end:
        yield ()
        return
    for rest in all_runs(profile, first + 1, end):
        yield rest
    inputs = set(profile.layers[first - 1].outputs if first else profile.inputs)
    for last in range(first, end):
        outputs = set(profile.layers[last].outputs)
        kept = inputs & outputs
        # A mask may go along beside what a layer makes; anything else may have been written to.
        if last in skipping or (kept and (kept == outputs or kept - {*profile.without_gradient})):
            return
        for rest in all_runs(profile, last + 1, end):
            yield (range(first, last + 1), *rest)


@pytest.mark.parametrize("outlives", [False, True])
@settings(max_examples=120, deadline=None)
@given(profiles(), st.data())
def test_runs_of_a_partition_equal_brute_force(
    outlives: bool, profile: gb.Profile, data: st.DataObject
) -> None:
    """Under every limit the runs cost as little as any, and need what `gpipebal.memory` says.

    Args:
        outlives: The output of one micro-batch, which outlives its graph in the caller's hands.
        profile: Costs of the layers.
        data: What else is drawn.
    """
    n = profile.n_layers
    cuts = data.draw(st.sets(st.integers(1, n - 1)) if n > 1 else st.just(set()))
    bounds = (0, *sorted(cuts), n)
    j = len(cuts) if outlives else data.draw(st.integers(0, len(cuts)))
    first, end = bounds[j : j + 2]
    chunks, shared = 1 if outlives else data.draw(st.integers(1, 4)), data.draw(st.booleans())
    schedule = "gpipe" if outlives else data.draw(st.sampled_from(["gpipe", "1f1b"]))
    inside = schedule == "1f1b" or (not outlives and data.draw(st.booleans()))
    if outlives:
        profile = holding_its_output(profile)
    without = data.draw(st.sets(st.integers(0, len(profile.storages) - 1)))
    profile = replace(profile, without_gradient=tuple(sorted(without)))
    loss = loss_of_micro_batch(profile) if inside and end == n else None
    cell = Cell(profile, first, end, loss, shared)
    assume(cell.goes_back)
    # What is handed through a whole partition is copied in its backward: the network counts that
    # also where the peak of a run hides it, so it may need a copy less than it says.
    assume(not (cell.handed_through and cell.layers[0].copied_bytes))
    times = [int(layer.recompute_time) for layer in profile.layers]
    order = order_of(schedule, len(bounds) - 1, chunks, "never")
    exist = data.draw(st.booleans())
    moments = moments_of(order, j, loss_inside=not cell.gives_outputs, gradients_exist=exist)
    network = partition_network(
        cell, moments, chunks, [*times[first:end], 0], gradients_exist=exist
    )
    peaks = {
        runs: peaks_without_waiting(
            with_runs(profile, runs),
            bounds,
            chunks=chunks,
            checkpoint="never",
            schedule=schedule,
            loss_inside=inside,
            shared_memory=shared,
            gradients_exist=exist,
        )[j].total
        for runs in all_runs(profile, first, end)
    }
    least = min(peaks.values())
    assert lowest(network).peak == least
    assert cheapest(network, least - 1) is None
    for limit in sorted(set(peaks.values()))[:6]:
        found = cheapest(network, limit)
        assert found is not None
        runs = tuple(arc.name for arc in found.arcs if arc.name)
        cost = {one: sum(times[k] for run in one for k in run) for one in peaks}
        assert found.cost == found.lower_bound == cost[runs]
        assert found.cost == min(cost[one] for one, peak in peaks.items() if peak <= limit)
        assert found.peak == peaks[runs] <= limit


def chain(**changes: Any) -> gb.Profile:
    """Return a profile of eight layers that differ in time and memory."""
    given: dict[str, Any] = {
        "forward": [3.0, 1.0, 4.0, 1.0, 5.0, 2.0, 6.0, 2.0],
        "saved_bytes": [n * MiB for n in (50, 10, 70, 5, 60, 30, 20, 10)],
        "output_bytes": [5 * MiB] * 8,
        "parameter_bytes": [10 * MiB] * 8,
        "chunks": 4,
        **changes,
    }
    return gb.Profile.from_costs(given.pop("forward"), **given)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("limit", [600, 400, 300, 240])
@pytest.mark.parametrize("width", [0, 5])
def test_the_plan_keeps_the_limit_and_the_bound_is_true(
    schedule: str, limit: int, width: int
) -> None:
    """Each partition fits, and no runs with which it fits take less time than its bound.

    What may wait is known of a plan only: where it decides, there is a gap.
    """
    profile = chain(output_bytes=[width * MiB] * 8)
    plan = gb.evaluate(profile, [5, 3], checkpoint="never", schedule=schedule)
    chosen = recompute_layers(profile, plan, memory_limit=f"{limit} MiB")
    for j, (first, end) in enumerate(pairwise(to_bounds(plan.balance))):
        times = []
        for runs in all_runs(profile, first, end):
            other = gb.evaluate(
                with_runs(profile, runs), [5, 3], checkpoint="never", schedule=schedule
            )
            if other.partitions[j].memory.total <= limit * MiB:
                times.append(sum(profile.layers[k].recompute_time for run in runs for k in run))
        assert chosen.lower_bounds[j] <= min(times) <= chosen.recompute_times[j]
        part, before = chosen.plan.partitions[j], chosen.before.partitions[j]
        assert part.memory.total <= part.memory_limit == limit * MiB
        assert part.backward_time == before.backward_time + chosen.recompute_times[j]
        assert before.memory == plan.partitions[j].memory
    assert chosen.status == "optimal" or width


@settings(max_examples=60, deadline=None)
@given(profiles(largest=4), st.data())
def test_a_bound_holds_whatever_else_is_recomputed(
    profile: gb.Profile, data: st.DataObject
) -> None:
    """No runs take less time than a partition's bound, whichever runs other partitions have.

    And where some runs fit in their own timeline, some are found.
    """
    assume(profile.n_layers > 1)
    cut = data.draw(st.integers(1, profile.n_layers - 1))
    balance = [cut, profile.n_layers - cut]
    given: dict[str, Any] = {"checkpoint": "never", "shared_memory": data.draw(st.booleans())}
    # In a partition without any gradient there is nothing to recompute.
    runs_of = [(0, cut), (cut, profile.n_layers)]
    assume(all(Cell(profile, *run, None, given["shared_memory"]).goes_back for run in runs_of))
    plan = gb.evaluate(profile, balance, **given)
    tried = [
        (runs, [part.memory.total for part in changed.partitions])
        for one in all_runs(profile, 0, cut)
        for other in all_runs(profile, cut, profile.n_layers)
        for runs in [(*one, *other)]
        for changed in [gb.evaluate(with_runs(profile, runs), balance, **given)]
    ]
    limits = data.draw(st.sampled_from([needs for _, needs in tried]))
    chosen = recompute_layers(profile, plan, memory_limit=limits)
    for j, part in enumerate(chosen.plan.partitions):
        assert part.memory.total <= limits[j]
        layers = range(cut) if j == 0 else range(cut, profile.n_layers)
        for runs, needs in tried:
            seconds = sum(
                profile.layers[k].recompute_time for run in runs for k in run if k in layers
            )
            assert needs[j] > limits[j] or chosen.lower_bounds[j] <= seconds


def test_a_partition_fits_once_the_one_before_it_saves_less() -> None:
    """In one memory, what has no gradient is held behind a cut as long as a graph before it is."""
    layers = [
        LayerProfile(name, "Layer", 1.0, 1.0, 1.0, outputs=outputs, saved=saved)
        for name, outputs, saved in (
            ("a", (1,), (2,)),
            ("b", (3, 4), (4, 5)),  # hands on a mask that it saves
            ("c", (6,), (7,)),
            ("d", (8,), (9,)),
        )
    ]
    sizes = (10, 10, 40, 10, 100, 100, 10, 40, 10, 40)
    profile = gb.Profile(tuple(layers), sizes, (0,), rows=1, chunks=4, without_gradient=(4,))
    plan = gb.evaluate(profile, [2, 2], checkpoint="never", shared_memory=True)
    without_mask = gb.evaluate(
        with_runs(profile, [range(1, 2)]), [2, 2], checkpoint="never", shared_memory=True
    )
    needs = [part.memory.total for part in plan.partitions]
    fewer = [part.memory.total for part in without_mask.partitions]
    assert all(less < more for less, more in zip(fewer, needs, strict=True))
    chosen = recompute_layers(profile, plan, memory_limit=fewer)
    assert chosen.runs == (range(1, 2),)
    assert chosen.lower_bounds == (1.0, 0.0)


class Masked(nn.Module):
    """A layer that hands on a mask beside what it makes."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(32, 128), nn.Linear(128, 32)

    def forward(self, both: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        x, mask = both
        return x + self.two(torch.relu(self.one(x))) * mask[:, None], mask


def test_a_mask_that_goes_along_is_in_no_way() -> None:
    """Layers that hand on what has no gradient can be in runs; the pipeline then needs as said."""
    model = nn.Sequential(*(Masked() for _ in range(6)))
    sample = (torch.randn(512, 32), torch.ones(512, dtype=torch.long))
    profile = gb.profile_model(
        model, sample, chunks=4, rows=(), timeout=0, as_pipeline=False, progress=False
    )
    plan = gb.evaluate(profile, [3, 3], checkpoint="never")
    limit = int(0.8 * max(part.memory.total for part in plan.partitions))
    chosen = recompute_layers(profile, plan, memory_limit=limit)
    assert chosen.runs
    assert all(part.memory.total <= limit for part in chosen.plan.partitions)
    pipe = gb.GPipe(
        with_recompute(model, chosen.runs), chosen.plan.balance, chunks=4, checkpoint="never"
    )
    gb.verify(model, pipe, sample)


def test_a_recompute_has_no_copies_to_spare() -> None:
    """Copies of gradients are spared in a layer's own backward, not in a recompute before it."""
    own = {"backward_peak_bytes": 100, "copied_bytes": 80, "forward_peak_bytes": 150}
    layers = (
        LayerProfile("a", "Layer", 1.0, 1.0, 1.0, outputs=(1,), saved=(2,), **own),
        LayerProfile("b", "Layer", 1.0, 1.0, 1.0, outputs=(3,), saved=(1,), **own),
    )
    profile = gb.Profile(layers, (10, 10, 60, 10), (0,), rows=1, chunks=1)
    a, b = with_runs(profile, [range(2)]).layers
    assert (a.backward_peak_bytes, a.copied_bytes) == (60 + 100, 80)
    # The forward of `b` has the graph and the output of `a` beside it: more than its backward.
    assert (b.backward_peak_bytes, b.copied_bytes) == (60 + 10 + 150, 0)


def test_what_waits_counts_in_the_choice_of_runs() -> None:
    """With the cheapest run an output too many would wait: one that is dearer and lower fits."""
    profile = gb.Profile(
        (
            LayerProfile("a", "Layer", 1.0, 1.0, 5.0, outputs=(1,), saved=(1, 2)),
            LayerProfile("in no run", "Layer", 1.0, 1.0, 1.0, outputs=(1,)),
            # Without a run its graph holds what else would wait for the slow layer behind it.
            LayerProfile(
                "b", "Layer", 1.0, 1.0, 1.0, outputs=(3,), saved=(3,), forward_peak_bytes=1000
            ),
            LayerProfile("slow", "Layer", 20.0, 1.0, 1.0, outputs=(4,)),
        ),
        (10, 110, 10, 100, 10),
        (0,),
        rows=1,
        chunks=8,
        skips=(SkipProfile("own", 1, 1),),
    )
    plan = gb.evaluate(profile, [3, 1], checkpoint="never")
    for limit, runs, dearer in ((2140, (range(2, 3),), 1.0), (2139, (range(1),), 5.0)):
        chosen = recompute_layers(profile, plan, memory_limit=[limit, None])
        assert chosen.runs == runs
        assert (chosen.lower_bounds[0], chosen.status) == (dearer, "optimal")
        assert chosen.plan.partitions[0].memory.total <= limit


@pytest.mark.parametrize(
    ("forward", "saved", "output", "balance", "chunks", "limits"),
    [
        ([9, 1], [5, 50], [50, 5], [1, 1], 2, [105, 270]),
        ([1, 9, 2, 1, 2], [0, 5, 5, 0, 50], [0, 50, 50, 5, 5], [3, 2], 2, [160, 230]),
        ([1, 1, 2, 1, 1], [5, 50, 0, 0, 0], [50, 0, 50, 0, 5], [1, 4], 3, [105, 380]),
    ],
)
def test_runs_that_need_more_by_themselves_may_wait_less(
    forward: list[float],
    saved: list[int],
    output: list[int],
    balance: list[int],
    chunks: int,
    limits: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """If the lowest runs do not fit with what waits, others may; what was not tried is said."""
    profile = gb.Profile.from_costs(forward, saved_bytes=saved, output_bytes=output, chunks=chunks)
    plan = gb.evaluate(profile, balance, checkpoint="never")
    chosen = recompute_layers(profile, plan, memory_limit=limits)
    needs = [part.memory.total for part in chosen.plan.partitions]
    assert all(need <= limit for need, limit in zip(needs, limits, strict=True))
    monkeypatch.setattr("gpipebal.planner.recompute.run_choice._MOST_CHOICES", 0)
    with pytest.raises(InfeasibleError, match="with any of the runs that were tried"):
        recompute_layers(profile, plan, memory_limit=limits)


def test_of_many_ways_some_are_listed() -> None:
    """All are listed if they are few; else from the cheapest to the lowest, within the limit."""
    profile = chain()
    moments = moments_of(order_of("gpipe", 1, 4, "never"), 0, loss_inside=False)
    cell = Cell(profile, 0, 8, None, False)
    network = partition_network(cell, moments, 4, [3, 1, 4, 1, 5, 2, 6, 2])
    limit = 500 * MiB
    every, are_all = choices_of(network, limit, 10**6)
    assert are_all
    assert all(way.peak <= limit for way in every)
    assert min(way.cost for way in every) == cheapest(network, limit).cost  # type: ignore[union-attr]
    some, are_all = choices_of(network, limit, 4)
    assert not are_all
    assert len(some) <= 4
    assert some[0].cost == min(way.cost for way in every)
    assert some[-1].peak == lowest(network).peak == min(way.peak for way in every)
    assert choices_of(network, lowest(network).peak - 1, 4) == ([], True)
    free, _ = choices_of(network, None, 4)
    assert (free[0].cost, free[-1].peak) == (0, lowest(network).peak)


def test_what_fits_in_the_last_round_is_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits that were tightened as often as may be are looked at once more."""
    profile = chain()
    plan = gb.evaluate(profile, [8], checkpoint="never")
    expected = recompute_layers(profile, plan, memory_limit=500 * MiB)
    monkeypatch.setattr("gpipebal.planner.recompute.run_choice.MOST_ROUNDS", 1)
    assert recompute_layers(profile, plan, memory_limit=500 * MiB).runs == expected.runs != ()


def test_a_limit_is_looked_for_while_it_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A search that asks for no more than the one before is not made again."""
    tried: list[Any] = []

    def answer(choice: Any) -> int:
        tried.append(choice._limits)
        return 0

    monkeypatch.setattr("gpipebal.planner.recompute.run_choice.RunChoice.answer", answer)
    profile = chain()
    with pytest.raises(InfeasibleError, match=r"\nFix: a plan with more partitions"):
        recompute_layers(profile, gb.evaluate(profile, [8], checkpoint="never"), memory_limit=1000)
    assert len(tried) == len({tuple(limits) for limits in tried}) == 2


def test_single_layers_take_less_time_than_whole_partitions() -> None:
    """Under one limit, runs beat the best plan that recomputes whole partitions."""
    profile = chain()
    whole = gb.solve(profile, 2, checkpoint="auto", memory_limit="300 MiB")
    single = recompute_layers(
        profile, gb.solve(profile, 2, checkpoint="never"), memory_limit=300 * MiB
    )
    assert single.plan.makespan < whole.makespan
    assert max(part.memory.total for part in single.plan.partitions) <= 300 * MiB


def test_a_partition_in_another_mode_is_left_if_it_fits() -> None:
    """What recomputes whole partitions stays, unless it exceeds the limit."""
    profile = chain()
    plan = gb.evaluate(profile, [5, 3], checkpoint=["except_last", "never"])
    needs = [part.memory.total for part in plan.partitions]
    chosen = recompute_layers(profile, plan, memory_limit=[needs[0], needs[1] - 1])
    assert chosen.plan.modes == ("except_last", "never")
    assert chosen.runs_of(0) == ()
    assert chosen.runs_of(1)
    tighter = recompute_layers(profile, plan, memory_limit=[needs[0] - 1, None])
    assert tighter.plan.modes == ("never", "never")
    assert tighter.runs_of(0)
    assert tighter.runs_of(1) == ()


def test_the_only_way_through_a_long_partition_is_listed() -> None:
    """Thousands of layers of which none may be recomputed are no deep recursion."""
    steps = {k: [Arc(k + 1, 0, 1, (1,))] for k in range(3000)}
    steps[0].append(Arc(1, 5, 0, (1,)))
    network = Network(steps, {3000: [Ceiling(0, times=1, beside=0)]})
    ways, are_all = choices_of(network, None, 9)
    assert [(len(way.arcs), way.cost) for way in ways] == [(3000, 0), (3000, 5)] and are_all


def test_partitions_are_named_by_their_index() -> None:
    """As in a plan: from the end too, and no others."""
    profile = chain()
    plan = gb.evaluate(profile, [5, 3], checkpoint="never")
    chosen = recompute_layers(profile, plan, memory_limit="300 MiB")
    assert chosen.runs_of(0) and chosen.runs_of(0) + chosen.runs_of(1) == chosen.runs
    assert chosen.runs_of(-1) == chosen.runs_of(1)
    for partition in (2, -3, "x"):
        with pytest.raises(gb.GpipebalError, match=r"^partition .*\nFix: partition="):
            chosen.runs_of(partition)  # type: ignore[arg-type]


def test_what_fits_is_left_as_it_is() -> None:
    """Without need nothing is recomputed, and the plan says the same as before."""
    profile = chain()
    plan = gb.solve(profile, 2, checkpoint="never", memory_limit="1 GiB")
    chosen = recompute_layers(profile, plan)
    assert (chosen.runs, chosen.value, chosen.status) == ((), 0, "optimal")
    assert chosen.plan == chosen.before
    assert "Nothing has to be recomputed" in chosen.explain()


@pytest.mark.parametrize("limit", ["100 MiB", ["100 MiB", None], [None, "90 MiB"]])
@pytest.mark.parametrize("reserve", [None, "7 MiB"])
def test_an_error_says_what_would_fit(limit: Any, reserve: Any) -> None:
    """With the limit that the error names there are runs; with a byte less there are none."""
    profile = chain()
    plan = gb.evaluate(profile, [5, 3], checkpoint="never")
    with pytest.raises(InfeasibleError) as caught:
        recompute_layers(profile, plan, memory_limit=limit, reserve=reserve)
    assert caught.value.partition == (1 if limit[0] is None else 0)
    (fix,) = re.findall(r"Fix: memory_limit=(\[.*?\]|\d+)", str(caught.value))
    enough = eval(fix)
    chosen = recompute_layers(profile, plan, memory_limit=enough, reserve=reserve)
    assert chosen.runs
    less = [n and n - 1 for n in enough] if isinstance(enough, list) else enough - 1
    with pytest.raises(InfeasibleError):
        recompute_layers(profile, plan, memory_limit=less, reserve=reserve)


def check_what_would_do(
    profile: gb.Profile, plan: gb.Plan, limits: range, words: str, **options: Any
) -> None:
    """Check that errors say these words where `solve` with such options has a plan."""
    seen = set()
    for limit in limits:
        try:
            recompute_layers(profile, plan, memory_limit=limit)
        except InfeasibleError as error:
            said = words in str(error)
        else:
            continue
        try:
            gb.solve(profile, 2, checkpoint="auto", memory_limit=limit, **options)
        except InfeasibleError:
            assert not said, limit
        else:
            assert said, limit
        seen.add(said)
    assert seen == {False, True}


@pytest.mark.parametrize("chunks", [2, 4, 16])
def test_an_error_says_whether_modes_would_do(chunks: int) -> None:
    """What the text says of `solve` is so, for every limit that runs cannot keep."""
    profile, limits = chain(), range(220 * MiB, 380 * MiB, 10 * MiB)
    plan = gb.evaluate(profile, [1, 7], checkpoint="never", chunks=chunks)
    words = "; or solve with checkpoint='auto', and recompute no single layers."
    check_what_would_do(profile, plan, limits, words, chunks=chunks)


def test_an_error_says_whether_the_loss_inside_would_do() -> None:
    """Large outputs exist at once where the caller computes the loss, whatever is recomputed."""
    profile = gb.Profile.from_costs(
        [1.0] * 4, saved_bytes=[MiB] * 4, output_bytes=[MiB, MiB, MiB, 50 * MiB], chunks=4
    )
    plan = gb.evaluate(profile, [2, 2], checkpoint="never")
    limits = range(40 * MiB, 400 * MiB, 20 * MiB)
    words = "; or solve with checkpoint='auto', loss_inside=True (and train with pipe.step)"
    check_what_would_do(profile, plan, limits, words, loss_inside=True)


@pytest.mark.parametrize("limit", ["2 GiB", "110 MiB", ["2 GiB", "90 MiB"], None])
def test_an_error_says_which_limits_of_devices_would_do(limit: Any) -> None:
    """Of two limits the lower one counts: where only the other one grows, nothing changes."""
    profile = chain()
    devices = [gb.Device(memory_limit=100 * MiB), gb.Device(memory_limit=2**31)]
    plan = gb.evaluate(profile, [5, 3], checkpoint="never", devices=devices)
    with pytest.raises(InfeasibleError) as caught:
        recompute_layers(profile, plan, memory_limit=limit, devices=devices)
    fix = str(caught.value).partition("\nFix: ")[2]
    (own,) = re.findall(r"devices with memory_limit=(\[.*?\])", fix)
    assert (eval(own)[0] > 100 * MiB) and eval(own)[1] == 2**31
    enough = re.findall(r"^memory_limit=(\[.*?\]|\d+)", fix)
    assert bool(enough) == (limit != "2 GiB")
    more = [gb.Device(memory_limit=n) for n in eval(own)]
    for one in enough:
        limit = eval(one)
    assert recompute_layers(profile, plan, memory_limit=limit, devices=more).runs


def test_a_mode_that_needs_less_than_all_runs_is_what_an_error_counts() -> None:
    """Partition 0 needs no less with runs instead of its mode; and an output of it may wait."""
    profile = gb.Profile.from_costs(
        [2.0, 1.0],
        saved_bytes=[40, 10],
        output_bytes=[20, 5],
        parameter_bytes=[10, 0],
        chunks=2,
    )
    plan = gb.evaluate(profile, [1, 1], checkpoint=["always", "never"], schedule="1f1b")
    assert [part.memory.total for part in plan.partitions] == [110, 75]
    with pytest.raises(InfeasibleError, match=r"Fix: memory_limit=\[") as caught:
        recompute_layers(profile, plan, memory_limit=[108, 38])
    (fix,) = re.findall(r"Fix: memory_limit=(\[.*?\])", str(caught.value))
    assert eval(fix) == [110, 75]
    recompute_layers(profile, plan, memory_limit=eval(fix))


def test_an_error_names_the_partition_that_lacks_most() -> None:
    """Not the first one that does not fit."""
    profile = gb.Profile.from_costs([1.0] * 4, parameter_bytes=[30, 30, 400, 400], chunks=2)
    plan = gb.evaluate(profile, [2, 2], checkpoint="never")
    with pytest.raises(InfeasibleError, match="partition 1 does not fit") as caught:
        recompute_layers(profile, plan, memory_limit=50)
    assert (caught.value.partition, caught.value.shortage) == (1, 1550)
    assert "It has layers 2 to 3, and needs 1.56 KiB at least.\n" in str(caught.value)


def test_an_error_about_one_layer_names_one() -> None:
    """Not a run from it to itself."""
    profile = gb.Profile.from_costs([1.0] * 2, parameter_bytes=[30, 400], names=["a", "z"])
    plan = gb.evaluate(profile, [1, 1], checkpoint="never")
    with pytest.raises(
        InfeasibleError, match=r"\. It has layer 1 \(z\), and needs 800 B at least\.\n"
    ):
        recompute_layers(profile, plan, memory_limit=100)


def test_devices_of_their_own() -> None:
    """Other devices recompute in their own time, in any order, under their own limits."""
    profile = chain()
    slow = chain(forward=[9.0, 1.0, 1.0, 1.0, 1.0, 9.0, 1.0, 9.0])
    devices = [slow, gb.Device(slowness=2, memory_limit=300 * MiB)]
    plan = gb.solve(profile, 2, checkpoint="never", devices=[slow, gb.Device(slowness=2)])
    there = gb.evaluate(
        profile, plan.balance, checkpoint="never", devices=[gb.Device(slowness=2), slow]
    )
    moved = replace(there, device_order=(1, 0))
    for one, j in ((plan, 1), (moved, 0)):
        chosen = recompute_layers(
            profile, one, devices=devices, memory_limit=["2 GiB", None], reserve=0
        )
        places = [k for run in chosen.runs for k in run]
        assert places
        assert chosen.recompute_times[1 - j] == 0
        assert chosen.recompute_times[j] == 2 * sum(
            profile.layers[k].recompute_time for k in places
        )
        extra = chosen.plan.partitions[j].backward_time - chosen.before.partitions[j].backward_time
        assert extra == pytest.approx(chosen.recompute_times[j])
    with pytest.raises(BalanceError, match="plan has other costs than the profile"):
        recompute_layers(profile, plan, devices=devices[:1] * 2, memory_limit=["300 MiB", None])
    plan = gb.evaluate(profile, plan.balance, checkpoint="never", devices=devices[:1] * 2)
    own = recompute_layers(profile, plan, devices=devices[:1] * 2, memory_limit=["300 MiB", None])
    again = sum(slow.layers[k].recompute_time for run in own.runs for k in run)
    assert own.recompute_times == (again, 0.0)
    assert again > 0


def test_out_of_time_a_choice_that_fits_is_returned() -> None:
    """Without time the partitions fit all the same, and the bound is one on the best choice."""
    profile = chain(forward=[3.0, 2.5, 4.1, 1.7, 5.3, 2.2, 6.4, 2.9])
    plan = gb.evaluate(profile, [8], checkpoint="never")
    for limit in (900, 500, 400):
        settings = {"memory_limit": limit * MiB}
        best = recompute_layers(profile, plan, **settings)
        hurried = recompute_layers(profile, plan, **settings, time_limit=0)
        assert hurried.lower_bound <= best.value <= hurried.value
        assert hurried.plan.partitions[0].memory.total <= limit * MiB


def test_the_text_says_what_is_recomputed() -> None:
    """The table and the explanation name layers, times and memory."""
    profile = chain()
    plan = gb.evaluate(profile, [5, 3], checkpoint="never")
    chosen = recompute_layers(profile, plan, memory_limit="300 MiB")
    assert chosen.layer_names == (("0",), ("2",), ("4",), ("5",))
    assert str(chosen) == (
        "4 layers recomputed in 4 runs: 14.0 s for each micro-batch (proven least); "
        "makespan 248 s, 198 s without\n"
        "partition     recomputed             time  peak memory    limit\n"
        "        0  3 of 5 layers  0, 2, 4  12.0 s      250 MiB  300 MiB\n"
        "        1  1 of 3 layers  5        2.00 s      240 MiB  300 MiB"
    )
    assert chosen.explain().splitlines()[0] == (
        "Partition 0 needs 845 MiB and may use 300 MiB: it recomputes 0, 2, 4, needs 250 MiB, and "
        "takes 12.0 s more for each micro-batch."
    )


def test_questions_that_make_no_sense_are_refused() -> None:
    """A limit, and the profile of the plan, are needed."""
    profile = chain()
    plan = gb.evaluate(profile, [5, 3], checkpoint="never")
    with pytest.raises(BalanceError, match="nothing limits the memory"):
        recompute_layers(profile, plan)
    other = chain(names=list("abcdefgh"))
    with pytest.raises(BalanceError, match="another chain"):
        recompute_layers(other, plan, memory_limit=300)


def test_run_begins_again_with_what_a_layer_hands_on_only_if_it_is_a_mask() -> None:
    """A layer that hands it on beside what it makes may have written to what has a gradient."""
    model = nn.Sequential(
        nn.Linear(4, 4),
        Apply(lambda x: (2 * x, x)),
        Apply(lambda both: (both[0] * both[1], both[0].to(torch.int64))),
        Apply(lambda both: (3 * both[0], both[1])),
        Apply(lambda both: both[0] * both[1]),
    )
    profile = estimate_profile(model, torch.rand(2, 4))
    assert not leaves_input(profile, 1, 1)
    assert leaves_input(profile, 3, 3)
