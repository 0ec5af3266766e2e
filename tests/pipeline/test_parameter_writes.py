"""Layers and hooks that write to parameters while a recompute or another micro-batch needs them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gpipebal.errors import ModelError, PipelineError
from gpipebal.pipeline import GPipe, is_recomputing, measure_memory, with_recompute

MODES = ["never", "except_last", "always"]
RECOMPUTES = pytest.mark.parametrize("chunks", [1, 3])


class Changing(nn.Linear):
    """A layer that changes a parameter in its forward, in any of several ways."""

    def __init__(self, change: Callable[[Any], Any]) -> None:
        super().__init__(4, 4, dtype=torch.float64)
        self.change = change

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.change(self)
        return super().forward(x)


def shrink(layer: Changing) -> None:
    """Change the bias each time: no graph saves it, so autograd has no objection."""
    layer.bias.mul_(0.5)


def shrink_once(layer: Changing) -> None:
    """Do so, but not in recomputes."""
    if not is_recomputing():
        layer.bias.mul_(0.5)


def limit(layer: Changing) -> None:
    """Change what is too large; the second time nothing is."""
    layer.bias.clamp_(-0.1, 0.1)


def make(change: Callable[[Any], Any]) -> nn.Sequential:
    """Make a chain whose first layer changes."""
    torch.manual_seed(0)
    last = nn.Linear(4, 2, dtype=torch.float64)
    return nn.Sequential(Changing(change), nn.Tanh(), last)


def rows() -> Tensor:
    """Make a mini-batch."""
    return torch.linspace(-1, 1, 24, dtype=torch.float64).reshape(6, 4)


def gradients_match(pipe: nn.Module, plain: nn.Module, chunks: int) -> None:
    """Compare a step with that of the plain model over the same micro-batches."""
    pipe(rows()).square().sum().backward()
    torch.cat([plain(part) for part in rows().tensor_split(chunks)]).square().sum().backward()
    for mine, theirs in zip(pipe.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs)
        torch.testing.assert_close(mine.grad, theirs.grad)


@RECOMPUTES
@pytest.mark.parametrize("trained", [True, False])
def test_a_recompute_of_a_changed_parameter_is_refused(chunks: int, trained: bool) -> None:
    """It would compute with other values than its forward, also for one micro-batch."""
    model = make(shrink)
    model[0].bias.requires_grad_(trained)
    pipe = GPipe(model, [2, 1], chunks=chunks, checkpoint="always")
    with pytest.raises(ModelError, match=r"was written to after its forward.*'bias' of a Ch"):
        pipe(rows()).square().sum().backward()


@RECOMPUTES
def test_a_run_of_a_changed_parameter_is_refused(chunks: int) -> None:
    """A run that is recomputed by itself is no exception."""
    model = with_recompute(make(shrink), [[0, 1]])
    pipe = GPipe(model, [2, 1], chunks=chunks, checkpoint="never")
    with pytest.raises(ModelError, match=r"was written to after its forward.*'bias' of a Ch"):
        pipe(rows()).square().sum().backward()


@pytest.mark.parametrize("mode", MODES)
def test_a_parameter_that_only_forwards_change(mode: Any) -> None:
    """With one micro-batch the recompute finds it as the forward left it."""
    model = make(shrink_once)
    plain = copy.deepcopy(model)
    gradients_match(GPipe(model, [2, 1], checkpoint=mode), plain, 1)


@RECOMPUTES
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("trained", [True, False])
def test_a_parameter_with_a_limit(chunks: int, mode: Any, trained: bool) -> None:
    """To limit it again changes nothing, so it can be recomputed, trained or not."""
    model = make(limit)
    model[0].bias.requires_grad_(trained)
    plain = copy.deepcopy(model)
    gradients_match(GPipe(model, [2, 1], chunks=chunks, checkpoint=mode), plain, chunks)
    model, plain = make(limit), make(limit)
    pipe = GPipe(with_recompute(model, [[0, 1]]), [2, 1], chunks=chunks, checkpoint=mode)
    gradients_match(pipe, plain, chunks)


@pytest.mark.parametrize("in_run", [False, True])
def test_micro_batches_share_a_copy_of_a_limited_parameter(in_run: bool) -> None:
    """To limit it again changes nothing, so more micro-batches need no more copies."""
    found = []
    for change in (lambda _: None, limit):
        model = make(change)
        run_of = with_recompute(model, [[0, 1]]) if in_run else model
        mode: Any = "never" if in_run else "always"
        # In one partition nothing waits for a neighbour.
        pipe = GPipe(run_of, [3], chunks=3, checkpoint=mode)
        for parameter in pipe.parameters():
            parameter.grad = torch.zeros_like(parameter)
        pipe(rows()).sum().backward()
        with measure_memory(pipe) as meter:
            y = pipe(rows())
        found.append(meter.peak_bytes[0])
        del y
    assert found[1] - found[0] == model[0].bias.nbytes


def step_in_hooks(model: nn.Module) -> None:
    """Give each parameter an optimizer that steps when its gradient has been added."""
    for parameter in model.parameters():
        optimizer = torch.optim.SGD([parameter], lr=0.1)

        def step(_: Tensor, optimizer: torch.optim.SGD = optimizer) -> None:
            optimizer.step()
            optimizer.zero_grad()

        parameter.register_post_accumulate_grad_hook(step)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("how", ["call", "gpipe", "1f1b"])
def test_an_optimizer_in_a_hook_is_refused(mode: Any, how: str) -> None:
    """It would step for each micro-batch, on a part of the gradient."""
    pipe = GPipe(make(lambda _: None), [2, 1], chunks=3, checkpoint=mode)
    step_in_hooks(pipe)
    with pytest.raises(PipelineError, match="a hook on a parameter has written to it"):
        run(pipe, how)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("how", ["call", "gpipe", "1f1b"])
def test_an_optimizer_in_a_hook_after_the_only_micro_batch(mode: Any, how: str) -> None:
    """The fix that the error names: then the gradient is complete."""
    pipe, plain = GPipe(make(lambda _: None), [2, 1], checkpoint=mode), make(lambda _: None)
    step_in_hooks(pipe)
    step_in_hooks(plain)
    run(pipe, how)
    plain(rows()).square().sum().backward()
    for mine, theirs in zip(pipe.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs)


def run(pipe: GPipe, how: str) -> None:
    """Run a step whose loss is a sum of squares."""
    if how == "call":
        pipe(rows()).square().sum().backward()
    else:
        pipe.step(rows(), loss_fn=lambda y: y.square().sum(), reduction="sum", schedule=how)


class Moving(nn.Linear):
    """A layer that puts a new tensor in the place of one that is not trained, in each forward."""

    def forward(self, x: Tensor) -> Tensor:
        self.bias = nn.Parameter(self.bias.detach() * 0.5, requires_grad=False)
        return super().forward(x)


@RECOMPUTES
@pytest.mark.parametrize("how", ["call", "gpipe", "1f1b"])
def test_a_recompute_of_a_replaced_parameter_is_refused(chunks: int, how: str) -> None:
    """To replace it is to change it, if it has other values then."""
    first = Moving(4, 4, dtype=torch.float64)
    first.bias.requires_grad_(False)
    model = nn.Sequential(first, nn.Tanh(), nn.Linear(4, 2, dtype=torch.float64))
    pipe = GPipe(model, [2, 1], chunks=chunks, checkpoint="always")
    if how == "1f1b" and chunks == 1:  # a graph is kept: nothing is recomputed
        run(pipe, how)
        return
    with pytest.raises(ModelError, match=r"was written to after its forward.*'bias' of a Moving"):
        run(pipe, how)


def unit_rows(layer: Changing) -> None:
    """Make the rows of the weight as long as 1: the second time only the last digits change."""
    layer.weight.copy_(nn.functional.normalize(layer.weight))


@RECOMPUTES
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex64])
@pytest.mark.filterwarnings("ignore:Complex modules are a new feature")
def test_a_parameter_that_is_normalised(chunks: int, dtype: torch.dtype) -> None:
    """To normalise it again changes nothing but for rounding."""
    for seed in range(10):
        torch.manual_seed(seed)
        model = nn.Sequential(Changing(unit_rows), nn.Tanh(), nn.Linear(4, 2)).to(dtype)
        plain = copy.deepcopy(model)
        pipe = GPipe(model, [2, 1], chunks=chunks, checkpoint="always")
        x = rows().to(dtype)
        pipe(x).abs().square().sum().backward()
        for part in x.tensor_split(chunks):
            plain(part).abs().square().sum().backward()
        for mine, theirs in zip(pipe.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, theirs.grad)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_parameter_that_is_normalised_in_half_precision_is_refused(dtype: torch.dtype) -> None:
    """The last of few digits is not nothing: a decay by a hundredth changes no more."""
    torch.manual_seed(0)
    model = nn.Sequential(Changing(unit_rows), nn.Tanh(), nn.Linear(4, 2)).to(dtype)
    pipe = GPipe(model, [2, 1], chunks=3, checkpoint="always")
    with pytest.raises(ModelError, match="was written to after its forward"):
        for _ in range(10):
            nn.init.normal_(pipe[0].weight)
            pipe(rows().to(dtype)).square().sum().backward()


@pytest.mark.parametrize("in_pipeline", [False, True])
def test_an_optimizer_in_a_hook_before_the_recompute_of_its_run(in_pipeline: bool) -> None:
    """A bias that is added last has its gradient before anything is recomputed: it may change."""
    x = rows().reshape(3, 2, 4).transpose(0, 1)  # a linear layer adds its bias by itself
    plain = nn.Sequential(nn.Linear(4, 4), nn.Tanh()).double()
    model = copy.deepcopy(plain)
    again: nn.Module = with_recompute(model, [[0]])
    if in_pipeline:
        again = GPipe(again, [1, 1], checkpoint="never")
    for each in (model, plain):
        step_in_hooks(each)
    again(x).square().sum().backward()
    plain(x).square().sum().backward()
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_an_optimizer_in_a_hook_before_another_backward() -> None:
    """A second forward was made before the step: its recompute would see other parameters."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh()).double()
    again = with_recompute(model, [[0]])
    step_in_hooks(model)
    one, two = again(rows()), again(rows())
    one.square().sum().backward()
    with pytest.raises(ModelError, match="was written to after its forward"):
        two.square().sum().backward()


