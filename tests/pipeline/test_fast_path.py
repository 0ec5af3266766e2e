"""Attention layers of torch in evaluation mode, whose fast path computes otherwise."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gpipebal as gb
from gpipebal.pipeline import GPipe, with_recompute
from gpipebal.schedule import CHECKPOINT_MODES, CheckpointMode

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors"),
]
MODES = pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)


class Padded(nn.Module):
    """An encoder that leaves out the positions from the fourth on: the fast path makes them 0."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)

    def forward(self, x: Tensor) -> Tensor:
        padding = torch.zeros(x.shape[:2], dtype=torch.bool)
        padding[:, 3:] = True
        y: Tensor = self.encoder(x, src_key_padding_mask=padding)
        return y


class Distance(nn.Module):
    """A loss that compares what an encoder makes of the output with nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = Padded().requires_grad_(False)

    def forward(self, output: Tensor) -> Tensor:
        y: Tensor = self.encoder(output)
        return y.square().sum()


def square(output: Tensor) -> Tensor:
    """Return the sum of the squares."""
    return output.square().sum()


def compare(model: nn.Sequential, pipe: GPipe, loss_fn: Callable[..., Any], inside: bool) -> None:
    """Compare loss and gradients of a step with those of the plain model."""
    inputs = torch.randn(6, 5, 8)
    expected = loss_fn(model(inputs))
    expected.backward()
    if inside:
        found = pipe.step(inputs, loss_fn=loss_fn, reduction="sum")
    else:
        found = loss_fn(pipe(inputs))
        found.backward()
    torch.testing.assert_close(found, expected)
    for mine, theirs in zip(pipe.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)


@MODES
@pytest.mark.parametrize("inside", [False, True])
def test_a_trained_encoder_in_evaluation_mode(checkpoint: CheckpointMode, inside: bool) -> None:
    """Every micro-batch goes the way of the plain model, in its forward and its recompute."""
    model = nn.Sequential(nn.Linear(8, 8), Padded(), nn.Linear(8, 8))
    model[1].eval()
    pipe = GPipe(copy.deepcopy(model), [1, 1, 1], chunks=3, checkpoint=checkpoint)
    compare(model, pipe, square, inside)


@MODES
def test_a_frozen_encoder_at_the_head(checkpoint: CheckpointMode) -> None:
    """Nothing behind it needs a gradient: the plain model takes the fast path, as the pipeline."""
    model = nn.Sequential(Padded(), nn.Linear(8, 8), nn.Linear(8, 8))
    model[0].eval().requires_grad_(False)
    pipe = GPipe(copy.deepcopy(model), [2, 1], chunks=3, checkpoint=checkpoint)
    compare(model, pipe, square, False)


@MODES
def test_a_loss_with_an_encoder(checkpoint: CheckpointMode) -> None:
    """A loss inside the pipeline runs with the layers, in recomputes too."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    pipe = GPipe(copy.deepcopy(model), [1, 1], chunks=3, checkpoint=checkpoint)
    compare(model, pipe, Distance().eval(), True)


@MODES
def test_a_run_of_layers_with_an_encoder(checkpoint: CheckpointMode) -> None:
    """A run that is recomputed by itself goes the same way, in each mode of its partition."""
    model = nn.Sequential(nn.Linear(8, 8), Padded(), nn.Linear(8, 8))
    model[1].eval()
    chain = with_recompute(copy.deepcopy(model), [[1]])
    assert isinstance(chain, nn.Sequential)
    compare(model, GPipe(chain, [2, 1], chunks=3, checkpoint=checkpoint), square, False)


def test_without_the_fast_path_no_graph_is_recorded() -> None:
    """Only the first micro-batch looks which outputs need a gradient."""
    recorded = []

    class Look(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if gb.is_checkpointing():
                recorded.append(torch.is_grad_enabled())
            return x

    model = nn.Sequential(nn.Linear(8, 8), Padded(), Look())
    pipe = GPipe(model, [1, 2], chunks=3, checkpoint="always")
    inputs = torch.randn(6, 5, 8)
    for _ in range(2):
        square(pipe(inputs)).backward()
    assert recorded == [True, False, False] * 2
    model[1].eval()
    square(pipe(inputs)).backward()
    assert recorded[6:] == [True, True, True]
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        square(pipe(inputs)).backward()
    finally:
        torch.backends.mha.set_fastpath_enabled(True)
    assert recorded[9:] == [True, False, False]
