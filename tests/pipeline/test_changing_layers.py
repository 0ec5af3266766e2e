"""Layers that do not do the same in every call: noticed before a gradient can be wrong."""

from __future__ import annotations

import copy
import pkgutil
import threading
import time
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
import torch.utils._pytree as pytree
from chains import run_plain
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.nn.utils.parametrizations import spectral_norm

import gpipebal as gb
from gpipebal.errors import ModelError, PipelineError, ProfileError
from gpipebal.pipeline import GPipe
from gpipebal.pipeline.layers.planned import Planned
from gpipebal.pipeline.workers.worker import WorkerPool
from gpipebal.schedule import CHECKPOINT_MODES, SCHEDULES, CheckpointMode

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


class Gated(nn.Module):
    """Skip the layer inside for micro-batches that begin with a negative number."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) if x[0, 0] > 0 else x


@MODES
@pytest.mark.parametrize("skipped", [[0], [1], [0, 1], [1, 2], [2], [0, 2], [0, 1, 2]])
@pytest.mark.parametrize("balance", [[1, 1], [2]])
def test_micro_batches_that_go_different_ways(
    checkpoint: CheckpointMode, skipped: list[int], balance: list[int]
) -> None:
    """Each gets the gradients of its own way, whichever way the first one went."""
    model = nn.Sequential(Gated(), nn.Linear(4, 4))
    pipe, plain = GPipe(model, balance, chunks=3, checkpoint=checkpoint), copy.deepcopy(model)
    inputs = torch.rand(6, 4) + 0.1
    for i in skipped:
        inputs[2 * i : 2 * i + 2] *= -1
    gradients_match(pipe, plain, inputs)
    gradients_match(pipe, plain, inputs.flip(0))


class Dropping(nn.Module):
    """Leave the layer inside out by chance, as stochastic depth does."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x if torch.rand(()) < 0.5 else self.linear(x)


@pytest.mark.parametrize("checkpoint", ["except_last", "always"])
@pytest.mark.parametrize("how", ["call", *SCHEDULES])
def test_stochastic_depth_under_checkpoints(checkpoint: CheckpointMode, how: str) -> None:
    """A first layer that is dropped by chance gets the gradients that it gets without them."""
    model = nn.Sequential(Dropping(), nn.Linear(4, 4), Dropping(), nn.Linear(4, 2))
    inputs, target = torch.randn(8, 4), torch.randn(8, 2)
    found = []
    for mode in ("never", checkpoint):
        pipe = GPipe(model, [1, 3], chunks=4, checkpoint=mode)
        for seed in range(12):
            pipe.zero_grad()
            torch.manual_seed(seed)
            if how == "call":
                mse_loss(pipe(inputs), target).backward()
            else:
                pipe.step(inputs, target=target, loss_fn=mse_loss, schedule=how)
            found.append([None if p.grad is None else p.grad.clone() for p in pipe.parameters()])
        pipe.close()
    for mine, theirs in zip(found[:12], found[12:], strict=True):
        torch.testing.assert_close(mine, theirs)


