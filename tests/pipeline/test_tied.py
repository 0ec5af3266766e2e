"""Parameters, buffers and layers that stand in several places of a chain."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from chains import run_plain
from torch import Tensor, nn

from gpipebal.errors import DuplicateLayerError, ModelError
from gpipebal.pipeline import GPipe, is_recomputing
from gpipebal.pipeline.workers import tied
from gpipebal.pipeline.workers.runtime import check_shared
from gpipebal.pipeline.workers.tied import leaves_behind
from gpipebal.schedule import CHECKPOINT_MODES, SCHEDULES, CheckpointMode

pytestmark = pytest.mark.timeout(60)
MODES = pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)


def tied_chain() -> nn.Sequential:
    """An embedding whose weight is the weight of the last layer too, and a layer that repeats."""
    torch.manual_seed(0)
    embedding, middle = nn.Embedding(11, 6), nn.Linear(6, 6)
    head = nn.Linear(6, 11)
    head.weight = embedding.weight
    return nn.Sequential(embedding, middle, nn.Tanh(), middle, head).double()


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Return copies of all gradients by name."""
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


@MODES
@pytest.mark.parametrize("balance", [[5], [2, 3], [1, 1, 3], [1, 1, 1, 1, 1]])
def test_tied_parameters_get_the_plain_models_gradients(
    balance: list[int], checkpoint: CheckpointMode
) -> None:
    """Whatever partitions share a parameter, its gradient is the sum of all uses, twice over."""
    plain = tied_chain()
    pipe = GPipe(copy.deepcopy(plain), balance, chunks=3, checkpoint=checkpoint)
    tokens = torch.arange(10) % 11
    for _ in range(2):  # gradients accumulate
        run_plain(plain, tokens, 3).square().sum().backward()
        pipe(tokens).square().sum().backward()
    assert list(pipe.state_dict()) == list(plain.state_dict())
    found, expected = gradients(pipe), gradients(plain)
    assert found.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(found[name], expected[name])


def test_the_sum_over_partitions_is_the_same_in_every_run() -> None:
    """Two workers that find gradients of one parameter never add in the order of the clock."""
    torch.manual_seed(0)
    shared = nn.Linear(33, 33)
    model = nn.Sequential(shared, nn.Tanh(), shared, nn.Tanh(), shared, nn.Linear(33, 1))
    pipe = GPipe(model, [2, 2, 2], chunks=6, checkpoint="never")
    inputs = torch.randn(24, 33)
    results = set()
    for _ in range(25):
        pipe.zero_grad()
        pipe(inputs).sum().backward()
        results.add(shared.weight.grad.numpy().tobytes())  # type: ignore[union-attr]
    assert len(results) == 1


def test_a_shared_layer_outside_of_the_pipeline_is_as_before() -> None:
    """The plain model's own backward adds to `.grad` itself, before and after the pipeline's."""
    model = tied_chain()
    pipe = GPipe(model, [2, 3], chunks=2)
    tokens = torch.arange(6)
    pipe(tokens).square().sum().backward()
    first = gradients(model)
    model(tokens).square().sum().backward()
    for name, gradient in gradients(model).items():
        torch.testing.assert_close(gradient, 2 * first[name])


def test_tied_parameters_of_another_dtype_are_caught_again() -> None:
    """After `pipe.to(dtype)` torch adds gradients in another node; they are caught there too."""
    plain = tied_chain()
    pipe = GPipe(copy.deepcopy(plain).float(), [2, 3], chunks=2)
    tokens = torch.arange(6)
    pipe(tokens).sum().backward()
    pipe.zero_grad()
    pipe.to(torch.float64)
    pipe.load_state_dict(plain.state_dict())
    pipe(tokens).square().sum().backward()
    run_plain(plain, tokens, 2).square().sum().backward()
    for name, gradient in gradients(plain).items():
        torch.testing.assert_close(gradients(pipe)[name], gradient)


