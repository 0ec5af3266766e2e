"""Gradients that go into a layer's backward and come out of it: which memory they are in."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from gpipebal.errors import ProfileError
from gpipebal.pipeline.process.engine_state import nodes_behind
from gpipebal.pipeline.values.tensors import bytes_of, has_storage, is_shared, storage_key

__all__ = [
    "Begun",
    "HandedBack",
    "begun_inside",
    "from_before",
    "handed_back",
    "handed_through",
    "memory_of",
    "needs_gradient",
    "used_again",
]

#: What gradients are that a backward begins with: all that is in their memory; views of all of it,
#: which torch does not add to in place; or parts of something larger, with gaps along every
#: dimension of several elements, as parts of a concatenation have along one.
Begun = Literal["own", "views", "parts"]

#: Bytes that kernels read at a time at most.
_AT_A_TIME = 16

#: All that is needed to make a gradient: shape, dtype and device.
_Recipe = tuple[torch.Size, torch.dtype, torch.device]


def needs_gradient(leaf: Any) -> bool:
    """Tell whether a leaf of a value is a tensor that requires a gradient."""
    return isinstance(leaf, Tensor) and leaf.requires_grad


def memory_of(gradients: Iterable[Tensor | None]) -> dict[int, tuple[int, int]]:
    """Return the key of each gradient's storage and the gradient's bytes, by place.

    What has no storage of its own is left out.
    """
    return {
        place: (storage_key(gradient), bytes_of(gradient))
        for place, gradient in enumerate(gradients)
        if gradient is not None and has_storage(gradient)
    }


def begun_inside(
    outputs: Sequence[Any], made: Callable[[dict[int, Tensor]], None], kind: Begun
) -> tuple[list[tuple[Tensor, Tensor]], dict[int, int]]:
    """Append to outputs a function whose backward makes their gradients.

    Nothing else holds these gradients, so they are freed once they are used: as in a chain.

    Args:
        outputs: Leaves of a value.
        made: Called with these gradients, by place of the output, when they are there.
        kind: What they are.

    Returns:
        What the backward begins with instead of the outputs, empty if none of them has a gradient;
        and the bytes of the gradients that it will make, by place.
    """
    wanted = {place: leaf for place, leaf in enumerate(outputs) if needs_gradient(leaf)}
    if not wanted:
        return [], {}
    if any(leaf.is_nested for leaf in wanted.values()):
        raise ProfileError(
            "nested tensors between layers cannot be profiled: nobody knows how large their "
            "gradients are.\n"
            "Fix: put the layers between which they go into one (an nn.Sequential inside the "
            "chain), or give costs of your own, gpipebal.Profile.from_costs(forward=[...])."
        )
    root: Tensor = _Begin.apply(kind, made, tuple(wanted), *wanted.values())
    n_bytes = {place: bytes_of(leaf) for place, leaf in wanted.items()}
    return [(root, torch.ones_like(root))], n_bytes


class _Begin(torch.autograd.Function):
    """Return a number for outputs; its backward makes a gradient for each of them."""

    @staticmethod
    def forward(
        ctx: Any,
        kind: Begun,
        made: Callable[[dict[int, Tensor]], None],
        places: tuple[int, ...],
        *outputs: Tensor,
    ) -> Tensor:
        ctx.kind, ctx.made, ctx.places = kind, made, places
        ctx.recipes = [(leaf.shape, leaf.dtype, leaf.device) for leaf in outputs]
        return torch.zeros((), device=outputs[0].device)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor | None, ...]:
        recipes: list[_Recipe] = ctx.recipes
        made = [
            _with_gaps(shape, dtype, device)
            if ctx.kind == "parts"
            else torch.zeros(shape, dtype=dtype, device=device)
            for shape, dtype, device in recipes
        ]
        ctx.made(dict(zip(ctx.places, made, strict=True)))
        if ctx.kind == "views":
            made = [one.view(one.shape) for one in made]
        return None, None, None, *made


def _with_gaps(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Make a view of something larger, in which no two dimensions can be taken for one.

    Gaps are as small as they can be with all rows aligned as they would be without any: a kernel
    may read several elements at a time without a look at the strides.
    """
    at_a_time, strides, reach = max(1, _AT_A_TIME // dtype.itemsize), list[int](), 1
    for n in reversed(shape):
        strides.append(reach)
        reach *= n
        if n > 1:  # none for a single element: that could take as much memory again
            reach += math.gcd(reach, at_a_time)
    return torch.zeros(reach, dtype=dtype, device=device).as_strided(shape, strides[::-1])


def from_before(inputs: Iterable[Any]) -> list[Any]:
    """Make of leaves what a layer would get from another one that is in front of it.

    Their gradients are not kept: autograd would copy those that something else holds.
    """
    return [_Before.apply(leaf) if needs_gradient(leaf) else leaf for leaf in inputs]


class _Before(torch.autograd.Function):
    """Stand for a layer that returned a tensor; its backward does nothing."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor) -> Tensor:
        # Not a view for autograd, like most of what layers return.
        return leaf.detach()

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> None:
        return None


def used_again(inputs: Sequence[Any], outputs: Iterable[Any]) -> frozenset[int]:
    """Find the inputs whose gradients come in several pieces, which autograd adds up.

    Args:
        inputs: Leaves of autograd, or what stands for them.
        outputs: What was made of them.

    Returns:
        Their places.
    """
    places = {
        get_gradient_edge(leaf).node: place
        for place, leaf in enumerate(inputs)
        if needs_gradient(leaf)
    }
    pieces = [0] * len(inputs)
    ends = [get_gradient_edge(leaf).node for leaf in outputs if needs_gradient(leaf)]
    for node in nodes_behind(ends, places):
        for before, _ in node.next_functions:
            if before in places:
                pieces[places[before]] += 1
    return frozenset(place for place, n_pieces in enumerate(pieces) if n_pieces > 1)


class _Keys:
    """Keys of storages, that stay theirs: what later lies in the place of one has another key.

    A gradient may be freed while the backward goes on, and the next one then has its place.
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[Any], int]] = {}
        self._n_more = 0

    def of(self, tensor: Tensor) -> int:
        """Return the key of a tensor's storage: its `storage_key`, or a number below zero."""
        place = storage_key(tensor)
        storage, key = self._known.get(place, (None, place))
        if storage is not None and storage() is not None:
            return key
        if storage is not None:
            self._n_more += 1
            key = -self._n_more
        self._known[place] = weakref.ref(tensor.untyped_storage()), key
        return key