class Centred(nn.Module):
    """Hand on a running mean, a buffer that the next micro-batch writes to."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(size, dtype=torch.double))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            self.mean[:4].add_(x.detach().mean(0))
        return x, self.mean


class Use(nn.Module):
    """Multiply by the running mean, late enough for the next micro-batch to have changed it."""

    def forward(self, given: tuple[Tensor, Tensor]) -> Tensor:
        time.sleep(0.02)
        return given[0] * given[1][:4].clone()


@MODES
@pytest.mark.parametrize("how", ["call", *SCHEDULES])
@pytest.mark.parametrize("size", [4, 20_000])
def test_buffers_that_are_handed_on_and_written_again(
    checkpoint: CheckpointMode, how: str, size: int
) -> None:
    """Each micro-batch keeps the values that it was handed; large buffers are no exception."""
    model = nn.Sequential(nn.Linear(4, 4), Centred(size), Use(), nn.Linear(4, 1)).double()
    plain, inputs = copy.deepcopy(model), torch.randn(6, 4, dtype=torch.double)
    pipe = GPipe(model, [2, 2], chunks=3, checkpoint=checkpoint)
    if how == "call":
        pipe(inputs).sum().backward()
    else:
        pipe.step(inputs, loss_fn=Tensor.sum, schedule=how, reduction="sum")
    run_plain(plain, inputs, 3).sum().backward()
    for mine, theirs in zip(pipe.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)
    with torch.no_grad():
        torch.testing.assert_close(pipe(inputs), run_plain(plain, inputs, 3))


def test_a_last_layer_that_hands_out_its_workspace() -> None:
    """What is joined at the end are the outputs as they were handed out."""

    class Workspace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("space", torch.zeros(2, 4))

        def forward(self, x: Tensor) -> Tensor:
            return torch.mul(x, 2.0, out=self.space)

    pipe = GPipe(nn.Sequential(nn.Identity(), Workspace()), [1, 1], chunks=3)
    inputs = torch.randn(6, 4)
    with torch.no_grad():
        assert torch.equal(pipe(inputs), 2 * inputs)


class Momentum(nn.Module):
    """A trained layer, and a second one that follows it and is written to in the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.fast, self.slow = nn.Linear(4, 4), nn.Linear(4, 4).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        if not gb.is_recomputing():
            with torch.no_grad():
                for slow, fast in zip(self.slow.parameters(), self.fast.parameters(), strict=True):
                    slow.mul_(0.5).add_(fast, alpha=0.5)
        return self.fast(x) * self.slow(x).detach()


@MODES
@pytest.mark.parametrize("how", ["call", *SCHEDULES])
def test_parameters_that_a_forward_writes(checkpoint: CheckpointMode, how: str) -> None:
    """The gradients are the plain model's, or a recompute says that it cannot give them."""
    model = nn.Sequential(nn.Linear(4, 4), Momentum(), nn.Linear(4, 4)).double()
    plain, inputs = copy.deepcopy(model), torch.randn(6, 4, dtype=torch.double)
    pipe = GPipe(model, [1, 2], chunks=3, checkpoint=checkpoint)
    try:
        if how == "call":
            pipe(inputs).square().sum().backward()
        else:
            pipe.step(inputs, loss_fn=lambda y: y.square().sum(), schedule=how, reduction="sum")
    except ModelError as error:
        assert checkpoint != "never" and "a parameter that is not trained" in str(error)
        return
    run_plain(plain, inputs, 3).square().sum().backward()
    for mine, theirs in zip(pipe.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)


@MODES
def test_frozen_embeddings_that_renormalise(checkpoint: CheckpointMode) -> None:
    """They write to their rows in every forward, and the same again in a recompute."""
    model = nn.Sequential(nn.Embedding(9, 4, max_norm=0.5), nn.Linear(4, 4), nn.Linear(4, 2))
    model[0].weight.requires_grad_(False)
    model[2].weight.requires_grad_(False)
    pipe, plain = GPipe(model, [2, 1], chunks=3, checkpoint=checkpoint), copy.deepcopy(model)
    gradients_match(pipe, plain, torch.tensor([0, 1, 2, 3, 1, 0]))


