"""Pipelines: aliases, given-up workers, interrupts, ties, lengths that were wrong once."""

from __future__ import annotations

import copy
import gc
import sys
import threading
import warnings
from collections.abc import Callable
from operator import itemgetter
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gpipebal.errors import ModelError, PipelineError, PipelineTimeoutError
from gpipebal.pipeline import GPipe, with_recompute
from gpipebal.pipeline.minibatch.minibatch import MiniBatch
from gpipebal.pipeline.values.places import find_overlaps, find_shared
from gpipebal.pipeline.workers.activity import Activity, timeout_error
from gpipebal.pipeline.workers.worker import WorkerPool
from gpipebal.schedule import CheckpointMode
from gpipebal.skip import pop, skippable, stash

pytestmark = pytest.mark.timeout(60)
MODES = pytest.mark.parametrize("checkpoint", ["never", "always"])


class Does(nn.Module):
    """A layer that does what a function does."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, value: Any) -> Any:
        return self.function(value)


@skippable(stash=["s"])
class Keep(nn.Module):
    def forward(self, x: Tensor) -> Any:
        yield stash("s", x)
        return x


@skippable(pop=["s"])
class Join(nn.Module):
    def forward(self, x: Tensor) -> Any:
        s = yield pop("s")
        return x + 10 * s


def with_skip() -> nn.Sequential:
    """Return a chain that stashes what it hands on, and writes to it later."""
    return nn.Sequential(nn.Linear(3, 3), Keep(), nn.Identity(), nn.ReLU(inplace=True), Join())


def with_pair() -> nn.Sequential:
    """Return a chain that hands a tensor on twice, and writes to one of the two."""
    return nn.Sequential(
        nn.Linear(3, 3),
        Does(lambda x: (x, x)),
        Does(lambda pair: pair),
        Does(lambda pair: (pair[0].mul_(2), pair[1])),
        Does(sum),  # of the pair
    )


@MODES
@pytest.mark.parametrize("make", [with_skip, with_pair])
@pytest.mark.parametrize("balance", [[5], [2, 3], [3, 2], [2, 1, 2], [2, 1, 1, 1], [2, 2, 1]])
def test_a_write_to_what_another_value_shares_is_right_inside_and_refused_over_a_cut(
    make: Callable[[], nn.Sequential], balance: list[int], checkpoint: CheckpointMode
) -> None:
    """Also where a partition in between only hands the value on; and again the next time."""
    plain = make()
    pipe = GPipe(copy.deepcopy(plain), balance, chunks=2, checkpoint=checkpoint)
    x = torch.randn(4, 3)
    expected = plain(x)
    expected.square().sum().backward()
    for _ in range(2):
        pipe.zero_grad()
        if len(balance) > 1:
            with pytest.raises(ModelError, match="writes to a tensor whose memory is also that"):
                pipe(x)
            continue
        output = pipe(x)
        output.square().sum().backward()
        torch.testing.assert_close(output, expected)
        torch.testing.assert_close(pipe[0].weight.grad, plain[0].weight.grad)


@pytest.mark.parametrize("chunks", [1, 2])
def test_outputs_do_not_share_memory(chunks: int) -> None:
    """A write to one of them is not seen in the other, however many micro-batches there are."""
    layer = nn.Linear(3, 3)
    pipe = GPipe(nn.Sequential(layer, Does(lambda h: (h, h[:, :2]))), [2], chunks=chunks)
    one, other = pipe(torch.ones(2, 3))
    one.mul_(2)
    loss = other.sum()
    loss.backward()
    assert loss.item() == pytest.approx(layer(torch.ones(2, 3))[:, :2].sum().item())
    assert layer.weight.grad is not None
    torch.testing.assert_close(layer.weight.grad[:2], torch.full((2, 3), 2.0))


class Hang(nn.Module):
    """Hang on zeros, until it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.gate = threading.Event(), threading.Event()

    def forward(self, x: Tensor) -> Tensor:
        if not x.any():
            self.inside.set()
            assert self.gate.wait(30)
        return x * 1