class HandedBack(NamedTuple):
    """The gradient of an input that a backward hands back.

    Attributes:
        key: Key of the memory that it lies in.
        n_bytes: Bytes of that memory.
        is_own: Whether nothing else holds it, and it has no gaps.
    """

    key: int
    n_bytes: int
    is_own: bool


@contextmanager
def handed_back(inputs: Iterable[Any], *, hold: bool) -> Iterator[dict[int, HandedBack | None]]:
    """Find out in which memory a block's backward hands back the gradients of its inputs.

    Args:
        inputs: Leaves of autograd.
        hold: Whether to hold this memory until the backward is over, as in a chain. Otherwise a
            larger gradient is freed once autograd has copied those that are parts of it.

    Yields:
        Receives the gradients, by place of the input; None: it has no storage of its own.
    """
    found: dict[int, HandedBack | None] = {}
    held: list[Any] = []
    keys = _Keys()

    def look(place: int, gradient: Tensor) -> None:
        if not has_storage(gradient):
            found[place] = None
            return
        is_dense = gradient.is_contiguous() or (
            gradient.dim() == 4 and gradient.is_contiguous(memory_format=torch.channels_last)
        )
        # Before anything here holds it.
        is_own, key = is_dense and not is_shared(gradient), keys.of(gradient)
        for other, before in found.items():
            if before is not None and before.key == key and other != place:
                found[other], is_own = before._replace(is_own=False), False
        storage = gradient.untyped_storage()
        found[place] = HandedBack(key, storage.nbytes(), is_own)
        if hold:
            held.append(storage)

    hooks = [
        leaf.register_hook(partial(look, place))
        for place, leaf in enumerate(inputs)
        if needs_gradient(leaf)
    ]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def handed_through(
    inputs: Sequence[Any],
    outputs: Sequence[Any],
    given: Mapping[int, tuple[int, int]],
    back: Mapping[int, HandedBack | None],
) -> dict[int, tuple[int, int]]:
    """Find the inputs that are outputs too, and whose gradient is the same.

    Args:
        inputs: Leaves of autograd.
        outputs: What came out.
        given: What `memory_of` says of the gradients that a backward started from, and that live
            until now.
        back: What `handed_back` has found in it.

    Returns:
        By places of the inputs, the keys of their storages, and the places of these outputs.
    """
    places = {
        (storage_key(outputs[at]), key): at
        for at, (key, _) in given.items()
        if has_storage(outputs[at])
    }
    found = {}
    for place, gradient in back.items():
        if gradient is not None and has_storage(inputs[place]):
            key = storage_key(inputs[place])
            at = places.get((key, gradient.key))
            if at is not None:
                found[place] = key, at
    return found
