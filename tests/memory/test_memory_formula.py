"""Predicted peak memory against bytes added up by hand."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from nothing_waits import peaks_without_waiting
from torch import nn

import gpipebal as gb
from gpipebal.errors import BalanceError
from gpipebal.memory import partition_memory
from gpipebal.memory.cell import Cell
from gpipebal.memory.waiting import Waiting
from gpipebal.plan import PeakMemory
from gpipebal.planner import evaluate
from gpipebal.profile import LayerProfile, SkipProfile, StepTerms
from gpipebal.schedule import Checkpoint, order_of
from gpipebal.simulator import Durations, place

pytestmark = pytest.mark.timeout(300)

CHUNKS = 4


def chain_of_known_bytes() -> gb.Profile:
    """Three layers: each saves 100 bytes of its own and hands on 10; parameters 1000."""
    return gb.Profile.from_costs(
        [1.0] * 3,
        parameter_bytes=[1000] * 3,
        saved_bytes=[100] * 3,
        output_bytes=[10] * 3,
        chunks=CHUNKS,
    )


def predict(checkpoint: Checkpoint, schedule: str = "gpipe") -> tuple[PeakMemory, ...]:
    """Predict for one layer per partition."""
    return partition_memory(
        chain_of_known_bytes(),
        (0, 1, 2, 3),
        chunks=CHUNKS,
        checkpoint=checkpoint,
        schedule=schedule,
    )


def test_memory_of_the_middle_partition_by_hand() -> None:
    """What is in flight is up to mode and schedule; the rest is one cell's.

    The peak is in the backward, or as high in the recompute. A cell holds 10 bytes of input and
    100 that its layer saves. The gradient of its output (10) is there, and that of its input (10)
    comes, while one of another micro-batch waits; and under 1F1B an output (10) of another one.
    Gradients of parameters exist in the second backward, when one micro-batch is through.
    """
    expected = {
        ("gpipe", "never"): 3 * 110,
        ("gpipe", "except_last"): 2 * 10 + 110,
        ("gpipe", "always"): 2 * 10 + 110,
        # Two partitions are left from this one on, so two cells are in flight.
        ("1f1b", "never"): 2 * 110,
        ("1f1b", "always"): 10 + 110,
    }
    for (schedule, mode), activations in expected.items():
        peak = predict(mode, schedule)[1]  # type: ignore[arg-type]
        waiting = 20 if schedule == "1f1b" else 10
        known = PeakMemory(1000, 1000, 0, None, activations, 20, waiting=waiting)
        assert peak == known, (schedule, mode)


def test_memory_goes_by_the_mode_of_each_partition() -> None:
    """A partition's memory depends on its own mode, not on its neighbours'."""
    mixed = predict(["never", "always", "never"])
    assert (mixed[0], mixed[2]) == (predict("never")[0], predict("never")[2])
    assert mixed[1] == predict("always")[1]


def with_loss(backward_peak_bytes: int) -> gb.Profile:
    """Return the chain with a loss: a target of 3 bytes per micro-batch, a number of 4 bytes."""
    profile = chain_of_known_bytes()
    gathered, whole_number, number = range(len(profile.storages), len(profile.storages) + 3)
    loss = LayerProfile(
        "loss",
        "squares",
        1.0,
        1.0,
        1.0,
        saved=profile.layers[-1].outputs,
        outputs=(number,),
        output_bytes=4,
        forward_peak_bytes=4,
        backward_peak_bytes=backward_peak_bytes,
        buffer_bytes=3,
    )
    whole = replace(
        loss,
        saved=(gathered,),
        outputs=(whole_number,),
        backward_peak_bytes=CHUNKS * backward_peak_bytes,
        buffer_bytes=CHUNKS * 3,
    )
    step = StepTerms(loss=loss, whole_loss=whole, gathered=(gathered,))
    return replace(profile, storages=(*profile.storages, 10 * CHUNKS, 4, 4), step=step)


def last_of(profile: gb.Profile, chunks: int = CHUNKS, **options: Any) -> PeakMemory:
    """Predict the last of two partitions, which has one layer of the known chain."""
    return partition_memory(profile, (0, 2, 3), chunks=chunks, checkpoint="never", **options)[-1]


def test_the_callers_loss_is_on_the_last_partition() -> None:
    """Behind the forwards stand the joined output, its gradient and the loss; the target always."""
    target, joined = 3 * CHUNKS, 10 * CHUNKS
    # A small loss comes and goes before the peak of the backward: the output, which the caller has
    # given a name, its gradient and the loss's number stay. A gradient waits to be taken.
    small = last_of(with_loss(10))
    assert small == PeakMemory(1000, 1000, 0, None, 3 * 110, 10, target + 2 * joined + 4, 10)
    # A large one is the peak, between the phases, when no gradients exist: with what it saves.
    large = last_of(with_loss(8000))
    around = target + joined + 4 + CHUNKS * 8000
    assert large == PeakMemory(1000, 0, 0, None, 4 * 110, 0, around)
    # It goes by the rows of the mini-batch.
    assert last_of(with_loss(8000), 2 * CHUNKS).outputs == 2 * around
    # One micro-batch is the mini-batch: nothing is copied, and its output is in no graph here.
    assert last_of(with_loss(8000), 1).outputs == 3 + 10 + 1 + 8000
    # Without a loss the joined output, once saved and twice in the making of its gradient.
    bare = replace(chain_of_known_bytes(), layers=chain_of_known_bytes().layers[:2])
    bare = replace(bare, layers=(bare.layers[0], replace(bare.layers[1], gradient_bytes=0)))
    peak = partition_memory(bare, (0, 1, 2), chunks=CHUNKS, checkpoint="never")[-1]
    assert (peak.activations, peak.outputs) == (4 * 110, 3 * joined)


def test_a_loss_inside_is_one_more_layer() -> None:
    """One micro-batch of it exists at a time; what stays are the targets, the caller's."""
    kept = CHUNKS * 3
    # At the last backward all numbers are there; the layer's output is saved by the loss.
    inside = last_of(with_loss(2000), schedule="1f1b")
    assert inside == PeakMemory(1000, 1000, 0, None, 110 + 10, 2000, kept, 10)
    # Under GPipe the micro-batches behind it hold their outputs, which the loss saves.
    held = last_of(with_loss(2000), loss_inside=True)
    assert held == PeakMemory(1000, 1000, 0, None, 3 * (110 + 10), 2000, kept, 10)
    # Where it was measured over the mini-batch only, each micro-batch has its share.
    profile = with_loss(2000)
    shared = replace(profile, step=replace(profile.step, loss=None))
    assert last_of(shared, schedule="1f1b").transient == 2000
    assert last_of(shared, schedule="1f1b").outputs == CHUNKS * 3


