"""A parameter's new gradient lies in memory of its own, whatever the first backward leaves it."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gpipebal as gb
from gpipebal.pipeline.minibatch.new_gradients import NewGradients

MODES = ["always", "except_last", "never"]


class AddRow(nn.Module):
    """Add a learned row: of one row, the gradients of both are that of the sum."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.row = nn.Parameter(torch.randn(width))

    def forward(self, x: Tensor) -> Tensor:
        return x.view(x.shape) + self.row.unsqueeze(0)


class AddRows(nn.Module):
    """Add two: their gradients are each other's."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Parameter(torch.randn(4)), nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.one.unsqueeze(0) + self.two[None]


class ReadsLate(nn.Module):
    """Give time to others before the gradient is read."""

    def forward(self, x: Tensor) -> Tensor:
        y = x * 1.0
        if y.requires_grad:
            y.register_hook(lambda gradient: time.sleep(0.02))
        return y


def gradients(module: nn.Module, run: Any) -> list[Tensor]:
    """Return the gradients that a step leaves."""
    module.zero_grad()
    run()
    return [p.grad.clone() for p in module.parameters() if p.grad is not None]


def assert_same(found: list[Tensor], expected: list[Tensor]) -> None:
    """Compare gradients, one by one."""
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


@pytest.fixture(autouse=True)
def _double() -> Any:
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("schedule", [None, "gpipe", "1f1b"])
def test_at_a_cut(mode: str, schedule: str | None) -> None:
    """The partition before reads the gradient late; the next micro-batch has been added by then."""
    model = nn.Sequential(nn.Linear(4, 4), ReadsLate(), AddRow(), nn.Linear(4, 4), nn.Tanh())
    x = torch.randn(4, 4)
    expected = gradients(model, lambda: model(x).square().mean().backward())
    pipe = gb.GPipe(model, [2, 3], chunks=4, checkpoint=mode)

    def run() -> None:
        if schedule is None:
            pipe(x).square().mean().backward()
        else:
            pipe.step(x, loss_fn=lambda y: y.square().mean(), schedule=schedule)

    assert_same(gradients(model, run), expected)


@pytest.mark.parametrize("mode", MODES)
def test_of_the_input(mode: str) -> None:
    """The input's gradients are joined when all micro-batches have been through."""
    model, x = nn.Sequential(AddRow(), nn.Linear(4, 4), nn.Tanh()), torch.randn(4, 4)
    x.requires_grad_()
    expected = gradients(model, lambda: model(x).sin().sum().backward())
    of_input, x.grad = x.grad, None
    pipe = gb.GPipe(model, [1, 2], chunks=4, checkpoint=mode)
    found = gradients(model, lambda: pipe(x).sin().sum().backward())
    assert_same([*found, x.grad], [*expected, of_input])  # type: ignore[list-item]


def test_of_the_target() -> None:
    """A loss with a parameter of its own, and a target that wants a gradient."""

    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.row = nn.Parameter(torch.randn(4))

        def forward(self, output: Tensor, target: Tensor) -> Tensor:
            return (output + target.view(target.shape) + self.row.unsqueeze(0)).sin().sum()

    model, loss = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), Loss()
    x, target = torch.randn(4, 4), torch.randn(4, 4, requires_grad=True)
    every = nn.ModuleList([model, loss, nn.ParameterList([nn.Parameter(torch.zeros(1))])])
    expected = gradients(every, lambda: loss(model(x), target).backward())
    of_target, target.grad = target.grad, None
    pipe = gb.GPipe(model, [1, 1], chunks=4)
    found = gradients(every, lambda: pipe.step(x, target=target, loss_fn=loss, reduction="sum"))
    assert_same([*found, target.grad], [*expected, of_target])  # type: ignore[list-item]


@pytest.mark.parametrize("mode", MODES)
def test_of_the_caller(mode: str) -> None:
    """The last layer: what the caller gave, and what its own graph reads, stays as it was."""
    model, outer = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), AddRow()), nn.Linear(4, 4)
    x, every = torch.randn(4, 4), nn.ModuleList([model, outer])
    # Cut where the partition's own gradient is another piece of memory.
    pipe = gb.GPipe(model, [1, 2], chunks=4, checkpoint=mode)

    def step(f: Any) -> None:
        shared = outer(x)
        (shared + f(x)).sin().sum().backward()

    expected = gradients(every, lambda: step(model))
    assert_same(gradients(every, lambda: step(pipe)), expected)
    given = torch.randn(4, 4)
    before = given.clone()
    model.zero_grad()
    pipe(x).backward(given)
    assert torch.equal(given, before)


