"""The profiler's ways: sizes, one layer at a time, any layer, and an end in the middle."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections import UserDict
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from profiler.test_profiler import profile, same, state_of
from random_chains import NEED_ROW, NEED_ROWS, build, chains
from skip_layers import give, hourglass, keep
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import gpipebal as gb
from gpipebal.errors import GpipebalError, ModelError, ProfileError
from gpipebal.pipeline.observers.ledger import Ledger
from gpipebal.profile import LayerProfile
from gpipebal.profiler import conduct, measure, study
from gpipebal.profiler.alone import join_times
from gpipebal.profiler.step.optimizer import Maker
from gpipebal.profiler.step.step import measure_optimizer
from gpipebal.profiler.times.rounds import Times
from gpipebal.profiler.times.settle import settle_rounds, whole_again

pytestmark = pytest.mark.timeout(120)

#: What a layer's profile says of its times.
TIMES = {
    "forward_time",
    "backward_time",
    "recompute_time",
    "no_grad_forward_time",
    "forward_spread",
    "backward_spread",
    "forward_host_time",
    "backward_host_time",
}


def without_times(layer: LayerProfile | None) -> Any:
    """Return what of a layer's profile is the same in every run."""
    if layer is None:
        return None
    return {name: value for name, value in vars(layer).items() if name not in TIMES}


def memory_of(result: gb.Profile) -> Any:
    """Return all of a profile that is the same in every run."""
    step = result.step
    return (
        [without_times(layer) for layer in result.layers],
        [without_times(step.loss), without_times(step.whole_loss), step.gathered],
        (result.storages, result.inputs, result.skips, result.rows, result.chunks),
        [memory_of(other) for other in result.other_sizes],
    )


@settings(max_examples=20, deadline=None)
@given(
    names=chains("tensor", torch.float64),
    chunks=st.integers(1, 3),
    way=st.sampled_from([{}, {"one_at_a_time": True}, {"share_identical": True}]),
    rows=st.sampled_from([None, (), (2, 6)]),
    training=st.booleans(),
    frozen=st.sets(st.integers(0, 6), max_size=2),
)
def test_any_chain_is_measured_and_left_alone(
    names: list[str],
    chunks: int,
    way: dict[str, Any],
    rows: Any,
    training: bool,
    frozen: set[int],
) -> None:
    """Skips, trees, in-place, shared, frozen and random layers: the model is bit-identical."""
    model = build(names).train(training)
    for k in frozen & set(range(len(model))):
        model[k].requires_grad_(False)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    sample = torch.randn(6, 3, dtype=torch.float64)
    model.double()
    before = state_of(model)
    # Layers that need rows may refuse a size.
    may_fail = not (NEED_ROW | NEED_ROWS).isdisjoint(names)
    with contextlib.suppress(GpipebalError) if may_fail else contextlib.nullcontext():
        result = profile(model, sample, chunks=chunks, rows=rows, **way)
        assert result.n_layers == len(model)
        assert gb.Profile.from_dict(result.to_dict()) == result
    assert same(state_of(model), before)


@settings(max_examples=15, deadline=None)
@given(names=chains("tensor", torch.float64), chunks=st.integers(1, 2))
def test_one_at_a_time_finds_the_same_memory(names: list[str], chunks: int) -> None:
    """Layer by layer, and of identical ones only one, the bytes and storages are the chain's."""
    assume(NEED_ROWS.isdisjoint(names) and NEED_ROW.isdisjoint(names))
    model, sample = build(names).double(), torch.randn(6, 3, dtype=torch.float64)
    options: dict[str, Any] = {"chunks": chunks, "rows": (2,)}
    whole = profile(model, sample, **options)
    for way in ({"one_at_a_time": True}, {"share_identical": True}):
        assert memory_of(profile(model, sample, **options, **way)) == memory_of(whole)