def test_a_mini_batch_on_workers_that_were_given_up_ends() -> None:
    """A mini-batch that waits for one that hangs ends with an error, too."""
    hang = Hang()
    pipe = GPipe(nn.Sequential(hang, nn.Identity()), [2], timeout=1.0)
    pipe(torch.ones(2, 2))
    raised: dict[str, BaseException] = {}

    def run(name: str, x: Tensor) -> None:
        try:
            pipe(x)
        except BaseException as error:
            raised[name] = error

    first = threading.Thread(target=run, args=("first", torch.zeros(2, 2)))
    second = threading.Thread(target=run, args=("second", torch.ones(2, 2)), daemon=True)
    first.start()
    assert hang.inside.wait(20)
    second.start()
    first.join(20)
    second.join(20)
    hang.gate.set()
    assert not first.is_alive() and not second.is_alive()
    # Which of them looks first, after as long a wait, is up to the system.
    assert "first" in raised
    assert all(isinstance(error, PipelineError) for error in raised.values())
    assert any(isinstance(error, PipelineTimeoutError) for error in raised.values())
    torch.testing.assert_close(pipe(torch.ones(2, 2)), torch.ones(2, 2))


def test_no_garbage_is_collected_while_python_looks_at_its_threads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Callbacks would let another thread run, which may wait for the same lock for ever."""
    collected = []
    look = sys._current_frames

    def looks() -> dict[int, Any]:
        collected.append(gc.isenabled())
        return look()

    monkeypatch.setattr(sys, "_current_frames", looks)
    error = timeout_error(1.0, [Activity()], [threading.current_thread()])
    assert isinstance(error, PipelineTimeoutError)
    assert collected == [False] and gc.isenabled()


def test_a_pipeline_may_be_collected_while_python_looks_at_its_threads() -> None:
    """Its workers need the lock that the collecting thread has to end: they are not waited for."""
    pipe = GPipe(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), [1, 1])
    pipe(torch.ones(2, 2)).sum().backward()
    runtime = pipe._runtime
    assert runtime is not None
    threads, circle = runtime.pool.threads, [pipe]
    circle.append(circle)  # type: ignore[arg-type]
    gc.disable()
    try:
        del pipe, runtime, circle
        with threading._active_limbo_lock:  # type: ignore[attr-defined]
            gc.collect()
    finally:
        gc.enable()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()


def test_sums_of_an_interrupted_backward_are_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A retained graph that is gone through again gives its gradient once."""
    layer = nn.Linear(4, 4)
    pipe = GPipe(nn.Sequential(nn.Sequential(layer, nn.Tanh()), layer), [1, 1], chunks=2)
    loss = pipe(torch.randn(4, 4)).sum()
    loss.backward(retain_graph=True)
    assert layer.weight.grad is not None
    expected = layer.weight.grad.clone()

    def interrupted(self: MiniBatch) -> None:
        raise KeyboardInterrupt

    pipe.zero_grad()
    with monkeypatch.context() as patch:
        patch.setattr(MiniBatch, "_take_input_gradients", interrupted)
        with pytest.raises(KeyboardInterrupt):
            loss.backward(retain_graph=True)
    pipe.zero_grad()
    loss.backward()
    torch.testing.assert_close(layer.weight.grad, expected)


