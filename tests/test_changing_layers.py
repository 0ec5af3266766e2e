"""Layers that do not do the same in every call: noticed before a gradient can be wrong."""

from __future__ import annotations

import copy
import os
import threading
from typing import Any

import pytest
import torch
from chains import run_plain
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

import gpipebal as gb
from gpipebal.pipeline import GPipe
from gpipebal.pipeline.worker import WorkerPool
from gpipebal.schedule import CHECKPOINT_MODES, CheckpointMode

pytestmark = pytest.mark.timeout(60)
MODES = pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)


def gradients_match(pipe: GPipe, plain: nn.Module, inputs: Tensor) -> None:
    """Compare the gradients of one step with those of the plain model."""
    pipe.zero_grad()
    plain.zero_grad()
    pipe(inputs).square().sum().backward()
    run_plain(plain, inputs, pipe.chunks).square().sum().backward()
    for mine, theirs in zip(pipe.parameters(), plain.parameters(), strict=True):
        assert (mine.grad is None) == (theirs.grad is None)
        if mine.grad is not None:
            torch.testing.assert_close(mine.grad, theirs.grad)


@pytest.mark.parametrize("checkpoint", ["except_last", "always"])
def test_dropout_that_is_switched_on_later(checkpoint: CheckpointMode) -> None:
    """A layer that starts to draw draws the same in the recompute, from its first time on."""
    dropout = nn.Dropout(0.0)
    model = nn.Sequential(nn.Linear(8, 8), dropout, nn.Linear(8, 8))
    pipe = GPipe(model, [1, 2], chunks=4, checkpoint=checkpoint)
    inputs = torch.randn(8, 8)
    pipe(inputs).sum().backward()
    dropout.p = 0.5
    pipe.zero_grad()
    torch.manual_seed(3)
    pipe(inputs).square().sum().backward()
    checkpointed = model[0].weight.grad
    never = GPipe(copy.deepcopy(model), [1, 2], chunks=4, checkpoint="never")
    never.zero_grad()
    torch.manual_seed(3)
    never(inputs).square().sum().backward()
    torch.testing.assert_close(checkpointed, never[0].weight.grad)


def test_dropout_that_is_switched_on_without_checkpoints() -> None:
    """Without checkpoints a layer may start to draw; every mini-batch has masks of its own."""
    dropout = nn.Dropout(0.0)
    pipe = GPipe(nn.Sequential(nn.Identity(), dropout), [1, 1], chunks=2, checkpoint="never")
    pipe(torch.ones(4, 9))
    dropout.p = 0.5
    first, second, third = (pipe(torch.ones(4, 9)) for _ in range(3))
    assert not torch.equal(first, second)
    assert not torch.equal(second, third)


