"""Memory of partitions, predicted and counted, for layers of which only bytes matter."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import gpipebal as gb
from gpipebal.pipeline import GPipe, measure_memory
from gpipebal.skip import pop, skippable, stash


@skippable(stash=["kept"])
class Keep(nn.Module):
    """Stash what it returns."""

    def forward(self, x: Tensor) -> Any:
        yield stash("kept", x)
        return x


@skippable(pop=["kept"])
class Beside(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return torch.cat([x, (yield pop("kept"))], dim=1)


@skippable(pop=["kept"])
class Add(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return x + (yield pop("kept"))


def squares(output: Tensor) -> Tensor:
    """Take the mean of squares."""
    return output.square().mean()


def measured(layers: nn.Sequential, inputs: Tensor, **given: Any) -> gb.Profile:
    """Measure as briefly as possible: only bytes matter here."""
    brief: dict[str, Any] = {"rows": (), "timeout": 0, "as_pipeline": False, "progress": False}
    return gb.profile_model(layers, inputs, **{**brief, **given})


def counted(layers: nn.Sequential, balance: list[int], inputs: Tensor, **given: Any) -> list[int]:
    """Return the largest memory of each partition in a step."""
    pipe = GPipe(layers, balance, **given)
    pipe.step(inputs, loss_fn=squares)
    pipe.zero_grad()
    with measure_memory(pipe) as meter:
        pipe.step(inputs, loss_fn=squares)
    pipe.zero_grad()
    return list(meter.peak_bytes)
