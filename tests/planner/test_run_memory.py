"""The memory of all runs at once is that of each partition by itself."""

from __future__ import annotations

import random
import tracemalloc
from dataclasses import fields, replace
from functools import partial
from itertools import pairwise
from operator import mul
from typing import Any

import numpy as np
import pytest
from examples import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from nothing_waits import peaks_without_waiting
from oracles import all_bounds
from plan_oracle import MODES, Taken, check_every_run, holding_its_output, profiles

import gpipebal as gb
from gpipebal.memory import partition_memory
from gpipebal.planner.posing import pose
from gpipebal.planner.question import ask as ask_planner
from gpipebal.planner.runs import memory as run_memory
from gpipebal.planner.runs.highest import Change, highest_before
from gpipebal.planner.runs.memory import KnownMemory, RunMemory
from gpipebal.planner.runs.moments import RowMoment, moments_of
from gpipebal.problem import Memory
from gpipebal.profile import LayerProfile, SkipProfile, StepTerms, TieProfile
from gpipebal.schedule import Action, order_of

SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large]


@settings(max_examples=60, deadline=None, suppress_health_check=SLOW)
@given(
    profiles(),
    st.integers(1, 5),
    st.sampled_from(MODES),
    st.booleans(),
    st.booleans(),
    st.booleans(),
    st.booleans(),
)
def test_every_run_needs_what_its_partition_does(
    profile: gb.Profile,
    chunks: int,
    mode: Any,
    inside: bool,
    shared: bool,
    exist: bool,
    pieces: bool,
) -> None:
    """All splits, storages shared in any way, skips, losses, ties: between the two bounds."""
    given: Any = {"chunks": chunks, "loss_inside": inside, "shared_memory": shared}
    given["gradients_exist"] = exist
    with pytest.MonkeyPatch.context() as patch:
        if pieces:
            patch.setattr(run_memory, "_MOST_ENTRIES", 5)
        check_every_run(profile, mode, given)


@settings(max_examples=200, deadline=None, suppress_health_check=SLOW)
@given(profiles(largest=4), st.sampled_from(MODES), st.booleans())
def test_the_output_of_one_micro_batch_outlives_its_graph(
    profile: gb.Profile, mode: Any, shared: bool
) -> None:
    """The caller keeps it, whichever layers of the last run hold it too; equal to the byte."""
    profile = holding_its_output(profile)
    given: Any = {"chunks": 1, "loss_inside": False, "shared_memory": shared}
    memory = Taken(profile, **given).memory
    n = profile.n_layers
    for first in range(n):
        bounds = (0, *([first] if first else []), n)
        exact = peaks_without_waiting(profile, bounds, checkpoint=mode, **given)[-1].total
        assert int(memory.rows(first, len(bounds) - 2, mode)[n - first - 1]) == exact


@settings(max_examples=40, deadline=None, suppress_health_check=SLOW)
@given(profiles(), st.integers(1, 6), st.sampled_from(MODES), st.booleans(), st.booleans())
def test_every_run_needs_what_its_partition_does_under_1f1b(
    profile: gb.Profile, chunks: int, mode: Any, shared: bool, exist: bool
) -> None:
    """Earlier partitions have more in flight; equal to the byte, and bounded for every clock."""
    given: Any = {"chunks": chunks, "loss_inside": True, "shared_memory": shared}
    given |= {"schedule": "1f1b", "gradients_exist": exist}
    check_every_run(profile, mode, given)


def test_gradients_of_the_start_end_while_others_are_handed_through() -> None:
    """Layers that hand on what they are given, before them one that makes more of it."""
    layer = LayerProfile(
        "0", "L", 1.0, 1.0, 1.0, outputs=(0,), handed_through=(0,), backward_peak_bytes=100
    )
    further, known = (30, 30, 10, 30, 10), (None, None, (1,), (1,), None)
    layers = [
        replace(layer, name=str(k), output_gradient_bytes=n_bytes, gradient_storages=storages)
        for k, (n_bytes, storages) in enumerate(zip(further, known, strict=True))
    ]
    layers[:2] = [replace(one, backward_peak_bytes=500) for one in layers[:2]]
    profile = gb.Profile(tuple(layers), (10, 30), rows=2, mini_batch_rows=6, chunks=3)
    for shared in (False, True):
        check_every_run(
            profile, "never", {"chunks": 3, "loss_inside": False, "shared_memory": shared}
        )


