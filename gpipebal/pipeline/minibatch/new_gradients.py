"""New gradients of parameters: none lies in memory that other cells or the caller read.

The first gradient that a backward finds becomes a parameter's ``.grad`` as it is. It may be a view:
after ``x.view(..) + bias.unsqueeze(0)`` on a micro-batch of one row, ``x.grad``, ``bias.grad`` and
the gradient that the backward began with are one piece of memory. The next micro-batch adds to
``bias.grad`` in place, while other partitions still read the others. In a loop of plain torch all
of them have been used by then; here the end of each cell is the last chance to separate them.

So after a cell's backward its worker gives a parameter a copy of its gradient where that lies in
memory that travels, or in another parameter's gradient, before anything is passed on. Other readers
(a hook that keeps a gradient) are not known here.

The caller's own graph may use a parameter of a layer too, and give it its first gradient before the
pipeline's backward begins: that gradient is separated from others at this point.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from gpipebal.pipeline.process.engine_state import will_run
from gpipebal.pipeline.values.tensors import has_storage, is_shared, parts_of, storage_key

__all__ = ["LateGradients", "NewGradients"]

#: Where in a storage elements lie, in bytes: from the first number to before the second; and the
#: parameter whose gradient that is; None: something else.
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
        """Add the parameters of the partition, at its first backward."""
        self.has_begun = True
        self.add(parameters)

    def add(self, parameters: Iterable[Tensor]) -> None:
        """Add parameters that want a gradient, and have none yet or may lose it again to a hook."""
        for one in parameters:
            # Under `torch.func.functional_call` something else may be in a parameter's place.
            if one.is_leaf and one.requires_grad and (one.grad is None or _may_lose(one)):
                self._watched[id(one)] = one

    def part_from(self, others: Sequence[Any]) -> None:
        """Replace gradients that are new by copies where others read the same memory.

        Args:
            others: Gradients that the backward began with, and those that it found for others;
                anything that is not a tensor is skipped.

        Complexity:
            O(n log n) for n new gradients and others, once for each mini-batch; O(1) after that.
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
    to it in place. A gradient that shared its memory already before the forward, as a part of a
    flat buffer does, is meant to share it.
    """

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        # Under `torch.func.functional_call` something else may be in a parameter's place.
        self._parameters = [one for one in parameters if one.is_leaf]
        self._meant = {
            id(one): storage_key(one.grad)
            for one in self._parameters
            if one.grad is not None and has_storage(one.grad) and is_shared(one.grad)
        }

    def part(self, take: Callable[[Tensor], None]) -> None:
        """Replace gradients that have come to share their memory since then by copies.

        Args:
            take: Called with each gradient before it is copied: it may have been made on another
                stream.
        """
        for one in self._parameters:
            gradient = one.grad
            # The engine gives no views of a tensor that has a name: these are the caller's.
            if gradient is None or gradient._is_view() or not is_shared(gradient):
                continue
            if has_storage(gradient) and self._meant.get(id(one)) == storage_key(gradient):
                continue
            # No other backward is under way: only this one can have made it a view.
            if not one.requires_grad:
                continue
            edge = get_gradient_edge(one)  # keeps the node alive until it has been asked for
            if will_run(edge.node):
                take(gradient)
                with torch.no_grad():
                    one.grad = gradient.clone()


def _may_lose(parameter: Tensor) -> bool:
    """Tell whether a hook may take the gradient away in the middle of a mini-batch."""
    return bool(parameter._post_accumulate_grad_hooks)


def _enter(value: Any, owner: Tensor | None, pieces: dict[int, list[_Piece]]) -> None:
    """Enter where the elements of a tensor lie; if it is sparse, those of its parts."""
    for part in parts_of(value) if isinstance(value, Tensor) else ():
        if has_storage(part) and part.numel():
            size = part.element_size()
            begin = int(part.storage_offset()) * size
            steps = zip(part.shape, part.stride(), strict=True)
            end = begin + (1 + sum([(n - 1) * step for n, step in steps])) * size
            pieces.setdefault(storage_key(part), []).append((begin, end, owner))


def _sharing(pieces: list[_Piece]) -> list[Tensor]:
    """Return whose gradients must move so that no two pieces of a storage have a byte in common.

    Of several gradients that lie in one place, with nothing else there, the first may stay.
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
