"""An optimizer is after a profile as before."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gpipebal as gb

pytestmark = pytest.mark.timeout(60)
WAYS: dict[str, dict[str, Any]] = {
    "estimate": {"method": "estimate"},
    "measure": {"timeout": 0, "as_pipeline": False},
}


class Decaying(torch.optim.Optimizer):
    """Writes to its options, which are tensors and lists."""

    def __init__(self, parameters: Any, lr: Any) -> None:
        scale = torch.ones(())
        defaults = {"lr": lr, "scale": scale, "steps": [], "tables": {"a": [torch.ones(2)]}}
        super().__init__(parameters, defaults)
        self.scale = scale
        self.lock = threading.Lock()
        self.seen: list[Any] = [self.lock]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert self.scale is self.param_groups[0]["scale"] is self.defaults["scale"]
        self.seen.append(1)
        self.defaults["steps"].append(1)
        for group in self.param_groups:
            group["scale"].mul_(0.5)
            group["tables"]["a"][0].add_(1)
            group["tables"]["b"] = 1
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(group["lr"] * group["scale"] * p.grad)


def profiled(model: nn.Module, way: str, optimizer: Any) -> gb.Profile:
    """Profile as little as possible."""
    return gb.profile_model(
        model, torch.randn(4, 4), rows=(), optimizer=optimizer, progress=False, **WAYS[way]
    )


@pytest.mark.parametrize("way", WAYS)
def test_options_that_a_step_writes_to(way: str) -> None:
    """Tensors and containers among them are copied, and stay the same in groups and defaults."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = Decaying(model.parameters(), 0.1)
    found = profiled(model, way, optimizer)
    assert found.step is not None and found.step.optimizer_time is not None
    for options in (optimizer.defaults, *optimizer.param_groups):
        assert options["scale"].item() == 1.0 and options["scale"] is optimizer.scale
        assert options["steps"] == [] and list(options["tables"]) == ["a"]
        assert torch.equal(options["tables"]["a"][0], torch.ones(2))
    assert optimizer.seen == [optimizer.lock]


@pytest.mark.parametrize("way", WAYS)
def test_options_that_belong_to_a_graph(way: str) -> None:
    """A learning rate that is learned itself is copied by value."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    rate = torch.tensor(0.1, requires_grad=True) * 1
    optimizer = Decaying(model.parameters(), rate)
    profiled(model, way, optimizer)
    assert optimizer.param_groups[0]["lr"] is rate and rate.grad_fn is not None


def test_the_time_of_a_step_is_known_as_before() -> None:
    """A rate that is a tensor is one for all groups, as it was."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    rate: Tensor = torch.tensor(0.1)
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    found = profiled(model, "measure", optimizer)
    assert found.step is not None and found.step.optimizer_time is not None
    assert optimizer.param_groups[0]["lr"] is rate