class Freezing(nn.Module):
    """Record no graph while it is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.frozen = True

    def forward(self, x: Tensor) -> Tensor:
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.frozen):
            return self.linear(x)


@MODES
def test_layers_that_unfreeze_themselves(checkpoint: CheckpointMode) -> None:
    """A layer that starts, or stops, to want gradients gets what the plain model gives it."""
    layer = Freezing()
    model = nn.Sequential(layer, nn.Linear(4, 2))
    pipe, plain = GPipe(model, [1, 1], chunks=4, checkpoint=checkpoint), copy.deepcopy(model)
    inputs = torch.randn(8, 4)
    gradients_match(pipe, plain, inputs)
    layer.frozen = plain[0].frozen = False
    gradients_match(pipe, plain, inputs)
    layer.frozen = plain[0].frozen = True
    gradients_match(pipe, plain, inputs)


@MODES
def test_buffers_that_a_forward_writes(checkpoint: CheckpointMode) -> None:
    """A recompute starts from the buffers of its forward and leaves the newer ones alone."""
    model = nn.Sequential(
        spectral_norm(nn.Linear(4, 4)),
        nn.Unflatten(1, (4, 1)),
        nn.InstanceNorm1d(4, track_running_stats=True),
        nn.Flatten(),
        nn.BatchNorm1d(4),
    ).double()
    model[2] = nn.Identity()  # InstanceNorm needs more than one value; see the next test
    pipe, plain = GPipe(model, [2, 3], chunks=3, checkpoint=checkpoint), copy.deepcopy(model)
    for _ in range(2):
        gradients_match(pipe, plain, torch.randn(6, 4, dtype=torch.double))
        for (name, mine), theirs in zip(pipe.named_buffers(), plain.buffers(), strict=True):
            assert torch.allclose(mine, theirs, rtol=1e-10), name


@MODES
def test_running_statistics_of_instance_norm(checkpoint: CheckpointMode) -> None:
    """Running statistics of every kind of layer count each micro-batch once."""
    model = nn.Sequential(nn.Conv1d(2, 3, 1), nn.InstanceNorm1d(3, track_running_stats=True))
    pipe, plain = GPipe(model, [1, 1], chunks=2, checkpoint=checkpoint), copy.deepcopy(model)
    gradients_match(pipe, plain, torch.randn(4, 2, 5))
    torch.testing.assert_close(model[1].running_mean, plain[1].running_mean)


def test_frozen_partitions_are_not_recomputed() -> None:
    """A partition whose outputs need no gradient runs once per micro-batch."""
    calls: list[int] = []
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)).requires_grad_(False)
    model[1].requires_grad_(True)
    model[0].register_forward_hook(lambda *_: calls.append(1))
    pipe = GPipe(model, [1, 1], chunks=4, checkpoint="always")
    pipe(torch.ones(4, 3)).sum().backward()
    assert len(calls) == 4


def test_a_pipe_inside_itself_is_refused() -> None:
    """A layer that calls its own pipeline, and torch's checkpoint around one, raise: no hang."""
    pipe = GPipe(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), [1, 1], chunks=2)
    pipe[1].register_forward_hook(lambda module, args, output: pipe(args[0]))
    with pytest.raises(RuntimeError, match="called by one of its own layers"):
        pipe(torch.ones(2, 2))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_backward_in_a_forked_child_is_refused() -> None:
    """A graph of the parent's workers raises in a child, which has none of them."""
    pipe = GPipe(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), [1, 1], chunks=2)
    output = pipe(torch.ones(2, 2))
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            output.sum().backward()
        except RuntimeError as error:
            os.write(writer, str(error).encode())
        finally:
            os._exit(0)
    os.close(writer)
    assert b"forked child" in os.read(reader, 1000)
    os.waitpid(child, 0)


def test_workers_that_cannot_start_are_an_error() -> None:
    """A worker that fails while starting raises in the caller, and leaves no thread behind."""
    before = threading.active_count()
    pipe = GPipe(nn.Sequential(nn.Linear(2, 2)), [1])
    object.__setattr__(pipe, "threads_per_partition", 2**40)
    with pytest.raises(ValueError, match="Overflow"):
        pipe(torch.ones(2, 2))
    assert threading.active_count() == before
    with pytest.raises(ValueError, match="threads_per_partition is too large"):
        GPipe(nn.Sequential(nn.Linear(2, 2)), [1], threads_per_partition=10_000)


def test_a_pool_that_gets_too_few_threads_leaves_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """When a thread cannot be started the others end, and the process keeps its setting."""
    start, started = threading.Thread.start, []

    def start_one(thread: threading.Thread) -> None:
        if started:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    pipe = GPipe(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), [1, 1])
    threads = torch.get_num_threads()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start_one)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            pipe(torch.ones(2, 2))
    started[0].join(30)
    assert not started[0].is_alive()
    assert torch.get_num_threads() == threads
    pipe(torch.ones(2, 2)).sum().backward()


