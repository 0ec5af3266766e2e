"""Skippable layers for the tests of skips."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from gpipebal.skip import Namespace, pop, skippable, stash


@skippable(stash=["image"])
class Keep(nn.Module):
    """Keep an image for later."""

    def __init__(self, width: int = 3) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Any:
        image = self.linear(x) * scale
        yield stash("image", image)
        return torch.tanh(image)


@skippable(pop=["image"])
class Join(nn.Module):
    def forward(self, x: Tensor) -> Any:
        image = yield pop("image")
        return x * image


class Identity(nn.Module):
    """Not skippable by itself: stash the input, or add what is popped, as declared."""

    def forward(self, x: Any) -> Any:
        for key in sorted(self.pops()):  # type: ignore[operator]
            x = x + (yield pop(key[1]))
        for key in sorted(self.stashes()):  # type: ignore[operator]
            yield stash(key[1], x)
        return x


KeepA = skippable(stash=["a"])(Identity)


class Remade(Identity):
    """It is copied and pickled in its own way: it is made anew."""

    def __reduce__(self) -> Any:
        return make_remade, ()


KeepRemade = skippable(stash=["a"])(Remade)


def make_remade() -> Any:
    """Make what a pickled KeepRemade becomes."""
    made = KeepRemade()
    made.remade = True
    return made


def layer(forward: Callable[..., Any], **names: list[str]) -> nn.Module:
    """Make a skippable layer of a function that is its forward, without self."""
    body = {"forward": lambda self, *args: forward(*args), "__doc__": None}
    return skippable(**names)(type("Layer", (nn.Module,), body))()


def keep(name: str, value: Callable[[Any], Any] = lambda x: x) -> nn.Module:
    """Make a layer that stashes what `value` makes of its input, and hands the input on."""

    def forward(x: Any) -> Any:
        yield stash(name, value(x))
        return x

    return layer(forward, stash=[name])


def give(name: str, use: Callable[[Any, Any], Any] = lambda x, value: value) -> nn.Module:
    """Make a layer that pops a value, and returns what `use` makes of its input and the value."""

    def forward(x: Any) -> Any:
        return use(x, (yield pop(name)))

    return layer(forward, pop=[name])


class Hourglass(nn.Module):
    """The reference: the same layers, with the images passed on by hand."""

    def __init__(self, model: nn.Sequential) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        first, second, middle = self.model[0], self.model[1][0], self.model[2]
        one = first.linear(x)
        two = second.linear(torch.tanh(one))
        return middle(torch.tanh(two)) * two * one


def hourglass() -> nn.Sequential:
    """Make a chain of two nested pairs of one name; one layer is inside a container."""
    outer, inner = Namespace(), Namespace()
    return nn.Sequential(
        Keep().isolate(outer),
        nn.Sequential(Keep().isolate(inner)),
        nn.Linear(3, 3),
        Join().isolate(inner),
        nn.Sequential(nn.Sequential(Join().isolate(outer))),
    ).double()


def run(forward: Callable[..., Any], **names: list[str]) -> Callable[[], Any]:
    """Make a call of a layer with this forward."""
    return lambda: layer(forward, **names)(1)


def does(*requests: Any) -> Callable[[Any], Any]:
    """Make a forward that yields these requests."""

    def forward(x: Any) -> Any:
        for request in requests:  # noqa: UP028 - the answers are sent to this generator
            yield request
        return x

    return forward
