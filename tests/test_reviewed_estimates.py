"""Faults of estimates and matches that a strict reading found."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import grid_sample

import gpipebal as gb


class Sampled(nn.Module):
    """Looks at an image in places that are not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("grid", torch.rand(1, 8, 8, 2) * 2 - 1)

    def forward(self, x: Tensor) -> Tensor:
        return grid_sample(x, self.grid.expand(len(x), 8, 8, 2), align_corners=False)


def frozen(layer: Any) -> nn.Module:
    """Let a convolution train its bias alone."""
    layer.weight.requires_grad_(False)
    return layer  # type: ignore[no-any-return]


CHAINS: dict[str, Any] = {
    "binary cross entropy": (
        [nn.Linear(16, 16), nn.Sigmoid()],
        (8, 16),
        {"loss_fn": nn.BCELoss(), "target": torch.rand(8, 16)},
    ),
    "grid_sample": ([nn.Conv2d(3, 3, 1), Sampled()], (8, 3, 8, 8), {}),
    "frozen weight": (
        [nn.Conv2d(3, 8, 3), frozen(nn.Conv2d(8, 8, 3)), nn.ReLU()],
        (8, 3, 16, 16),
        {},
    ),
    "frozen weight, transposed": (
        [nn.Conv2d(3, 4, 1), frozen(nn.ConvTranspose2d(4, 8, 3)), nn.ReLU()],
        (8, 3, 16, 16),
        {},
    ),
}


@pytest.mark.parametrize("name", CHAINS)
def test_an_estimate_has_the_bytes_of_a_measurement(name: str) -> None:
    """Peaks of a CPU's kernels, also of what they make for nobody."""
    layers, shape, options = CHAINS[name]
    model, sample = nn.Sequential(*layers), torch.randn(shape)
    fixed: dict[str, Any] = {"chunks": 2, "rows": (), "progress": False, **options}
    measured = gb.profile_model(model, sample, timeout=0, **fixed)
    estimate = gb.profile_model(model, sample, method="estimate", rates="CPU core", **fixed)
    both: list[Any] = list(zip(measured.layers, estimate.layers, strict=True))
    if options:
        both.append((measured.step.whole_loss, estimate.step.whole_loss))
    for one, other in both:
        for peak in ("forward_peak_bytes", "backward_peak_bytes", "accumulating_peak_bytes"):
            assert getattr(other, peak) == getattr(one, peak), (one.name, peak)


def test_layers_that_were_tied_since_do_not_match() -> None:
    """Nor do layers that were tied when they were profiled, and are not."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    options: dict[str, Any] = {"chunks": 2, "rows": (), "timeout": 0, "progress": False}
    untied = gb.profile_model(model, torch.randn(4, 4), **options)
    assert untied.matches(model)
    model[2].weight = model[0].weight
    assert not untied.matches(model) and untied.matches(model).tied == ("0", "2")
    assert "layer '2' is tied otherwise" in str(untied.matches(model))
    tied = gb.profile_model(model, torch.randn(4, 4), **options)
    assert tied.matches(model)
    model[2].weight = nn.Parameter(model[0].weight.detach().clone())
    assert tied.matches(model).tied == ("0", "2")
