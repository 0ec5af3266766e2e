"""Copies of inputs, buffers and targets lie in memory as what they are copies of."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from gpipebal import GPipe, verify
from gpipebal.pipeline import with_recompute
from gpipebal.pipeline.values.tensors import copy_of
from gpipebal.schedule import CHECKPOINT_MODES, CheckpointMode

MODES = pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)


class Half(nn.Module):
    """Hand on a slice, with gaps between its rows."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).chunk(2, -1)[0]


class Tripled(nn.Module):
    """Write to what is a copy where the input has gaps, and the input itself where it has none."""

    def forward(self, x: Tensor) -> Tensor:
        whole = x.contiguous()
        whole.mul_(3)
        return whole + x


class OfBuffer(nn.Module):
    """Do the same with a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("table", (torch.arange(32.0) / 100).view(4, 8)[:, :4])

    def forward(self, x: Tensor) -> Tensor:
        whole = self.table.contiguous()
        whole.mul_(3)
        return torch.tanh(self.linear(x) @ (whole + self.table))


def compare(model: nn.Sequential, pipe: GPipe, x: Tensor) -> None:
    """Run both twice; outputs and gradients agree."""
    plain = copy.deepcopy(model)
    for mine, theirs in zip(plain.modules(), model.modules(), strict=True):
        for name, buffer in theirs._buffers.items():
            if buffer is not None:  # deepcopy gives it other strides
                mine._buffers[name] = copy_of(buffer)
    for _ in range(2):
        pipe.zero_grad()
        plain.zero_grad()
        found, expected = pipe(x), plain(x)
        torch.testing.assert_close(found, expected)
        found.square().sum().backward()
        expected.square().sum().backward()
        for one, two in zip(pipe.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(one.grad, two.grad)


@MODES
@pytest.mark.parametrize("chunks", [1, 2, 3])
def test_a_slice_that_crosses_a_cut(checkpoint: CheckpointMode, chunks: int) -> None:
    """`contiguous()` copies it in the first micro-batch, in later ones and in recomputes."""
    model = nn.Sequential(Half(), Tripled()).double()
    pipe = GPipe(model, [1, 1], chunks=chunks, checkpoint=checkpoint)
    compare(model, pipe, torch.randn(6, 4, dtype=torch.double))
    verify(model, pipe, torch.randn(6, 4, dtype=torch.double))


@MODES
@pytest.mark.parametrize("how", ["slice", "step", "expanded", "transposed"])
def test_an_input_with_gaps(checkpoint: CheckpointMode, how: str) -> None:
    """So does it where the mini-batch has gaps, or its elements are one and the same."""
    wide = torch.randn(6, 8, dtype=torch.double)
    x = {
        "slice": wide[:, :4],
        "step": wide[:, ::2],
        "expanded": wide[:, :1].expand(-1, 4),
        "transposed": torch.randn(4, 6, dtype=torch.double).T,
    }[how]
    model = nn.Sequential(Tripled(), nn.Linear(4, 4)).double()
    if how == "transposed":  # dense: a copy that the plain model makes as well
        assert not x.is_contiguous() and copy_of(x).stride() == x.stride()
    compare(model, GPipe(model, [2], chunks=2, checkpoint=checkpoint), x)


@MODES
def test_a_buffer_with_gaps(checkpoint: CheckpointMode) -> None:
    """The recompute's copy of it lies as it does itself, so the gradient is that of the forward."""
    model = nn.Sequential(OfBuffer())
    compare(model, GPipe(model, [1], chunks=2, checkpoint=checkpoint), torch.randn(6, 4))


@MODES
@pytest.mark.parametrize("dims", [0, None])
def test_a_target_with_gaps(checkpoint: CheckpointMode, dims: int | None) -> None:
    """A loss that copies it only if it must sees the same strides whenever it is run."""

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        whole = target.contiguous()
        whole.mul_(3)
        return (output - whole - target).square().mean()

    model = nn.Sequential(nn.Linear(4, 4))
    x, target = torch.randn(6, 4), torch.randn(6, 8)[: 6 if dims == 0 else 3, :4]
    pipe = GPipe(model, [1], chunks=2, checkpoint=checkpoint)
    found = pipe.step(x, target=target, loss_fn=loss_fn, target_dims=dims)
    parts = target.split(3) if dims == 0 else [target, target]
    losses = [loss_fn(model(one), two) for one, two in zip(x.split(3), parts, strict=True)]
    torch.testing.assert_close(found, torch.stack(losses).mean().detach())


def test_a_run_that_is_recomputed_by_itself() -> None:
    """A run of layers inside a partition keeps strides likewise, also of what is expanded."""
    model = nn.Sequential(nn.Linear(4, 1), nn.Identity(), Tripled(), nn.Linear(4, 4)).double()
    model[1].forward = lambda x: x.expand(-1, 4)  # type: ignore[method-assign]
    again = with_recompute(model, [[2, 3]])
    x = torch.randn(6, 4, dtype=torch.double)
    for _ in range(2):
        torch.testing.assert_close(again(x), model(x))


def test_copies() -> None:
    """Strides, values, gradients; and nothing is held that is not there."""
    base = torch.randn(3, 8)
    for one in (base, base[:, ::2], base.T, base[:, :1].expand(-1, 5), base[1:, 3:4].T, base[:0]):
        leaf = one.detach().requires_grad_()
        found = copy_of(leaf)
        torch.testing.assert_close(found, one)
        assert found.stride() == one.stride() or not one.numel()
        assert found.untyped_storage().data_ptr() != one.untyped_storage().data_ptr()
        weights = torch.randn(one.shape)
        (found * weights).sum().backward()
        torch.testing.assert_close(leaf.grad, weights)
    assert copy_of(base[:, :1].expand(-1, 5)).untyped_storage().nbytes() <= base.nbytes
    sliding = torch.arange(6.0).as_strided((4, 3), (1, 1))
    torch.testing.assert_close(copy_of(sliding), sliding)


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_copies_of_quantised_numbers() -> None:
    """They are dense: torch lays no quantised numbers out with gaps."""
    whole = torch.quantize_per_tensor(torch.randn(3, 4), 0.1, 0, torch.qint8)
    for one in (whole, whole.T, whole[:, ::2]):
        assert torch.equal(copy_of(one).dequantize(), one.dequantize())