class Force(nn.Module):
    """Differentiate an energy by the layer's own input."""

    def __init__(self, cut_off: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.cut_off = cut_off

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            if self.cut_off and not x.requires_grad:
                x = x.detach().requires_grad_()
            energy = self.linear(x).tanh().sum()
            return torch.autograd.grad(energy, x, create_graph=True)[0]


@MODES
@pytest.mark.parametrize("balance", [[1, 2], [2, 1]])
def test_layers_that_differentiate_by_their_input(
    checkpoint: CheckpointMode, balance: list[int]
) -> None:
    """Without a graph they fail, and the error says why; with one of their own they are right."""
    for cut_off in (True, False):
        model = nn.Sequential(nn.Linear(4, 4), Force(cut_off), nn.Linear(4, 2))
        pipe, plain = GPipe(model, balance, chunks=3, checkpoint=checkpoint), copy.deepcopy(model)
        inputs = torch.randn(6, 4)
        if cut_off or checkpoint == "never":
            gradients_match(pipe, plain, inputs)
            continue
        with pytest.raises(RuntimeError, match="require grad") as caught:
            pipe(inputs)
        assert "records no graph" in "".join(caught.value.__notes__)


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


def test_workers_that_cannot_start_are_an_error() -> None:
    """A worker that fails while starting raises in the caller, and leaves no thread behind."""
    before = set(threading.enumerate())
    pipe = GPipe(nn.Sequential(nn.Linear(2, 2)), [1])
    object.__setattr__(pipe, "threads_per_partition", 2**40)
    with pytest.raises(ValueError, match="Overflow"):
        pipe(torch.ones(2, 2))
    assert set(threading.enumerate()) <= before
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


@pytest.mark.parametrize("at", ["gpipe.Runtime", "workers.worker.threading.Barrier"])
def test_a_start_inside_a_start_is_refused(at: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal handler or destructor that calls a pipeline there would wait for its own thread."""
    outer, inner = (GPipe(nn.Sequential(nn.Linear(2, 2)), [1]) for _ in range(2))
    module, _, name = f"gpipebal.pipeline.{at}".rpartition(".")
    holder = pkgutil.resolve_name(module)
    make, n_calls = getattr(holder, name), 0

    def make_one(*arguments: Any) -> Any:
        nonlocal n_calls
        n_calls += 1
        if n_calls == 1:  # as a signal does between two statements
            inner(torch.ones(2, 2))
        return make(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(holder, name, make_one)
        with pytest.raises(PipelineError, match=r"just starting one: by a signal handler"):
            outer(torch.ones(2, 2))
    for pipe in (inner, outer):
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
    """Times and memory are those of the caller's autocast; inference mode is not an obstacle."""
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
    with pytest.raises(ProfileError, match="lazy layers"):
        gb.profile_model(
            nn.Sequential(nn.LazyLinear(3)), torch.ones(2, 3), optimizer=torch.optim.SGD
        )


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


def test_training_under_another_autocast_than_the_profile_warns_once() -> None:
    """Times and memory are of other dtypes. Calls without a graph, and estimates, are not meant."""
    model, x = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), torch.ones(2, 3)
    plain = gb.profile_model(model, x, threads=1, timeout=0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = gb.profile_model(model, x, threads=1, timeout=0)
    estimated = gb.profile_model(model, x, method="estimate", timeout=0)

    def pipe_of(profile: gb.Profile) -> GPipe:
        return GPipe.from_plan(model, gb.solve(profile, 2), threads_per_partition=1)

    pipe = pipe_of(plain)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        pipe_of(cast)(x)
        with torch.no_grad():
            pipe(x)
        text = "are trained under autocast to bfloat16, but were profiled without autocast"
        with pytest.warns(UserWarning, match=text):
            pipe.step(x, loss_fn=Tensor.sum)
        pipe.step(x, loss_fn=Tensor.sum)
    pipe_of(plain)(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        GPipe(model, [1, 1])(x)
    pipe = pipe_of(cast)
    with pytest.warns(UserWarning, match="trained without autocast, but were profiled under auto"):
        pipe(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        GPipe.from_plan(model, gb.solve(estimated, 2))(x)


def test_calls_in_two_threads_may_compare_autocast_at_once() -> None:
    """What another call has taken to compare is gone at the next look."""
    looks = iter([("cpu", None), None])

    class Taken(Planned):
        autocast = property(lambda _: next(looks), lambda _, value: None)

    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    plan = gb.solve(gb.Profile.from_costs([1.0, 1.0], names=["0", "1"]), 2)
    pipe = GPipe.from_plan(model, plan)
    pipe._planned = Taken(plan, pipe.devices)
    for _ in range(2):
        pipe(torch.ones(2, 3))
    assert not list(looks)


def test_replaced_layers_are_used() -> None:
    """A layer that is replaced in the pipeline runs; settings that cannot change say so."""
    pipe = GPipe(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), [1, 1], chunks=2)
    inputs = torch.ones(4, 4)
    pipe(inputs)
    setattr(pipe, "1", nn.Linear(4, 3))
    assert pipe(inputs).shape == (4, 3)
    pipe[-1] = head = nn.Linear(4, 2)
    assert pipe(inputs).shape == (4, 2) and pipe[1] is head
    pipe.chunks = 4
    assert pipe(inputs).shape == (4, 2)
    with pytest.raises(IndexError):
        pipe[2] = head
    for no_module in ("head", None):
        with pytest.raises(TypeError, match=r"(?s)pipe\[1\]=.*expected an nn\.Module.*Fix: "):
            pipe[1] = no_module  # type: ignore[assignment]
    for name, value in (("balance", [2]), ("devices", ["cpu"]), ("threads_per_partition", 2)):
        with pytest.raises(RuntimeError, match=f"{name} of a pipeline cannot be changed"):
            setattr(pipe, name, value)
    with pytest.raises(ValueError, match="chunks=0"):
        pipe.chunks = 0
    with pytest.raises(ValueError, match="expected one of"):
        pipe.checkpoint = "some"  # type: ignore[assignment]
    with pytest.raises(RuntimeError, match="no modules besides its layers: more=Linear"):
        pipe.more = nn.Linear(3, 3)


class Times(nn.Module):
    """Multiplies by a parameter; all of its kind are equal."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(factor))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Times)

    def __hash__(self) -> int:
        return 1

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


def test_equal_layers_are_not_the_same() -> None:
    """A class may say what equal means; a pipeline runs the layers that it has."""
    inside = nn.Sequential(Times(2.0))
    pipe = GPipe(nn.Sequential(Times(3.0), inside, Times(4.0)), [1, 2], chunks=2)
    inputs = torch.ones(2, 1)
    pipe(inputs).sum().backward()
    assert pipe[2].factor.grad is not None  # type: ignore[union-attr]
    assert pipe(inputs).unique().tolist() == [24.0]
    pipe[0] = Times(5.0)
    assert pipe(inputs).unique().tolist() == [40.0]
    inside[0] = Times(1.0)
    assert pipe(inputs).unique().tolist() == [20.0]
    assert len(pipe._runtime.partitions[1].modules.parameters()) == 2  # type: ignore[union-attr]


#: Ways to change which modules an `nn.Module` or an `nn.Sequential` has, and what is said of them.
CHANGES: dict[str, Callable[[Any], object]] = {
    "pipe[0]=None": lambda pipe: setattr(pipe, "first", None),
    "pipe[0]=Parameter": lambda pipe: setattr(pipe, "first", nn.Parameter(torch.ones(2))),
    "pipe[0]=tensor": lambda pipe: setattr(pipe, "first", torch.ones(2)),
    "pipe[1]=None": lambda pipe: pipe.add_module("chunks", None),
    "besides its layers: more=ReLU": lambda pipe: setattr(pipe, "more", nn.ReLU()),
    "besides its layers: more=Linear": lambda pipe: pipe.add_module("more", nn.Linear(2, 2)),
    "besides its layers: more=NoneType": lambda pipe: pipe.add_module("more", None),
    "besides its layers: more=Tanh": lambda pipe: pipe.register_module("more", nn.Tanh()),
    "besides its layers: more=Sigmoid": lambda pipe: pipe.set_submodule("more", nn.Sigmoid()),
    "keeps as many layers as": lambda pipe: delattr(pipe, "first"),
    "a pipeline keeps as many layers": lambda pipe: pipe.__delitem__(0),
    "keeps as many": lambda pipe: pipe.__iadd__(nn.Sequential(nn.ReLU())),
    "keeps as": lambda pipe: pipe.__imul__(2),
    "no attribute 'append': a pipeline keeps": lambda pipe: pipe.append(nn.ReLU()),
    "no attribute 'insert': a pipeline keeps": lambda pipe: pipe.insert(0, nn.ReLU()),
    "no attribute 'extend': a pipeline keeps": lambda pipe: pipe.extend([nn.ReLU()]),
    "no attribute 'pop': a pipeline keeps": lambda pipe: pipe.pop(0),
}


@pytest.mark.parametrize("what", CHANGES)
def test_layers_are_replaced_and_never_added_or_taken_away(what: str) -> None:
    """What the balance does not allow is refused at once, and changes nothing."""
    layers = {"first": nn.Linear(2, 2), "chunks": nn.ReLU()}
    model = nn.Sequential()
    model._modules.update(layers)
    pipe = GPipe(model, [1, 1], chunks=2)
    with pytest.raises((PipelineError, ModelError, AttributeError)) as raised:
        CHANGES[what](pipe)
    assert what in str(raised.value) and "\nFix: " in str(raised.value)
    assert dict(pipe.named_children()) == layers and pipe.chunks == 2
    assert pipe(torch.ones(4, 2)).shape == (4, 2)


@pytest.mark.parametrize(
    "change",
    [
        lambda pipe, layer: pipe.add_module("chunks", layer),
        lambda pipe, layer: pipe.register_module("chunks", layer),
        lambda pipe, layer: pipe.__setitem__(-1, layer),
    ],
)
def test_a_layer_is_replaced_whatever_its_name(change: Callable[[GPipe, nn.Module], None]) -> None:
    """As in torch's modules, also where a setting has this name."""
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    model._modules["chunks"] = model._modules.pop("1")
    pipe = GPipe(model, [1, 1], chunks=2)
    layer = nn.Linear(2, 3)
    change(pipe, layer)
    assert pipe[1] is layer and pipe.chunks == 2
    assert pipe(torch.ones(4, 2)).shape == (4, 3)


def test_outputs_that_do_not_go_by_rows_are_refused() -> None:
    """A state of an LSTM, or a mean over the rows, cannot be joined along dim 0."""
    pipe = GPipe(nn.Sequential(nn.Linear(3, 3), nn.LSTM(3, 2, batch_first=True)), [1, 1], chunks=2)
    with pytest.raises(TypeError, match=r"does not go by rows: leaf \[1\]\[0\] has 1"):
        pipe(torch.ones(8, 5, 3))
    # One micro-batch is joined with nothing.
    pipe.chunks = 1
    output, (state, _) = pipe(torch.ones(8, 5, 3))
    expected, (expected_state, _) = nn.Sequential(*pipe)(torch.ones(8, 5, 3))
    assert torch.equal(output, expected) and torch.equal(state, expected_state)
    gradients = torch.autograd.grad(expected_state.sum(), list(pipe.parameters()))
    state.sum().backward()
    for parameter, gradient in zip(pipe.parameters(), gradients, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)
    flat = GPipe(nn.Sequential(nn.Linear(3, 3), nn.Flatten(0, 1)), [1, 1], chunks=3)
    assert flat(torch.ones(8, 5, 3)).shape == (40, 3)


class Opens(nn.Module):
    """Returns two values, of which the second has a gradient only while it is open."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(3, 3), nn.Linear(3, 3)
        self.is_open = False

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        other = self.other(x)
        return self.one(x), other if self.is_open else other.detach()


class Total(nn.Module):
    def forward(self, values: tuple[Tensor, ...]) -> Tensor:
        return torch.stack(values).sum(0)


@MODES
def test_an_output_that_gets_a_gradient_does_so_at_all_sizes(checkpoint: CheckpointMode) -> None:
    """What the first micro-batch shows holds for smaller ones, too, which are of another kind."""
    plain = nn.Sequential(Opens(), Total())
    pipe = GPipe(copy.deepcopy(plain), [1, 1], chunks=4, checkpoint=checkpoint)
    for is_open in (False, True, False):
        plain[0].is_open = pipe[0].is_open = is_open
        gradients_match(pipe, plain, torch.randn(6, 3))


@pytest.mark.parametrize("then", [1, 3])
def test_another_number_of_outputs_in_the_recompute_is_refused(then: int) -> None:
    """Whether there are more or fewer."""

    class Repeats(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            return (self.linear(x),) * (then if gb.is_recomputing() else 2)

    pipe = GPipe(nn.Sequential(Repeats(), Total()), [1, 1], chunks=2, checkpoint="always")
    with pytest.raises(ModelError, match="partition 0 cannot be recomputed"):
        pipe(torch.randn(4, 3)).sum().backward()


class Named(dict[str, Tensor]):
    """A dictionary whose class has told torch how to take it apart, but not its keys."""


class Noted:
    """A pair whose class adds to its shape what is another object each time."""

    def __init__(self, pair: list[Tensor]) -> None:
        self.pair, self.note = pair, torch.zeros(2)


pytree.register_pytree_node(
    Named,
    lambda named: (list(named.values()), list(named)),
    lambda values, names: Named(zip(names, values, strict=True)),
)
pytree.register_pytree_node(
    Noted, lambda noted: (noted.pair, noted.note), lambda pair, _: Noted([*pair])
)


class TwoOutputs(nn.Module):
    """Two linear layers, whose outputs a function puts together."""

    def __init__(self, make: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.one, self.other, self.make = nn.Linear(3, 3), nn.Linear(3, 3), make

    def forward(self, x: Tensor) -> Any:
        return self.make(self.one(x), self.other(x))


class Weighs(nn.Module):
    """Their difference, one of them twice."""

    def forward(self, value: Any) -> Tensor:
        if isinstance(value, Noted):
            value = dict(zip(("one", "other"), value.pair, strict=True))
        return cast("Tensor", value["one"] - 2 * value["other"])


@pytest.mark.parametrize("kind", [dict, Named])
def test_another_order_of_keys_in_the_recompute_is_refused(kind: type[dict[str, Tensor]]) -> None:
    """Gradients would go to the wrong outputs, without a word."""

    def make(one: Tensor, other: Tensor) -> dict[str, Tensor]:
        named = [("one", one), ("other", other)]
        return kind(named[::-1] if gb.is_recomputing() else named)

    model = nn.Sequential(TwoOutputs(make), Weighs())
    pipe = GPipe(model, [1, 1], chunks=2, checkpoint="always")
    with pytest.raises(ModelError, match=r"was .*'one'.*, and is .*'other'.* now") as caught:
        pipe(torch.randn(4, 3)).sum().backward()
    assert "in the same order and under the same keys" in str(caught.value)
    never = GPipe(model, [1, 1], chunks=2, checkpoint="never")
    never(torch.randn(4, 3)).sum().backward()


def test_what_else_differs_between_forward_and_recompute_may_differ() -> None:
    """Only the places of the outputs count: not what a class adds, nor a list for a tuple."""

    def noted(one: Tensor, other: Tensor) -> Noted:
        return Noted([one, other])

    def with_more(one: Tensor, other: Tensor) -> dict[str, Any]:
        rest: Any = () if gb.is_recomputing() else []
        return {"one": one, "other": other, "rest": rest}

    for make in (noted, with_more):
        model = nn.Sequential(TwoOutputs(make), Weighs())
        plain = copy.deepcopy(model)
        pipe = GPipe(model, [1, 1], chunks=2, checkpoint="always")
        gradients_match(pipe, plain, torch.randn(4, 3))
