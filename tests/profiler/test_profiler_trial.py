"""The trial of a profile as a pipeline, and the correction that comes of it."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import gpipebal as gb
import gpipebal.errors
from gpipebal.planner import evaluate
from gpipebal.profile import Profile, StepTerms
from gpipebal.profiler.chain.batch import Batch
from gpipebal.profiler.chain.data import Data
from gpipebal.profiler.trial import correct as correct_module
from gpipebal.profiler.trial import trial
from gpipebal.profiler.trial.correct import correct
from gpipebal.profiler.trial.findings import Trial
from gpipebal.profiler.trial.trial import Setting, run_trial


def chain(n_layers: int = 4) -> nn.Sequential:
    """A chain of small layers."""
    return nn.Sequential(*(nn.Linear(8, 8) for _ in range(n_layers)))


def profile(model: nn.Sequential, rows: int = 8, **options: Any) -> Profile:
    """Measure as little as possible, without a bar."""
    options = {"timeout": 0, "progress": False, "rows": (), "chunks": 4, **options}
    return gb.profile_model(model, torch.randn(rows, 8), **options)


def setting(model: nn.Sequential, chunks: int, n_partitions: int, **options: Any) -> Setting:
    """Try a model with one thread for each partition."""
    given = {"target": None, "loss_fn": None, "sample": torch.randn(2 * chunks, 8), **options}
    return Setting(
        layers=OrderedDict(model.named_children()),
        data=Data(
            Batch.sample(given["sample"]), [2] * chunks, Batch.target(given["target"]), out_dims=0
        ),
        loss_fn=given["loss_fn"],
        n_partitions=n_partitions,
        n_threads=1,
    )


def told(**factors: float) -> Trial:
    """What a trial told, with these factors."""
    known = dict.fromkeys(("forward", "no_grad_forward", "recompute", "backward"), 1.0)
    return Trial([1, 1], 4, 3, known | factors, 0.25, 2.0, 1.0)


def test_each_kind_of_cell_has_its_factor() -> None:
    """Times of a layer are multiplied by the factor of their kind; spreads go along."""
    before = Profile.from_costs([1.0, 3.0], [2.0, 5.0])
    layers = tuple(
        replace(layer, no_grad_forward_time=0.5, backward_spread=0.1) for layer in before.layers
    )
    before = replace(before, layers=layers, other_sizes=(replace(before, rows=2),))
    after = correct(before, told(forward=1.5, no_grad_forward=4.0, recompute=2.0, backward=3.0))
    first = after.layers[0]
    assert (first.forward_time, first.backward_time) == (1.5, 6.0)
    assert (first.recompute_time, first.no_grad_forward_time) == (2.0, 2.0)
    assert first.backward_spread == pytest.approx(0.3)
    assert after.other_sizes[0].layers[1].backward_time == 15.0


def test_a_factor_far_from_one_is_told_of() -> None:
    """The provenance has the trial, and a flag for each factor that is notable."""
    after = correct(Profile.from_costs([1.0, 3.0]), told(recompute=1.2, backward=1.05))
    assert after.provenance["trial"]["factors"]["recompute"] == 1.2
    assert [flag for flag in after.provenance["flags"] if "corrected" in flag] == [
        "corrected: recomputes in partitions took 1.20 of their layers'"
    ]
    far = correct(Profile.from_costs([1.0, 3.0]), told(forward=4.0))
    assert "took 4.00 or more of their" in str(far.provenance["flags"])
    assert Profile.from_dict(after.to_dict()) == after


def test_a_step_has_the_overheads() -> None:
    """A predicted step has one overhead, and that of a cell once for each cell on its way."""
    before = replace(
        Profile.from_costs([1.0, 1.0], [2.0, 2.0]),
        step=StepTerms(gather_time=0.0, optimizer_time=0.5, loss=None),
    )
    loss = replace(before.layers[0], saved=(), outputs=(), forward_time=0.0, backward_time=0.0)
    before = replace(before, step=replace(before.step, loss=loss, whole_loss=loss))
    after = correct(before, told())
    for inside, overhead in ((False, 2.0), (True, 1.0)):
        plans = [
            evaluate(each, [1, 1], chunks=3, checkpoint="never", loss_inside=inside)
            for each in (before, after)
        ]
        plain, corrected = (plan.step_time for plan in plans)
        assert plain is not None and corrected is not None
        # Two phases of chunks + partitions - 1 cells each.
        assert corrected - plain == pytest.approx(overhead + 2 * (3 + 2 - 1) * 0.25)


def test_other_rows_keep_the_overheads() -> None:
    """What a step costs beside its cells does not go by the rows of a micro-batch."""
    after = correct(Profile.from_costs([1.0, 1.0], rows=4), told())
    step = after.at_rows(2).step
    assert (step.overhead_time, step.inside_overhead_time, step.cell_overhead_time) == (2, 1, 0.25)


@pytest.mark.parametrize("n_partitions", [1, 2, 9])
@pytest.mark.parametrize("with_loss", [False, True])
def test_a_trial_tells_of_all_kinds(n_partitions: int, with_loss: bool) -> None:
    """A trial has a factor for every kind of cell, one round at least, and leaves no gradient."""
    model = chain()
    options: dict[str, Any] = {}
    if with_loss:
        options = {"loss_fn": nn.functional.mse_loss, "target": torch.zeros(6, 8)}
    before = profile(model, as_pipeline=False)
    found = run_trial(before, setting(model, 3, n_partitions, **options), 0.0)
    assert sum(found.balance) == 4 and len(found.balance) == min(n_partitions, 4)
    assert set(found.factors) == {"forward", "no_grad_forward", "recompute", "backward"}
    assert all(0.25 <= factor <= 4 for factor in found.factors.values())
    assert found.rounds == 1 and found.overhead_time >= 0 and found.cell_overhead_time > 0
    assert found.inside_overhead_time is not None and found.inside_overhead_time >= 0
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("optimizer", [None, torch.optim.Adam])
def test_before_a_step_caches_hold_what_an_optimizer_goes_through(
    optimizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parameters, gradients and its state: that much is overwritten, if there is one."""
    model = chain()
    found = profile(model, optimizer=optimizer, as_pipeline=False)
    sizes: list[int] = []
    run, traced = trial._Way.run, trial.trace
    there: list[Tensor] = []

    def running(way: Any, chosen: Setting, elsewhere: Tensor | None = None) -> None:
        sizes.append(0 if elsewhere is None else elsewhere.nbytes)
        there[:] = [] if elsewhere is None else [elsewhere.fill_(1.0)]
        run(way, chosen, elsewhere)

    def begins(pipe: Any) -> Any:
        assert not any(memory.any() for memory in there)
        return traced(pipe)

    monkeypatch.setattr(trial._Way, "run", running)
    monkeypatch.setattr(trial, "trace", begins)
    run_trial(found, setting(model, 3, 2), 0.0)
    counted = [size for size in sizes if size]
    if optimizer is None:
        assert not counted
    else:
        # Two numbers of Adam's for each parameter, and the number of its steps.
        n_parameters = sum(parameter.numel() for parameter in model.parameters())
        assert set(counted) == {4 * (4 * n_parameters + len(list(model.parameters())))}
        # Of each way, one that does not count and one that does.
        assert len(counted) == 12


