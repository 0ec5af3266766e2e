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
from gpipebal.pipeline.values.places import find_to_part
from gpipebal.pipeline.values.tensors import has_storage, is_shared, storage_key

__all__ = ["LateGradients", "NewGradients"]


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
            That of `find_to_part` for all of them, once for each mini-batch; then O(1).
        """
        found = [one for one in self._watched.values() if one.grad is not None]
        if not found:
            return
        # Of several gradients that lie in one place, with nothing else there, the first stays.
        moved = find_to_part([one.grad for one in found], others)
        with torch.no_grad():
            for k, one in enumerate(found):
                if not _may_lose(one):
                    del self._watched[id(one)]
                if k in moved and one.grad is not None:
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
