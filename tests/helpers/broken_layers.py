"""Layers that do something else inside a pipeline than outside."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import gpipebal as gb


class Scale(nn.Module):
    """A linear layer whose result is multiplied by a number of choice."""

    def __init__(self, factor: Callable[[], Any] = lambda: 1.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(3) + 0.1)
        self.register_buffer("calls", torch.zeros(()))
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.weight) * self.factor()


class CountCalls(Scale):
    """Counts in the pipeline's threads only."""

    def forward(self, x: Tensor) -> Tensor:
        if in_worker():
            self.calls.add_(1)
        return super().forward(x)


class Detach(Scale):
    """Keeps its weight out of the recompute's graph."""

    def forward(self, x: Tensor) -> Tensor:
        return x @ (self.weight.detach() if gb.is_recomputing() else self.weight)


class Cut(Scale):
    """Cuts the graph off in the pipeline's threads."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).detach() if in_worker() else super().forward(x)


class Pair(Scale):
    """Returns a list in the main thread, a tuple in the others."""

    def forward(self, x: Tensor) -> Any:
        return (tuple if in_worker() else list)([super().forward(x)])


class Named(Scale):
    """Returns the thread's kind beside its result."""

    def forward(self, x: Tensor) -> Any:
        return {"value": super().forward(x), "worker": in_worker()}


class Single(Scale):
    """Returns single precision in the pipeline's threads."""

    def forward(self, x: Tensor) -> Any:
        return super().forward(x).to(torch.float32 if in_worker() else torch.float64)


class Wide(Scale):
    """Returns another shape in the pipeline's threads."""

    def forward(self, x: Tensor) -> Any:
        return super().forward(x)[:, : 2 if in_worker() else 3]


class Late(Scale):
    """Its gradient depends on how many forwards there have been when the backward comes."""

    def __init__(self) -> None:
        super().__init__()
        self.n_forwards = 0

    def forward(self, x: Tensor) -> Tensor:
        self.n_forwards += 1
        x = super().forward(x)
        if x.requires_grad:
            x.register_hook(lambda gradient: gradient * self.n_forwards)
        return x


def in_worker() -> bool:
    """Tell whether this is a thread of a pipeline."""
    return threading.current_thread().name.startswith("gpipebal-partition")


def numpy_noise() -> float:
    """Draw from a generator that no pipeline rules."""
    return float(np.random.rand())


class Sum(nn.Module):
    def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
        return pair[0] + pair[1]