def test_steps_behind_another_way_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """In each turn of a way the first step is left out, and as many count as shall."""
    model = chain()
    counted: list[tuple[int, bool, int]] = []
    ran: list[tuple[int, str, bool]] = []
    of_loss: list[Any] = []
    read, run = trial.read_trial, trial._Way.run

    def noted(*given: Any) -> Trial:
        counted.extend((way.n_partitions, way.inside, len(way.steps)) for way in given[4])
        of_loss.append(given[6])
        return read(*given)

    def running(way: Any, *given: Any) -> None:
        ran.append((way.n_partitions, way.mode, way.inside))
        run(way, *given)

    monkeypatch.setattr(trial, "read_trial", noted)
    monkeypatch.setattr(trial, "MOST_ROUNDS", 2)
    monkeypatch.setattr(trial, "LEAST_TRIAL_SECONDS", 0.0)
    monkeypatch.setattr(trial, "TURN_STEPS", 3)
    overheads = dict.fromkeys(trial.KINDS, 1e-6)
    monkeypatch.setattr(trial, "_overheads", lambda *given: (overheads, {"forward": 1e-7}))
    monkeypatch.setattr(trial._Way, "run", running)
    found = run_trial(profile(model, as_pipeline=False), setting(model, 3, 2), 60.0)
    assert found.rounds == 2
    # Two modes, and a loss inside, in two partitions and in one.
    hows = (False, False, True)
    assert counted == [(n, inside, 2 * trial.TURN_STEPS) for n in (2, 1) for inside in hows]
    assert len(ran) == 6 * 2 * (1 + trial.TURN_STEPS)
    assert of_loss == [{"forward": 1e-7}]
    # In one partition forwards and backwards take turns in every second step.
    in_turns = [(1, "never", False), (1, "never", True)] * (1 + trial.TURN_STEPS)
    assert "".join(map(repr, in_turns)) in "".join(map(repr, ran))


