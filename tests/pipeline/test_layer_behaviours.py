"""What layers may do in their own way: deferred statistics, buffers, draws, methods, losses."""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import gpipebal as gb
from gpipebal import GPipe
from gpipebal.errors import DuplicateLayerError, ModelError, PipelineError
from gpipebal.pipeline import convert_deferred_batch_norm, measure_memory

MODES = ["never", "except_last", "always"]


def rows(n: int, width: int = 3) -> Tensor:
    """Make some rows, the same every time."""
    generator = torch.Generator().manual_seed(n)
    return torch.randn(n, width, generator=generator, dtype=torch.float64)


def linear(width: int = 3) -> nn.Linear:
    """Make a layer, the same every time."""
    torch.manual_seed(0)
    return nn.Linear(3, width, dtype=torch.float64)


class Shift(nn.Module):
    """Has a buffer that is trained."""

    delta: Tensor

    def __init__(self, n: int) -> None:
        super().__init__()
        self.register_buffer("delta", torch.zeros(n, dtype=torch.float64).requires_grad_())

    def forward(self, x: Tensor) -> Tensor:
        return (x + self.delta[:3]).square()


@pytest.mark.parametrize("n", [3, 20_000])
@pytest.mark.parametrize("mode", MODES)
def test_a_buffer_that_requires_a_gradient_gets_it(mode: Any, n: int) -> None:
    """Recomputes work on it and not on a copy, however large it is."""
    plain = nn.Sequential(linear(), Shift(n), linear())
    pipe = GPipe(copy.deepcopy(plain), [1, 2], chunks=3, checkpoint=mode)
    plain(rows(6)).sum().backward()
    pipe(rows(6)).sum().backward()
    torch.testing.assert_close(pipe[1].delta.grad, plain[1].delta.grad)


@pytest.mark.parametrize("mode", MODES[1:])
def test_a_buffer_that_requires_a_gradient_may_not_be_written_to(mode: Any) -> None:
    """A recompute could not have it as it was."""

    class Writes(Shift):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.delta.add_(1.0)
            return x + self.delta[:3]

    pipe = GPipe(nn.Sequential(linear(), Writes(3)), [2], chunks=3, checkpoint=mode)
    with pytest.raises(ModelError, match=r"'delta' of a Writes requires a gradient, and was"):
        pipe(rows(6)).sum().backward()


class Teacher(nn.Module):
    """Moves a frozen parameter in its forward, by a write or by another tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.query = linear()
        self.key = copy.deepcopy(self.query).requires_grad_(False)
        self.key.weight.mul_(2.0)

    def forward(self, x: Tensor) -> Tensor:
        self.key.weight.data = self.key.weight.data * 0.5 + self.query.weight.data * 0.5
        return self.query(x) * self.key(x)


@pytest.mark.parametrize("mode", MODES[1:])
def test_a_frozen_parameter_that_is_exchanged_is_noticed(mode: Any) -> None:
    """Its recompute would move it once more."""
    pipe = GPipe(nn.Sequential(Teacher(), linear()), [2], chunks=3, checkpoint=mode)
    with pytest.raises(ModelError, match="a parameter that is not trained was written to"):
        pipe(rows(6)).sum().backward()


@pytest.mark.parametrize("mode", MODES)
def test_two_forwards_of_an_embedding_that_keeps_its_rows_short(mode: Any) -> None:
    """To shorten a row again changes nothing, so the first forward can still be recomputed."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Embedding(8, 4, max_norm=0.5), nn.Linear(4, 2))
    pipe = GPipe(copy.deepcopy(plain), [1, 1], chunks=2, checkpoint=mode)
    one, two = torch.tensor([0, 1, 2, 3]), torch.tensor([2, 5, 6, 7])
    for model in (plain, pipe):
        (model(one) * model(two)).sum().backward()
    torch.testing.assert_close(pipe[0].weight.grad, plain[0].weight.grad)