@pytest.mark.parametrize("mode", MODES)
def test_of_two_parameters(mode: str) -> None:
    """Each is added to by itself."""
    model, x = nn.Sequential(nn.Linear(4, 4), AddRows(), nn.Linear(4, 4)), torch.randn(4, 4)
    expected = gradients(model, lambda: model(x).sin().sum().backward())
    pipe = gb.GPipe(model, [1, 2], chunks=4, checkpoint=mode)
    assert_same(gradients(model, lambda: pipe(x).sin().sum().backward()), expected)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("balance", [[3], [1, 2]])
def test_beside_a_sparse_gradient(balance: list[int], mode: str) -> None:
    """The values of an embedding's gradient may be the memory of a dense one."""
    model = nn.Sequential(nn.Embedding(10, 4, sparse=True), AddRow(), nn.Linear(4, 4))
    x = torch.tensor([1, 2, 3, 4])
    expected = gradients(model, lambda: model(x).sin().sum().backward())
    pipe = gb.GPipe(model, balance, chunks=4, checkpoint=mode)
    found = gradients(model, lambda: pipe(x).sin().sum().backward())
    assert_same([g.to_dense() for g in found], [g.to_dense() for g in expected])


def test_of_a_loss_with_a_leaf_of_its_own() -> None:
    """A tensor that requires a gradient is no less than a parameter."""
    row = torch.randn(4, requires_grad=True)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    x, target = torch.randn(4, 4), torch.randn(4, 4, requires_grad=True)

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return (output + target.view(target.shape) + row.unsqueeze(0)).sin().sum()

    loss(model(x), target).backward()
    expected = [row.grad, target.grad]
    row.grad = target.grad = None
    gb.GPipe(model, [1, 2], chunks=4).step(x, target=target, loss_fn=loss, reduction="sum")
    assert_same([row.grad, target.grad], expected)  # type: ignore[list-item]


@pytest.mark.parametrize("mode", MODES)
def test_after_a_hook_has_taken_a_gradient(mode: str) -> None:
    """The next one that a parameter gets is as new as the first."""
    model = nn.Sequential(nn.Linear(4, 4), ReadsLate(), AddRow(), nn.Linear(4, 4), nn.Tanh())
    x, row = torch.randn(8, 4), model[2].row
    assert isinstance(row, nn.Parameter)
    expected = gradients(model, lambda: model(x).sin().sum().backward())[:2]
    calls = []

    def take(parameter: Tensor) -> None:
        calls.append(1)
        if len(calls) % 2 == 0:
            parameter.grad = None

    row.register_post_accumulate_grad_hook(take)
    pipe = gb.GPipe(model, [2, 3], chunks=8, checkpoint=mode)
    assert_same(gradients(model, lambda: pipe(x).sin().sum().backward())[:2], expected)
    assert len(calls) == 8


def test_of_a_parameter_made_in_the_first_forward() -> None:
    """Only the first backward knows of it."""

    class Late(AddRow):
        def forward(self, x: Tensor) -> Tensor:
            if self.row.numel() == 0:
                self.row = nn.Parameter(torch.ones(4))
            return super().forward(x)

    x = torch.randn(4, 4)
    model = nn.Sequential(nn.Linear(4, 4), ReadsLate(), Late(0), nn.Linear(4, 4), nn.Tanh())
    pipe = gb.GPipe(model, [2, 3], chunks=4, checkpoint="never")
    found = gradients(model, lambda: pipe.step(x, loss_fn=lambda y: y.sin().sum(), reduction="sum"))
    assert_same(found, gradients(model, lambda: model(x).sin().sum().backward()))


