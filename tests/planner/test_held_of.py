"""What the partitions of a plan hold over time: its highest is what the plan itself says."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from oracles import all_bounds
from plan_oracle import MODES, holding_its_output, profiles

import gpipebal as gb
from gpipebal.errors import BalanceError
from gpipebal.memory import partition_memory
from gpipebal.memory.cell import Cell
from gpipebal.memory.loss import loss_of_micro_batch
from gpipebal.planner import evaluate
from gpipebal.planner.execution import Execution
from gpipebal.planner.times import step_timeline
from gpipebal.profile import LayerProfile
from gpipebal.simulator import held_of, memory_over_time

SLOW = (HealthCheck.too_slow, HealthCheck.data_too_large)


def without_optimizer(profile: gb.Profile) -> gb.Profile:
    """Leave out what the optimizer's step needs for a moment, which no track shows."""
    nothing = {"optimizer_peak_bytes": 0, "optimizer_carried_bytes": 0}
    layers = tuple(replace(layer, **nothing) for layer in profile.layers)
    return replace(profile, layers=layers, step=replace(profile.step, optimizer_groups=()))


def at_work(profile: gb.Profile) -> gb.Profile:
    """Let every layer need, while it works, at least what it leaves behind."""
    # Once as an output, and once for every skip: each may be taken by somebody else.
    most = (1 + len(profile.skips)) * sum(profile.storages)
    most += sum(map(profile.gradients_into, range(profile.n_layers)))

    def working(layer: LayerProfile) -> LayerProfile:
        back = layer.gradient_bytes + most

        def more(peak: int | None, by: int = back) -> int | None:
            return None if peak is None else peak + by

        return replace(
            layer,
            handed_through=(),
            copied_bytes=0,
            cut_copied_bytes=0,
            chained_cut_copied_bytes=0,
            forward_peak_bytes=layer.forward_peak_bytes + most,
            no_grad_forward_peak_bytes=more(layer.no_grad_forward_peak_bytes, most),
            backward_peak_bytes=layer.backward_peak_bytes + back,
            accumulating_peak_bytes=more(layer.accumulating_peak_bytes),
            chained_peak_bytes=more(layer.chained_peak_bytes),
            chained_accumulating_peak_bytes=more(layer.chained_accumulating_peak_bytes),
        )

    step = profile.step
    loss = None if step.loss is None else working(step.loss)
    layers = tuple(map(working, profile.layers))
    return replace(profile, layers=layers, step=replace(step, loss=loss))


def both(
    profile: gb.Profile, bounds: tuple[int, ...], **options: Any
) -> tuple[list[int], list[int]]:
    """Return the peaks in the timeline of a plan, and those over time in the same timeline.

    Those of the plan itself count the most that may wait: they are no less.
    """
    balance = [end - start for start, end in pairwise(bounds)]
    plan = evaluate(profile, balance, **options)
    timeline = step_timeline(profile, bounds, Execution.of(plan))
    tracks = memory_over_time(timeline, held_of(profile, plan))
    exact = partition_memory(
        profile,
        bounds,
        chunks=plan.chunks,
        checkpoint=plan.checkpoint,
        schedule=plan.schedule,
        loss_inside=plan.loss_inside,
        shared_memory=plan.shared_memory,
        gradients_exist=plan.gradients_exist,
        timeline=timeline,
    )
    for part, peak in zip(plan.partitions, exact, strict=True):
        assert peak.total <= part.memory.total
    return [peak.total for peak in exact], [track.peak for track in tracks]


@settings(max_examples=60, deadline=None, suppress_health_check=SLOW)
@given(profile=profiles(shortest=1, largest=4), shared=st.booleans())
def test_the_output_of_one_micro_batch_outlives_its_graph(
    profile: gb.Profile, shared: bool
) -> None:
    """Where the last layer saves what it hands on, and the highest moment is behind it."""
    # Ties are for the next test: here a partition may have no gradients but those of its ties.
    profile = at_work(holding_its_output(without_optimizer(replace(profile, ties=()))))
    options: Any = {"chunks": 1, "checkpoint": "never", "loss_inside": False}
    n = profile.n_layers
    for bounds in [(0, n), (0, 1, n)][: min(n, 2)]:
        if not all(Cell(profile, a, b, None, shared).goes_back for a, b in pairwise(bounds)):
            continue
        planned, followed = both(profile, bounds, shared_memory=shared, **options)
        assert followed == planned


@settings(max_examples=150, deadline=None, suppress_health_check=SLOW)
@given(data=st.data(), shared=st.booleans(), exist=st.booleans(), chunks=st.integers(1, 5))
def test_peaks_over_time_are_those_of_the_formula(
    data: st.DataObject, shared: bool, exist: bool, chunks: int
) -> None:
    """Any storages, skips, ties, modes and losses, in or behind the pipeline: to the byte."""
    profile = without_optimizer(data.draw(profiles(shortest=1)))
    schedule = data.draw(st.sampled_from(["gpipe", "1f1b"]))
    inside = schedule == "1f1b" or data.draw(st.booleans())
    n = data.draw(st.integers(1, profile.n_layers))
    modes = tuple(data.draw(st.sampled_from(MODES)) for _ in range(n))
    options: Any = {
        "schedule": schedule,
        "chunks": chunks,
        "checkpoint": modes,
        "loss_inside": inside,
        "shared_memory": shared,
        "gradients_exist": exist,
    }
    loss = loss_of_micro_batch(profile) if inside else None
    for bounds in all_bounds(profile.n_layers, n):
        runs = pairwise(bounds)
        last = bounds[-1]
        cells = [Cell(profile, a, b, loss if b == last else None, shared) for a, b in runs]
        if not all(cell.goes_back for cell in cells):
            continue  # no gradient comes to it: when it gets those of its parameters is moot
        planned, followed = both(at_work(profile), bounds, **options)
        assert followed == planned
        # A layer that needs less than it leaves behind counts with what it leaves behind.
        low, seen = both(profile, bounds, **options)
        assert all(a <= b <= c for a, b, c in zip(low, seen, planned, strict=True))


def test_a_list_of_no_modes_is_not_taken_for_none_given() -> None:
    """It is refused, as by whatever takes modes."""
    with pytest.raises(BalanceError, match="checkpoint mode does not exist"):
        held_of(gb.Profile.from_costs([1.0]), (0, 1), checkpoint=[])
