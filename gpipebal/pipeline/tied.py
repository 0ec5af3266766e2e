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
        for parameter in self.parameters:
            for j, of_partition in enumerate(sums):
                gradient = of_partition.pop(parameter, None)
                if gradient is None:
                    continue
                lanes[j].give_to_caller([gradient], None)
                if parameter.grad is None:
                    parameter.grad = gradient
                else:
                    parameter.grad = parameter.grad + gradient


def _catcher(parameter: nn.Parameter) -> Any:
    def catch(gradients: tuple[Tensor | None, ...]) -> tuple[None] | None:
        sums: _Sums | None = getattr(_current, "sums", None)
        gradient = gradients[0]
        if sums is None or gradient is None:
            return None  # a backward outside of the pipeline
        known = sums.get(parameter)
        # A copy: the same tensor may be on its way to other parameters too.
        sums[parameter] = gradient.detach().clone() if known is None else known + gradient
        return (None,)  # nothing is added to `.grad`

    return catch
