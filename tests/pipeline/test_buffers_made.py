"""Buffers that a forward makes: recomputes start without them, and leave no trace in them."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from chains import run_plain
from torch import Tensor, nn

import gpipebal as gb
from gpipebal.errors import ModelError
from gpipebal.schedule import CHECKPOINT_MODES, CheckpointMode


class FromNone(nn.Module):
    """Adds up what it has seen, in a buffer that is None at first."""

    total: Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.register_buffer("total", None)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        seen = y.detach().sum(0)
        self.total = seen if self.total is None else self.total + seen
        return y * self.total


class Late(nn.Module):
    """Counts its forwards in a buffer that the first one registers."""

    n: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        if "n" not in self._buffers:
            self.register_buffer("n", torch.zeros(()))
            self.register_buffer("twice", torch.zeros(()))
        self.n = self.n + 1
        self.twice = 2 * self.n
        y: Tensor = self.linear(x)
        return y * self.n + self.twice


class Gone(nn.Module):
    """Takes a buffer away in the first forward."""

    first: Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.register_buffer("first", torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x) * (1 if self.first is None else 2)
        self.first = None
        return y


class Deleted(nn.Module):
    """Deletes a buffer in the first forward, and its place with it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.register_buffer("first", torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        if hasattr(self, "first"):
            del self.first
            return 2 * y
        return y


@pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)
@pytest.mark.parametrize("make", [FromNone, Late, Gone, Deleted])
def test_buffers_that_come_and_go(
    make: Callable[[], nn.Module], checkpoint: CheckpointMode
) -> None:
    """Outputs, gradients and buffers are the plain model's, in the first mini-batch and later."""
    plain = nn.Sequential(make(), nn.Linear(3, 2)).double()
    model = copy.deepcopy(plain)
    pipe = gb.GPipe(model, [1, 1], chunks=3, checkpoint=checkpoint)
    for _ in range(2):
        inputs = torch.rand(6, 3, dtype=torch.float64)
        plain.zero_grad()
        pipe.zero_grad()
        theirs, mine = run_plain(plain, inputs, 3), pipe(inputs)
        torch.testing.assert_close(mine, theirs)
        theirs.square().sum().backward()
        mine.square().sum().backward()
        for one, other in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(one.grad, other.grad)
        assert list(model.state_dict()) == list(plain.state_dict())
        for one, other in zip(model.buffers(), plain.buffers(), strict=True):
            torch.testing.assert_close(one, other)


@pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)
def test_scripted_layers_have_buffers(checkpoint: CheckpointMode) -> None:
    """A scripted batch normalisation is recomputed from its own statistics."""
    plain = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).double()
    model = copy.deepcopy(plain)
    model[1] = torch.jit.script(model[1])
    pipe = gb.GPipe(model, [1, 2], chunks=3, checkpoint=checkpoint)
    inputs = torch.rand(6, 4, dtype=torch.float64)
    pipe(inputs).square().sum().backward()
    run_plain(plain, inputs, 3).square().sum().backward()
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)
    for mine, theirs in zip(model.buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(mine, theirs)


class Sometimes(nn.Module):
    """Hands on a second output only for positive rows."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        return x, (x.sum(1) if bool(x[0, 0] > 0) else None)


@pytest.mark.parametrize("rows", [[-1.0, -1.0, 1.0, 1.0], [1.0, 1.0, -1.0, -1.0]])
def test_an_output_of_some_micro_batches_only_is_refused(rows: list[float]) -> None:
    """It would be lost with the others."""
    pipe = gb.GPipe(nn.Sequential(Sometimes()), [1], chunks=2)
    inputs = torch.tensor(rows)[:, None].expand(4, 2).contiguous()
    with pytest.raises(gb.errors.ModelError, match=r"differ: .*\[1\] is a .* in micro-batch 1"):
        pipe(inputs)


class Masked(nn.Module):
    """A layer with a mask, which several may share."""

    def __init__(self, mask: Tensor) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("mask", mask)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.mask  # type: ignore[no-any-return, operator]


def masked(mode: CheckpointMode | None) -> tuple[nn.Sequential, nn.Module]:
    """Return a chain whose layers share a mask, and what runs it."""
    torch.manual_seed(0)
    mask = torch.ones(4)
    model = nn.Sequential(Masked(mask), nn.Tanh(), Masked(mask))
    run = model if mode is None else gb.GPipe(model, [2, 1], chunks=2, checkpoint=mode)
    return model, run


@pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)
def test_a_shared_buffer_that_is_replaced_is_the_forwards_in_a_recompute(
    checkpoint: CheckpointMode,
) -> None:
    """Of two mini-batches each is recomputed with its own mask, in both partitions."""
    found = []
    for mode in (None, checkpoint):
        model, run = masked(mode)
        outputs = []
        for mask in (torch.tensor([1.0, 0, 1, 0]), torch.tensor([0.0, 1, 0, 1])):
            for k in (0, 2):
                model[k].mask = mask
            outputs.append(run(torch.ones(4, 4)))
        (outputs[0].sum() + 2 * outputs[1].sum()).backward()
        found.append([parameter.grad for parameter in model.parameters()])
    torch.testing.assert_close(found[1], found[0])


def test_a_shared_buffer_that_is_written_to_before_a_recompute_is_refused() -> None:
    """As torch refuses it where nothing is recomputed; the next mini-batch is right."""
    model, run = masked("always")
    output = run(torch.ones(4, 4))
    model[0].mask.mul_(0.5)  # type: ignore[union-attr, operator]
    with pytest.raises(ModelError, match="'mask' of a Masked belongs to several partitions"):
        output.sum().backward()
    run(torch.ones(4, 4)).sum().backward()
