"""An optimizer, and hooks on the steps of all optimizers, are after a profile as before."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

import gpipebal as gb
from gpipebal.profiler.step.alike import global_hooks_left_out

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


@pytest.mark.parametrize("as_factory", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_hooks_on_the_steps_of_all_optimizers(way: str, as_factory: bool) -> None:
    """They do not run for stand-ins, and are there afterwards, in their order."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    averaged = torch.optim.swa_utils.AveragedModel(model)
    ran: list[str] = []
    hooks = [
        register_optimizer_step_pre_hook(lambda *_: ran.append("before")),
        register_optimizer_step_post_hook(lambda *_: averaged.update_parameters(model)),
        register_optimizer_step_post_hook(lambda *_: ran.append("behind")),
    ]
    try:
        optimizer = torch.optim.Adam(model.parameters())
        profiled(model, way, torch.optim.Adam if as_factory else optimizer)
        assert ran == [] and averaged.n_averaged == 0
        optimizer.step()
        assert ran == ["before", "behind"] and averaged.n_averaged == 1
    finally:
        for hook in hooks:
            hook.remove()


def test_hooks_of_another_thread_run() -> None:
    """It may train meanwhile; hooks that are removed or added meanwhile stay so."""
    ran: list[str] = []
    stepper = torch.optim.SGD([torch.ones(1)])
    removed = register_optimizer_step_post_hook(lambda *_: ran.append("removed"))
    kept = register_optimizer_step_post_hook(lambda *_: ran.append("kept"))
    try:
        with pytest.raises(KeyboardInterrupt), global_hooks_left_out():
            other = threading.Thread(target=stepper.step)
            other.start()
            other.join()
            assert ran == ["removed", "kept"]
            removed.remove()
            stepper.step()
            assert ran == ["removed", "kept"]
            raise KeyboardInterrupt
        stepper.step()
        assert ran == ["removed", "kept", "kept"]
    finally:
        kept.remove()


def test_the_time_of_a_step_is_known_as_before() -> None:
    """A rate that is a tensor is one for all groups, as it was."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    rate: Tensor = torch.tensor(0.1)
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    found = profiled(model, "measure", optimizer)
    assert found.step is not None and found.step.optimizer_time is not None
    assert optimizer.param_groups[0]["lr"] is rate