@pytest.mark.parametrize("after", [1, 2, 3, 5, 8, 13, 21])
def test_interrupts_at_any_moment_leave_a_working_pipe(
    after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An interrupt while tasks are being handed out ends the mini-batch, and the next one runs."""
    pipe = GPipe(nn.Sequential(*(nn.Linear(2, 2) for _ in range(3))), [1, 1, 1], chunks=2)
    expected = pipe(torch.ones(4, 2))
    submit = WorkerPool.submit

    def interrupted(pool: WorkerPool, tasks: Any) -> None:
        # Hand out only some of the tasks, then stop as Ctrl-C would.
        if after < 3:
            for queue, task in list(zip(pool._queues, tasks, strict=True))[:after]:
                queue.put(task)
        else:
            submit(pool, tasks)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(WorkerPool, "submit", interrupted)
        with pytest.raises(KeyboardInterrupt):
            pipe(torch.ones(4, 2))
    assert torch.equal(pipe(torch.ones(4, 2)), expected)
    with monkeypatch.context() as patch:
        patch.setattr(WorkerPool, "submit", interrupted)
        with pytest.raises(KeyboardInterrupt):
            expected.sum().backward()
    pipe(torch.ones(4, 2)).sum().backward()


def test_embeddings_that_renormalise_are_left_alone_by_the_profiler() -> None:
    """A layer whose forward writes its own parameters is measured on a copy of them."""
    model = nn.Sequential(nn.Embedding(5, 4, max_norm=0.1), nn.Linear(4, 2))
    before = model[0].weight.detach().clone()
    gb.profile_model(model, torch.arange(5), timeout=0)
    assert torch.equal(model[0].weight, before)
    assert model[0].weight._version == 0 or torch.equal(model[0].weight, before)


def test_profiles_of_rows_that_do_not_divide() -> None:
    """The loss is measured over the rows that the target has, whatever the micro-batches."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    profile = gb.profile_model(
        model,
        torch.randn(7, 3),
        chunks=4,
        loss_fn=nn.functional.cross_entropy,
        target=torch.zeros(7, dtype=torch.long),
        timeout=0,
    )
    assert profile.step.loss_time is not None


def test_profiling_follows_autocast_and_leaves_inference_mode() -> None:
    """Times and memory are those of the caller's autocast; inference mode is no obstacle."""
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 8))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        half = gb.profile_model(model, torch.randn(8, 64), timeout=0)
    with torch.inference_mode():
        full = gb.profile_model(model, torch.randn(8, 64), timeout=0)
    assert 2 * half.layers[1].output_bytes == full.layers[1].output_bytes


def test_lazy_layers_are_refused() -> None:
    """A model that has not seen any input cannot be measured."""
    with pytest.raises(ValueError, match="lazy layers"):
        gb.profile_model(nn.Sequential(nn.LazyLinear(3)), torch.ones(2, 3))


def test_plans_for_changed_models_warn() -> None:
    """A layer that has changed since it was profiled, and other threads, are warned of."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    plan = gb.solve(gb.profile_model(model, torch.ones(2, 3), threads=1, timeout=0), 2)
    with pytest.warns(UserWarning, match="2 threads each, but their layers were profiled with 1"):
        GPipe.from_plan(model, plan, threads_per_partition=2)
    with pytest.warns(UserWarning, match="1 layer changed since the profile"):
        GPipe.from_plan(
            nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3, bias=False)),
            plan,
            threads_per_partition=1,
        )


def test_replaced_layers_are_used() -> None:
    """A layer that is replaced in the pipeline runs; settings that cannot change say so."""
    pipe = GPipe(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), [1, 1], chunks=2)
    inputs = torch.ones(4, 4)
    pipe(inputs)
    setattr(pipe, "1", nn.Linear(4, 3))
    assert pipe(inputs).shape == (4, 3)
    pipe.chunks = 4
    assert pipe(inputs).shape == (4, 3)
    for name, value in (("balance", [2]), ("devices", ["cpu"]), ("threads_per_partition", 2)):
        with pytest.raises(RuntimeError, match=f"{name} of a pipeline cannot be changed"):
            setattr(pipe, name, value)
    with pytest.raises(ValueError, match="chunks=0"):
        pipe.chunks = 0
    with pytest.raises(ValueError, match="expected one of"):
        pipe.checkpoint = "some"  # type: ignore[assignment]
    pipe.more = nn.Linear(3, 3)
    with pytest.raises(RuntimeError, match="layers were added"):
        pipe(inputs)


def test_outputs_that_do_not_go_by_rows_are_refused() -> None:
    """A state of an LSTM, or a mean over the rows, cannot be joined along dim 0."""
    pipe = GPipe(nn.Sequential(nn.Linear(3, 3), nn.LSTM(3, 2, batch_first=True)), [1, 1], chunks=2)
    with pytest.raises(TypeError, match=r"does not go by rows: leaf \[1\]\[0\] has 1"):
        pipe(torch.ones(8, 5, 3))
    flat = GPipe(nn.Sequential(nn.Linear(3, 3), nn.Flatten(0, 1)), [1, 1], chunks=3)
    assert flat(torch.ones(8, 5, 3)).shape == (40, 3)