def test_the_bounds_differ_by_no_more_than_an_output() -> None:
    """Without skips, in memories of their own: an output may wait, and be in a graph anyway."""
    profile = gb.Profile.from_costs(
        [1.0] * 4, saved_bytes=[10, 20, 30, 40], output_bytes=[5, 6, 7, 8]
    )
    for mode in MODES:
        given: Any = {"chunks": 4, "loss_inside": False, "shared_memory": False}
        least, most = (RunMemory(profile, **given, most=most).memory for most in (False, True))
        for start in range(4):
            slack = np.array(most.rows(start, 0, mode)) - np.array(least.rows(start, 0, mode))
            assert (slack >= 0).all()
            for end, more in enumerate(slack.tolist(), start + 1):
                assert more <= (profile.layers[end - 1].output_bytes if end < 4 else 0)


def test_numbers_beyond_64_bits_stay_exact() -> None:
    """Bytes of a chain that no machine integer holds are added up all the same."""
    big = 2**61
    profile = gb.Profile.from_costs([1.0] * 2, saved_bytes=[big, big], output_bytes=[0, 0])
    memory = RunMemory(profile, chunks=8, loss_inside=True, shared_memory=False).memory
    assert int(memory.rows(0, 0, "never")[1]) == 8 * 2 * big


@pytest.mark.parametrize("field", [f.name for f in fields(LayerProfile) if "_bytes" in f.name])
def test_any_bytes_may_be_beyond_64_bits(field: str) -> None:
    """Of a layer, and of the loss that the caller computes."""
    plain = LayerProfile("", "Layer", 1.0, 1.0, 1.0)
    large = replace(plain, **{field: 2**62})
    for layers, loss in (((large,) * 3, None), ((plain,) * 3, large)):
        profile = gb.Profile(layers, step=StepTerms(whole_loss=loss))
        for exist in (False, True):
            given: Any = {"chunks": 2, "loss_inside": False, "shared_memory": False}
            given["gradients_exist"] = exist
            memory = Taken(profile, **given).memory
            for mode in MODES:
                for bounds in all_bounds(3, 2):
                    exact = peaks_without_waiting(profile, bounds, checkpoint=mode, **given)
                    for j, (start, end) in enumerate(pairwise(bounds)):
                        found = int(memory.rows(start, j, mode)[end - start - 1])
                        assert found == exact[j].total


def test_gradients_beyond_64_bits_are_of_the_runs_that_make_them() -> None:
    """A run of one layer needs none of what the layers before it do."""
    profile = gb.Profile.from_costs([1.0] * 2, parameter_bytes=[2**62, 0], saved_bytes=[0, 7])
    memory = RunMemory(profile, chunks=1, loss_inside=True, shared_memory=False).memory
    exact = partition_memory(profile, (0, 1, 2), chunks=1, checkpoint="never", loss_inside=True)
    assert int(memory.rows(1, 1, "never")[0]) == exact[1].total == 7


def test_a_skip_is_input_of_the_run_that_pops_it_and_stash_of_the_one_that_makes_it() -> None:
    """By hand: 100 bytes go from layer 0 to layer 2, past layer 1."""
    layer: Any = {"kind": "Layer", "forward_time": 1.0, "backward_time": 1.0, "recompute_time": 1.0}
    layers = tuple(LayerProfile(str(k), **layer) for k in range(3))
    profile = gb.Profile(layers, (100,), skips=(SkipProfile("x", 0, 2, (0,)),))
    given: Any = {"chunks": 3, "loss_inside": True, "shared_memory": False, "n_partitions": 3}
    least, most = (RunMemory(profile, **given, most=most).memory for most in (False, True))
    # While the third is stashed the one before it may wait, and while the layer after it works,
    # which has it too. If it goes past a partition, so may the first one.
    assert least.rows(0, 0, "never").tolist() == [100, 200, 100]
    assert most.rows(0, 0, "never").tolist() == [200, 300, 100]
    planned = partition_memory(
        profile, (0, 1, 2, 3), chunks=3, checkpoint="never", loss_inside=True
    )
    assert [peak.total for peak in planned] == [200, 0, 300]
    for memory in (least, most):
        # The one in the middle never sees it; with the last it holds three of them, and the
        # gradient that the last layer returns waits while the one before it goes back.
        assert memory.rows(1, 1, "never").tolist() == [0, 400]
        assert memory.rows(2, 2, "except_last").tolist() == [300]


