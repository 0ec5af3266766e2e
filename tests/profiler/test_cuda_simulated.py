"""What profiles do on CUDA alone, tried without a device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from counted_memory import Beside, Keep, measured
from torch import Tensor, nn

from gpipebal.pipeline.observers.ledger import Ledger
from gpipebal.profile import LayerProfile
from gpipebal.profiler.memory import layer_run

pytestmark = pytest.mark.timeout(120)
ROWS, COLUMNS = 8, 16


class Halves(nn.Module):
    """Hand on two parts of the input, with gaps."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return x.chunk(2, 1)


class Join(nn.Module):
    """Its backward hands back two parts of one gradient."""

    def forward(self, parts: tuple[Tensor, Tensor]) -> Tensor:
        return torch.cat(parts, 1)


class Add(nn.Module):
    """Its backward hands back one gradient twice."""

    def forward(self, parts: tuple[Tensor, Tensor]) -> Tensor:
        return parts[0] + parts[1]


def own() -> nn.Sequential:
    """Every gradient has memory of its own."""
    return nn.Sequential(nn.Linear(COLUMNS, 64), nn.ReLU(), nn.Linear(64, COLUMNS), nn.Tanh())


def joined() -> nn.Sequential:
    """Gradients are parts of a larger one."""
    return nn.Sequential(nn.Linear(COLUMNS, 64), Halves(), Join(), nn.Linear(64, COLUMNS))


def added() -> nn.Sequential:
    """Two gradients are one."""
    return nn.Sequential(nn.Linear(COLUMNS, 64), Halves(), Add(), nn.Linear(32, COLUMNS))


def skipped() -> nn.Sequential:
    """Of one gradient, a part goes back to the layer before and another one to a skip."""
    way = nn.Linear(COLUMNS, 64), Keep(), nn.Linear(64, 64), Beside()
    return nn.Sequential(*way, nn.Linear(128, COLUMNS))


def with_allocator(monkeypatch: pytest.MonkeyPatch, more: int) -> None:
    """Have peaks read from an allocator, which sees what the ledger sees and `more` bytes."""
    begun: list[Ledger] = []
    plain = layer_run._Peak.__init__

    def begin(self: Any, ledger: layer_run.DeviceLedger, device: torch.device) -> None:
        plain(self, ledger, device)
        self._device, self._allocated = device, sum(ledger.live)
        begun[:] = [ledger]

    monkeypatch.setattr(layer_run._Peak, "__init__", begin)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: begun[0].total_peak + more)


def bytes_of(layer: LayerProfile) -> dict[str, Any]:
    """Return what a profile says of a layer's bytes; no optimizer is measured."""
    return {name: value for name, value in vars(layer).items() if "bytes" in name}


@pytest.mark.parametrize("more", [0, 4096])
@pytest.mark.parametrize("make", [own, joined, added, skipped])
def test_what_only_the_allocator_sees_is_added_to_the_peaks(
    make: Callable[[], nn.Sequential], more: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If it sees no more, profiles are those of a CPU, also where gradients share memory."""
    model, sample = make(), torch.randn(ROWS, COLUMNS)
    expected = [bytes_of(layer) for layer in measured(model, sample, chunks=2).layers]
    with_allocator(monkeypatch, more)
    found = [bytes_of(layer) for layer in measured(model, sample, chunks=2).layers]
    for mine, known in zip(found, expected, strict=True):
        # What copies take before a forward is a peak too.
        peaks = [name for name in known if "peak" in name or name == "written_input_bytes"]
        changed = {name: known[name] + more for name in peaks if known[name] is not None}
        assert mine == known | changed
