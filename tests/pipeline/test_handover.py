"""What one partition has taken from another is its own: the sender keeps nothing of it alive."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from skip_layers import Join, Keep
from torch import Tensor, nn

from gpipebal.pipeline import GPipe
from gpipebal.pipeline.minibatch.routes import Routes
from gpipebal.skip import pop, skippable, stash

#: Seconds that a sender is held back at most; it goes on as soon as the tensors are gone.
PATIENCE = 20.0


@pytest.fixture
def slow_senders(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, int]]:
    """Hold every sender back until what it sent is gone; list what would not go."""
    kept: list[tuple[str, int, int]] = []

    def slow(name: str, leaves_of: Callable[[Any], list[Any]]) -> None:
        original = getattr(Routes, name)

        def put(self: Routes, j: int, i: int, sent: Any, *ready: Any) -> None:
            tensors = [t for t in leaves_of(sent) if isinstance(t, Tensor)]
            # Not the tensors: the sender's input may be in the same memory.
            storages = [weakref.ref(tensor.untyped_storage()) for tensor in tensors]
            del tensors
            original(self, j, i, sent, *ready)
            is_callers = j == (2 if name == "put_output" else 0)
            deadline = time.monotonic() + PATIENCE
            while not is_callers and any(one() is not None for one in storages):
                if time.monotonic() > deadline:
                    kept.append((name, j, i))
                    return
                time.sleep(0.001)

        monkeypatch.setattr(Routes, name, put)

    slow("put_output", lambda packet: packet.leaves)
    slow("put_gradients", lambda gradients: gradients)
    return kept


def chain() -> nn.Sequential:
    """Make a chain whose skip connection goes past the partition in the middle."""
    return nn.Sequential(
        *[nn.Linear(4, 6), Keep(6), nn.Linear(6, 3), nn.Linear(3, 3), nn.ReLU()],
        *[nn.Linear(3, 6), Join(), nn.Linear(6, 2)],
    )


def test_values_are_gone_while_their_senders_still_send(
    slow_senders: list[tuple[str, int, int]],
) -> None:
    """Without a graph a value ends with the cell that took it, whatever its sender does."""
    pipe = GPipe(chain(), [3, 2, 3], chunks=2)
    with torch.no_grad():
        pipe(torch.randn(4, 4))
    pipe.close()
    assert not slow_senders


class Double(nn.Module):
    """Makes a second value of its input."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x + 1, x + 2


class Beside(nn.Module):
    """Works on the first of two values; the second is handed through."""

    def forward(self, value: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return value[0] + 1, value[1]


class Total(nn.Module):
    """Adds both up."""

    def forward(self, value: tuple[Tensor, Tensor]) -> Tensor:
        return value[0] + value[1]


def test_values_handed_through_are_gone_too(slow_senders: list[tuple[str, int, int]]) -> None:
    """Who hands its input on has forgotten it, too, before the receiver has it."""
    pipe = GPipe(nn.Sequential(Double(), Beside(), Total()), [1, 1, 1], chunks=2)
    with torch.no_grad():
        pipe(torch.randn(4, 4))
    pipe.close()
    assert not slow_senders


@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_gradients_are_gone_while_their_senders_still_send(
    checkpoint: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """A gradient ends with the cell that took it, whatever its sender does."""
    pipe = GPipe(chain(), [3, 2, 3], chunks=2, checkpoint=checkpoint)  # type: ignore[arg-type]
    output = pipe(torch.randn(4, 4))
    slow_senders: list[tuple[str, int, int]] = request.getfixturevalue("slow_senders")
    output.sum().backward()
    pipe.close()
    assert not slow_senders


class Write(nn.Module):
    """Write to the input; tell when the second micro-batch has been written to."""

    def __init__(self) -> None:
        super().__init__()
        self.written = threading.Event()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        x.mul_(2)
        self.calls += 1
        if self.calls == 2:
            self.written.set()
        return x


class Wait(nn.Module):
    """Take long, until the second micro-batch has been written to elsewhere."""

    def __init__(self, written: threading.Event) -> None:
        super().__init__()
        self.written = written

    def forward(self, x: Tensor) -> Tensor:
        assert self.written.wait(PATIENCE)
        return x + 1


@skippable(stash=["same"])
class Stash(nn.Module):
    def forward(self, x: Tensor) -> Any:
        yield stash("same", x)
        return x


@skippable(pop=["same"])
class Add(nn.Module):
    def forward(self, x: Tensor) -> Any:
        same = yield pop("same")
        return x + same


def test_writes_to_another_micro_batch_are_not_taken_for_ones_own() -> None:
    """Micro-batches are views of one tensor, which counts the writes to all of them together."""
    write = Write()
    pipe = GPipe(nn.Sequential(write, Stash(), Wait(write.written), Add()), [2, 2], chunks=2)
    with torch.no_grad():
        output = pipe(torch.ones(4, 1))
    pipe.close()
    assert output.tolist() == [[5.0]] * 4