def test_hooks_beside_a_limit_that_a_recompute_applies_again() -> None:
    """An embedding that limits its rows does so in the backward too, and no hook has."""
    model = nn.Sequential(nn.Embedding(6, 4, max_norm=1.0), nn.Tanh(), nn.Linear(4, 2))
    plain = copy.deepcopy(model)

    def clip(parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.clamp_(-1e6, 1e6)

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(clip)
    pipe = GPipe(with_recompute(model, [[0, 1]]), [2, 1], chunks=3, checkpoint="never")
    for each in (pipe, plain):
        each(torch.arange(6)).square().sum().backward()
    for mine, theirs in zip(pipe.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)


def test_a_hook_on_a_gradient_that_writes_is_refused() -> None:
    """It runs before the gradient is added, once for each micro-batch too."""
    pipe = GPipe(make(lambda _: None), [2, 1], chunks=3, checkpoint="never")
    bias = pipe[2].bias

    def step(gradient: Tensor) -> None:
        with torch.no_grad():
            bias.sub_(0.1 * gradient)

    bias.register_hook(step)
    with pytest.raises(PipelineError, match="a hook on a parameter has written to it"):
        pipe(rows()).square().sum().backward()


@pytest.mark.parametrize("trained", [True, False])
def test_a_bias_that_is_frozen_or_thawed_after_its_forward_was_not_written_to(
    trained: bool,
) -> None:
    """Its values are what they were, and the run has no use for them in its backward."""
    plain = nn.Sequential(nn.Linear(4, 4), nn.Tanh()).double()
    model = copy.deepcopy(plain)
    for each, run_of in ((model, with_recompute(model, [[0, 1]])), (plain, plain)):
        each[0].bias.requires_grad_(trained)
        loss = run_of(rows()).square().sum()
        each[0].bias.requires_grad_(not trained)
        loss.backward()
    torch.testing.assert_close(model[0].weight.grad, plain[0].weight.grad)


class Shifted(nn.Module):
    """A loss that has a parameter."""

    def __init__(self, change: Callable[[Any], Any]) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.full((), 0.3, dtype=torch.float64))
        self.change = change

    def forward(self, y: Tensor) -> Tensor:
        with torch.no_grad():
            self.change(self)
        return (y + self.bias).square().sum()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("how", ["gpipe", "1f1b"])
