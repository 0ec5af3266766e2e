"""Chains and their pipelines for the tests of verify."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import skip_layers
import torch
from chains import batchnorm_chain, skip_chain
from torch import Tensor, nn

from gpipebal.pipeline import GPipe


def rows(*shape: int, grad: bool = False) -> Tensor:
    """Make an input in double precision."""
    return torch.randn(*shape, dtype=torch.float64, requires_grad=grad)


def dropouts() -> nn.Sequential:
    """Make a chain whose results are random."""
    return nn.Sequential(
        nn.Linear(3, 6), nn.Dropout(0.3), nn.ReLU(inplace=True), nn.Dropout(0.5), nn.Linear(6, 2)
    )


def tied() -> nn.Sequential:
    """Make a chain in which two layers share a weight."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3), nn.Linear(3, 3))
    model[3].weight = model[0].weight
    return model


def repeated() -> nn.Sequential:
    """Make a chain in which a layer stands twice."""
    shared = nn.Linear(3, 3)
    return nn.Sequential(shared, nn.Dropout(), shared, nn.Tanh())


class Words(nn.Module):
    """Look words up, under a mask; the mask goes on."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 3, sparse=True)

    def forward(self, value: dict[str, Tensor]) -> dict[str, Any]:
        hidden = self.table(value["words"]) * value["mask"].unsqueeze(-1)
        return {"hidden": hidden, "mask": value["mask"], "name": "words"}


class Mean(nn.Module):
    def forward(self, value: dict[str, Any]) -> dict[str, Any]:
        return {**value, "hidden": torch.tanh(value["hidden"]).mean(1)}


#: By name: the chain, its input, and its balance.
CHAINS: dict[str, tuple[Callable[[], nn.Sequential], Callable[[], Any], list[int]]] = {
    "batch normalisation": (batchnorm_chain, lambda: rows(6, 2, 8, 8), [2, 3, 3]),
    "dropout": (dropouts, lambda: rows(7, 3, grad=True), [2, 3]),
    "tuples": (skip_chain, lambda: rows(5, 4, grad=True), [1, 2, 2]),
    "skips": (skip_layers.hourglass, lambda: rows(5, 3, grad=True), [2, 1, 2]),
    "tied parameters": (tied, lambda: rows(5, 3), [1, 1, 2]),
    "a repeated layer": (repeated, lambda: rows(5, 3), [1, 1, 2]),
    "no layer": (lambda: nn.Sequential(), lambda: rows(5, 3, grad=True), []),
    "integers and a dict": (
        lambda: nn.Sequential(Words(), Mean()),
        lambda: {"words": torch.randint(5, (7, 4)), "mask": torch.rand(7, 4).round().double()},
        [1, 1],
    ),
}


def make(name: str, **options: Any) -> tuple[nn.Sequential, GPipe, Any]:
    """Make a chain in double precision, its pipeline and an input."""
    chain, sample, balance = CHAINS[name]
    model = chain().double()
    return model, GPipe(model, balance, **{"chunks": 3, **options}), sample()
