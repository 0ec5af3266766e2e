"""Small chains of layers for the tests of the executor and the profiler."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from gpipebal.pipeline import scatter


class Calls(nn.Module):
    """Call a function in every forward."""

    def __init__(self, function: Callable[[], None]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        self.function()
        return x * 1


class Fork(nn.Module):
    """Turn a tensor into a tuple: the tensor's image, and the tensor itself."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.linear(x), x


class Aside(nn.Module):
    """Work on the first element of a tuple and hand the second on."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return torch.tanh(self.linear(pair[0])), pair[1]


class Join(nn.Module):
    """Add the two elements of a tuple."""

    def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
        return pair[0] + pair[1]


def skip_chain(width: int = 4) -> nn.Sequential:
    """A chain whose values between layers are tensors and tuples."""
    return nn.Sequential(Fork(width), Aside(width), Aside(width), Join(), nn.Linear(width, 2))


def batchnorm_chain() -> nn.Sequential:
    """A convolution chain with batch normalisation and in-place activations."""
    return nn.Sequential(
        nn.Conv2d(2, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(inplace=True),
        nn.Conv2d(4, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(inplace=True),
        nn.Flatten(),
        nn.Linear(4 * 4 * 4, 3),
    )


def run_plain(model: nn.Module, inputs: Tensor, chunks: int) -> Tensor:
    """Run the plain model over the micro-batches that a pipeline makes."""
    return torch.cat([model(part) for part in scatter(inputs, chunks)])
