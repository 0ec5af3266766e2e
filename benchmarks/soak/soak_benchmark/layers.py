"""Chains of small layers that can fail: every kind of thing that a pipeline treats in its own way.

The last column of a value is the number of the row and goes through every layer as it is.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from gpipebal.skip import pop, skippable, stash
from soak_benchmark.faults import visit, wire

# The layers themselves are met in chains only.
__all__ = ["CHAINS", "WIDTH", "Norm", "make_chain"]

#: Columns of a value, without the number.
WIDTH = 4


class Layer(nn.Module):
    """A layer whose forward, recompute and backward are noted, and can fail."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def forward(self, value: Any) -> Any:
        x = value[0] if isinstance(value, tuple) else value
        visit(self.name, x)
        output = self.work(value)
        if isinstance(output, tuple):
            return (wire(self.name, output[0], x), *output[1:])
        return wire(self.name, output, x)

    def work(self, value: Any) -> Any:
        """Do what the layer is there for."""
        raise NotImplementedError


def _with(work: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Work on all columns but the number."""
    return torch.cat([work(x[:, :-1]), x[:, -1:]], dim=1)


class Dense(Layer):
    def __init__(self, name: str, linear: nn.Linear | None = None) -> None:
        super().__init__(name)
        self.linear = linear or nn.Linear(WIDTH, WIDTH)

    def work(self, value: Tensor) -> Tensor:
        return _with(lambda x: torch.tanh(self.linear(x)), value)


class Relu(Layer):
    """Write to the input."""

    def work(self, value: Tensor) -> Tensor:
        value[:, :-1].relu_()
        return value


class Norm(Layer):
    """Batch normalisation; while `seen` is a list it keeps its inputs there."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.seen: list[Tensor] | None = None

    def work(self, value: Tensor) -> Tensor:
        """Normalise."""
        if self.seen is not None:
            self.seen.append(value[:, :-1].detach().clone())
        return _with(self.norm, value)


class Drop(Layer):
    def work(self, value: Tensor) -> Tensor:
        return _with(lambda x: nn.functional.dropout(x, 0.3, self.training), value)


class Fork(Dense):
    """Make a tuple: an image, the input itself, integers, and a nested rest."""

    def work(self, value: Any) -> Any:
        return super().work(value), value, value.argmax(1), {"none": None, "half": value[:, :2]}


class Aside(Dense):
    def work(self, value: Any) -> Any:
        return super().work(value[0]), *value[1:]


class Join(Layer):
    def work(self, value: Any) -> Any:
        image, x, numbers, rest = value
        extra = rest["half"].sum(1, keepdim=True) + numbers.unsqueeze(1)
        return _with(lambda image: image + x[:, :-1] + 0.1 * extra, image)


class _Skip(Dense):
    def forward(self, value: Tensor) -> Any:
        visit(self.name, value)
        output = self.work(value)
        for _, name in self.pops():  # type: ignore[operator]
            other = yield pop(name)
            addend = nn.functional.pad(other["image"][:, :-1] * other["factor"], (0, 1))
            output = output + addend
        for _, name in self.stashes():  # type: ignore[operator]
            yield stash(name, {"image": output * 2, "factor": 0.5, "none": None})
        return wire(self.name, output, value)


KeepFar = skippable(stash=["far"])(_Skip)
KeepNear = skippable(stash=["near"])(_Skip)
GiveFar = skippable(pop=["far"])(_Skip)
GiveNear = skippable(pop=["near"])(_Skip)


def _tied() -> list[Layer]:
    shared = nn.Linear(WIDTH, WIDTH)
    return [Dense("a"), Dense("b", shared), Relu("c"), Dense("d", shared), Dense("e")]


def _norm() -> list[Layer]:
    return [Dense("a"), Norm("b"), Relu("c"), Dense("d"), Norm("e"), Dense("f")]


def _tuples() -> list[Layer]:
    return [Fork("a"), Aside("b"), Aside("c"), Join("d"), Dense("e")]


def _skips() -> list[Layer]:
    first, last = [KeepFar("a"), Dense("b"), KeepNear("c")], [GiveNear("e"), GiveFar("f")]
    return [*first, Relu("d"), *last]


def _dropout() -> list[Layer]:
    return [Dense("a"), Drop("b"), Dense("c"), Drop("d"), Dense("e")]


#: The chains by name.
CHAINS: Mapping[str, Callable[[], list[Layer]]] = {
    "tied": _tied,
    "norm": _norm,
    "tuples": _tuples,
    "skips": _skips,
    "dropout": _dropout,
}


def make_chain(name: str, seed: int) -> nn.Sequential:
    """Make a chain in double precision, with parameters from a seed."""
    torch.manual_seed(seed)
    return nn.Sequential(OrderedDict((layer.name, layer) for layer in CHAINS[name]())).double()
