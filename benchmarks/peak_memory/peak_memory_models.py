"""The three models: what decides their memory is each time something else."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from benchmark_tools.layers import Block, by_token
from torch import Tensor, nn


@dataclass(frozen=True)
class Model:
    """A model to train, and how it is cut.

    Attributes:
        about: What it is, in a few words.
        layers: Makes its layers.
        data: Makes a mini-batch and its target.
        loss_fn: The loss.
        optimizer: Makes the optimizer of its parameters.
        balances: By number of partitions, the layers in each.
    """

    about: str
    layers: Callable[[], list[nn.Module]]
    data: Callable[[], tuple[Tensor, Tensor]]
    loss_fn: Callable[[Tensor, Tensor], Tensor]
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
    balances: Mapping[int, list[int]]


def _mlp() -> list[nn.Module]:
    return [layer for _ in range(8) for layer in (nn.Linear(512, 512), nn.ReLU())]


def _convolutions() -> list[nn.Module]:
    layers: list[nn.Module] = []
    for channels in (3, 32, 32, 32, 32, 32):
        layers += [nn.Conv2d(channels, 32, 3, padding=1), nn.BatchNorm2d(32)]
        layers += [nn.ReLU(inplace=True)]
    return [*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10)]


def _transformer() -> list[nn.Module]:
    width, vocabulary = 128, 8192
    blocks = [Block(width, heads=4) for _ in range(6)]
    head = nn.Linear(width, vocabulary, bias=False)
    return [nn.Embedding(vocabulary, width), *blocks, nn.LayerNorm(width), head]


def _momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-3, momentum=0.9)


def _adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=1e-4)


#: The models by name.
MODELS = {
    "mlp": Model(
        "8 x (Linear 512, ReLU), 1536 rows, mean square, Adam",
        _mlp,
        lambda: (torch.randn(1536, 512), torch.randn(1536, 512)),
        nn.MSELoss(),
        _adam,
        {2: [8, 8], 4: [4, 4, 4, 4]},
    ),
    "convolutions": Model(
        "6 x (Conv2d 32, BatchNorm2d, ReLU in place) and a head, 32 images of 48 x 48, cross "
        "entropy, SGD with momentum",
        _convolutions,
        lambda: (torch.randn(32, 3, 48, 48), torch.randint(10, (32,))),
        nn.CrossEntropyLoss(),
        _momentum,
        {2: [9, 12], 4: [4, 5, 5, 7]},
    ),
    "transformer": Model(
        "6 blocks of width 128, vocabulary of 8192, 16 texts of 64 tokens, cross entropy, Adam",
        _transformer,
        lambda: (torch.randint(8192, (16, 64)), torch.randint(8192, (16, 64))),
        by_token,
        _adam,
        {2: [5, 4], 4: [3, 2, 2, 2]},
    ),
}
