"""Frozen layers at the beginning: a partition that has no others recomputes nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations, pairwise
from typing import Any

import pytest
import torch
from torch import nn

import gpipebal as gb
from gpipebal.errors import BalanceError
from gpipebal.planner import training_step
from gpipebal.problem import Problem
from gpipebal.profiler.trial.findings import read_trial
from gpipebal.profiler.trial.traces import KINDS, Traced
from gpipebal.schedule import CHECKPOINT_MODES, order_of
from gpipebal.simulator import Durations, durations_of, place
from gpipebal.solvers import split

N_FROZEN, N_LAYERS, CHUNKS = 3, 7, 4


def chain() -> nn.Sequential:
    """Return layers of different sizes, of which the first are frozen."""
    sizes = [16, 64, 200, 16, 120, 32, 200, 16]
    layers = [nn.Linear(one, two) for one, two in pairwise(sizes)]
    for layer in layers[:N_FROZEN]:
        layer.requires_grad_(False)
    return nn.Sequential(*layers)


def profile_of(model: nn.Sequential) -> gb.Profile:
    """Estimate the chain."""
    sample = torch.empty(64, 16)
    return gb.profile_model(
        model, sample, chunks=CHUNKS, method="estimate", rates="CPU core", rows=()
    )


@pytest.mark.parametrize("mode", ["except_last", "always"])
@pytest.mark.parametrize("cut", range(1, N_LAYERS))
def test_the_executor_recomputes_behind_the_frozen_layers_only(
    mode: gb.CheckpointMode, cut: int
) -> None:
    """All layers of a partition are recomputed, or none: what plans count is what runs."""
    model = chain()
    again: set[int] = set()

    def look(layer: nn.Module, *_: object) -> None:
        if gb.is_recomputing():
            again.add([*model].index(layer))

    for layer in model:
        layer.register_forward_hook(look)
    pipe = gb.GPipe(model, [cut, N_LAYERS - cut], chunks=CHUNKS, checkpoint=mode)
    pipe(torch.ones(64, 16)).sum().backward()
    plan = gb.evaluate(profile_of(chain()), [cut, N_LAYERS - cut], checkpoint=mode)
    counted = {
        k
        for j, part in enumerate(plan.partitions)
        if part.recompute_time
        for k in range(cut * j, cut if j == 0 else N_LAYERS)
    }
    assert again == counted == set(range(0 if cut > N_FROZEN else cut, N_LAYERS))


class Reader(nn.Module):
    """Read a sequence: with a graph torch's kernel for it makes room for a backward."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(64, 64, batch_first=True).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return one value for all words."""
        return self.lstm(x)[0].sum(1)


@pytest.mark.parametrize("mode", CHECKPOINT_MODES)
def test_a_forward_that_is_never_recomputed_needs_what_a_graph_does(
    mode: gb.CheckpointMode,
) -> None:
    """The executor records one each time, to see that nothing needs a gradient."""
    model, sample = nn.Sequential(Reader(), nn.Linear(64, 8)), torch.randn(48, 16, 64)
    profile = gb.profile_model(
        model, sample, chunks=3, rows=(), timeout=0, as_pipeline=False, progress=False
    )
    first = profile.layers[0]
    assert first.forward_peak_bytes > 2 * (first.no_grad_forward_peak_bytes or 0)
    plan = gb.evaluate(profile, [1, 1], checkpoint=mode)
    pipe = gb.GPipe(model, [1, 1], chunks=3, checkpoint=mode)
    pipe(sample).square().mean().backward()
    model.zero_grad()
    with gb.pipeline.measure_memory(pipe) as meter:
        pipe(sample).square().mean().backward()
    pipe.close()
    # How many outputs wait is up to the clock; they are small.
    assert plan.partitions[0].memory.total == pytest.approx(meter.peak_bytes[0], rel=0.02)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("mode", [*CHECKPOINT_MODES, "auto"])
def test_plans_are_the_best_of_all(schedule: str, mode: gb.CheckpointMode) -> None:
    """What the solver promises is what the simulator gives, and no split is better."""
    profile = profile_of(chain())
    assert profile.n_frozen == N_FROZEN
    for n_partitions in (2, 3):
        plan = gb.solve(profile, n_partitions, checkpoint=mode, schedule=schedule)
        every = [
            gb.evaluate(
                profile,
                [end - start for start, end in pairwise((0, *cuts, N_LAYERS))],
                checkpoint="never" if mode == "auto" else mode,
                schedule=schedule,
            ).makespan
            for cuts in combinations(range(1, N_LAYERS), n_partitions - 1)
        ]
        assert plan.status == "optimal"
        assert plan.makespan == pytest.approx(min(every), rel=1e-12)
        assert gb.simulate(plan).makespan == pytest.approx(plan.makespan, rel=1e-12)