@pytest.mark.parametrize("chunks", [1, 2, 7, 2**14])
@pytest.mark.parametrize("mode", MODES)
def test_few_moments_stand_for_a_long_row(chunks: int, mode: Any) -> None:
    """However many micro-batches there are, a dozen moments can be the highest."""
    for most in (False, True):
        order = order_of("gpipe", 1, chunks, mode)
        moments = moments_of(order, 0, loss_inside=False, most=most, in_phases=True)
        assert len(moments) <= 14
        assert max(moment.n_graphs + moment.n_inputs for moment in moments) == chunks


def _all_moments(row: tuple[Action, ...], ahead: int | None, hops: int, **given: bool) -> Any:
    """Walk through a row, action by action."""
    chunks = sum(action.kind == "F" for action in row)
    recomputed = {action.micro_batch for action in row if action.kind == "R"}
    inside, most, exist = (given[name] for name in ("loss_inside", "most", "gradients_exist"))
    graphs, inputs = set[int](), set[int]()
    forwards = backwards = 0
    found = []
    for _, kind, i in row:
        others = len(graphs - {i}), len(inputs - {i})
        n_come, n_back = forwards + (kind == "F"), backwards + (kind == "B")
        made = far = max(0, forwards - n_back)
        near = backwards
        if given["in_phases"]:
            early = kind == "R" and not backwards and inside
            made = far = forwards if kind == "F" or early else 0
        elif ahead is not None:
            made = max(0, far - max(0, ahead - 2)) if n_back else far
            near = backwards - max(0, n_come - 1 - ahead)
        elif not most:
            made = near = 0
        out = [min(made, 2 - (kind == "F"))]
        out.append(min(far, 2 * hops - (kind == "F")) if most else out[0])
        held = most * given["held"]
        back = [min(near, 2 + held - (kind == "B"))]
        back.append(min(backwards, 2 * hops + held - (kind == "B")) if most else back[0])
        passed = most * (others[0] + (kind == "B"))
        now = kind, i in recomputed, exist or backwards > 0, forwards == chunks
        found.append(RowMoment(*now, *others, *out, *back, passed))
        if kind == "F":
            (inputs if i in recomputed else graphs).add(i)
            forwards += 1
            if forwards == chunks and not inside:
                in_flight = len(graphs), len(inputs)
                passed = most * in_flight[0]
                found.append(RowMoment("L", False, exist, True, *in_flight, 0, 0, 0, 0, passed))
        if kind == "B":
            graphs.discard(i)
            inputs.discard(i)
            backwards += 1
    return [*found, RowMoment("O", False, True, True, 0, 0, 0, 0, 0, 0, 0)]


