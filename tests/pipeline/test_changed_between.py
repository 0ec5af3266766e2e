"""What layers write to, and what changes between steps or between a forward and its backward."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gpipebal as gb
from gpipebal.pipeline import measure_memory, with_recompute
from gpipebal.pipeline.layers.buffers import SMALL
from gpipebal.schedule import CheckpointMode
from gpipebal.skip import pop, skippable, stash

pytestmark = pytest.mark.timeout(120)

MODES: list[CheckpointMode] = ["never", "except_last", "always"]


@skippable(stash=["kept"])
class Stash(nn.Module):
    """Stashes its input, and hands it on."""

    def forward(self, x: Tensor) -> Any:
        yield stash("kept", x)
        return x.view_as(x)


@skippable(pop=["kept"])
class Pop(nn.Module):
    """Adds what was stashed."""

    def forward(self, x: Tensor) -> Any:
        kept = yield pop("kept")
        return x + kept


class Twice(nn.Module):
    """Hands its input on in two places."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, x


class WriteToFirst(nn.Module):
    """Writes to the first of two values."""

    def forward(self, value: tuple[Tensor, Tensor]) -> Tensor:
        return value[0].relu_() * 2 + value[1]


def stashed() -> nn.Sequential:
    """A value is stashed, and then written to in place."""
    torch.manual_seed(0)
    layers = [nn.Linear(4, 4), Stash(), nn.ReLU(inplace=True), nn.Linear(4, 4), Pop()]
    return nn.Sequential(*layers).double()


def in_a_tuple() -> nn.Sequential:
    """The same with a tuple."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), Twice(), WriteToFirst(), nn.Linear(4, 4)).double()


def gradients(model: nn.Module) -> list[Tensor]:
    """Return those of all parameters."""
    return [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("make", [stashed, in_a_tuple])
@pytest.mark.parametrize("mode", MODES)
def test_a_run_writes_to_what_others_have_too(
    make: Callable[[], nn.Sequential], mode: CheckpointMode
) -> None:
    """A run that begins with a layer in place does to its input what the layer does alone."""
    x = torch.randn(6, 4, dtype=torch.float64)
    plain, model = make(), make()
    expected = plain(x)
    expected.sum().backward()
    n = len(model)
    for runs in ([[2]], [[2, 3]]):
        again = with_recompute(model, runs)
        for run in (again, gb.GPipe(again, [n], chunks=2, checkpoint=mode)):
            for _ in range(2):
                model.zero_grad()
                output = run(x)
                output.sum().backward(retain_graph=True)
                model.zero_grad()
                output.sum().backward()
                torch.testing.assert_close(output, expected)
                torch.testing.assert_close(gradients(model), gradients(plain))
            with torch.no_grad():
                torch.testing.assert_close(run(x), expected)


@pytest.mark.parametrize("mode", MODES)
def test_a_run_cannot_hide_a_write_behind_a_cut(mode: CheckpointMode) -> None:
    """What is refused without runs is refused with them."""
    pipe = gb.GPipe(with_recompute(stashed(), [[2]]), [2, 3], chunks=2, checkpoint=mode)
    with pytest.raises(gb.errors.ModelError, match="writes to a tensor whose memory is also"):
        pipe(torch.randn(6, 4, dtype=torch.float64))
    pipe.close()


class Parts(nn.Module):
    """Gives two views of its input."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, x[:, :]


def test_a_run_that_writes_to_one_of_two_views_is_refused() -> None:
    """A recompute works on copies, which have no memory in common."""
    model = nn.Sequential(nn.Linear(4, 4), Parts(), WriteToFirst(), nn.Linear(4, 4))
    x = torch.randn(6, 4)
    model(x).sum().backward()
    with pytest.raises(gb.errors.ModelError, match=r"another of its inputs: \['2'\]"):
        with_recompute(model, [[2]])(x)


@pytest.mark.parametrize("balance", [[2, 1], [1, 2]])
def test_a_run_never_writes_to_the_mini_batch(balance: list[int]) -> None:
    """Neither where a mini-batch of one row has been before, which no recompute follows."""
    torch.manual_seed(0)
    layers = [nn.Linear(4, 4), nn.Linear(4, 4)]
    begin = 0 if balance == [2, 1] else 1
    layers.insert(begin, nn.ReLU(inplace=True))
    for trained in (True, False):
        model = nn.Sequential(*copy.deepcopy(layers)).double()
        model[:2].requires_grad_(trained)
        plain = copy.deepcopy(model)
        again = with_recompute(model, [[begin]])
        pipe = gb.GPipe(again, balance, chunks=2, checkpoint="except_last")
        for rows in (1, 8, 8):
            x = torch.randn(rows, 4, dtype=torch.float64)
            before = x.clone()
            pipe(x).sum().backward()
            plain(before.clone()).sum().backward()
            assert torch.equal(x, before)
            torch.testing.assert_close(gradients(model), gradients(plain))
        pipe.close()


class Outer(nn.Module):
    """A layer with another inside."""

    def __init__(self) -> None:
        super().__init__()
        self.inner: nn.Module = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