class Branches(nn.Module):
    """A layer that hands on what wants a gradient and what does not, and logs what it gets."""

    def __init__(self, log: list[tuple[str, torch.Tensor]]) -> None:
        super().__init__()
        self.log = log
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> tuple[Any, ...]:
        image = (x * self.weight).reshape(-1, 2, 2, 2).to(memory_format=torch.channels_last)
        found = {
            "image": image,
            "complex": x * self.weight * 1j,
            "half": (x * self.weight).bfloat16(),
            "aux": x * self.weight,
        }
        for name, tensor in found.items():
            tensor.register_hook(lambda grad, name=name: self.log.append((name, grad)))
        return (*found.values(), None, torch.arange(len(x)))


@pytest.mark.parametrize("with_loss", [False, True])
def test_steps_with_a_loss_that_takes_no_time_have_the_gradients_of_others(with_loss: bool) -> None:
    """As many, for the same outputs, of the same kinds; whatever else is in the output."""
    log: list[tuple[str, torch.Tensor]] = []
    chosen = setting(
        nn.Sequential(Branches([])),
        3,
        1,
        loss_fn=(lambda out: out[0].sum() + out[1].abs().sum()) if with_loss else None,
    )
    loss = trial._NoLoss()
    told = []
    for inside in (False, True):
        model = nn.Sequential(Branches(log))
        way = trial._way_of(model, [1], "never", inside, chosen, loss)
        way.run(chosen)
        way.pipe.close()
        told.append(sorted((name, str(grad.dtype), tuple(grad.shape)) for name, grad in log))
        log.clear()
    assert told[0] == told[1]
    assert {name for name, *_ in told[0]} == (
        {"image", "complex"} if with_loss else {"image", "complex", "half", "aux"}
    )


def test_gradients_that_are_there_already_lie_as_their_outputs_do() -> None:
    """They are made once for each shape and stride, and nobody writes to them."""
    loss = trial._NoLoss()
    image = torch.ones(2, 3, 4, 4).to(memory_format=torch.channels_last).requires_grad_()
    for _ in range(2):
        loss((image, None, 3)).backward()
    assert image.grad is not None and bool((image.grad == 2).all())
    (ones,) = loss._ones.values()
    assert ones.stride() == image.stride() and bool((ones == 1).all())
    # A micro-batch in which nothing wants a gradient, or fewer outputs do, is told apart.
    assert not loss(torch.ones(2)).requires_grad
    loss.used = (True, False)
    assert loss((image, torch.ones(2))).requires_grad
    other = torch.ones(2, requires_grad=True)
    loss((image, other)).backward()
    assert other.grad is None and bool((image.grad == 3).all())