@settings(max_examples=examples(300), deadline=None)
@given(st.data(), st.sampled_from(["gpipe", "1f1b"]), st.sampled_from(MODES))
def test_moments_are_the_highest_of_all_actions(
    data: st.DataObject, schedule: str, mode: Any
) -> None:
    """Against a walk through the whole row, whatever a graph, an input or what waits may weigh."""
    chunks, n = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 12))
    j = data.draw(st.integers(0, n - 1))
    flags = ("most", "held", "gradients_exist")
    given_as: Any = {name: data.draw(st.booleans()) for name in flags}
    given_as["loss_inside"] = schedule == "1f1b" or data.draw(st.booleans())
    ahead = None if schedule == "gpipe" else data.draw(st.sampled_from([None, n - j]))
    given_as["in_phases"] = schedule == "gpipe" and data.draw(st.booleans())
    hops = data.draw(st.integers(1, 4))
    order = order_of(schedule, n, chunks, mode)
    found = moments_of(order, j, ahead=ahead, hops=hops, **given_as)
    every = _all_moments(order.row(j), ahead, hops, **given_as)
    assert set(found) <= set(every)
    weights = data.draw(st.lists(st.integers(0, 9), min_size=7, max_size=7))

    def highest(moments: list[RowMoment]) -> dict[tuple[Any, ...], int]:
        most: dict[tuple[Any, ...], int] = {}
        for moment in moments:
            height = sum(map(mul, moment[4:], weights))
            most[moment[:4]] = max(height, most.get(moment[:4], 0))
        return most

    assert highest(found) == highest(every)


def test_each_of_very_many_micro_batches_adds_as_much() -> None:
    """The peak of a run grows evenly with them, in all modes."""
    profile = gb.Profile.from_costs([1.0] * 3, saved_bytes=[7] * 3, output_bytes=[1] * 3)
    for schedule in ("gpipe", "1f1b"):
        given_as: Any = {"loss_inside": True, "shared_memory": False, "n_partitions": 3}
        for mode in MODES:
            most, more, less = (
                RunMemory(profile, chunks=chunks, schedule=schedule, **given_as).rows(0, 0, mode)
                for chunks in (2**14, 2**14 - 1, 2**14 - 2)
            )
            assert (most - more == more - less).all()