class Unbind(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> list[Tensor]:
        return list(self.layer(x).unbind(0))


@pytest.mark.parametrize("checkpoint", ["never", "except_last", "always"])
def test_as_many_outputs_as_rows(checkpoint: CheckpointMode) -> None:
    """Micro-batches of unequal sizes may hand on different numbers of tensors."""
    model = nn.Sequential(Unbind(), Does(torch.stack))
    pipe = GPipe(model, [1, 1], chunks=2, checkpoint=checkpoint)
    for _ in range(3):
        pipe.zero_grad()
        pipe(torch.ones(5, 3)).sum().backward()
        torch.testing.assert_close(model[0].layer.weight.grad, torch.full((3, 3), 5.0))


class Along(nn.Module):
    """Hands its input on beside its result."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.layer(x), x


@pytest.mark.parametrize("chunks", [1, 2])
def test_an_output_is_not_in_the_memory_of_an_input_that_has_a_gradient(chunks: int) -> None:
    """A write to one of the two would change the other, unseen by autograd."""
    pipe = GPipe(nn.Sequential(Along(), nn.Identity()), [1, 1], chunks=chunks, checkpoint="never")
    for _ in range(2):
        leaf = torch.ones(4, 3, requires_grad=True)
        x = leaf * 1
        _, y = pipe(x)
        y.mul_(2)
        loss = y.sum() + x.sum()
        assert loss.item() == 36.0
        loss.backward()
        assert leaf.grad is not None
        torch.testing.assert_close(leaf.grad, torch.full((4, 3), 3.0))


class Force(nn.Module):
    """Differentiates by its own input, and lets torch leave the gradient there."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            x.requires_grad_()
            (x**2).sum().backward()
        assert x.grad is not None
        return x.grad.clone() * self.weight


@pytest.mark.parametrize("checkpoint", ["never", "except_last", "always"])
def test_a_gradient_that_a_layer_leaves_on_its_input_is_of_one_pass(
    checkpoint: CheckpointMode,
) -> None:
    """No recompute adds to what the forward left."""
    pipe = GPipe(nn.Sequential(Force(), nn.Identity()), [1, 1], chunks=2, checkpoint=checkpoint)
    for _ in range(2):
        pipe.zero_grad()
        pipe(torch.ones(4, 3)).sum().backward()
        torch.testing.assert_close(pipe[0].weight.grad, torch.full((3,), 8.0))


def test_a_gradient_that_a_run_leaves_on_its_input_is_of_one_pass() -> None:
    """The same where layers are recomputed by themselves."""
    model = nn.Sequential(Force(), nn.Identity())
    inside = with_recompute(model, [[0]])
    for _ in range(3):
        model.zero_grad()
        inside(torch.ones(4, 3)).sum().backward()
        torch.testing.assert_close(model[0].weight.grad, torch.full((3,), 8.0))


class Mask(nn.Module):
    """Writes to a tensor that all micro-batches get."""

    def forward(self, value: tuple[Tensor, Tensor]) -> Tensor:
        x, mask = value
        return x + mask.mul_(-10.0)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_writes_that_change_nothing_at_first_are_seen_later(mode: Any) -> None:
    """Tensors made in inference mode count no writes: a mask of zeros tells nothing."""
    pipe = GPipe(nn.Sequential(Mask(), nn.Identity()), [1, 1], chunks=2, in_dims=(0, None))
    with mode():
        for fill in (0.0, 1.0):
            mask = torch.full((3,), fill)
            found = pipe((torch.zeros(4, 3), mask))
            torch.testing.assert_close(found, torch.full((4, 3), -10.0 * fill))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_what_is_not_a_number_is_no_write(mode: Any) -> None:
    """Nor is a sparse input, which cannot be compared as a whole."""
    x = torch.ones(4, 3)
    x[0, 0] = float("nan")
    model = nn.Sequential(Keep(), nn.Identity(), Join())
    graph = nn.Sequential(
        Does(lambda v: (torch.sparse.mm(v[1], v[0].T).T, v[1])), Does(itemgetter(0))
    )
    with mode():
        found = GPipe(model, [1, 1, 1], chunks=2)(x)
        torch.testing.assert_close(found, 11 * x, equal_nan=True)
        pipe = GPipe(graph, [1, 1], chunks=2, in_dims=(0, None))
        torch.testing.assert_close(pipe((x, torch.eye(3).to_sparse()))[1:], x[1:])


def test_values_that_were_computed_for_a_tied_parameter_get_their_gradient() -> None:
    """`functional_call` with what the caller's own graph made of leaves."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
    model[2].weight = model[0].weight
    pipe = GPipe(model, [2, 1], checkpoint="never")
    x = torch.randn(4, 3)
    base = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    found = []
    for module in (model, pipe):
        values = {name: value + 1 for name, value in base.items()}
        torch.func.functional_call(module, values, (x,)).square().sum().backward()
        found.append([value.grad for value in base.values()])
        for value in base.values():
            value.grad = None
    for theirs, mine in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs)


@MODES
@pytest.mark.parametrize("form", ["rows", "strides"])
def test_views_that_depend_on_the_form_of_the_input(checkpoint: CheckpointMode, form: str) -> None:
    """What is a view for one row is a copy for two; likewise with the order in memory."""
    turn = Does(lambda x: x.transpose(0, 1).contiguous().transpose(0, 1))
    flat = Does(lambda x: x.flatten(1))
    model = nn.Sequential(nn.Identity(), turn if form == "rows" else flat, nn.ReLU(inplace=True))
    pipe = GPipe(model, [1, 2], chunks=3, checkpoint=checkpoint)
    inputs = [torch.randn(5, 3)] * 2
    if form == "strides":
        first = torch.randn(6, 2, 2, 2)
        inputs = [first.to(memory_format=torch.channels_last), first]
    for x in inputs:
        leaf = x.clone().requires_grad_()
        pipe(leaf).sum().backward()
        assert leaf.grad is not None
        torch.testing.assert_close(leaf.grad, (x > 0).float())


def test_tensors_without_plain_memory_are_compared() -> None:
    """One nested tensor in two places overlaps, and parts of a sparse one do with a dense one."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        nested = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(1, 3)])
    values = torch.ones(2)
    indices = torch.tensor([[0, 1]])
    sparse = torch.sparse_coo_tensor(indices, values, (3,), check_invariants=False)
    assert find_overlaps([nested, nested]) == {0, 1}
    assert find_overlaps([values * 1, sparse, sparse._values()]) == {1, 2}
    assert find_shared([values * 1, sparse], [sparse._values()]) == {1}
    assert find_overlaps([sparse, nested]) == frozenset()


@MODES
@pytest.mark.parametrize("n_partitions", [1, 2, 3])
def test_sparse_tensors_with_gradients_cross_cuts(
    checkpoint: CheckpointMode, n_partitions: int
) -> None:
    """They are handed on, and gathered, and so are their gradients."""
    layers = [Does(torch.Tensor.to_sparse), nn.Identity(), Does(torch.Tensor.to_dense)]
    model = nn.Sequential(*layers[:n_partitions])
    pipe = GPipe(model, [1] * n_partitions, chunks=2, checkpoint=checkpoint)
    x = torch.randn(4, 3, requires_grad=True)
    output = pipe(x)
    (3 * (output.to_dense() if output.is_sparse else output)).sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, torch.full((4, 3), 3.0))