def test_a_recompute_needs_a_smaller_forward_before() -> None:
    """Forwards without a graph, and backwards where gradients exist, have peaks of their own."""
    profile = chain_of_known_bytes()
    wide = replace(profile.layers[1], no_grad_forward_peak_bytes=5000, accumulating_peak_bytes=3000)
    profile = replace(profile, layers=(profile.layers[0], wide, profile.layers[2]))

    def middle(checkpoint: Checkpoint) -> PeakMemory:
        return partition_memory(profile, (0, 1, 2, 3), chunks=CHUNKS, checkpoint=checkpoint)[1]

    # All but the first input is held already when the last micro-batch comes, and an output waits.
    assert middle("always") == PeakMemory(1000, 0, 0, None, 4 * 10, 5000, waiting=10)
    assert middle("never") == PeakMemory(1000, 1000, 0, None, 3 * 110, 10 + 3000, waiting=10)


def waits(profile: gb.Profile, bounds: tuple[int, ...], **options: Any) -> list[list[int]]:
    """Return what waits in each partition, action by action, under GPipe."""
    order = order_of("gpipe", len(bounds) - 1, CHUNKS, options.get("checkpoint", "never"))
    times = [
        [sum(getattr(layer, name) for layer in profile.layers[a:b]) for a, b in pairwise(bounds)]
        for name in ("forward_time", "recompute_time", "backward_time")
    ]
    timeline = place(order, Durations(*map(tuple, times)))
    cells = [
        Cell(profile, a, b, None, options.get("shared_memory", False)) for a, b in pairwise(bounds)
    ]
    waiting = Waiting(cells, order, None if options.get("most") else timeline)
    return [waiting.of_row(j) for j in range(len(cells))]