@pytest.mark.parametrize("mode", MODES)
def test_buffers_that_come_into_a_run_later_count_once(mode: CheckpointMode) -> None:
    """Modules may be put into the layers of a run between two steps."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), Outer(), nn.Linear(4, 4)).double()
    plain = copy.deepcopy(model)
    pipe = gb.GPipe(with_recompute(model, [[1, 2]]), [1, 2], chunks=2, checkpoint=mode)
    for step in range(3):
        x = torch.randn(8, 4, dtype=torch.float64)
        if step == 1:
            for one in (model, plain):
                one[1].inner = nn.BatchNorm1d(4).double()
        pipe(x).square().sum().backward()
        torch.cat([plain(part) for part in x.split(4)]).square().sum().backward()
    assert int(model[1].inner.num_batches_tracked) == 4
    torch.testing.assert_close(dict(model.named_buffers()), dict(plain.named_buffers()))
    pipe.close()


@pytest.mark.parametrize("balance", [[1, 3], [2, 2], [1, 1, 2]])
def test_a_balance_that_cuts_a_run_is_refused(balance: list[int]) -> None:
    """A partition that begins inside of one would run nothing of it."""
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    again = with_recompute(model, [[0, 1, 2]])
    with pytest.raises(gb.errors.BalanceError, match=r"partition 1 begins with layer '\d'"):
        gb.GPipe(again, balance)
    gb.GPipe(again, [3, 1]).close()


@pytest.mark.parametrize("inside", [False, True])
def test_statistics_move_once_behind_a_warm_up_with_zeros(inside: bool) -> None:
    """The mean of large normalisation layers may stay what it was at first, and move later."""
    n = SMALL // 4 + 100
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, n, bias=False), nn.BatchNorm1d(n), nn.Linear(n, 2))
    plain = copy.deepcopy(model)
    layers = with_recompute(model, [[1, 2]]) if inside else model
    pipe = gb.GPipe(layers, [3], chunks=2, checkpoint="never" if inside else "always")
    for x in (torch.zeros(8, 4), torch.randn(8, 4)):
        pipe(x).sum().backward()
        for part in x.split(4):
            plain(part)
    torch.testing.assert_close(dict(model.named_buffers()), dict(plain.named_buffers()))
    pipe.close()


class Average(nn.Module):
    """Keeps a moving average of what it sees, with as many elements as a large buffer has."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(SMALL))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.mean.mul_(0.9).add_(0.1 * x.mean())
        return x + self.mean[0]


def test_a_write_that_changes_nothing_is_a_write() -> None:
    """A moving average of zeros is written to as later ones are."""
    model = nn.Sequential(nn.Linear(4, 4, bias=False), Average(), nn.Linear(4, 2))
    plain = copy.deepcopy(model)
    pipe = gb.GPipe(model, [3], chunks=2, checkpoint="always")
    for x in (torch.zeros(8, 4), torch.randn(8, 4)):
        pipe(x).sum().backward()
        for part in x.split(4):
            plain(part)
    torch.testing.assert_close(model[1].mean, plain[1].mean)
    pipe.close()


def test_a_tied_parameter_may_be_frozen_before_the_backward() -> None:
    """As plain autograd: what is frozen by then gets no gradient."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    model[2].weight = model[0].weight
    pipe = gb.GPipe(model, [2, 1], chunks=2, checkpoint="never")
    output = pipe(torch.randn(4, 4))
    model[0].weight.requires_grad_(False)
    output.sum().backward()
    assert model[0].weight.grad is None and model[2].bias.grad is not None
    pipe.close()


def _cast_there_and_back(layer: nn.Module) -> None:
    layer.to(torch.bfloat16).to(torch.float32)


def _replace_data(layer: nn.Linear) -> None:
    layer.weight.data = torch.randn(4, 4)


@pytest.mark.parametrize("change", [_cast_there_and_back, _replace_data])
def test_other_values_before_a_recompute_are_refused(change: Callable[[nn.Module], None]) -> None:
    """A recompute with other values than the forward had would give wrong gradients."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    pipe = gb.GPipe(model, [1, 1], chunks=2, checkpoint="always")
    output = pipe(torch.randn(4, 4))
    before = model[0].weight.data  # so that its memory is not given again
    change(model[0])
    with pytest.raises(RuntimeError, match="cannot be recomputed"):
        output.sum().backward()
    assert before.shape == (4, 4)
    pipe.close()


class Both(nn.Module):
    """Hands its input on beside its output, for a second term of the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.linear(x), x


@pytest.mark.parametrize("last", [nn.Identity, Both])
def test_what_the_loss_is_given_as_it_came_lives_for_a_micro_batch(last: type[nn.Module]) -> None:
    """With '1f1b' one micro-batch is in flight in the last partition, however many there are."""
    counted = []
    for chunks in (2, 16):
        model = nn.Sequential(nn.Linear(8, 64), last())
        pipe = gb.GPipe(model, [1, 1], chunks=chunks, checkpoint="never")

        def loss_of(output: Tensor | tuple[Tensor, Tensor]) -> Tensor:
            values = output if isinstance(output, tuple) else (output,)
            return sum((value.square().mean() for value in values), torch.zeros(()))

        for _ in range(2):
            model.zero_grad()
            with measure_memory(pipe) as meter:
                pipe.step(torch.randn(8 * chunks, 8), loss_fn=loss_of, schedule="1f1b")
        counted.append(meter.peak_bytes[1])
        pipe.close()
    # One more may wait for the last partition.
    assert counted[1] <= counted[0] + 2 * 4 * 8 * 64, counted