@pytest.mark.parametrize("mode", MODES)
def test_two_backwards_of_an_embedding_that_keeps_its_rows_short(mode: Any) -> None:
    """It writes only to rows that are too long: the second recompute writes nothing."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Embedding(8, 4, max_norm=0.5), nn.Linear(4, 2))
    pipe = GPipe(copy.deepcopy(plain), [1, 1], chunks=2, checkpoint=mode)
    for model in (plain, pipe):
        loss = model(torch.tensor([0, 1, 2, 3])).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()
    torch.testing.assert_close(pipe[0].weight.grad, plain[0].weight.grad)


@pytest.mark.parametrize("mode", MODES[1:])
def test_a_second_backward_of_a_layer_that_limits_its_weights_is_refused(mode: Any) -> None:
    """Its recompute writes to the weights again, so what it saved first is out of date."""

    class Limits(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.weight.clamp_(min=0.0)
            return super().forward(x)

    pipe = GPipe(nn.Sequential(Limits(3, 3), nn.Linear(3, 2)), [1, 1], chunks=2, checkpoint=mode)
    loss = pipe(torch.randn(4, 3)).square().sum()
    loss.backward(retain_graph=True)
    with pytest.raises(PipelineError, match="Fix:"):
        loss.backward()


class Kept(nn.Module):
    """A layer and a batch normalisation that it also has by another way."""

    def __init__(self, keep: Callable[[Kept], Any]) -> None:
        super().__init__()
        self.linear, self.norm = linear(), nn.BatchNorm1d(3, dtype=torch.float64)
        self.way = keep(self)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.linear(x))


WAYS: dict[str, Callable[[Kept], Any]] = {
    "list": lambda kept: [kept.linear, kept.norm],
    "dict": lambda kept: {"norm": (kept.norm,)},
    "function": lambda kept: lambda x: kept.norm(x),
    "default": lambda kept: lambda x, norm=kept.norm: norm(x),
    "method": lambda kept: kept.forward,
    "partial": lambda kept: functools.partial(torch.relu, kept.norm),
}


@pytest.mark.parametrize("way", WAYS)
def test_deferred_statistics_need_the_layer_that_runs(way: str) -> None:
    """A copy of a module with another way to its batch normalisation would run the original."""
    model = nn.Sequential(Kept(WAYS[way]))
    with pytest.raises(ModelError, match=r"also reaches it by an attribute: Kept\.way"):
        GPipe(model, [1], deferred_batch_norm=True)


def test_attributes_that_lead_elsewhere_are_no_other_way() -> None:
    """A list of other layers, numbers, functions of nothing: all as before."""
    model = nn.Sequential(Kept(lambda kept: [kept.linear, 1, None, torch.relu, {"a": {3}}]))
    converted = convert_deferred_batch_norm(model)
    assert type(converted[0].norm).__name__ == "DeferredBatchNorm1d"


class Again(nn.Module):
    """Recomputes by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = linear(), nn.BatchNorm1d(3, dtype=torch.float64)

    def forward(self, x: Tensor) -> Any:
        return checkpoint(lambda y: self.norm(self.linear(y)), x, use_reentrant=False)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_a_layers_own_recompute_is_not_gathered_again(schedule: str) -> None:
    """In a step it runs before the statistics are settled."""
    plain = nn.Sequential(linear(), Again())
    pipe = GPipe(
        copy.deepcopy(plain), [1, 1], chunks=3, checkpoint="never", deferred_batch_norm=True
    )
    pipe.step(rows(7), loss_fn=torch.sum, reduction="sum", schedule=schedule)
    with torch.no_grad():
        plain(rows(7))
    torch.testing.assert_close(pipe[1].norm.running_var, plain[1].norm.running_var)
    assert pipe[1].norm.num_batches_tracked == 1