def test_gradients_of_tied_parameters_are_tensors_of_their_own() -> None:
    """Two tied parameters that get one gradient do not end up with one tensor."""
    first, second = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))

    class Add(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = first, second

        def forward(self, x: Tensor) -> Tensor:
            return x + (self.first + self.second)

    pipe = GPipe(nn.Sequential(Add(), Add()), [1, 1])
    pipe(torch.zeros(1, 2)).sum().backward()
    assert first.grad is not None
    assert second.grad is not None
    first.grad.zero_()
    assert second.grad.tolist() == [2.0, 2.0]


@pytest.mark.parametrize("how", ["call", *SCHEDULES])
@pytest.mark.parametrize("channels_last", [False, True])
def test_gradients_of_tied_parameters_lie_as_the_parameters_do(
    how: str, channels_last: bool
) -> None:
    """A fused optimizer, which asks for no strides, trains shared layers as the plain model's."""
    torch.manual_seed(0)
    shared = nn.Conv2d(3, 3, 3, padding=1, bias=False)
    plain = nn.Sequential(shared, nn.Tanh(), shared, nn.Flatten()).double()
    images = torch.randn(6, 3, 4, 5, dtype=torch.double)
    if channels_last:
        images = images.to(memory_format=torch.channels_last)  # torch's gradient lies so, too
    else:
        plain.to(memory_format=torch.channels_last)
    pipe = GPipe(copy.deepcopy(plain), [2, 2], chunks=2)
    models = (pipe, plain)
    optimizers = [torch.optim.AdamW(each.parameters(), 0.1, fused=True) for each in models]
    for _ in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        if how == "call":
            pipe(images).square().mean().backward()
        else:
            pipe.step(images, loss_fn=lambda y: y.square().mean(), schedule=how)
        run_plain(plain, images, 2).square().mean().backward()
        found, expected = (one[0].weight.grad for one in models)
        assert found.stride() == expected.stride() == plain[0].weight.stride()
        for optimizer in optimizers:
            optimizer.step()
        torch.testing.assert_close(pipe[0].weight, plain[0].weight)


def test_gradients_of_the_input_alone_leave_tied_parameters_alone() -> None:
    """`torch.autograd.grad` on the input neither adds to nor makes gradients of parameters."""
    layer = nn.Linear(2, 2)
    pipe = GPipe(nn.Sequential(layer, layer), [1, 1], chunks=2)
    inputs = torch.ones(4, 2, requires_grad=True)
    torch.autograd.grad(pipe(inputs).sum(), inputs)
    assert layer.weight.grad is None


def test_a_frozen_tied_parameter_gets_no_gradient() -> None:
    """A shared layer may be frozen, and thawed again."""
    layer = nn.Linear(2, 2)
    pipe = GPipe(nn.Sequential(nn.Linear(2, 2), layer, layer), [2, 1])
    layer.requires_grad_(False)
    pipe(torch.ones(2, 2)).sum().backward()
    assert layer.weight.grad is None
    layer.requires_grad_(True)
    pipe(torch.ones(2, 2)).sum().backward()
    assert layer.weight.grad is not None


@MODES
def test_batch_normalisation_that_stands_twice_in_a_partition(checkpoint: CheckpointMode) -> None:
    """A layer with buffers may repeat inside a partition; its statistics see every call."""
    norm = nn.BatchNorm1d(3).double()
    plain = nn.Sequential(nn.Linear(3, 3).double(), norm, nn.ReLU(), norm)
    pipe = GPipe(copy.deepcopy(plain), [1, 3], chunks=2, checkpoint=checkpoint)
    inputs = torch.randn(6, 3, dtype=torch.float64)
    run_plain(plain, inputs, 2).square().sum().backward()
    pipe(inputs).square().sum().backward()
    for mine, theirs in zip(pipe.buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(mine, theirs)
    deferred = GPipe(plain, [1, 3], chunks=2, deferred_batch_norm=True)
    assert deferred[1] is deferred[3]


def test_two_partitions_that_write_to_one_buffer_are_refused() -> None:
    """Which of two workers wrote last would depend on the clock: that is an error with a fix."""
    norm = nn.BatchNorm1d(2)
    model = nn.Sequential(norm, nn.Linear(2, 2), norm)
    pipe = GPipe(model, [1, 2], chunks=2)
    with pytest.raises(ModelError, match=r"written to by two partitions: 'running_mean'"):
        pipe(torch.randn(4, 2))
    GPipe(model, [3], chunks=2)(torch.randn(4, 2))  # the fix
    assert torch.isfinite(pipe.eval()(torch.randn(4, 2))).all()  # nothing is written in eval mode
    with pytest.raises(DuplicateLayerError, match="deferred batch normalisation stands twice"):
        GPipe(model, [1, 2], chunks=2, deferred_batch_norm=True)


def test_sharing_across_devices_is_refused() -> None:
    """One parameter cannot live on two devices; the error names both layers."""
    layer = nn.Linear(2, 2)
    devices = [torch.device("cpu"), torch.device("meta")]
    with pytest.raises(ValueError, match=r"layer 'a' of partition 0 and in layer 'b' of partition"):
        check_shared({"a": layer, "b": nn.Sequential(layer)}, [1, 1], devices)
    check_shared({"a": layer, "b": nn.Sequential(layer)}, [1, 1], devices[:1] * 2)


class Scale(nn.Module):
    """A matrix that is trained, and that is no parameter."""

    matrix: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("matrix", torch.randn(33, 33))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.matrix


@pytest.mark.parametrize("used_by", ["layers", "loss"])
def test_a_trained_buffer_of_several_partitions_gets_one_sum(used_by: str) -> None:
    """Its gradients are added up as a parameter's are, also if it is thawed after a forward."""
    torch.manual_seed(0)
    shared = Scale()
    other = shared if used_by == "layers" else nn.Identity()
    model = nn.Sequential(shared, nn.Tanh(), other, nn.Tanh(), other, nn.Linear(33, 33))
    plain = copy.deepcopy(model)
    pipe = GPipe(model, [2, 2, 2], chunks=6, checkpoint="never")
    inputs = torch.randn(24, 33)

    def loss_of(scale: Any) -> Callable[[Tensor], Tensor]:
        matrix = scale.matrix if used_by == "loss" else torch.eye(33)
        return lambda y: (y @ matrix).sum()

    pipe(inputs).sum().backward()
    for one in (model, plain):
        one[0].matrix.requires_grad_()  # type: ignore[operator, union-attr]
    results = set()
    for _ in range(20):
        shared.matrix.grad = None
        pipe.step(inputs, loss_fn=loss_of(shared), reduction="sum")
        results.add(shared.matrix.grad.numpy().tobytes())  # type: ignore[union-attr]
    assert len(results) == 1
    loss_of(plain[0])(run_plain(plain, inputs, 6)).backward()
    torch.testing.assert_close(shared.matrix.grad, plain[0].matrix.grad, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("schedule", list(SCHEDULES))
@MODES
def test_a_parameter_that_the_loss_uses_too(checkpoint: CheckpointMode, schedule: str) -> None:
    """A loss that projects onto the embedding of another partition: one sum, in one order."""
    # Also a test against a hang: `weight.T` keeps Python's lock while it waits for the weight, and
    # another worker may be making a graph of it.
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Embedding(33, 33), nn.Tanh(), nn.Linear(33, 33), nn.Tanh())
    plain = plain.double()
    tokens, target = torch.randint(0, 33, (2, 48))

    def loss_of(model: nn.Module) -> Callable[[Tensor, Tensor], Tensor]:
        return lambda y, t: nn.functional.cross_entropy(y @ model[0].weight.T, t)  # type: ignore[index, union-attr, operator]

    loss_of(plain)(plain(tokens), target).backward()
    pipe = GPipe(copy.deepcopy(plain), [1, 1, 2], chunks=12, checkpoint=checkpoint)
    results = set()
    for _ in range(20):
        pipe.zero_grad()
        pipe.step(tokens, target=target, loss_fn=loss_of(pipe), schedule=schedule)
        results.add(pipe[0].weight.grad.numpy().tobytes())  # type: ignore[union-attr, operator]
    assert len(results) == 1
    for name, gradient in gradients(plain).items():
        torch.testing.assert_close(gradients(pipe)[name], gradient)


def test_leaves_behind_a_loss_end_at_its_output() -> None:
    """What the output itself was made of does not count; what the loss uses besides does."""
    layer, other = nn.Linear(2, 2), nn.Parameter(torch.ones(2))
    output = layer(torch.ones(1, 2))
    before, given = {output.grad_fn}, [output, torch.ones(2), None]
    assert leaves_behind(output.sum(), before, given) == []
    # Also where the loss writes to the output.
    (found,) = leaves_behind((output.mul_(2) @ other).sum(), before, given)
    assert found is other
    (found,) = leaves_behind(output.mul_(other).sum(), before, given)
    assert found is other
    assert leaves_behind(torch.ones(()), before, given) == []
    # A leaf may be handed to the loss as it is.
    assert leaves_behind(other.square().sum(), set(), [other]) == []


@pytest.mark.parametrize("context", [torch.inference_mode, torch.no_grad, "enabled"])
def test_tied_parameters_without_gradients(context: Any) -> None:
    """Inference needs no graph of tied parameters, before training and after it."""
    pipe = GPipe(tied_chain(), [2, 3], chunks=2)
    tokens = torch.arange(6)
    for _ in range(2):
        with ExitStack() as stack:
            stack.enter_context(torch.inference_mode() if context == "enabled" else context())
            if context == "enabled":
                stack.enter_context(torch.enable_grad())
            output = pipe(tokens)
        assert output.shape == (6, 11)
        pipe(tokens).sum().backward()
    assert pipe[0].weight.grad is not None


@pytest.mark.parametrize("schedule", [None, *SCHEDULES])
@pytest.mark.parametrize("balances", [([2, 3], [5]), ([5], [2, 3]), ([1, 1, 3], [3, 2])])
def test_another_pipeline_of_the_same_layers_does_not_take_the_gradients(
    balances: tuple[list[int], list[int]], schedule: str | None
) -> None:
    """What is tied in one pipeline may not be in the next one, whose gradients are its own."""
    model = tied_chain()
    plain = copy.deepcopy(model)
    tokens = torch.arange(10) % 11
    first, second = (GPipe(model, balance, chunks=3) for balance in balances)
    for pipe in (first, second, first):
        for each in (model, plain):
            each.zero_grad()
        if schedule is None:
            pipe(tokens).square().sum().backward()
        else:
            pipe.step(
                tokens, loss_fn=lambda y: y.square().sum(), reduction="sum", schedule=schedule
            )
        run_plain(plain, tokens, 3).square().sum().backward()
        found, expected = gradients(pipe), gradients(plain)
        assert found.keys() == expected.keys()
        for name in expected:
            torch.testing.assert_close(found[name], expected[name])


@pytest.mark.parametrize("anew", ["pipeline", "ties"])
def test_a_tied_parameter_has_one_hook(anew: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It outlives pipelines, and so may the node that adds to its gradient."""
    layer = nn.Linear(2, 2)
    model = nn.Sequential(layer, nn.Linear(2, 2), layer)
    pipe = GPipe(model, [1, 1, 1])
    made: list[Tensor] = []
    catcher = tied._catcher

    def count(parameter: Tensor) -> Any:
        made.append(parameter)
        return catcher(parameter)

    monkeypatch.setattr(tied, "_catcher", count)
    kept, found = [], []
    for _ in range(3):
        if anew == "pipeline":
            pipe = GPipe(model, [1, 1, 1])
        else:
            pipe[1].weight = nn.Parameter(model[1].weight.detach().clone())
        pipe.zero_grad()
        kept.append(pipe(torch.ones(2, 2)).sum())
        kept[-1].backward()
        found.append(gradients(pipe)["0.weight"])
    assert sorted(map(id, made)) == sorted([id(layer.weight), id(layer.bias)])
    assert torch.equal(found[0], found[2])


def test_an_interrupt_before_the_hook_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next forward sets it; one that is set twice catches once."""
    layer = nn.Linear(2, 2)
    pipe = GPipe(nn.Sequential(layer, nn.Tanh(), layer), [1, 1, 1])
    alive = [tied._user(parameter) for parameter in layer.parameters()]
    made: list[Tensor] = []
    catcher = tied._catcher

    def interrupt(parameter: Tensor) -> Any:
        raise KeyboardInterrupt

    def count(parameter: Tensor) -> Any:
        made.append(parameter)
        return catcher(parameter)

    monkeypatch.setattr(tied, "_catcher", interrupt)
    with pytest.raises(KeyboardInterrupt):
        pipe(torch.ones(2, 2))
    monkeypatch.setattr(tied, "_catcher", count)
    found = []
    for _ in range(2):
        pipe.zero_grad()
        pipe(torch.ones(2, 2)).sum().backward()
        found.append(gradients(pipe)["0.weight"])
        for user in alive:
            tied._adder(user).metadata.clear()
    assert sorted(map(id, made)) == sorted(2 * [id(layer.weight), id(layer.bias)])
    assert torch.equal(*found)


def test_a_refused_parameter_is_refused_at_every_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    """A parameter that may not be shared is not taken for known once it has been refused."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    pipe = GPipe(model, [1, 1], chunks=2)
    pipe(torch.ones(2, 4)).sum().backward()

    def refusing(*given: Any) -> None:
        raise DuplicateLayerError("as on two devices")

    monkeypatch.setattr("gpipebal.pipeline.gpipe.check_shared", refusing)
    model[1].weight = model[0].weight
    for _ in range(2):
        with pytest.raises(DuplicateLayerError, match="as on two devices"):
            pipe(torch.ones(2, 4))
    monkeypatch.undo()
    pipe.zero_grad()
    pipe(torch.ones(2, 4)).sum().backward()
    assert model[0].weight.grad is not None
    plain = nn.Sequential(copy.deepcopy(model[0]), copy.deepcopy(model[1]))
    plain[1].weight = plain[0].weight
    plain.zero_grad()
    plain(torch.ones(2, 4)).sum().backward()
    torch.testing.assert_close(model[0].weight.grad, plain[0].weight.grad)


class Local(nn.Module):
    """A layer that trains a weight by a loss of its own, in its forward."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight
        self.found: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled() and not is_recomputing():
            (x.detach() @ self.weight).square().mean().backward()
            assert self.weight.grad is not None
            self.found = self.weight.grad.clone()
        return x @ self.weight


class Use(nn.Module):
    """A layer with the same weight."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


def test_a_layers_own_backward_adds_to_a_weight_of_two_partitions() -> None:
    """At once, as in the plain model, and the pipeline's backward adds to that."""
    found = []
    for balance in ([3], [2, 1]):
        torch.manual_seed(0)
        weight = nn.Parameter(torch.randn(4, 4))
        model = nn.Sequential(Use(weight), nn.Tanh(), Local(weight))
        output = GPipe(model, balance, checkpoint="never")(torch.ones(2, 4))
        output.sum().backward()
        found.append((model[2].found, weight.grad))
    torch.testing.assert_close(found[1], found[0])


def test_gradients_of_mini_batches_in_two_threads_are_added_one_after_the_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else one of two sums that are added at the same time would be lost."""
    layer = nn.Linear(2, 2, bias=False)
    pipe = GPipe(nn.Sequential(layer, layer), [1, 1])
    runtime = pipe._started()

    def add_up() -> None:
        sums: list[Any] = [{layer.weight: (torch.ones(2, 2), ())}, {}]
        runtime.tied.add_up(sums)

    second = threading.Thread(target=add_up)
    added = tied._added

    def slowly(known: Tensor | None, gradient: Tensor) -> Tensor:
        if threading.current_thread() is not second:
            second.start()
            second.join(0.2)  # it has to wait
        return added(known, gradient)

    monkeypatch.setattr(tied, "_added", slowly)
    add_up()
    second.join(20)
    assert layer.weight.grad is not None
    assert layer.weight.grad.tolist() == [[2.0, 2.0]] * 2
    pipe.close()
