"""Layers of the models: skip connections, and what a recurrent layer hands on."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from gpipebal.skip import Namespace, pop, skippable, stash

__all__ = ["TakeOutput", "TakeState", "convolution", "down", "residual", "up"]


@skippable(stash=["kept"])
class Keep(nn.Module):
    """Hand on the input, and keep it for the layer that pops it."""

    def forward(self, x: Tensor) -> Any:
        """Return the input."""
        yield stash("kept", x)
        return x


@skippable(pop=["kept"])
class Add(nn.Module):
    """Add what was kept."""

    def forward(self, x: Tensor) -> Any:
        """Return the sum."""
        kept = yield pop("kept")
        return x + kept


@skippable(pop=["kept"])
class Beside(nn.Module):
    """Put what was kept beside the input, as more channels."""

    def forward(self, x: Tensor) -> Any:
        """Return both."""
        kept = yield pop("kept")
        return torch.cat([x, kept], dim=1)


class TakeOutput(nn.Module):
    """Go on with the outputs of a recurrent layer, and drop its last state."""

    def forward(self, pair: tuple[Tensor, Any]) -> Tensor:
        """Return the outputs of all moments."""
        return pair[0]


class TakeState(nn.Module):
    """Go on with the last state of a recurrent layer, and drop its outputs."""

    def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
        """Return the state of the topmost layer."""
        return pair[1][-1]


def convolution(before: int, after: int, stride: int = 1) -> list[nn.Module]:
    """Make a convolution, its normalisation, and a ReLU that works in place."""
    return [
        nn.Conv2d(before, after, 3, stride=stride, padding=1, bias=False),
        nn.BatchNorm2d(after),
        nn.ReLU(inplace=True),
    ]


def residual(channels: int) -> list[nn.Module]:
    """Make two convolutions with a skip connection past them."""
    ns = Namespace()
    first, second = convolution(channels, channels), convolution(channels, channels)
    return [Keep().isolate(ns), *first, *second[:2], Add().isolate(ns), nn.ReLU()]


def down(before: int, after: int, ns: Namespace) -> list[nn.Module]:
    """Make a level of a U-Net's way down: its end is kept in the namespace, and halved."""
    return [*convolution(before, after), Keep().isolate(ns), nn.MaxPool2d(2)]


def up(before: int, kept: int, after: int, ns: Namespace) -> list[nn.Module]:
    """Make a level of a U-Net's way up: doubled, and what the namespace keeps beside it."""
    return [
        nn.Upsample(scale_factor=2),
        Beside().isolate(ns),
        *convolution(before + kept, after),
    ]