def test_an_optimizer_in_a_hook_on_a_parameter_of_a_loss_is_refused(mode: Any, how: str) -> None:
    """It would step for each micro-batch, like one in a hook on a layer's parameter."""
    pipe = GPipe(make(lambda _: None), [2, 1], chunks=3, checkpoint=mode)
    loss = Shifted(lambda _: None)
    step_in_hooks(loss)
    with pytest.raises(PipelineError, match="a hook on a parameter has written to it"):
        pipe.step(rows(), loss_fn=loss, reduction="sum", schedule=how)


def test_a_loss_that_changes_a_parameter() -> None:
    """Where it is run again this is refused, unless the second time nothing changes."""
    pipe, plain = (
        GPipe(make(lambda _: None), [2, 1], chunks=n, checkpoint="always") for n in (3, 1)
    )
    with pytest.raises(ModelError, match=r"was written to after its forward.*'bias' of a Shifted"):
        pipe.step(rows(), loss_fn=Shifted(shrink), reduction="sum", schedule="gpipe")
    pipe.zero_grad()
    mine, theirs = Shifted(limit), Shifted(limit)
    pipe.step(rows(), loss_fn=mine, reduction="sum", schedule="gpipe")
    theirs(plain(rows())).backward()
    for ours, expected in zip(
        (*pipe.parameters(), mine.bias), (*plain.parameters(), theirs.bias), strict=True
    ):
        torch.testing.assert_close(ours.grad, expected.grad)


def test_a_loss_that_has_a_parameter_of_a_layer_that_limits_it() -> None:
    """The partition of the layer looks after it: for the loss nothing has changed."""
    losses = []
    pipe, plain = (GPipe(make(limit)[:2], [1, 1], chunks=n, checkpoint="always") for n in (3, 1))
    for model in (pipe, plain):
        loss = Shifted(lambda _: None)
        loss.bias = model[0].bias
        losses.append(loss)
    pipe.step(rows(), loss_fn=losses[0], reduction="sum", schedule="gpipe")
    losses[1](plain(rows())).backward()
    for mine, theirs in zip(pipe.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)


class Constrained(nn.Linear):
    """A layer that knows the largest norm that its weight may have, and does not limit it."""

    max_norm = 1.0


def test_only_embeddings_limit_their_weights_unseen() -> None:
    """A step between a forward and its recompute is refused, whatever attributes a layer has."""
    model = nn.Sequential(Constrained(4, 4), nn.Tanh())
    pipe = GPipe(model, [1, 1], chunks=2, checkpoint="always")
    output = pipe(torch.ones(4, 4))
    with torch.no_grad():
        model[0].weight.mul_(0.5)
    with pytest.raises(PipelineError, match="a parameter was written to"):
        output.sum().backward()