def test_a_scripted_batch_norm_is_left_with_a_warning() -> None:
    """It cannot be replaced, and says nothing by itself."""
    inner = torch.jit.script(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)))
    with pytest.warns(UserWarning, match="a scripted batch normalisation is left as it is"):
        GPipe(nn.Sequential(nn.Linear(3, 3), inner), [1, 1], deferred_batch_norm=True)


class Frozen(nn.Sequential):
    """Keeps its batch normalisations in evaluation mode."""

    def train(self, mode: bool = True) -> Frozen:
        super().train(mode)
        for module in self.modules():
            if isinstance(module, nn.BatchNorm1d):
                module.eval()
        return self


class Doubled(nn.Sequential):
    """Does more than its layers when it is called."""

    def __call__(self, x: Any) -> Any:
        return 2 * super().__call__(x)


def test_methods_of_a_chains_own_are_told() -> None:
    """A pipeline has its own; nested chains that have some stay closed."""
    chain = Frozen(nn.Linear(3, 3), nn.BatchNorm1d(3))
    with pytest.warns(UserWarning, match=r"does not take over: Frozen\.train\. Fix:"):
        GPipe(chain, [1, 1])
    flat = gb.flatten(nn.Sequential(chain, nn.Linear(3, 1)))
    assert list(flat) == [chain, flat[1]]
    assert not flat.train()[0][1].training
    nested = nn.Sequential(Doubled(nn.Linear(3, 3)), nn.Linear(3, 1))
    x = torch.ones(2, 3)
    assert torch.equal(gb.flatten(nested)(x), nested(x))
    with pytest.raises(ModelError, match=r"module has a __call__ of its own: Doubled\.__call__"):
        GPipe(nested[0], [1])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        GPipe(nn.Sequential(nn.Linear(3, 3)), [1])


