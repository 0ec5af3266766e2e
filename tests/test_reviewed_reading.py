"""Small faults of estimates, files, runs and messages that a strict reading found."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import grid_sample

import gpipebal as gb
from gpipebal.cli import main
from gpipebal.errors import BalanceError, VerificationError
from gpipebal.pipeline import GPipe
from gpipebal.text import one_line


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


class Numbered(nn.Module):
    """Hands on 16-bit numbers without a sign, of which torch finds no extremes."""

    def forward(self, x: Tensor) -> Tensor:
        return x.to(torch.int32).add(1).to(torch.uint16)


class Doubled(Numbered):
    """Hands on others."""

    def forward(self, x: Tensor) -> Tensor:
        return x.to(torch.int32).add(2).to(torch.uint16)


def test_unsigned_numbers_that_differ_are_told() -> None:
    """As any other difference, and not by a kernel that is missing."""
    pipe = GPipe(nn.Sequential(nn.Identity(), Doubled()), [1, 1])
    with pytest.raises(VerificationError, match="output"):
        gb.verify(nn.Sequential(nn.Identity(), Numbered()), pipe, torch.ones(4, 2))


@pytest.mark.parametrize("seed", ["a", 2**70, True, 1.5])
def test_a_seed_is_one_of_torchs(seed: Any) -> None:
    """Others are refused by name."""
    model = nn.Sequential(nn.Linear(2, 2))
    with pytest.raises(BalanceError, match="seed is no seed"):
        gb.verify(model, GPipe(model, [1]), torch.ones(2, 2), seed=seed)


def test_names_steer_no_terminal() -> None:
    """Control characters of eight bits, and those that turn the order, are taken out too."""
    shown = one_line("\x9b31mred \u202eback \u2066in \x1b[0m")
    assert not any(sign in shown for sign in "\x9b\x1b\u202e\u2066")
    assert "31mred" in shown


def test_an_error_that_cannot_be_written_has_its_status(monkeypatch: pytest.MonkeyPatch) -> None:
    """Standard error may be full, or not there: the exit status says it."""

    class Full(io.StringIO):
        def write(self, _: str) -> int:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(sys, "stderr", Full())
    assert main(["show", "no-such-file.json"]) == 2
    monkeypatch.setattr(sys, "stderr", None)
    assert main(["show", "no-such-file.json"]) == 2
    assert sys.stderr is not None
    sys.stderr.close()


def test_a_run_of_what_cannot_be_trained_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anything is profiled."""
    (tmp_path / "nothing.py").write_text(
        "import torch\n\n\ndef model():\n    layers = torch.nn.Sequential(torch.nn.ReLU(), "
        "torch.nn.Tanh())\n    return layers, torch.ones(8, 4)\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    out = tmp_path / "out"
    assert main(["run", "nothing:model", "--device", "cpu", "--output", str(out)]) == 2
    assert not out.exists()
