"""What a cell hands on, and what it lets go: no more memory than the values need."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gpipebal import GPipe
from gpipebal.pipeline.minibatch.cell import Cell
from gpipebal.skip import pop, skippable, stash

pytestmark = pytest.mark.timeout(60)


@skippable(stash=["wide"])
class _Keep(nn.Module):
    def forward(self, x: Tensor) -> Any:
        yield stash("wide", x * 2)
        return x


@skippable(pop=["wide"])
class _Join(nn.Module):
    def forward(self, x: Tensor) -> Any:
        wide = yield pop("wide")
        return torch.cat([wide, x], 1)


def test_gradients_that_travel_keep_no_larger_one_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    """On one row the gradient of a part lies in that of the whole; what is handed on does not."""
    handed: list[Tensor] = []
    backward = Cell.backward

    def seen(self: Cell, *arguments: Any, **keywords: Any) -> list[Tensor | None]:
        found = backward(self, *arguments, **keywords)
        handed.extend(gradient for gradient in found if gradient is not None)
        return found

    monkeypatch.setattr(Cell, "backward", seen)
    model = nn.Sequential(nn.Conv2d(2, 2, 1), _Keep(), nn.Conv2d(2, 2, 1), _Join())
    pipe = GPipe(model, [2, 2], chunks=4)
    x = torch.ones(4, 2, 3, 3)
    pipe(x).square().sum().backward()
    assert len(handed) == 8
    for gradient in handed:
        assert gradient.untyped_storage().nbytes() <= gradient.nbytes
    expected = [parameter.grad for parameter in pipe.parameters()]
    pipe.zero_grad()
    plain = torch.cat([2 * pipe[0](x), pipe[2](pipe[0](x))], 1)
    plain.square().sum().backward()
    for parameter, gradient in zip(pipe.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)


class _Watched(nn.Module):
    """Looks, in its forward, whether what came into the layer before is still there."""

    def __init__(self) -> None:
        super().__init__()
        self.earlier: weakref.ref[Any] | None = None
        self.alive: list[bool] = []

    def note(self, x: Tensor) -> None:
        self.earlier = weakref.ref(x.untyped_storage())

    def forward(self, x: Tensor) -> Tensor:
        if self.earlier is not None:
            self.alive.append(self.earlier() is not None)
        return x + 1


class _WritesToInput(nn.Module):
    def __init__(self, watched: _Watched) -> None:
        super().__init__()
        self.watched = [watched]

    def forward(self, x: Tensor) -> Tensor:
        x.mul_(2)
        self.watched[0].note(x)
        return torch.cat([x, x], 1)


@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_copies_for_writers_live_as_long_as_the_layers_need_them(checkpoint: Any) -> None:
    """The copy that a first layer writes to is gone when the next layer runs."""
    watched = _Watched()
    # Frozen: nothing is saved for a backward.
    pipe = GPipe(
        nn.Sequential(nn.Linear(4, 4).requires_grad_(False), _WritesToInput(watched), watched),
        [1, 2],
        chunks=3,
        checkpoint=checkpoint,
    )
    pipe(torch.ones(6, 4))
    pipe(torch.ones(6, 4))
    # All but the one by which facts were found out.
    assert watched.alive.count(True) <= 1
    assert watched.alive.count(False) >= 5
