"""What is on its way between layers while a chain is measured, and its gradients."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from gpipebal.pipeline.values.dims import Dim
from gpipebal.pipeline.values.microbatch import flatten
from gpipebal.pipeline.values.tensors import copy_of
from gpipebal.profiler.chain.failures import memory_for
from gpipebal.profiler.chain.gradients import needs_gradient
from gpipebal.skip.tracker import Key

__all__ = [
    "Record",
    "SkipEnds",
    "Value",
    "as_leaves",
    "cloned",
    "random_gradients",
    "roots_of",
    "take_gradients",
]

#: Skips of a chain: the layer that stashes, and the one that pops.
SkipEnds = Mapping[Key, tuple[int, int]]


@dataclass
class Value:
    """What is on its way between two layers.

    Attributes:
        leaves: Leaves of the output of the layer before.
        structure: Their pytree.
        skips: What was stashed and is not yet popped, each as leaves and pytree.
        views: Places of leaves that are views of a tensor with a gradient, as the output of a
            Linear on three dimensions is. A layer that writes to one copies gradients in its
            backward.
    """

    leaves: list[Any]
    structure: Any
    skips: dict[Key, tuple[list[Any], Any]] = field(default_factory=dict)
    views: frozenset[int] = frozenset()

    @classmethod
    def of(cls, value: Any) -> Value:
        """Take a pytree apart."""
        leaves, structure = flatten(value)
        views = [
            i
            for i, leaf in enumerate(leaves)
            if isinstance(leaf, Tensor) and leaf.grad_fn is not None and leaf._is_view()
        ]
        return cls(leaves, structure, views=frozenset(views))

    def leaves_with(self, keys: Iterable[Key]) -> list[Any]:
        """Return its leaves, followed by those of some skips."""
        return [*self.leaves, *(leaf for key in keys for leaf in self.skips[key][0])]

    def without_graph(self) -> Value:
        """Let go of the graph that it came from."""
        skips = {
            key: (as_leaves(leaves, wants=True), structure)
            for key, (leaves, structure) in self.skips.items()
        }
        return Value(as_leaves(self.leaves, wants=True), self.structure, skips, self.views)


@dataclass
class Record:
    """What a layer's forward leaves for its backward.

    Attributes:
        inputs: Leaves of its input, followed by those of what it popped.
        popped: How many leaves of `inputs` belong to each skip.
        outputs: Leaves of its output, followed by those of what it stashed.
    """

    inputs: list[Any]
    popped: dict[Key, int]
    outputs: list[Any]


def random_gradients(outputs: Sequence[Any], dims: Sequence[Dim] = ()) -> list[Tensor | None]:
    """Make gradients to start a backward with: random, as small as a mean loss makes them.

    Args:
        outputs: Leaves of a layer's output.
        dims: For the first of them, the dimension along which several micro-batches are joined:
            gradients then lie as parts of that of the mini-batch do, whatever the output is like.
    """

    def gradient_of(leaf: Tensor, dim: Dim) -> Tensor:
        if leaf.layout != torch.strided:
            # With elements where the leaf has them, as its own backward would make it.
            return leaf.detach() / max(1, leaf.numel())
        gradient = torch.randn_like(leaf) / max(1, leaf.numel())
        if dim is None:
            return gradient
        if dim % leaf.dim() == 0:
            return torch.cat([gradient])
        return torch.cat([gradient, gradient], dim).narrow(dim, 0, leaf.shape[dim])

    with memory_for("the gradient of the layer's output"):
        return [
            gradient_of(leaf, dim) if needs_gradient(leaf) else None
            for leaf, dim in zip_longest(outputs, dims)
        ]


def cloned(inputs: Sequence[Any], places: Container[int], views: Container[int]) -> list[Any]:
    """Copy the tensors in some places, as for a layer that writes to them; views stay views."""

    def copied(i: int, leaf: Tensor) -> Tensor:
        return copy_of(leaf).view_as(leaf) if i in views else copy_of(leaf)

    with memory_for("a copy of what a layer writes to"):
        return [
            copied(i, leaf) if isinstance(leaf, Tensor) and i in places else leaf
            for i, leaf in enumerate(inputs)
        ]


def roots_of(
    outputs: Sequence[Any], gradients: Sequence[Tensor | None]
) -> list[tuple[Tensor, Tensor]]:
    """Pair the outputs that need a gradient with those that have come."""
    return [
        (leaf, gradient)
        for leaf, gradient in zip(outputs, gradients, strict=True)
        if needs_gradient(leaf) and gradient is not None
    ]


def take_gradients(inputs: Sequence[Any]) -> list[Tensor | None]:
    """Return the gradients of leaves, and clear them."""
    found: list[Tensor | None] = []
    for leaf in inputs:
        found.append(leaf.grad if isinstance(leaf, Tensor) else None)
        if isinstance(leaf, Tensor):
            leaf.grad = None
    return found


def as_leaves(leaves: Sequence[Any], *, wants: bool) -> list[Any]:
    """Cut tensors off from the graph; with `wants`, those that required a gradient do so again."""
    return [
        leaf.detach().requires_grad_(
            leaf.requires_grad and wants and (leaf.is_floating_point() or leaf.is_complex())
        )
        if isinstance(leaf, Tensor)
        else leaf
        for leaf in leaves
    ]
