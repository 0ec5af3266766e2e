"""New gradients of parameters: none lies in memory that other cells or the caller read.

The first gradient that a backward finds becomes a parameter's ``.grad`` as it is. It may be a view:
behind ``x.view(..) + bias.unsqueeze(0)`` on a micro-batch of one row, ``x.grad``, ``bias.grad`` and
the gradient that the backward began with are one piece of memory. The next micro-batch adds to
``bias.grad`` in place, while other partitions still read the others. In a loop of plain torch all
of them have been used by then; here each cell's end is the last moment at which they can be parted.

So whoever has run a cell's backward lets parameters keep copies of what lies in memory that
travels, or in another's gradient, before anything is handed on. What else may look on (a hook that
keeps a gradient) is not known here.

The caller's own graph may use a parameter of a layer too, and give it its first gradient before the
pipeline's backward begins: it is parted from others by then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from gpipebal.pipeline.engine_state import will_run
from gpipebal.pipeline.tensors import has_storage, is_shared, parts_of, storage_key

__all__ = ["LateGradients", "NewGradients"]

#: Where in a storage elements lie, in bytes: from the first to before the second; and whose
#: gradient that is; None: something else.
_Piece = tuple[int, int, Tensor | None]


class NewGradients:
    """The parameters that one partition gives gradients to, as long as they have none.

    Belongs to the partition's worker while it runs.

    Attributes:
        has_begun: Whether it knows the partition's parameters.
    """

    def __init__(self) -> None:
        self.has_begun = False
        self._watched: dict[int, Tensor] = {}

    def begin(self, parameters: Iterable[Tensor]) -> None:
        """Take in the parameters of the partition, at its first backward."""
        self.has_begun = True
        self.add(parameters)

    def add(self, parameters: Iterable[Tensor]) -> None:
        """Take in what wants a gradient, and has got none yet or may lose it again to a hook."""
        for one in parameters:
            # Under `torch.func.functional_call` something else may stand in a parameter's place.
            if one.is_leaf and one.requires_grad and (one.grad is None or _may_lose(one)):
                self._watched[id(one)] = one

    def part_from(self, others: Sequence[Any]) -> None:
        """Let gradients that have come into being keep copies of what others read too.

        Args:
            others: What the backward began with and what it found for others; what is no tensor
                is passed over.

        Complexity:
            O(n log n) for n new gradients and others, once for each mini-batch; then nothing.
        """
        found = [one for one in self._watched.values() if one.grad is not None]
        if not found:
            return
        pieces: dict[int, list[_Piece]] = {}
        for other in others:
            _enter(other, None, pieces)
        for one in found:
            if not _may_lose(one):
                del self._watched[id(one)]
            _enter(one.grad, one, pieces)
        shared: dict[int, Tensor] = {}
        for in_storage in pieces.values():
            if len(in_storage) > 1:
                shared.update((id(one), one) for one in _sharing(in_storage))
        with torch.no_grad():
            for one in shared.values():
                assert one.grad is not None
                one.grad = one.grad.clone()


class LateGradients:
    """Gradients that the caller's graph gives parameters before the pipeline's backward begins.

    Such a gradient may be a view of another one, which is still on its way, and workers would add
    to it in place. One that shared its memory before the forward, as a part of a flat buffer does,
    is meant to.
    """

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        # Under `torch.func.functional_call` something else may stand in a parameter's place.
        self._parameters = [one for one in parameters if one.is_leaf]
        self._meant = {
            id(one): storage_key(one.grad)
            for one in self._parameters
            if one.grad is not None and has_storage(one.grad) and is_shared(one.grad)
        }

    def part(self, take: Callable[[Tensor], None]) -> None:
        """Let gradients that share their memory since then be copies.

        Args:
            take: Is called with a gradient before it is copied: it may have been made on another
                stream.
        """
        for one in self._parameters:
            gradient = one.grad
            if gradient is None or not is_shared(gradient):
                continue
            if has_storage(gradient) and self._meant.get(id(one)) == storage_key(gradient):
                continue
            # Nobody else's backward is under way: only this one can have left it a view.
            if not one.requires_grad:
                continue
            edge = get_gradient_edge(one)  # which keeps the node as long as it is asked for
            if will_run(edge.node):
                take(gradient)
                with torch.no_grad():
                    one.grad = gradient.clone()


def _may_lose(parameter: Tensor) -> bool:
    """Tell whether a hook may take the gradient away in the middle of a mini-batch."""
    return bool(parameter._post_accumulate_grad_hooks)


def _enter(value: Any, owner: Tensor | None, pieces: dict[int, list[_Piece]]) -> None:
    """Enter where the elements of a tensor lie, of a sparse one those of its parts."""
    for part in parts_of(value) if isinstance(value, Tensor) else ():
        if has_storage(part) and part.numel():
            size = part.element_size()
            begin = int(part.storage_offset()) * size
            steps = zip(part.shape, part.stride(), strict=True)
            end = begin + (1 + sum([(n - 1) * step for n, step in steps])) * size
            pieces.setdefault(storage_key(part), []).append((begin, end, owner))


def _sharing(pieces: list[_Piece]) -> list[Tensor]:
    """Return whose gradients must move so that no two pieces of a storage have a byte in common.

    Of several that lie in one place, and nothing else there, the first may stay.
    """
    moving: list[Tensor] = []
    group: list[Tensor | None] = []
    reached = -1
    for begin, end, owner in sorted(pieces, key=lambda piece: piece[:2]):
        if begin >= reached:
            moving += _movers(group)
            group = []
        group.append(owner)
        reached = max(reached, end)
    return moving + _movers(group)


def _movers(group: list[Tensor | None]) -> list[Tensor]:
    owners = [owner for owner in group if owner is not None]
    return owners if len(owners) < len(group) else owners[1:]