@settings(max_examples=examples(150), deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_the_highest_of_layers_is_that_of_each_end_by_itself(seed: int) -> None:
    """Whatever changes begin and stop: as if the table were made anew for every end."""
    rng = np.random.default_rng(seed)
    n_rows, width = int(rng.integers(1, 4)), int(rng.integers(1, 7))
    needs = rng.integers(0, 9, (n_rows, width))
    columns = np.sort(rng.integers(0, width + 1, int(rng.integers(1, 8))))
    changes = []
    for _ in range(int(rng.integers(0, 5))):
        ends = range(*np.sort(rng.integers(1, len(columns) + 2, 2)).tolist())
        rows = slice(*np.sort(rng.integers(0, n_rows + 1, 2)).tolist())
        first, more = int(rng.integers(0, width)), rng.integers(-9, 9, (1, width))
        changes.append(Change(ends, first, partial(np.copy, more), rows))
    expected = []
    for end, column in enumerate(columns.tolist(), start=1):
        table = needs.copy()
        for change in changes:
            if end in change.ends:
                table[change.rows, change.first :] += change.amounts()[:, : width - change.first]
        expected.append(table[:, :column].max(axis=1, initial=-100))
    found = highest_before(needs, columns, changes, -100)
    assert found.tolist() == np.stack(expected, axis=1).tolist()


def test_what_the_loss_hands_out_is_counted_once() -> None:
    """A loss that gives its input back holds the memory that an earlier partition waits for."""
    handed, nothing = (0,), ()
    layers = [
        LayerProfile(str(k), "Layer", 1.0, 1.0, 1.0, outputs=outputs)
        for k, outputs in enumerate((handed, handed, nothing, nothing, nothing))
    ]
    loss = LayerProfile("loss", "Layer", 1.0, 1.0, 1.0, outputs=handed)
    profile = gb.Profile(
        tuple(layers),
        rows=1,
        mini_batch_rows=2,
        chunks=2,
        storages=(1,),
        step=StepTerms(loss=loss, whole_loss=loss),
    )
    given: Any = {"chunks": 2, "shared_memory": True, "loss_inside": True, "schedule": "1f1b"}
    planned = partition_memory(profile, (0, 1, 2, 5), checkpoint="always", **given)
    most = RunMemory(profile, **given, n_partitions=3).memory
    # Of two micro-batches there are two such tensors, and no more.
    assert planned[2].total == 2 == int(most.rows(2, 2, "always")[2])


def test_what_earlier_runs_hand_through_for_their_recompute_is_bounded() -> None:
    """A storage without a gradient, which nothing saves: who got it last is charged with it."""
    through = (0, 1)
    layers = (
        LayerProfile("0", "Layer", 1.0, 1.0, 1.0, outputs=through),
        LayerProfile("1", "Layer", 1.0, 1.0, 1.0, outputs=through),
        LayerProfile("2", "Layer", 1.0, 1.0, 1.0, backward_peak_bytes=1),
    )
    profile = gb.Profile(layers, storages=(1, 1), without_gradient=(0,))
    for schedule, chunks in (("gpipe", 1), ("gpipe", 3), ("1f1b", 2)):
        given: Any = {"chunks": chunks, "loss_inside": True, "shared_memory": True}
        given["schedule"] = schedule
        planned = partition_memory(profile, (0, 1, 2, 3), checkpoint="always", **given)
        most = RunMemory(profile, **given, n_partitions=3).memory
        assert planned[2].total <= int(most.rows(2, 2, "always")[0])


def _some(rng: random.Random, n_storages: int, most: int) -> tuple[int, ...]:
    """Draw some of the storages, at most so many."""
    return tuple(rng.sample(range(n_storages), min(n_storages, rng.randint(0, most))))


@settings(max_examples=examples(200), deadline=None)
@given(st.randoms(use_true_random=False), st.sampled_from(["gpipe", "1f1b"]))
def test_what_is_handed_through_in_one_memory_is_bounded(rng: random.Random, schedule: str) -> None:
    """Whatever the modes of other partitions are; values with and without a gradient, and skips."""
    n, n_storages = rng.randint(2, 6), rng.randint(1, 4)
    some = partial(_some, rng, n_storages)
    through = some(2)
    layers = tuple(
        LayerProfile(
            str(k),
            "Layer",
            1.0,
            1.0,
            1.0,
            gradient_bytes=rng.choice([0, 4]),
            outputs=tuple({*some(1), *(through if rng.random() < 0.8 else ())}),
            saved=some(2) if rng.random() < 0.4 else (),
        )
        for k in range(n)
    )
    skips = [SkipProfile("x", *sorted(rng.sample(range(n), 2)), some(1))][: rng.randint(0, 1)]
    profile = gb.Profile(
        layers,
        storages=tuple(rng.choice([1, 10, 100]) for _ in range(n_storages)),
        without_gradient=some(3),
        skips=tuple(skips),
    )
    given: Any = {"chunks": rng.randint(1, 16), "loss_inside": True, "shared_memory": True}
    given |= {"schedule": schedule, "gradients_exist": rng.random() < 0.5}
    cuts = rng.randint(0, n - 1)
    bounds = (0, *sorted(rng.sample(range(1, n), cuts)), n)
    modes = tuple(rng.choice(MODES) for _ in bounds[1:])
    planned = partition_memory(profile, bounds, checkpoint=modes, **given)
    least, most = (
        RunMemory(profile, **given, n_partitions=len(modes), most=most).memory
        for most in (False, True)
    )
    for j, (start, end) in enumerate(pairwise(bounds)):
        low, high = (
            int(memory.rows(start, j, modes[j])[end - start - 1]) for memory in (least, most)
        )
        assert low <= planned[j].total <= high


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("exist", [False, True])
def test_long_chains_with_skips_across_each_other_are_equal_to_the_byte(
    shared: bool, exist: bool
) -> None:
    """What lasts for many ends, and what is one end's own, at all lengths."""
    rng = random.Random(8)
    n, some = 40, [rng.randint(1, 1000) for _ in range(60)]
    layers = [
        LayerProfile(
            str(k),
            "Layer",
            1.0,
            1.0,
            1.0,
            gradient_bytes=rng.choice([0, 100]),
            outputs=(k, *rng.sample(range(k), k=min(k, rng.randint(0, 1)))),
            saved=tuple({k, rng.randint(max(0, k - 3), k)}),
            handed_through=(k - 1,) if k and rng.random() < 0.3 else (),
            backward_peak_bytes=rng.randint(0, 900),
        )
        for k in range(n)
    ]
    ends = [(2, 35), (5, 30), (5, 12), (11, 28), (20, 39), (22, 24)]
    skips = tuple(SkipProfile(str(k), *each, (40 + k, 50)) for k, each in enumerate(ends))
    ties = (TieProfile((3, 17, 31), 10, 100),)
    for k in ties[0].layers:
        layers[k] = replace(layers[k], parameter_bytes=10, gradient_bytes=100)
    profile = gb.Profile(tuple(layers), tuple(some), skips=skips, ties=ties)
    given: Any = {"chunks": 3, "loss_inside": False, "shared_memory": shared}
    given["gradients_exist"] = exist
    memory = Taken(profile, **given).memory
    for mode in MODES:
        for _ in range(60):
            start, end = sorted(rng.sample(range(n + 1), 2))
            bounds = sorted({0, start, end, n})
            exact = peaks_without_waiting(profile, bounds, checkpoint=mode, **given)
            j = bounds.index(start)
            assert int(memory.rows(start, j, mode)[end - start - 1]) == exact[j].total


def _with_many_skips(rng: random.Random) -> gb.Profile:
    """Draw a chain of a dozen layers whose skips lie in each other, cross, and share storages."""
    n, n_storages, tied = 12, rng.choice([4, 12, 40]), (3, 5, 9)
    some = partial(_some, rng, n_storages)
    layers = tuple(
        LayerProfile(
            str(k),
            "Layer",
            1.0,
            1.0,
            1.0,
            gradient_bytes=100 if k in tied else rng.choice([0, 100]),
            outputs=some(2),
            saved=some(3),
            handed_through=some(2),
            output_gradient_bytes=rng.choice([None, 200]),
            gradient_storages=rng.choice([None, some(2)]),
            through_gradient_storages=some(2),
            written=some(1),
            forward_peak_bytes=rng.randint(0, 900),
            backward_peak_bytes=rng.randint(0, 900),
            chained_peak_bytes=rng.choice([None, 50]),
            copied_bytes=rng.choice([0, 30]),
            cut_copied_bytes=rng.choice([0, 0, 200]),
            chained_cut_copied_bytes=rng.choice([0, 0, 40]),
            stashed_sum_bytes=rng.choice([0, 70]),
        )
        for k in range(n)
    )
    nested = [(k, n - 1 - k) for k in range(n // 2)]
    crossing = [(rng.randrange(n // 2), rng.randrange(n // 2, n)) for _ in range(6)]
    # A concatenation of several, whose gradients are parts of one.
    joined = [(rng.randrange(8), 9) for _ in range(3)]
    skips = [
        SkipProfile(
            str(k),
            *ends,
            some(2) if k % 2 else layers[ends[0]].outputs,
            some(2) if k % 3 == 0 or ends in joined else None,
        )
        for k, ends in enumerate(nested + crossing + joined)
    ]
    return gb.Profile(
        layers,
        tuple(rng.choice([1, 2, 8, 50, 1000]) for _ in range(n_storages)),
        some(2),
        skips=tuple(skips),
        ties=(TieProfile(tied, 0, 100),),
        without_gradient=some(3),
    )


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("inside", [False, True])
def test_many_skips_are_equal_to_the_byte(shared: bool, inside: bool) -> None:
    """What runs receive, and what their ends change, for skips of all kinds at once."""
    rng = random.Random(11)
    for _ in range(12):
        profile = _with_many_skips(rng)
        n, exist = profile.n_layers, rng.random() < 0.5
        given: Any = {"chunks": rng.choice([1, 3]), "loss_inside": inside, "shared_memory": shared}
        given["gradients_exist"] = exist
        memory = Taken(profile, **given).memory
        for mode in MODES:
            for start, end in rng.sample([(a, b) for b in range(1, n + 1) for a in range(b)], 15):
                bounds = sorted({0, start, end, n})
                exact = peaks_without_waiting(profile, bounds, checkpoint=mode, **given)
                j = bounds.index(start)
                assert int(memory.rows(start, j, mode)[end - start - 1]) == exact[j].total


def test_skips_in_each_other_need_no_more_room_for_planning() -> None:
    """However many skip connections a run pops, there is one row of the tables for its start."""
    n = 120
    layers = tuple(LayerProfile(str(k), "Layer", 1.0, 1.0, 1.0, outputs=(k,)) for k in range(n))
    nested = tuple(SkipProfile(str(k), k, n - 1 - k, (k,)) for k in range(50))
    peaks = []
    for skips in (nested[:1], nested):
        profile = gb.Profile(layers, (8,) * n, skips=skips)
        memory = RunMemory(profile, chunks=3, loss_inside=True, shared_memory=False).memory
        tracemalloc.start()
        memory.rows(0, 0, "always")
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 2 * peaks[0]


def test_what_runs_without_a_gradient_hold_for_others_is_bounded() -> None:
    """Their input is not part of a graph of theirs, and earlier partitions keep it all the same."""
    outputs: tuple[tuple[int, ...], ...] = ((0,), (0,), (1,), (), ())
    layers = [
        LayerProfile(str(k), "Layer", 1.0, 1.0, 1.0, outputs=each) for k, each in enumerate(outputs)
    ]
    profile = gb.Profile(tuple(layers), storages=(1000, 0), without_gradient=(1,))
    given: Any = {"chunks": 2, "loss_inside": True, "shared_memory": True}
    bounds = (0, 1, 2, 3, 5)
    for mode in MODES:
        planned = partition_memory(profile, bounds, checkpoint=mode, **given)
        most = RunMemory(profile, **given).memory
        for j, (start, end) in enumerate(pairwise(bounds)):
            assert planned[j].total <= int(most.rows(start, j, mode)[end - start - 1])


def test_large_storages_of_one_memory_stay_exact() -> None:
    """What is taken off where runs end is counted beyond 64 bits, too."""
    handed = (0,)
    layers = [
        LayerProfile(str(k), "Layer", 1.0, 1.0, 1.0, outputs=handed, saved=handed) for k in range(4)
    ]
    profile = gb.Profile(tuple(layers), storages=(2**61,))
    given: Any = {"chunks": 8, "loss_inside": True, "shared_memory": True}
    memory = Taken(profile, **given).memory
    for mode in MODES:
        for bounds in all_bounds(4, 2):
            exact = peaks_without_waiting(profile, bounds, checkpoint=mode, **given)
            for j, (start, end) in enumerate(pairwise(bounds)):
                assert int(memory.rows(start, j, mode)[end - start - 1]) == exact[j].total


def test_what_is_known_of_memory_is_worked_out_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the questions about one chain those asked for last are kept, and no more than fit."""
    profile = gb.Profile.from_costs([1.0] * 4, saved_bytes=[1] * 4)
    known = KnownMemory()

    def ask(chunks: int) -> Memory:
        found = known.of(profile, chunks=chunks, loss_inside=True, shared_memory=False)
        found.rows(0, 0, "never")
        return found

    first, second = ask(2), ask(3)
    assert ask(2) is first and ask(3) is second
    # Room for two: that which was asked for longest ago goes.
    monkeypatch.setattr(run_memory, "_MOST_KNOWN", 2 * 8 * (4 + 3 + 2 + 1))
    assert ask(2) is first
    third = ask(4)
    assert ask(2) is first and ask(4) is third and ask(3) is not second
    # Only the newest has the tables that more peaks would be made of.
    kept = [runs for _, runs in known._known.values()]
    assert [runs._tables is not None for runs in kept] == [False] * (len(kept) - 1) + [True]


def test_all_numbers_of_partitions_share_what_is_known() -> None:
    """Under GPipe the memory of a run does not depend on how many others there are."""
    profile = gb.Profile.from_costs([1.0] * 6, parameter_bytes=[100] * 6, chunks=4)
    question = ask_planner(profile, 2, {"memory_limit": 10_000})
    for n, schedule, is_same in ((3, "gpipe", True), (3, "1f1b", False)):
        other = pose(replace(question, n_partitions=n, schedule=schedule))
        assert (other.problem.memory is pose(question).problem.memory) == is_same
