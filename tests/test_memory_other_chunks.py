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


def product(output: Tensor | tuple[Tensor, Tensor]) -> Tensor:
    """A loss of one output, or of two."""
    one, other = output if isinstance(output, tuple) else (output, output)
    return (one * other).mean()


@pytest.mark.parametrize("checkpoint", ["never", "always"])
@pytest.mark.parametrize("make", [wide, few_columns, first_of_sequence, doubled])
def test_peaks_do_not_depend_on_the_profiles_own_number_of_micro_batches(
    make: Callable[[], nn.Sequential], checkpoint: Any
) -> None:
    """What the loss is given is one micro-batch's output, or several joined, as the plan says."""
    peaks = []
    for chunks in (1, 2, 4):
        profile = gb.profile_model(
            make(), torch.randn(16, 8), chunks=chunks, loss_fn=product, timeout=0, progress=False
        )
        plans = [
            gb.evaluate(profile, [len(profile.layers)], chunks=m, checkpoint=checkpoint)
            for m in (1, 2, 4)
        ]
        peaks.append([plan.partitions[0].memory.total for plan in plans])
    assert peaks[0] == peaks[1] == peaks[2]