@pytest.mark.filterwarnings("error")
def test_what_stands_in_a_parameters_place_is_left_alone() -> None:
    """Under `functional_call` it is not a leaf, and has no gradient of its own."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layers = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
            self.pipe = gb.GPipe(layers, [2, 1], chunks=2)

        def forward(self, x: Tensor) -> Tensor:
            return self.pipe.step(x, loss_fn=lambda y: y.sin().sum())

    net = Net()
    base = {name: p.detach().requires_grad_() for name, p in net.named_parameters()}
    moved = {name: value.clone() for name, value in base.items()}
    torch.func.functional_call(net, moved, (torch.randn(4, 4),))
    assert all(value.grad is not None for value in base.values())


def test_what_stood_in_a_parameters_place_in_the_forward() -> None:
    """The gradients are those of the leaves that were lent, though these have been taken back."""
    model = nn.Sequential(nn.Linear(4, 4), ReadsLate(), AddRow(), nn.Tanh())
    pipe, x = gb.GPipe(model, [2, 2], chunks=4, checkpoint="never"), torch.randn(4, 4)
    found = []
    for module in (model, pipe):
        lent = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
        torch.func.functional_call(module, lent, (x,)).sin().sum().backward()
        found.append([one.grad for one in lent.values()])
    assert_same(*found)


def test_only_what_is_shared_is_copied() -> None:
    """Parts of one piece that have no element in common stay where they are."""
    apart, shared, other, late = (nn.Parameter(torch.zeros(2)) for _ in range(4))
    new = NewGradients()
    new.begin([apart, shared, other])
    piece, travels = torch.arange(6.0), torch.arange(4.0)
    apart.grad, shared.grad, other.grad = piece[:2], travels[2:], piece[2:4]
    places = [p.grad.data_ptr() for p in (apart, shared, other)]
    new.part_from([travels[:3], None, torch.empty(0)])
    assert [p.grad.data_ptr() for p in (apart, other)] == places[::2]
    assert shared.grad.data_ptr() != places[1]
    assert shared.grad.tolist() == [2.0, 3.0]
    # Once parted, never again; and who comes later is looked at then.
    new.add([late, shared])
    late.grad, shared.grad = travels[:2], travels[2:]
    new.part_from([travels])
    assert shared.grad.data_ptr() == travels[2:].data_ptr()
    assert late.grad.data_ptr() != travels.data_ptr()


def test_of_several_in_one_place_one_stays() -> None:
    """Unless something else lies there, or they touch it in a chain."""
    one, two, three = (nn.Parameter(torch.zeros(2)) for _ in range(3))
    new = NewGradients()
    new.begin([one, two, three])
    piece = torch.arange(6.0)
    one.grad, two.grad, three.grad = piece[:2], piece[1:3], piece[3:5]
    places = [p.grad.data_ptr() for p in (one, two, three)]
    new.part_from([])
    assert [p.grad.data_ptr() == at for p, at in zip((one, two, three), places, strict=True)] == [
        True,
        False,
        True,
    ]
    assert two.grad.tolist() == [1.0, 2.0]


class ScaleByTable(nn.Module):
    """Use a table of a row for each row of the mini-batch, which the caller can use as it is."""

    def __init__(self, rows: int, width: int) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(rows, width))
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.table.sum(0)


@pytest.mark.parametrize("checkpoint", MODES)
@pytest.mark.parametrize("use", ["view_as", "flatten", "transposed", "itself"])
def test_gradient_that_the_callers_graph_gave_first_is_not_added_to_in_place(
    checkpoint: Any, use: str
) -> None:
    """Behind a view of a parameter its gradient is that of the output, which travels back."""
    uses = {
        "view_as": lambda table, out: out + table.view_as(out),
        "flatten": lambda table, out: out.flatten() + table.flatten(),
        "transposed": lambda table, out: out + table.t().t(),
        "itself": lambda table, out: out + table,
    }
    torch.manual_seed(0)
    x = torch.randn(4, 3, dtype=torch.float64)
    model = nn.Sequential(ScaleByTable(4, 3), nn.Linear(3, 3)).double()
    side = nn.Linear(3, 3).double()  # whose backward comes behind the pipeline's
    plain, plain_side = copy.deepcopy(model), copy.deepcopy(side)

    def run(run_model: Any, layers: nn.Sequential, beside: nn.Linear) -> None:
        shift = beside(x)
        out = uses[use](layers[0].table, run_model(x) + shift)
        out.square().sum().backward()

    run(lambda x: torch.cat([plain(part) for part in x.split(2)]), plain, plain_side)
    run(gb.GPipe(model, [1, 1], chunks=2, checkpoint=checkpoint), model, side)
    expected = [*plain.parameters(), *plain_side.parameters()]
    for mine, theirs in zip([*model.parameters(), *side.parameters()], expected, strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)


def test_gradient_that_was_there_before_stays_where_it_is() -> None:
    """A gradient that is a part of one flat buffer of the caller's is added to there."""
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 1, bias=False))
    flat = torch.zeros(12)
    for parameter, part in zip(model.parameters(), (flat[:9], flat[9:]), strict=True):
        parameter.grad = part.view_as(parameter)
    gb.GPipe(model, [1, 1], chunks=2)(torch.ones(4, 3)).sum().backward()
    assert flat.count_nonzero() == 12


