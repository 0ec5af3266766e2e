"""Workloads: chains of layers of realistic sizes, with a mini-batch and its target.

The sizes were fixed before any way of running them was compared with another: realistic layers, as
many of them as let the whole benchmark end within half an hour on two cores.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpipebal import balance_cost

N_PARTITIONS = 2
CHUNKS = (1, 4, 8, 16)

#: The mean over a mini-batch is the mean over its equal micro-batches.
loss_fn = F.mse_loss


@dataclass(frozen=True)
class Workload:
    """A chain, its mini-batch, and how it is divided.

    Attributes:
        name: Unique name.
        about: What it is, in words.
        make_layers: Makes the layers; the caller seeds the generator.
        shape: Shape of one row of the input.
        rows: Rows of a mini-batch.
        chunks: Numbers of micro-batches to try; each divides `rows`.
        random: Whether its layers draw random numbers, so that no two ways give the same gradients.
        small: Whether its cells are so small that handing them over costs a part of them: outside
            the floors.
        is_tiny: Whether it is here to try the benchmark, and not the machine.
    """

    name: str
    about: str
    make_layers: Callable[[], list[nn.Module]]
    shape: tuple[int, ...]
    rows: int
    chunks: tuple[int, ...] = CHUNKS
    random: bool = False
    small: bool = False
    is_tiny: bool = False

    def make_model(self) -> nn.Sequential:
        """Make the chain; every call, in every process, gives the same parameters."""
        torch.manual_seed(0)
        return nn.Sequential(*self.make_layers())

    @functools.cache  # noqa: B019 - the workloads are a few, and live as long as the program
    def make_batch(self) -> tuple[Tensor, Tensor]:
        """Make a mini-batch and its target; every call, in every process, gives the same."""
        generator = torch.Generator().manual_seed(1)
        inputs = torch.randn(self.rows, *self.shape, generator=generator)
        with torch.no_grad():
            output = self.make_model()(inputs[:2])
        target = torch.randn(self.rows, *output.shape[1:], generator=generator)
        return inputs, target


def _mlp(n_layers: int, width: int) -> list[nn.Module]:
    pairs = [(nn.Linear(width, width), nn.ReLU()) for _ in range(n_layers)]
    return [layer for pair in pairs for layer in pair]


def _convolutions(channels: tuple[int, ...]) -> list[nn.Module]:
    """Convolution, BatchNorm and ReLU, over and over; more channels, half the width and height."""
    layers: list[nn.Module] = []
    for before, after in zip((3, *channels), channels, strict=False):
        stride = 2 if before not in (3, after) else 1
        layers += [
            nn.Conv2d(before, after, 3, stride=stride, padding=1, bias=False),
            nn.BatchNorm2d(after),
            nn.ReLU(),
        ]
    return layers


def _transformer(
    n_layers: int, width: int, heads: int, feed_forward: int, dropout: float
) -> list[nn.Module]:
    return [
        nn.TransformerEncoderLayer(width, heads, feed_forward, dropout, batch_first=True)
        for _ in range(n_layers)
    ]


WORKLOADS = (
    Workload(
        name="mlp",
        about="8 x (Linear 1024 + ReLU), 512 rows",
        make_layers=lambda: _mlp(8, 1024),
        shape=(1024,),
        rows=512,
    ),
    Workload(
        name="convolutions",
        about="8 x (3x3 convolution + BatchNorm + ReLU), 4 of 32 channels at 32x32, 4 of 64 "
        "channels at 16x16, 64 images",
        make_layers=lambda: _convolutions((32,) * 4 + (64,) * 4),
        shape=(3, 32, 32),
        rows=64,
    ),
    Workload(
        name="transformer",
        about="4 encoder layers, width 256, 8 heads, feed-forward 1024, 32 sequences of 64, "
        "no dropout",
        make_layers=lambda: _transformer(4, 256, 8, 1024, 0.0),
        shape=(64, 256),
        rows=32,
    ),
    Workload(
        name="transformer-dropout",
        about="the same with dropout 0.1",
        make_layers=lambda: _transformer(4, 256, 8, 1024, 0.1),
        shape=(64, 256),
        rows=32,
        random=True,
    ),
)

SMALL = tuple(
    Workload(
        name=f"small-{rows}",
        about="4 encoder layers, width 128, 4 heads, feed-forward 512, sequences of 32, no "
        f"dropout, {rows} rows in each of 8 micro-batches",
        make_layers=lambda: _transformer(4, 128, 4, 512, 0.0),
        shape=(32, 128),
        rows=8 * rows,
        chunks=(8,),
        small=True,
    )
    for rows in (2, 4, 8)
)

#: Layers, shape of a row, and rows of a tiny workload.
_TINY: dict[str, tuple[Callable[[], list[nn.Module]], tuple[int, ...], int]] = {
    "mlp": (lambda: _mlp(4, 16), (16,), 16),
    "convolutions": (lambda: _convolutions((4, 4, 8)), (3, 8, 8), 32),
    "transformer": (lambda: _transformer(2, 16, 2, 32, 0.0), (8, 16), 16),
    "transformer-dropout": (lambda: _transformer(2, 16, 2, 32, 0.1), (8, 16), 16),
}


def tiny(workload: Workload) -> Workload:
    """Return the workload with layers that take no time: to try the benchmark, not the machine."""
    layers, shape, rows = _TINY["transformer" if workload.small else workload.name]
    rows = workload.rows if workload.small else rows
    return replace(workload, about="tiny", make_layers=layers, shape=shape, rows=rows, is_tiny=True)


def find_balance(workload: Workload, *, repeats: int = 5) -> tuple[list[int], list[float]]:
    """Measure forward plus backward of every layer, one after the other, and balance them.

    One balance for all ways of running a workload and for all its `chunks`: measured at the
    micro-batch of the next to largest number of them.

    Returns:
        The balance, and the median seconds of each layer.
    """
    layers = list(workload.make_model())
    inputs, _ = workload.make_batch()
    chunks = sorted(workload.chunks)[-2:][0]
    value = inputs[: workload.rows // chunks]
    times: list[list[float]] = [[] for _ in layers]
    for _ in range(repeats + 1):
        leaves, outputs = [], []
        hop = value
        for index, layer in enumerate(layers):
            leaf = hop.detach().requires_grad_(index > 0)
            started = time.perf_counter()
            output = layer(leaf)
            times[index].append(time.perf_counter() - started)
            leaves.append(leaf)
            outputs.append(output)
            hop = output
        gradient: Tensor | None = torch.ones_like(outputs[-1])
        for index in reversed(range(len(layers))):
            # The first layer may have nothing to find a gradient for.
            if outputs[index].requires_grad:
                started = time.perf_counter()
                torch.autograd.backward(outputs[index], gradient)
                times[index][-1] += time.perf_counter() - started
            gradient = leaves[index].grad
    seconds = [statistics.median(measured[1:]) for measured in times]
    return balance_cost(seconds, N_PARTITIONS), seconds