def test_what_waits_by_hand() -> None:
    """An output waits for a slow partition, a gradient for a slow one before; who made it pays.

    Partition 0 takes 1 s forward, partition 1 3 s: it begins its forwards at 1, 4, 7 and 10 s.
    """
    profile = gb.Profile.from_costs(
        [1.0, 3.0], parameter_bytes=[100] * 2, output_bytes=[10, 7], chunks=CHUNKS
    )
    forwards, backwards = waits(profile, (0, 1, 2))
    # At 1 s the first output is only just being taken. With two to take, partition 0 would wait.
    assert forwards == [0, 10, 10, 10, 0, 0, 0, 0]
    # Each gradient is taken when the next backward begins, as long as its output.
    assert backwards == [0, 0, 0, 0, 0, 10, 10, 10]
    slow_first = gb.Profile.from_costs(
        [3.0, 1.0], parameter_bytes=[100] * 2, output_bytes=[10, 7], chunks=CHUNKS
    )
    # Partition 0 goes back in 6 s and partition 1 in 2: it waits before it makes a third gradient.
    assert waits(slow_first, (0, 1, 2))[1] == [0, 0, 0, 0, 0, 10, 10, 10]
    # Whatever the clock, it cannot be more than was made and need not have been taken.
    assert waits(profile, (0, 1, 2), most=True) == [
        [0, 10, 10, 10, 0, 0, 0, 0],
        [0, 0, 0, 0, 0, 10, 10, 10],
    ]
    # No gradient goes where nothing can be trained.
    frozen = replace(profile.layers[0], gradient_bytes=0)
    frozen_first = replace(profile, layers=(frozen, profile.layers[1]))
    assert waits(frozen_first, (0, 1, 2))[1] == [0] * 8


def test_what_a_sender_keeps_stays_with_the_receiver() -> None:
    """In one memory, an output that the sender's graph holds outlives the receiver's backward."""
    profile = gb.Profile.from_costs([1.0, 1.0], output_bytes=[10, 7], chunks=CHUNKS)
    sender = replace(profile.layers[0], saved=profile.layers[0].outputs)
    profile = replace(profile, layers=(sender, profile.layers[1]))
    assert waits(profile, (0, 1, 2), shared_memory=True)[1] == [0, 0, 0, 0, 0, 10, 10, 10]
    assert waits(profile, (0, 1, 2))[1] == [0] * 8
    # What an earlier layer has saved is there until the backward has come to that.
    through = gb.Profile.from_costs([0.5, 0.5, 1.0], output_bytes=[10, 10, 7], chunks=CHUNKS)
    first, second, last = through.layers
    first = replace(first, saved=first.outputs)
    second = replace(second, outputs=first.outputs)
    through = replace(through, layers=(first, second, last))
    assert waits(through, (0, 2, 3), shared_memory=True)[1] == [0, 0, 0, 0, 0, 10, 20, 20]
    # A recompute of the sender makes its own.
    again = waits(profile, (0, 1, 2), shared_memory=True, checkpoint=["always", "never"])
    assert again[1] == [0] * 8


def test_skips_are_held_where_they_are_popped() -> None:
    """A skip past a partition is an input of the one that pops it; the one in between has none."""
    profile = chain_of_known_bytes()
    plain = predict("never")
    skip = SkipProfile("s", 0, 2, (len(profile.storages),))
    profile = replace(profile, storages=(*profile.storages, 50), skips=(skip,))
    bounds = (0, 1, 2, 3)
    first, middle, last = partition_memory(profile, bounds, chunks=CHUNKS, checkpoint="never")
    assert middle == plain[1]
    # Three cells hold it at the peak.
    assert last.activations - plain[2].activations == 3 * 50
    # Its gradient is there while the one that stashed it goes back.
    assert first.transient - plain[0].transient == 50
    # On its way it is with its maker: partition 2 takes it two micro-batches later.
    assert waits(profile, bounds)[0][:4] == [0, 60, 110, 110]
    # Inside a partition it lives until it is popped, and its gradient until it is stashed.
    whole = partition_memory(profile, (0, 3), chunks=CHUNKS, checkpoint="always")[0]
    bare = partition_memory(replace(profile, skips=()), (0, 3), chunks=CHUNKS, checkpoint="always")
    assert whole.total - bare[0].total == 50


sizes = st.lists(st.integers(0, 50), min_size=4, max_size=4)


