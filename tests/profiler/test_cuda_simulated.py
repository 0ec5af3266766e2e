"""What profiles do on CUDA alone, tried without a device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from counted_memory import Beside, Keep, measured
from profiler.test_profiler_ways import memory_of
from torch import Tensor, nn

from gpipebal.pipeline.observers.ledger import Ledger
from gpipebal.pipeline.values.tensors import storage_key
from gpipebal.profile import LayerProfile
from gpipebal.profiler import alone
from gpipebal.profiler.chain.moving import value_to
from gpipebal.profiler.chain.value import Value
from gpipebal.profiler.memory import device_ledger

pytestmark = pytest.mark.timeout(120)
ROWS, COLUMNS = 8, 16
#: A device that no tensor here is on, though its memory is the same.
ELSEWHERE = torch.device("cpu:0")


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
    plain = device_ledger.Peak.__init__

    def begin(self: Any, ledger: device_ledger.DeviceLedger, device: torch.device) -> None:
        plain(self, ledger, device)
        self._device, self._allocated = device, sum(ledger.live)
        begun[:] = [ledger]

    monkeypatch.setattr(device_ledger.Peak, "__init__", begin)
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


def some_leaves() -> list[Tensor]:
    """Make tensors with gaps, repeated, turned around and overlapping; some share their memory."""
    whole, other = torch.randn(6, 8), torch.randn(3, requires_grad=True)
    parts = [whole[2:, 4:], whole[2:, :4], whole[4].view(torch.int16), whole.T[1:5]]
    return [*parts, other.expand(4, 3), other[1:], torch.randn(5).unfold(0, 3, 1), torch.randn(())]


@pytest.mark.parametrize("device", [torch.device("meta"), ELSEWHERE])
def test_values_lie_on_another_device_as_they_did(device: torch.device) -> None:
    """With their strides, in the memory that they have in common, also with a skip."""
    leaves = some_leaves()
    moved = value_to(Value(leaves[:5], None, {(None, "skip"): (leaves[5:], None)}), device)
    found = [*moved.leaves, *moved.skips[None, "skip"][0]]
    assert [leaf.stride() for leaf in found] == [leaf.stride() for leaf in leaves]
    assert [leaf.requires_grad for leaf in found] == [leaf.requires_grad for leaf in leaves]

    def shared(leaves: list[Tensor]) -> list[int]:
        keys = [storage_key(leaf) for leaf in leaves]
        return [keys.index(key) for key in keys]

    assert shared(found) == shared(leaves)
    if device == ELSEWHERE:
        assert all(map(torch.equal, found, leaves))
        assert {*map(storage_key, found)}.isdisjoint(map(storage_key, leaves))


def test_skips_that_wait_may_stay_behind() -> None:
    """Those that a layer does not pop stay where they are."""
    skips = {(None, name): ([torch.ones(2)], None) for name in ("popped", "other")}
    moved = value_to(Value([], None, dict(skips)), torch.device("meta"), only=[(None, "popped")])
    assert moved.skips[None, "popped"][0][0].is_meta
    assert moved.skips[None, "other"] is skips[None, "other"]


class Dense(nn.Module):
    """Save a copy, unless there are no gaps."""

    def forward(self, parts: tuple[Tensor, Tensor]) -> Tensor:
        return parts[0].contiguous().square() + parts[1]


@pytest.mark.parametrize("make", [joined, added, skipped])
def test_layers_alone_get_what_they_get_in_the_chain(
    make: Callable[[], nn.Sequential], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One layer at a time, though every value goes to the host and back: the same bytes."""
    model, sample = nn.Sequential(*make(), Halves(), Dense()), torch.randn(ROWS, COLUMNS)
    expected = memory_of(measured(model, sample, chunks=2))
    monkeypatch.setattr(alone, "_HOST", ELSEWHERE)
    assert memory_of(measured(model, sample, chunks=2, one_at_a_time=True)) == expected


def test_a_micro_batch_on_its_way_to_a_device_has_no_gaps() -> None:
    """A pipeline copies the rows alone, wherever they lie in the mini-batch."""
    (leaf,) = alone.SizeWalk.start(
        2, Value.of(torch.randn(4, 6)[:, :2]), torch.device("meta")
    ).trail.arrived.value.leaves
    assert leaf.shape == (4, 2) and leaf.is_contiguous()