def test_a_skip_with_a_gradient_ends_the_frozen_layers() -> None:
    """What a trained layer stashes needs a gradient, though its output does not."""

    @gb.skip.skippable(stash=["kept"])
    class Stash(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> object:
            yield gb.skip.stash("kept", self.linear(x))
            return x

    @gb.skip.skippable(pop=["kept"])
    class Pop(nn.Module):
        def forward(self, x: torch.Tensor) -> object:
            kept = yield gb.skip.pop("kept")
            return x + kept

    frozen = nn.Linear(4, 4).requires_grad_(False)
    model = nn.Sequential(frozen, Stash(), nn.ReLU(), Pop())
    found = gb.profile_model(model, torch.empty(8, 4), chunks=2, method="estimate", rows=())
    assert found.n_frozen == 1
    assert gb.Profile.from_costs([1.0, 2.0]).n_frozen == 0


def test_more_frozen_layers_than_there_are_are_all() -> None:
    """Then nothing is recomputed at all."""
    problem = Problem([1, 2], [0, 0], [1, 2], 2, chunks=3, n_frozen=9)
    assert problem.n_frozen == 2
    assert problem.makespan((0, 1, 2)) == 3 + 2 * 2


@pytest.mark.parametrize("n_frozen", [None, -1, 0.0, True, "2", []])
def test_what_is_no_number_of_frozen_layers_is_refused(n_frozen: Any) -> None:
    """A problem that took it would fail somewhere inside a solver."""
    with pytest.raises(BalanceError, match="n_frozen is not a number of layers"):
        Problem([1, 2], [1, 1], [1, 2], 2, chunks=3, n_frozen=n_frozen)


@pytest.mark.parametrize("objective", ["makespan", "bottleneck"])
@pytest.mark.parametrize("mode", ["except_last", "always"])
@pytest.mark.parametrize("n_frozen", [1, 2])
def test_a_single_partition_recomputes_unless_all_layers_are_frozen(
    n_frozen: int, mode: gb.CheckpointMode, objective: Any
) -> None:
    """What is found for it is what the problem says of its only split."""
    problem = Problem([1, 2], [1, 1], [5, 7], 1, chunks=3, checkpoint=mode, n_frozen=n_frozen)
    found = split(problem, objective)
    assert found.value == getattr(problem, objective)((0, 2))
    assert found.status == "optimal"


def given_costs(backward: Sequence[float], times: Sequence[float] | None = None) -> gb.Profile:
    """Return a profile whose layers without a backward are frozen."""
    times = [1.0] * len(backward) if times is None else times
    sizes = [8] * len(backward)
    profile = gb.Profile.from_costs(times, backward, output_bytes=sizes, chunks=CHUNKS)
    outputs = [
        layer.outputs for layer, time in zip(profile.layers, backward, strict=True) if not time
    ]
    return replace(profile, without_gradient=sum(outputs, ()))


def test_tables_compare_with_the_split_of_least_bottleneck() -> None:
    """A rule of thumb that is called so has it, and schedules are compared for that split."""
    profile = given_costs([0.0] * 5 + [1.0, 1.0], [1.0, 8.0, 5.0, 4.0, 2.0, 6.0, 1.0])
    least = gb.solve(profile, 2, checkpoint="always", objective="bottleneck")
    plan = gb.solve(profile, 2, checkpoint="always")
    rules = {row.rule: row for row in gb.compare_rules(profile, plan).rows}
    assert rules["least bottleneck"].bottleneck == least.value == 20.0
    schedules = gb.compare_schedules(profile, 2, checkpoint="always", schedules="gpipe")
    assert schedules.row("gpipe").makespan == least.makespan


def test_nothing_is_launched_for_a_recompute_that_is_none() -> None:
    """Where the host limits the pace, frozen partitions are recomputed as little as on devices."""
    profile = given_costs([0.0, 0.0, 2.0, 2.0])
    hosts = [(10.0, 0.0)] * 2 + [(10.0, 10.0)] * 2
    layers = [
        replace(layer, forward_host_time=there, backward_host_time=back)
        for layer, (there, back) in zip(profile.layers, hosts, strict=True)
    ]
    profile = replace(profile, layers=tuple(layers))
    assert durations_of(profile, (0, 1, 2, 4)).recompute_launch == (0.0, 0.0, 20.0)
    recomputed, kept = (
        training_step(profile, gb.evaluate(profile, [2, 2], checkpoint=[mode, "always"]))
        for mode in ("always", "never")
    )
    assert recomputed.makespan == kept.makespan


def test_a_recompute_that_is_none_has_no_cell() -> None:
    """What a cell takes besides its layers is not added to it."""
    profile = given_costs([0.0, 0.0, 2.0, 2.0])
    profile = replace(profile, step=replace(profile.step, cell_overhead_time=0.5))
    plan = gb.evaluate(profile, [2, 2], checkpoint="always", schedule="1f1b")
    timeline = training_step(profile, plan)
    spans = {(e.partition, e.kind): e.end - e.start for e in timeline.events}
    assert spans[0, "R"] == 0.0
    assert spans[0, "F"] == 2.5


def test_a_trial_compares_one_partition_with_the_whole_chain() -> None:
    """It recomputes the frozen layers too: that is no reason to take recomputes for slow."""
    profile = given_costs([0.0, 2.0], [3.0, 1.0])
    apart = Durations((3.0, 1.0), (0.0, 1.0), (0.0, 2.0))
    whole = Durations((4.0,), (4.0,), (2.0,))
    ways = []
    for times in (apart, whole):
        for mode in CHECKPOINT_MODES:
            timeline = place(order_of("gpipe", times.n_partitions, CHUNKS, mode), times)
            ways.append(Traced(mode, False, times.n_partitions, [(timeline.makespan, timeline)]))
    found = read_trial(profile, (1, 1), CHUNKS, 1, ways, dict.fromkeys(KINDS, 0.0))
    assert found.factors == pytest.approx(dict.fromkeys(KINDS, 1.0))