@settings(max_examples=20, deadline=None)
@given(
    names=chains("tensor", torch.float64),
    rows=st.sampled_from([(1, 2), (2, 3), (2, 1), (3, 2), (4, 2)]),
    way=st.sampled_from([{}, {"one_at_a_time": True}]),
)
def test_memory_at_a_size_does_not_depend_on_which_was_measured_first(
    names: list[str], rows: tuple[int, int], way: dict[str, Any]
) -> None:
    """Other sizes take over what made no difference at the micro-batch's own size; bytes stay."""
    assume(NEED_ROWS.isdisjoint(names) and NEED_ROW.isdisjoint(names))
    model, sample = build(names).double(), torch.randn(12, 3, dtype=torch.float64)
    own, other = rows
    found = profile(model, sample, chunks=12 // own, rows=(other,), **way).other_sizes[0]
    alone = profile(model, sample, chunks=12 // other, rows=(own,), **way)
    assert list(map(without_times, found.layers)) == list(map(without_times, alone.layers))
    assert (found.storages, found.skips) == (alone.storages, alone.skips)


@pytest.mark.parametrize("way", [{}, {"one_at_a_time": True}])
def test_places_without_a_difference_are_not_looked_at_again(way: dict[str, Any]) -> None:
    """At other sizes a layer runs only in those places in which it behaved otherwise."""
    runs: list[int] = []

    class Counted(nn.ReLU):
        def forward(self, x: Tensor) -> Tensor:
            if torch.utils._python_dispatch._get_current_dispatch_mode_stack():
                runs.append(len(x))
            return super().forward(x)

    model = nn.Sequential(nn.Linear(4, 4), Counted())
    profile(model, torch.randn(8, 4), chunks=2, rows=(2, 8), **way)
    # Operations, a forward without a graph, and one with: held gradients, and others of any kind.
    assert runs.count(2) == runs.count(8) == 4
    # These of three kinds; and at first a forward to see what it writes to.
    assert runs.count(4) == 7
    runs.clear()
    # What a single row does may be another matter.
    profile(model, torch.randn(8, 4), chunks=8, rows=(2,), **way)
    assert (runs.count(1), runs.count(2)) == (7, 6)


def test_identical_layers_are_measured_once() -> None:
    """Of layers alike with inputs alike only the first is run, and has the times of all."""
    runs = []

    class Block(nn.Module):
        def __init__(self, slope: float = 1.0) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)
            self.slope = slope

        def forward(self, x: Tensor) -> Tensor:
            runs.append(self.inner.weight.data_ptr())
            return self.inner(x) * self.slope

    model = nn.Sequential(*(Block() for _ in range(4)))
    result = profile(model, torch.randn(6, 4), rows=(), share_identical=True)
    # Two were run: the first, whose input needs no gradient, and the second for all others.
    n_runs = len(runs)
    runs.clear()
    profile(model[:2], torch.randn(6, 4), rows=(), share_identical=True)
    assert len(runs) == n_runs
    # An option that differs makes another layer of it.
    runs.clear()
    profile(nn.Sequential(*model[:2], Block(2.0)), torch.randn(6, 4), rows=(), one_at_a_time=True)
    alone = len(runs)
    runs.clear()
    profile(nn.Sequential(*model[:2], Block(2.0)), torch.randn(6, 4), rows=(), share_identical=True)
    # Each once more, as a recompute: where layers differ, what they read of their options counts.
    assert len(runs) == alone + 3
    assert result.provenance["share_identical"]
    times = {(layer.forward_time, layer.backward_time) for layer in result.layers[1:]}
    assert len(times) == 1
    assert len({layer.saved for layer in result.layers}) == 4


def test_what_identical_layers_hand_on_is_not_what_waits_beside_it() -> None:
    """A layer that is not run again hands on another value than the one that is like it."""
    linear = [nn.Linear(4, 4) for _ in range(3)]
    # The third is like the second, whose output waits until it is multiplied by its own.
    model = nn.Sequential(*linear[:2], keep("early"), linear[2], give("early", torch.mul))
    sample, options = torch.randn(6, 4), {"chunks": 2, "rows": (2,)}
    whole = profile(model, sample, **options)
    assert len(whole.layers[-1].saved) == 2
    for way in ({"one_at_a_time": True}, {"share_identical": True}):
        assert memory_of(profile(model, sample, **options, **way)) == memory_of(whole)
    estimated = gb.profile_model(model, sample, method="estimate", **options)
    assert [layer.saved for layer in estimated.layers] == [layer.saved for layer in whole.layers]


@pytest.mark.parametrize(
    ("rows", "chunks", "expected"),
    [
        (None, 4, [2, 8]),
        (None, 1, [4, 8]),
        (None, 16, [2, 3]),
        ((), 4, []),
        (3, 4, [3]),
        (torch.tensor(3), 4, [3]),
        ((16, 1, 4), 4, [1, 16]),
    ],
)
def test_other_sizes(rows: Any, chunks: int, expected: list[int]) -> None:
    """The micro-batch's own size, and by default two others, with memory and times of their own."""
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh())
    result = profile(
        model,
        torch.randn(16, 4),
        rows=rows,
        chunks=chunks,
        loss_fn=nn.functional.mse_loss,
        target=torch.randn(16, 8),
    )
    assert result.rows == -(-16 // chunks)
    assert [other.rows for other in result.other_sizes] == expected
    for other in (result, *result.other_sizes):
        assert other.layers[1].output_bytes == 4 * 8 * other.rows
        assert other.bytes_of(other.layers[0].saved) == 4 * 4 * other.rows
        assert other.layers[0].forward_time > 0
        assert other.layers[0].flops == 2 * 4 * 8 * other.rows
        assert other.step.loss is not None and other.step.loss.forward_time > 0
        assert other.step.loss.buffer_bytes == 4 * 8 * other.rows
        assert other.provenance["rows"] == other.rows
        # The same storages have the same numbers at every size.
        assert [layer.saved for layer in other.layers] == [layer.saved for layer in result.layers]
        whole = other.step.whole_loss
        assert (whole is not None) == (other.rows <= result.rows)
        if whole is not None:
            assert whole.buffer_bytes == 4 * 8 * other.mini_batch_rows


@pytest.mark.parametrize("rows", [0, 17, 2.0, True, (4, -1)])
def test_sizes_that_the_sample_does_not_have(rows: Any) -> None:
    """A size that is not a number of rows of the sample is refused, with the fix."""
    with pytest.raises(ProfileError, match="rows cannot be measured") as caught:
        profile(nn.Sequential(nn.Tanh()), torch.randn(16, 4), rows=rows)
    assert "Fix: " in str(caught.value)


@pytest.mark.parametrize("method", ["measure", "estimate"])
def test_a_sample_without_rows_is_refused(method: Any) -> None:
    """There is nothing to measure, and no plan to make of it."""
    with pytest.raises(ProfileError, match=r"sample has no rows.*\n.*Fix: give a mini-batch"):
        gb.profile_model(nn.Sequential(nn.Tanh()), torch.randn(0, 4), method=method)


@pytest.mark.parametrize("method", ["measure", "estimate"])
def test_tensors_in_objects_that_torch_cannot_take_apart_are_refused(method: Any) -> None:
    """What a tokenizer returns is a mapping and no dict: the error says so, as the pipeline's."""
    tokens = UserDict(tokens=torch.ones(4, 4))
    with pytest.raises(
        ModelError, match=r"the sample has tensors inside .*\['tokens'\] of a UserD"
    ):
        gb.profile_model(nn.Sequential(nn.Tanh()), tokens, method=method)
    loss: dict[str, Any] = {"loss_fn": lambda out, target: (out - target["tokens"]).sum()}
    with pytest.raises(ModelError, match=r"the target has .*\n.*Fix: .* such as dict\(value\)"):
        x = torch.ones(4, 4)
        gb.profile_model(nn.Sequential(nn.Tanh()), x, target=tokens, **loss, method=method)


def test_what_a_loss_gets_whole_may_be_any_object() -> None:
    """A part of the target that is not divided is handed on as it is, as in a pipeline."""
    model, x = nn.Sequential(nn.Linear(4, 4)), torch.ones(4, 4)
    given: dict[str, Any] = {
        "target": (x, UserDict(weight=torch.ones(4))),
        "target_dims": (0, None),
    }
    given["loss_fn"] = lambda out, target: ((out - target[0]) * target[1]["weight"]).sum()
    gb.GPipe(model, [1], chunks=2).step(x, **given)
    profile = gb.profile_model(model, x, chunks=2, **given, rows=(), timeout=0, as_pipeline=False)
    assert profile.n_layers == 1


def test_batch_normalisation_on_one_row() -> None:
    """Where torch refuses, the error names the layer and the fix; another size is left out."""
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    with pytest.raises(ProfileError, match=r"layer '1' .* \(1, 4\) .*more than 1 value") as caught:
        profile(model, torch.randn(4, 4), chunks=4)
    assert "Fix: give fewer chunks or a larger sample" in str(caught.value)
    for way in ({}, {"one_at_a_time": True}):
        result = profile(model, torch.randn(8, 4), chunks=4, **way)
        assert [other.rows for other in result.other_sizes] == [4]
        assert any("not measured at 1 row: layer '1'" in x for x in result.provenance["flags"])
        with pytest.raises(ProfileError, match="layer '1'"):
            profile(model, torch.randn(8, 4), chunks=4, rows=(1,), **way)
    # With a picture of several values per channel one row is not an obstacle.
    assert profile(nn.Sequential(nn.BatchNorm2d(2)), torch.randn(2, 2, 4, 4), chunks=2).rows == 1


def test_no_backward_before_the_first_trainable_layer() -> None:
    """Where no gradient is wanted a backward takes no time at all."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh())
    model[0].requires_grad_(False)
    layers = profile(model, torch.randn(6, 4)).layers
    assert [layer.backward_time > 0 for layer in layers] == [False, False, True, True]
    assert [layer.backward_peak_bytes > 0 for layer in layers] == [False, False, True, True]


@pytest.mark.parametrize("way", [{}, {"one_at_a_time": True}])
@pytest.mark.parametrize("last", [1, 7, 33])
@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, ValueError])
def test_an_end_in_the_middle_leaves_the_model_alone(
    error: type[BaseException], last: int, way: dict[str, Any]
) -> None:
    """Whenever a layer is interrupted or raises, model, random states and threads are as before."""
    calls = []

    class Late(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            calls.append(1)
            random.random()
            np.random.rand()
            if len(calls) >= last:
                raise error("in the middle")
            return x

    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), Late())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    sample = torch.randn(8, 4)
    before = [*state_of(model), random.getstate(), np.random.get_state()[1].tolist()]
    threads = set(threading.enumerate())
    expected = ProfileError if error is ValueError else error
    with pytest.raises(expected, match="in the middle"):
        gb.profile_model(model, sample, timeout=20, progress=False, **way)
    after = [*state_of(model), random.getstate(), np.random.get_state()[1].tolist()]
    assert same(after, before)
    assert set(threading.enumerate()) <= threads


def test_a_failing_layer_is_named() -> None:
    """The error has the layer's name, its place, what it was given, and the original error."""

    class Refuses(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return x + y

    model = nn.Sequential(nn.Linear(4, 4), Refuses())
    for way in ({}, {"one_at_a_time": True}):
        with pytest.raises(ProfileError) as caught:
            profile(model, torch.randn(6, 4), chunks=2, **way)
        text = str(caught.value)
        assert "layer '1' (layer 1) failed on a micro-batch of shape (3, 4) torch.float32" in text
        assert "TypeError" in text and "Fix: " in text
        assert isinstance(caught.value.__cause__, TypeError)


@pytest.mark.parametrize("way", [{}, {"one_at_a_time": True}])
def test_skips_are_measured_in_the_chain(way: dict[str, Any]) -> None:
    """Nested skips of one name, some inside containers, are told apart by their namespaces."""
    result = profile(hourglass(), torch.randn(4, 3, dtype=torch.float64), chunks=2, **way)
    found = [(skip.name, skip.source, skip.destination) for skip in result.skips]
    assert found == [("image@0", 0, 4), ("image@1", 1, 3)]
    assert all(layer.backward_time > 0 for layer in result.layers)
    assert [result.bytes_of(skip.storages) for skip in result.skips] == [2 * 3 * 8] * 2


def test_dtype_and_provenance() -> None:
    """A profile says with what, where and how it was measured, and what is doubtful."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh()).double()
    sample = torch.randn(6, 4, dtype=torch.float64)
    result = profile(model, sample, chunks=2, threads=1, as_pipeline=False)
    expected = {"method": "measure", "dtype": "float64", "autocast": None, "rows": 3, "threads": 1}
    assert expected.items() <= result.provenance.items()
    names = {"device", "torch", "cuda", "date", "gpipebal", "rounds", "correction", "partitions"}
    assert names <= set(result.provenance)
    assert any("sparse" in flag for flag in result.provenance["flags"])
    correction = result.provenance["correction"]["forward"]
    assert correction["sum_of_layers"] > 0 and correction["whole"] > 0
    total = sum(layer.forward_time for layer in result.layers)
    assert total == pytest.approx(correction["whole"])


def test_the_timeout_bounds_the_repeats() -> None:
    """Without time each layer is measured at least once; with time more often."""
    model, sample = nn.Sequential(nn.Linear(4, 4)), torch.randn(4, 4)
    once = gb.profile_model(model, sample, timeout=0, progress=False, partitions=1)
    often = gb.profile_model(model, sample, timeout=30, progress=False, partitions=1)
    assert once.provenance["rounds"] == measure.LEAST_ROUNDS
    assert often.provenance["rounds"] == measure.MOST_ROUNDS


@pytest.mark.parametrize("timeout", [None, 5.0])
@pytest.mark.parametrize("tries", [False, True])
@pytest.mark.parametrize(
    ("step", "to_measure", "to_measure_and_try"),
    [
        (1.0, 10.0, (6.0, 10.0)),
        (0.1, 2.0, (2.0, 5.0)),
        (1e-3, 2.0, (2.0, 3.0)),
        (5.0, 50.0, (30.0, 20.0)),
        (60.0, 60.0, (60.0, 30.0)),
    ],
)
def test_the_default_is_about_ten_steps(
    timeout: float | None,
    tries: bool,
    step: float,
    to_measure: float,
    to_measure_and_try: tuple[float, float],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All may take ten training steps, within bounds; with a timeout half of it is for the trial.

    At least half of the time for rounds is left for them, whatever comes before.
    """
    monkeypatch.setattr(conduct, "LEAST_SECONDS", 2.0)  # tests do not wait so long
    monkeypatch.setattr(conduct, "LEAST_TRIAL_SECONDS", 3.0)
    monkeypatch.setattr(conduct, "MANY_STEPS", 50)
    cpu = torch.device("cpu")
    counts: dict[str, Any] = {"rows": (), "n_partitions": 2, "side_by_side": 2, "n_threads": 1}
    how: dict[str, Any] = {"alone": False, "share": False, "as_pipeline": tries, "progress": False}
    chosen = conduct.Conduct(cpu, limit=timeout, **counts, **how)
    assert chosen.tries == tries
    rounds, trial = to_measure_and_try if tries else (to_measure, 0.0)
    if timeout is not None:
        rounds, trial = timeout, timeout / 2
    now = time.perf_counter()
    assert chosen.seconds_left(now - 1_000.0, step, 1) == rounds / 2
    assert chosen.seconds_left(now + 1_000.0, step, 1) > rounds
    # One layer at a time, nothing comes before the rounds of all layers.
    alone = replace(chosen, alone=True)
    one = alone.seconds_left(now - 1_000.0, step / 4, 4)
    assert not alone.tries
    assert one == pytest.approx((to_measure if timeout is None else timeout) / 4)
    if tries:
        assert chosen.seconds_to_try(step) == trial


def test_estimates_are_dispatched() -> None:
    """`method='estimate'` needs no values; another method is refused."""
    model = nn.Sequential(nn.Linear(8, 4, device="meta"))
    assert gb.profile_model(model, torch.ones(4, 8), method="estimate").layers[0].flops == 256
    with pytest.raises(ProfileError, match="method='guess'"):
        gb.profile_model(model, torch.ones(4, 8), method="guess")  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("what", ["layer '0'", "sample or target"])
def test_shapes_alone_cannot_be_measured(what: str) -> None:
    """Where a model or a sample has no values, the error names what needs none."""
    of_layer, of_sample = ("meta", "cpu") if what == "layer '0'" else ("cpu", "meta")
    model = nn.Sequential(nn.Linear(8, 4, device=of_layer))
    with pytest.raises(ProfileError, match=rf"{what} has no values.*\n.*method='estimate'"):
        gb.profile_model(model, torch.ones(4, 8, device=of_sample))


# torch asks every value for its gradient while it compiles, and hides what it says of those that
# are no leaves.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_compiled_layers_are_measured() -> None:
    """A layer made by `torch.compile` is measured as it runs."""
    compiled = torch.compile(nn.Linear(4, 4), backend="eager")
    model = nn.Sequential(nn.Linear(4, 4), compiled, nn.Tanh())
    sample = torch.randn(6, 4)
    before = state_of(model)
    result = profile(model, sample)
    assert [layer.flops for layer in result.layers] == [2 * 6 * 16, 2 * 6 * 16, 0]
    assert same(state_of(model), before)


def test_a_recompute_keeps_what_it_costs_beyond_a_forward() -> None:
    """Settled with the whole chain, a recompute is as much longer as its layers were measured."""
    forward, whole = [[2.0, 3.0], [2.0, 3.0]], [4.0, 4.0]
    again = [[2.5, 3.5], [2.5, 3.5]]
    settled = settle_rounds(again, whole_again(again, forward, whole))
    assert settled.times.sum() == pytest.approx(5.0)
    assert whole_again(again, forward, []) == []


@pytest.mark.parametrize("way", [{}, {"one_at_a_time": True}])
def test_a_size_that_the_loss_refuses_is_noted(way: dict[str, Any]) -> None:
    """A loss that needs two rows has none at a size of one, which the profiler chose itself."""

    def needs_two(output: Tensor) -> Tensor:
        if len(output) < 2:
            raise ValueError("two rows are needed")
        return output.square().mean()

    model, sample = nn.Sequential(nn.Linear(4, 4)), torch.randn(4, 4)
    options: dict[str, Any] = {"loss_fn": needs_two, "as_pipeline": False, **way}
    result = profile(model, sample, **options)
    assert result.step.loss is not None and result.step.whole_loss is not None
    small = result.other_sizes[0]
    assert small.rows == 1 and small.step.loss is None and small.step.whole_loss is None
    assert sum("two rows are needed" in flag for flag in result.provenance["flags"]) == 2
    with pytest.raises(ProfileError, match="the loss failed: ValueError: two rows"):
        profile(model, sample, rows=(1,), **options)


@pytest.mark.parametrize("method", ["measure", "estimate"])
@pytest.mark.parametrize("chunks", [1, 2])
def test_a_target_of_other_rows_belongs_to_the_mini_batch_alone(method: Any, chunks: int) -> None:
    """A loss may take it whole; micro-batches have none, and a flag says so."""
    model, sample = nn.Sequential(nn.Linear(8, 8)), torch.randn(10, 8)
    options: dict[str, Any] = {"method": method, "chunks": chunks, "rows": (), "progress": False}
    if method == "measure":
        options |= {"timeout": 0, "as_pipeline": False}
    found = gb.profile_model(
        model,
        sample,
        loss_fn=lambda output, target: (output.sum() - target.sum()) ** 2,
        target=torch.randn(12),
        **options,
    )
    assert found.step.loss is None and found.step.whole_loss is not None
    assert found.step.whole_loss.buffer_bytes == 4 * 12
    flags = " ".join(found.provenance["flags"])
    assert f"the loss is not measured at {10 // chunks} rows: target has other rows" in flags


def test_a_target_that_does_not_fit_is_told_before_anything_is_clocked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nobody waits for the rounds to hear that the target has other rows than the sample."""
    rounds: list[Any] = []
    run_round = Times.run_round

    def counted(self: Times, *arguments: Any, **options: Any) -> None:
        rounds.append(None)
        run_round(self, *arguments, **options)

    monkeypatch.setattr(Times, "run_round", counted)
    model, sample = nn.Sequential(nn.Linear(4, 4)), torch.randn(8, 4)
    options: dict[str, Any] = {"chunks": 2, "loss_fn": cross_entropy, "rows": ()}
    with pytest.raises(ProfileError, match="the loss failed: ValueError"):
        profile(model, sample, target=torch.zeros(5, dtype=torch.long), **options)
    assert not rounds

    def of_all(output: Tensor, target: Tensor) -> Tensor:
        if len(output) < 8:
            raise ValueError("all rows are needed")
        return cross_entropy(output, target)

    # A loss that only the mini-batch has is tried early, and is measured later all the same.
    options["loss_fn"] = of_all
    found = profile(model, sample, target=torch.zeros(8, dtype=torch.long), **options)
    assert rounds and found.step.loss is None and found.step.whole_loss is not None
    used = {k for layer in found.layers for k in (*layer.outputs, *layer.saved)}
    used |= {k for layer in found.layers for k in layer.gradient_storages or ()}
    used |= {*found.inputs, *found.step.gathered}
    used |= {*found.step.whole_loss.outputs, *found.step.whole_loss.saved}
    assert set(range(len(found.storages))) <= used | set(found.without_gradient)


class Projects(nn.Module):
    """Multiplies by a matrix that is not a parameter."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("matrix", torch.ones(4, width))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.matrix


def test_layers_with_other_buffers_are_not_identical() -> None:
    """Of layers that differ in the shape of a buffer each is measured."""
    model = nn.Sequential(nn.Linear(4, 4), Projects(4), Projects(16))
    options: dict[str, Any] = {"rows": (), "as_pipeline": False}
    alone = profile(model, torch.randn(4, 4), share_identical=True, **options)
    assert memory_of(alone) == memory_of(profile(model, torch.randn(4, 4), **options))
    assert alone.layers[2].output_bytes == 4 * 16 * 4


def test_host_times_of_layers_with_other_numbers_of_rounds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Layers that were measured alone in more rounds or fewer have host times too."""

    def as_on_cuda(layers: list[Times]) -> Times:
        for n, times in enumerate(layers):
            times.host_forward = [[n + 1.0]] * (n + 1)
            times.host_backward = [[n + 2.0]] * (n + 1)
        return join_times(layers)

    monkeypatch.setattr(study, "join_times", as_on_cuda)
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    layers = profile(model, torch.randn(4, 4), rows=(), one_at_a_time=True).layers
    assert [layer.forward_host_time for layer in layers] == [1, 2, 3]
    assert [layer.backward_host_time for layer in layers] == [2, 3, 4]


def test_one_layer_at_a_time_gathers_nothing_large() -> None:
    """With a loss over many micro-batches no more lives than one layer and one micro-batch need."""
    rows, chunks, wide = 64, 16, 256
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, wide))
    sample = torch.randn(rows * chunks, 8)
    options: dict[str, Any] = {"chunks": chunks, "rows": (), "as_pipeline": False}
    options["loss_fn"] = lambda y: y.logsumexp(1).mean()
    ledger = Ledger()
    ledger.hold([sample, *model.parameters()], 0)
    before = ledger.start_peak()
    with ledger.watch(0):
        alone = profile(model, sample, one_at_a_time=True, **options)
    micro_batch = 4 * rows * wide
    assert ledger.total_peak - before < 6 * micro_batch
    assert any("is scaled, not measured" in flag for flag in alone.provenance["flags"])
    whole, measured = alone.step.whole_loss, profile(model, sample, **options)
    assert whole is not None and measured.step.whole_loss is not None
    assert alone.bytes_of(alone.step.gathered) == measured.bytes_of(measured.step.gathered)
    assert alone.bytes_of(whole.saved) == measured.bytes_of(measured.step.whole_loss.saved)
    peaks = (whole.backward_peak_bytes, measured.step.whole_loss.backward_peak_bytes)
    assert peaks[0] == pytest.approx(peaks[1], rel=0.01)
    assert alone.step.loss is not None
    assert whole.forward_time == pytest.approx(chunks * alone.step.loss.forward_time)


@pytest.mark.parametrize(
    "given",
    [
        {"device": "nonsense"},
        {"threads": -1},
        {"one_at_a_time": True},
        {"share_identical": True},
    ],
)
def test_an_estimate_refuses_what_has_no_meaning(given: dict[str, Any]) -> None:
    """What tells how to measure is refused by name, and so are rates for a measurement."""
    model, sample = nn.Sequential(nn.Linear(4, 4)), torch.randn(4, 4)
    (name,) = given
    with pytest.raises(ProfileError, match=f"{name} has no meaning with method='estimate'"):
        gb.profile_model(model, sample, method="estimate", **given)
    with pytest.raises(ProfileError, match="rates has no meaning with method='measure'"):
        gb.profile_model(model, sample, rates="A100")


def test_an_estimate_keeps_any_timeout() -> None:
    """An estimate repeats nothing, so that a timeout changes nothing; but it must be a duration."""
    model, sample = nn.Sequential(nn.Linear(4, 4)), torch.randn(4, 4)
    limited = gb.profile_model(model, sample, method="estimate", timeout=0)
    assert limited.layers == gb.profile_model(model, sample, method="estimate").layers
    with pytest.raises(ProfileError, match="timeout is not a duration"):
        gb.profile_model(model, sample, method="estimate", timeout=-5)


@pytest.mark.parametrize("method", ["measure", "estimate"])
@pytest.mark.parametrize(
    ("given", "error", "text"),
    [
        ({"target": torch.ones(4, 4)}, ProfileError, "a target is given without a loss"),
        ({"loss_fn": 3}, ModelError, r"loss_fn is not a function: type\(loss_fn\)=int"),
        ({"loss_fn": nn.MSELoss}, ModelError, "loss_fn is a class: loss_fn=MSELoss"),
    ],
)
def test_a_loss_that_does_not_fit_is_refused_before_any_layer_runs(
    given: dict[str, Any], error: type[Exception], text: str, method: Any
) -> None:
    """A target without a loss would change nothing, and what is not called could be anything."""
    runs: list[int] = []

    class Layer(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            runs.append(1)
            return super().forward(x)

    with pytest.raises(error, match=text) as caught:
        gb.profile_model(nn.Sequential(Layer(4, 4)), torch.ones(4, 4), method=method, **given)
    assert "\nFix: " in str(caught.value) and not runs


def test_layers_that_share_a_measurement_are_not_measured_in_a_chain() -> None:
    """Both cannot be asked for; one alone is right."""
    model, sample = nn.Sequential(nn.Linear(4, 4)), torch.ones(4, 4)
    with pytest.raises(ProfileError, match="one_at_a_time=False with share_identical=True"):
        profile(model, sample, share_identical=True, one_at_a_time=False)
    assert profile(model, sample, share_identical=True, one_at_a_time=True, rows=()).n_layers == 1


class _Rows(torch.autograd.Function):
    """Counts rows that go forward and backward."""

    counts: ClassVar[list[int]] = [0, 0]

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        _Rows.counts[0] += len(x)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        _Rows.counts[1] += len(gradient)
        return gradient


class _CountsRows(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return _Rows.apply(super().forward(x))


@pytest.mark.parametrize(
    ("options", "forwards", "backwards"),
    [
        # To find what is written, to look (10 and 8), to warm up, and one round (5 and 3 each).
        ({"partitions": 1, "as_pipeline": False, "rows": ()}, 21, 14),
        # At other sizes, here a half and a quarter, warm rounds leave the chain in one piece out,
        # and six of eight backwards are like another one.
        ({"partitions": 1, "as_pipeline": False}, 21 + 12 * 0.75, 14 + 7 * 0.75),
        ({"one_at_a_time": True, "rows": ()}, 17, 12),
        # Three ways of running warm up and have a turn: with 1, 2 and 1 forwards.
        ({"partitions": 1, "rows": ()}, 21 + 2 * 4, 14 + 2 * 3),
    ],
)
def test_a_profile_costs_a_known_number_of_steps(
    options: dict[str, Any], forwards: float, backwards: float
) -> None:
    """Without time for repeats, so many forwards and backwards of a mini-batch are run."""
    _Rows.counts[:] = [0, 0]
    profile(nn.Sequential(_CountsRows(4, 4)), torch.randn(8, 4), threads=1, **options)
    assert [count / 8 for count in _Rows.counts] == [forwards, backwards]


def test_an_estimate_costs_a_known_number_of_steps() -> None:
    """So many forwards and backwards of a micro-batch without values."""
    _Rows.counts[:] = [0, 0]
    model, sample = nn.Sequential(_CountsRows(4, 4)), torch.randn(8, 4)
    gb.profile_model(model, sample, rows=(), method="estimate")
    assert [count / 8 for count in _Rows.counts] == [13, 10]


def test_a_failing_backward_says_what_it_was_given() -> None:
    """The error names the layer and the shape of its input; of a chain, who writes to its input."""

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
            raise ValueError("no way back")

    class Layer(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return Fails.apply(x)

    where = r"the backward of layer '1', on a micro-batch of shape \(6, 4\) torch.float32, failed: "
    with pytest.raises(ProfileError, match=where + "ValueError: no way back"):
        profile(nn.Sequential(nn.Linear(4, 4), Layer()), torch.randn(6, 4), rows=())
    in_place = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.ReLU(inplace=True))
    with pytest.raises(ProfileError, match="let layer '2', which writes to its input"):
        profile(in_place, torch.randn(6, 4), rows=())


def test_every_step_of_the_optimizer_finds_new_gradients() -> None:
    """What is clocked is a step on gradients that a backward has just made, not on freed ones."""
    seen: list[float] = []

    class Noting(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            seen.append(sum(float(p.grad.sum()) for p in self.param_groups[0]["params"]))
            return super().step(closure)

    parameters = [torch.nn.Parameter(torch.ones(4)), torch.nn.Parameter(torch.ones(2))]
    maker = Maker(lambda found: Noting(found, lr=0.1), parameters)
    seconds = measure_optimizer(maker, torch.device("cpu"))
    assert seconds > 0 and len(seen) > 1
    assert seen == [pytest.approx(6e-6)] * len(seen)
    assert all(p.grad is None and bool((p == 1).all()) for p in parameters)


@pytest.mark.parametrize("method", ["measure", "estimate"])
def test_a_sample_of_different_rows_says_what_a_profile_needs(method: Any) -> None:
    """The fix names the argument that tells where rows are."""
    sample = (torch.ones(4, 3), torch.ones(5, 3))
    with pytest.raises(gb.errors.ModelError, match=r"sample tensors have .*\nFix: .*in_dims"):
        gb.profile_model(nn.Sequential(nn.Linear(3, 3)), sample, chunks=2, method=method)