def test_a_chain_that_ends_without_a_gradient_is_tried_all_the_same() -> None:
    """Its layers have something to train, but no output wants a gradient: there is no step."""

    class Detach(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.detach()

    model = nn.Sequential(nn.Linear(8, 8), Detach())
    found = run_trial(profile(model, as_pipeline=False), setting(model, 3, 2), 0.0)
    assert found.inside_overhead_time is None and set(found.factors) == set(trial.KINDS)


@pytest.mark.parametrize("n_partitions", [1, 3])
def test_what_a_loss_that_does_nothing_adds(n_partitions: int) -> None:
    """It adds to forwards and backwards, and never takes away."""
    times, more = trial._overheads(n_partitions, setting(chain(), 4, n_partitions))
    assert set(times) == set(trial.KINDS) and min(times.values()) > 0
    assert set(more) == {"forward", "backward"} and min(more.values()) >= 0


class Counting(nn.Linear):
    """A layer that counts its forwards, in all its copies."""

    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        Counting.calls += 1
        return super().forward(x)


@pytest.mark.parametrize("chunks", [1, 4, 8])
def test_what_a_profile_without_repeats_costs(chunks: int) -> None:
    """Eleven forwards to look, ten for each measuring thread, and a trial of up to twelve steps.

    The steps have two micro-batches for each partition at most.
    """
    Counting.calls = 0
    model = nn.Sequential(nn.Linear(8, 8), Counting(8, 8))
    found = profile(model, chunks=chunks)
    # Two steps in each way, those that recompute with two forwards; and, if there is anything to
    # work side by side, all in one partition too.
    steps = (2 + 4 + 2) * (2 if chunks > 1 else 1)
    assert Counting.calls == 11 + 10 * found.provenance["side_by_side"] + steps * min(chunks, 4)


@given(
    chunks=st.integers(1, 8),
    n_partitions=st.integers(1, 5),
    seconds=st.floats(0.0, 1_000.0),
    more=st.floats(0.0, 1_000.0),
)
def test_a_trial_has_as_many_micro_batches_as_there_is_time_for(
    chunks: int, n_partitions: int, seconds: float, more: float
) -> None:
    """Two for each partition at least, more with more time, and all where there is enough."""
    known = Profile.from_costs([1.0, 2.0, 3.0], [2.0, 4.0, 6.0])

    def chosen(seconds: float) -> int:
        return trial.chunks_in_time(known, n_partitions, chunks, seconds)

    least = min(chunks, 2 * min(n_partitions, 3))
    assert least <= chosen(seconds) <= chosen(seconds + more) <= chunks
    assert chosen(0.0) == least and chosen(1e6) == chunks


def test_a_profile_is_tried_out_unless_it_is_not_wanted() -> None:
    """On a CPU a profile carries its trial; with `as_pipeline=False` it does not."""
    tried = profile(chain())
    assert tried.provenance["trial"]["chunks"] == 4
    assert tried.step.overhead_time is not None and tried.step.inside_overhead_time is not None
    assert "trial" not in profile(chain(), as_pipeline=False).provenance


def test_rows_that_do_not_divide_are_tried_at_the_size_that_was_measured() -> None:
    """Micro-batches of a trial have the measured rows; the sample's are repeated for that."""
    seen: list[int] = []

    class Layer(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append(len(x))
            return super().forward(x)

    model = nn.Sequential(Layer(8, 8), nn.Linear(8, 8))
    assert profile(model, rows=7).rows == 2
    assert set(seen) == {2}


def test_what_fails_in_a_pipeline_is_profiled_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """A chain that works alone but in no pipeline leaves a flag, not an error."""

    def refuse(*_: Any) -> Trial:
        raise gb.errors.ModelError("a pipeline cannot run this.\nFix: write it otherwise.")

    monkeypatch.setattr(correct_module, "run_trial", refuse)
    result = profile(chain())
    assert "not tried as a pipeline: a pipeline cannot run this." in result.provenance["flags"]
    assert result.step.cell_overhead_time is None


def test_a_frozen_model_is_tried_without_a_loss_inside() -> None:
    """A chain without anything to train has forwards to be tried, and no step."""
    result = profile(chain().requires_grad_(False))
    assert result.step.overhead_time is not None and result.step.inside_overhead_time is None
    assert not any("not tried" in flag for flag in result.provenance["flags"])


def test_a_model_too_large_for_a_trial_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many micro-batches are tried as half of the free memory holds, and none if none fits."""
    big = Profile.from_costs([1.0, 1.0], saved_bytes=[100, 50], parameter_bytes=[30, 20])
    for free, chunks in ((10_000, 6), (1_000, 3), (300, 0)):
        monkeypatch.setattr(correct_module, "available_memory", lambda free=free: free)
        assert correct_module.chunks_that_fit(big, 6) == chunks
    monkeypatch.setattr(correct_module, "available_memory", lambda: 0)
    result = profile(chain())
    assert any("not enough memory" in flag for flag in result.provenance["flags"])