@settings(deadline=None)
@given(
    st.lists(st.integers(1, 9), min_size=4, max_size=4),
    sizes,
    sizes,
    st.integers(1, 6),
    st.sampled_from(["gpipe", "1f1b"]),
    st.lists(st.sampled_from(["always", "except_last", "never"]), min_size=3, max_size=3),
    st.booleans(),
)
def test_no_clock_makes_more_wait_than_the_order_allows(
    times: list[int], saved: list[int], outputs: list[int], chunks: int, schedule: str,
    modes: list[Any], shared: bool,
) -> None:  # fmt: skip
    """A prediction with a clock lies between nothing that waits and what a plan counts."""
    profile = gb.Profile.from_costs(
        [float(time) for time in times],
        parameter_bytes=[8] * 4,
        saved_bytes=saved,
        output_bytes=outputs,
        chunks=chunks,
    )
    skips = (SkipProfile("s", 0, 2, (1,)), SkipProfile("t", 1, 3, (3,)))
    profile = replace(profile, skips=skips)
    plan = evaluate(profile, [1, 2, 1], checkpoint=modes, schedule=schedule, shared_memory=shared)
    options: Any = {"chunks": chunks, "checkpoint": tuple(modes), "schedule": schedule}
    options["shared_memory"] = shared
    clock = gb.simulate(plan)
    least = peaks_without_waiting(profile, (0, 1, 3, 4), **options)
    clocked = partition_memory(profile, (0, 1, 3, 4), timeline=clock, **options)
    for low, peak, part in zip(least, clocked, plan.partitions, strict=True):
        assert low.total <= peak.total <= part.memory.total


def test_memory_parts() -> None:
    """Parameters and gradients count once, and an unknown optimizer is said, not guessed."""
    peak = partition_memory(chain_of_known_bytes(), (0, 3), chunks=CHUNKS, checkpoint="never")[0]
    assert (peak.parameters, peak.gradients, peak.optimizer) == (3000, 3000, None)
    assert peak.total == 6000 + peak.activations + peak.transient + peak.outputs
    assert "does not count optimizer state" in str(gb.solve(chain_of_known_bytes(), 1))


def test_a_cut_in_one_memory_counts_once() -> None:
    """Partitions that share a memory do not both hold the tensor at their cut."""
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU())
    profile = gb.profile_model(
        model, torch.ones(400, 8), chunks=2, rows=(), timeout=0, as_pipeline=False
    )
    apart, together = (
        partition_memory(profile, (0, 2, 4), chunks=2, checkpoint="never", shared_memory=shared)
        for shared in (False, True)
    )
    cut = profile.layers[1].output_bytes
    assert apart[0].activations - together[0].activations == 2 * cut
    assert apart[1].activations == together[1].activations


def test_what_takes_no_time_waits_no_longer_than_its_order_lets_it() -> None:
    """A timeline in which everything happens at once says no more than the order of the actions."""
    profile = gb.Profile.from_costs([0.0] * 3, output_bytes=[8] * 3, chunks=2)
    for schedule in ("gpipe", "1f1b"):
        options: Any = {"chunks": 2, "checkpoint": "never", "schedule": schedule}
        peaks = [part.memory for part in gb.evaluate(profile, [1, 1, 1], **options).partitions]
        clock = gb.simulate(gb.evaluate(profile, [1, 1, 1], **options))
        found = partition_memory(profile, (0, 1, 2, 3), timeline=clock, **options)
        assert all(one.total <= peak.total for one, peak in zip(found, peaks, strict=True))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"bounds": (0, 2)},
            r"bounds=\(0, 2\) .*from 0 to 3\)\.\nFix: bounds=to_bounds\(balance\)",
        ),
        ({"bounds": (1, 2, 3)}, "bounds"),
        ({"bounds": (0, 1, 1, 3)}, "bounds"),
        ({"bounds": (2, 1)}, "bounds"),
        ({"bounds": (0, 1.5, 3)}, "bounds"),
        ({"chunks": 2**30}, "too many micro-batches"),
        ({"shared_memory": "no"}, "shared_memory='no'"),
        ({"loss_inside": "no"}, "loss_inside='no'"),
        ({"loss_inside": 0, "schedule": "1f1b"}, "caller cannot compute the loss"),
        ({"gradients_exist": 2}, "gradients_exist=2"),
        ({"chunks": 5}, r"3 partitions and 4 micro-batches \(expected 3 and 5\)"),
        ({"chunks": 3}, r"\(expected 3 and 3\).\nFix: .* chunks=4"),
        ({"bounds": (0, 1, 3)}, r"\(expected 2 and 4\)"),
        ({"bounds": (0, 3)}, r"\(expected 1 and 4\)"),
    ],
)
def test_what_is_no_step_of_the_chain_is_refused(changes: dict[str, Any], message: str) -> None:
    """Bounds, counts, shares and flags that make no sense, and timelines of other steps."""
    profile = chain_of_known_bytes()
    timeline = gb.simulate(evaluate(profile, [1, 1, 1], checkpoint="never"))
    asked: dict[str, Any] = {"bounds": (0, 1, 2, 3), "chunks": CHUNKS, "checkpoint": "never"}
    asked |= {"timeline": timeline}
    assert len(partition_memory(profile, **asked)) == 3
    with pytest.raises(BalanceError, match=message):
        partition_memory(profile, **asked | changes)