class Scale(nn.Module):
    """Its gradient is the sum of its output."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


@pytest.mark.parametrize("mode", MODES)
def test_first_values_do_not_move_the_dropout_of_a_lazy_layer(mode: Any) -> None:
    """They are drawn in the first forward, and not in its recompute."""
    lazy = nn.Sequential(nn.LazyLinear(8), nn.Dropout(0.5))
    pipe = GPipe(nn.Sequential(lazy, Scale()), [2], chunks=2, checkpoint=mode)
    output = pipe(torch.ones(4, 4))
    output.sum().backward()
    torch.testing.assert_close(pipe[1].weight.grad, output.detach().sum(0))
    weight, bias = pipe[0][0].weight, pipe[0][0].bias
    assert not torch.equal(weight[0, :4], bias[:4])


def test_lazy_layers_of_two_partitions_are_refused_and_metered_in_one() -> None:
    """Whose the values would be is not known before there are any."""
    shared = nn.LazyLinear(3)
    model = nn.Sequential(shared, nn.ReLU(), shared)
    with pytest.raises(DuplicateLayerError, match=r"without values stands twice .*\nFix: run the"):
        GPipe(model, [2, 1], chunks=2)
    pipe = GPipe(nn.Sequential(nn.LazyLinear(3), nn.Linear(3, 1)), [1, 1], chunks=2)
    with measure_memory(pipe) as meter:
        pipe(torch.ones(4, 3)).sum().backward()
    assert meter.peak_bytes[0] >= pipe[0].weight.nbytes


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("chunks", [1, 2])
def test_lazy_layers_may_stay_without_values(chunks: int, frozen: bool, mode: Any) -> None:
    """A forward that does not use one leaves it as it is."""
    layer = Scale()
    layer.add_module("unused", nn.LazyLinear(3))
    if frozen:
        for parameter in layer.unused.parameters():  # type: ignore[union-attr, operator]
            parameter.requires_grad = False
    pipe = GPipe(nn.Sequential(layer, nn.Linear(8, 1)), [1, 1], chunks=chunks, checkpoint=mode)
    pipe(torch.ones(4, 8)).sum().backward()
    assert layer.weight.grad is not None


class Logs(nn.Module):
    """Draws something beside, in its forward only."""

    def __init__(self, drop: bool) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.5 if drop else 0.0)
        self.seen: list[int] = []

    def forward(self, x: Tensor) -> Any:
        if not gb.is_recomputing():
            self.seen.append(int(torch.randint(len(x), ())))
        return self.dropout(x)


@pytest.mark.parametrize("mode", MODES[1:])
def test_a_recompute_that_draws_less_is_refused(mode: Any) -> None:
    """Its dropout would get other numbers; where it draws nothing there are none to be wrong."""
    pipe = GPipe(nn.Sequential(Logs(drop=True), Scale()), [2], chunks=2, checkpoint=mode)
    with pytest.raises(ModelError, match="are drawn 1 times by layer 0 of the chain"):
        pipe(torch.ones(4, 8)).sum().backward()
    pipe = GPipe(nn.Sequential(Logs(drop=False), Scale()), [2], chunks=2, checkpoint=mode)
    pipe(torch.ones(4, 8)).sum().backward()
    assert len(pipe[0].seen) == 2


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("constant", range(3))
def test_a_micro_batch_whose_loss_is_a_constant(mode: Any, schedule: str, constant: int) -> None:
    """It has no gradient, and the others have theirs; if none has, that is an error."""

    def loss_of(output: Tensor, target: Tensor) -> Tensor:
        if not target.any():
            return torch.zeros((), dtype=output.dtype)
        return ((output - target) * target).square().sum()

    target = torch.ones(6, 3, dtype=torch.float64)
    target[2 * constant : 2 * constant + 2] = 0
    plain = nn.Sequential(linear(), linear())
    pipe = GPipe(copy.deepcopy(plain), [1, 1], chunks=3, checkpoint=mode)
    options: dict[str, Any] = {"loss_fn": loss_of, "reduction": "sum", "schedule": schedule}
    loss = pipe.step(rows(6), target=target, **options)
    expected = loss_of(plain(rows(6)), target)
    expected.backward()
    torch.testing.assert_close(loss, expected.detach())
    torch.testing.assert_close(pipe[0].weight.grad, plain[0].weight.grad)
    with pytest.raises(PipelineError, match="the loss needs no gradient"):
        pipe.step(rows(6), target=torch.zeros(6, 3), **options)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("chunks", [1, 3, 4])
def test_a_constant_loss_after_another_one(mode: Any, chunks: int) -> None:
    """What was found out about smaller micro-batches under one loss does not hold for the next."""
    pipe = GPipe(nn.Sequential(linear(), linear()), [1, 1], chunks=chunks, checkpoint=mode)

    def constant(output: Tensor) -> Tensor:
        return torch.zeros((), dtype=output.dtype)

    for _ in range(2):
        assert pipe.step(rows(6), loss_fn=lambda output: output.square().mean()) > 0
        with pytest.raises(PipelineError, match="the loss needs no gradient"):
            pipe.step(rows(6), loss_fn=constant)


def test_verify_leaves_gradients_that_the_loss_finds_by_itself() -> None:
    """A penalty on the models' own weights is not a copy's."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    pipe = GPipe(model, [1, 1], chunks=2)
    model[1].bias.grad = kept = torch.ones(1)
    gb.verify(
        model, pipe, torch.ones(4, 3), loss_fn=lambda y: y.mean() + model[0].weight.square().mean()
    )
    assert model[0].weight.grad is None and model[1].bias.grad is kept
    assert torch.equal(kept, torch.ones(1))


def test_a_pipeline_cannot_be_traced() -> None:
    """The trace would have nothing of the workers in it."""
    pipe = GPipe(nn.Sequential(nn.Linear(3, 3)), [1])
    with pytest.raises(PipelineError, match="a pipeline cannot be traced"):
        torch.jit.trace(pipe, torch.ones(2, 3))
