"""Tied parameters: one parameter that layers of several partitions use.

Each worker's backward would add into the same ``.grad``, in the order of the clock, and floating
point sums depend on their order. So while a worker runs, the gradients of tied parameters are
caught on their way and summed up for its partition alone; when all workers have ended, the caller's
thread adds the partitions' sums to ``.grad``, first partition first: the same bits in every run.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from gpipebal.pipeline.lane import Lane
from gpipebal.pipeline.partition import Partition

__all__ = ["TiedParameters"]

#: The gradients of a partition's tied parameters.
_Sums = dict[nn.Parameter, Tensor]

_current = threading.local()


class TiedParameters:
    """The parameters that several of these partitions use."""

    def __init__(self, partitions: Sequence[Partition]) -> None:
        owners: dict[nn.Parameter, set[int]] = {}
        for partition in partitions:
            for layer in partition.layers:
                for parameter in layer.parameters():
                    owners.setdefault(parameter, set()).add(partition.index)
        self.parameters = [p for p, found in owners.items() if len(found) > 1]
        self._n_partitions = len(partitions)
        # Two mini-batches of two threads may be ready at once.
        self._adding = threading.Lock()
        # torch keeps the node that adds to `.grad` only while a graph does; the hook is on it.
        self._nodes: dict[nn.Parameter, Any] = {}

    def sums(self) -> list[_Sums]:
        """Return an empty sum for each partition, and make sure that gradients will be caught."""
        for parameter in self.parameters:
            if parameter.requires_grad:
                node = get_gradient_edge(parameter).node
                # It is another one after the parameter has changed its type or device.
                if self._nodes.get(parameter) is not node:
                    node.register_prehook(_catcher(parameter))
                    self._nodes[parameter] = node
        return [{} for _ in range(self._n_partitions)]

    @contextmanager
    def collecting(self, sums: _Sums) -> Iterator[None]:
        """Catch the gradients that backwards of this thread and block find."""
        if not self.parameters:
            yield
            return
        _current.sums = sums
        try:
            yield
        finally:
            _current.sums = None

    def add_up(self, sums: Sequence[_Sums], lanes: Sequence[Lane]) -> None:
        """Add the sums of the partitions to ``.grad``; called in the caller's thread."""
        with self._adding, torch.no_grad():
            for parameter in self.parameters:
                found = False
                for j, of_partition in enumerate(sums):
                    gradient = of_partition.pop(parameter, None)
                    if gradient is not None:
                        found = True
                        lanes[j].give_to_caller([gradient], None)
                        parameter.grad = _added(parameter.grad, gradient)
                if found:
                    for hook in list((parameter._post_accumulate_grad_hooks or {}).values()):
                        hook(parameter)


def _added(known: Tensor | None, gradient: Tensor) -> Tensor:
    """Add a gradient in place, where torch can: a sparse one to a dense one, not the other way."""
    if known is None:
        return gradient
    if known.is_sparse and not gradient.is_sparse:
        return gradient.add_(known)
    return known.add_(gradient)


def _catcher(parameter: nn.Parameter) -> Any:
    def catch(gradients: tuple[Tensor | None, ...]) -> tuple[None] | None:
        sums: _Sums | None = getattr(_current, "sums", None)
        gradient = gradients[0]
        if sums is None or gradient is None:
            return None  # a backward outside of the pipeline
        with torch.no_grad():
            known = sums.get(parameter)
            if known is None or (known.is_sparse and not gradient.is_sparse):
                # A copy: the same tensor may be on its way to other parameters too.
                gradient = gradient.detach().clone()
            sums[parameter] = _added(known, gradient)
        return (None,)  # nothing is added to `.grad`

    return catch