@pytest.mark.parametrize("timeout", [None, 600.0])
def test_no_mini_batch_waits_for_workers_that_were_given_up(
    timeout: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another one, of another thread, gave them up before it could begin."""
    never, inside, handed = threading.Event(), threading.Event(), threading.Event()

    class Hang(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if not x.any():
                inside.set()
                never.wait()
            return x * 1

    submit = WorkerPool.submit

    def told(self: WorkerPool, tasks: Any) -> None:
        submit(self, tasks)
        if inside.is_set():
            handed.set()

    monkeypatch.setattr(WorkerPool, "submit", told)
    pipe = GPipe(nn.Sequential(Hang(), nn.Identity()), [1, 1], timeout=timeout)
    pipe(torch.ones(2, 2))
    raised: dict[str, BaseException] = {}

    def run(name: str, x: Tensor) -> None:
        try:
            pipe(x)
        except BaseException as error:
            raised[name] = error

    first = threading.Thread(target=run, args=("first", torch.zeros(2, 2)), daemon=True)
    second = threading.Thread(target=run, args=("second", torch.ones(2, 2)), daemon=True)
    try:
        first.start()
        assert inside.wait(20)
        second.start()
        assert handed.wait(20)
        assert pipe._runtime is not None
        pipe._runtime.pool.give_up()
        first.join(20)
        second.join(20)
        assert not first.is_alive() and not second.is_alive()
        assert all(isinstance(raised[name], PipelineError) for name in ("first", "second"))
        torch.testing.assert_close(pipe(torch.ones(2, 2)), torch.ones(2, 2))
    finally:
        never.set()