@pytest.mark.parametrize("checkpoint", MODES)
def test_gradients_cleared_between_forward_and_backward_change_nothing(checkpoint: Any) -> None:
    """The usual training loop: old gradients are still there at the forward; a graph is kept."""
    torch.manual_seed(0)
    x = torch.randn(4, 3, dtype=torch.float64)
    model = nn.Sequential(ScaleByTable(4, 3), nn.Linear(3, 3)).double()
    plain = copy.deepcopy(model)
    pipe = gb.GPipe(model, [1, 1], chunks=2, checkpoint=checkpoint)

    def train(run_model: Any, layers: nn.Sequential) -> list[Any]:
        optimizer = torch.optim.SGD(layers.parameters(), lr=0.01)
        found = []
        for _ in range(3):
            out = run_model(x)
            loss = (out + layers[0].table.view_as(out)).square().sum()
            for again in (True, False):
                optimizer.zero_grad()
                loss.backward(retain_graph=again)
                found += [p.grad.clone() for p in layers.parameters()]
            optimizer.step()
        return found

    expected = train(lambda x: torch.cat([plain(part) for part in x.split(2)]), plain)
    torch.testing.assert_close(train(pipe, model), expected)


def test_a_flat_gradient_may_be_attached_after_the_forward() -> None:
    """A caller's `zero_grad` puts parts of one tensor into `.grad`: they stay there."""

    def run(make: Callable[[nn.Sequential], nn.Module]) -> Tensor:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 4), nn.Tanh())
        net, parameters = make(model), list(model.parameters())
        flat = torch.zeros(sum(parameter.numel() for parameter in parameters))
        x = torch.arange(8)
        for _ in range(2):
            # A head outside of the pipeline has the first weight too.
            loss = F.cross_entropy(net(x) @ model[0].weight.T, x)
            flat.zero_()
            start = 0
            for parameter in parameters:
                end = start + parameter.numel()
                parameter.grad = flat[start:end].view_as(parameter)
                start = end
            loss.backward()
        return flat

    mine = run(lambda model: gb.GPipe(model, [1, 2], chunks=2))
    torch.testing.assert_close(mine, run(lambda model: model))


class AddBuffer(nn.Module):
    """Add a row that is trained, and that is no parameter."""

    row: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("row", torch.randn(4).requires_grad_())

    def forward(self, x: Tensor) -> Tensor:
        return x.view(x.shape) + self.row.unsqueeze(0)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("schedule", [None, "gpipe", "1f1b"])
def test_of_a_buffer(mode: str, schedule: str | None) -> None:
    """A buffer that requires a gradient gets one as a parameter does."""
    model = nn.Sequential(nn.Linear(4, 4), ReadsLate(), AddBuffer(), nn.Linear(4, 4), nn.Tanh())
    plain, x = copy.deepcopy(model), torch.randn(4, 4)
    plain(x).square().mean().backward()
    pipe = gb.GPipe(model, [2, 3], chunks=4, checkpoint=mode)
    if schedule is None:
        pipe(x).square().mean().backward()
    else:
        pipe.step(x, loss_fn=lambda y: y.square().mean(), schedule=schedule)
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)
    torch.testing.assert_close(model[2].row.grad, plain[2].row.grad)


@pytest.mark.parametrize("mode", MODES)
def test_of_a_buffer_that_the_callers_graph_uses(mode: str) -> None:
    """Its first gradient is that of the output, which travels back."""
    model = nn.Sequential(AddBuffer(), nn.Linear(4, 4))
    side = nn.Linear(4, 4)
    plain, plain_side = copy.deepcopy(model), copy.deepcopy(side)
    x = torch.randn(4, 4)

    def run(f: Any, layers: nn.Sequential, beside: nn.Linear) -> None:
        shift = beside(x).sum(0)
        ((f(x).sum(0) + shift).flatten() + layers[0].row.flatten()).square().sum().backward()

    run(plain, plain, plain_side)
    run(gb.GPipe(model, [1, 1], chunks=2, checkpoint=mode), model, side)
    torch.testing.assert_close(model[0].row.grad, plain[0].row.grad)
    for mine, theirs in zip(side.parameters(), plain_side.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)
