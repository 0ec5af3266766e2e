"""Memory planned for another number of micro-batches than the profile was taken with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gpipebal as gb


class Columns(nn.Module):
    """Hands on a view of a few columns, or of one row of a sequence."""

    def __init__(self, *index: Any) -> None:
        super().__init__()
        self.index = index

    def forward(self, x: Tensor) -> Tensor:
        return x[self.index]


class Double(nn.Module):
    """Hands on its input twice."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, x


class Several(nn.Module):
    """Hands on several tensors, some of which are small views."""

    def __init__(self, which: int) -> None:
        super().__init__()
        self.which = which

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        ways = (x[:, :3], x.argmax(1)), (x.exp(), x[:, :3]), (x.exp()[:, :1], x.sin()[:, :1])
        return ways[self.which]


def wide() -> nn.Sequential:
    """Outputs far larger than everything else."""
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 500))


def few_columns() -> nn.Sequential:
    """An output that is a small view of a large tensor."""
    return nn.Sequential(nn.Linear(8, 80), Columns(slice(None), slice(3)))


def first_of_sequence() -> nn.Sequential:
    """The same, where the loss is given much less than the last layer."""
    return nn.Sequential(
        nn.Unflatten(1, (8, 1)), nn.Linear(1, 16), nn.LogSoftmax(2), Columns(slice(None), 0)
    )


def doubled() -> nn.Sequential:
    """Two outputs in one memory."""
    return nn.Sequential(nn.Linear(8, 80), Double())


def view_and_numbers() -> nn.Sequential:
    """A small view, and numbers that have no gradient."""
    return nn.Sequential(nn.Linear(8, 80), Several(0))


def one_view_of_two() -> nn.Sequential:
    """A tensor of its own, and a small view."""
    return nn.Sequential(nn.Linear(8, 80), Several(1))


def two_views() -> nn.Sequential:
    """Two small views of two tensors."""
    return nn.Sequential(nn.Linear(8, 80), Several(2))


def squares(output: Tensor | tuple[Tensor, Tensor]) -> Tensor:
    """A loss of one output, or of two."""
    outputs = output if isinstance(output, tuple) else (output,)
    return sum((one.float().square().mean() for one in outputs), torch.zeros(()))


MODELS = [
    *(wide, few_columns, first_of_sequence, doubled),
    *(view_and_numbers, one_view_of_two, two_views),
]


@pytest.mark.parametrize("checkpoint", ["never", "always"])
@pytest.mark.parametrize("make", MODELS)
def test_peaks_do_not_depend_on_the_profiles_own_number_of_micro_batches(
    make: Callable[[], nn.Sequential], checkpoint: Any
) -> None:
    """What the loss is given is one micro-batch's output, or several joined, as the plan says."""
    peaks = []
    for chunks in (1, 2, 4):
        profile = gb.profile_model(
            make(),
            torch.randn(16, 8),
            chunks=chunks,
            loss_fn=squares,
            timeout=0,
            as_pipeline=False,
            progress=False,
        )
        plans = [
            gb.evaluate(profile, [len(profile.layers)], chunks=m, checkpoint=checkpoint)
            for m in (1, 2, 4)
        ]
        peaks.append([plan.partitions[0].memory.total for plan in plans])
    assert peaks[0] == peaks[1] == peaks[2]
