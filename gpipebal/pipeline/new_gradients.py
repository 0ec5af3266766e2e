"""New gradients of parameters: none lies in memory that somebody else reads.

The first gradient that a backward finds becomes a parameter's ``.grad`` as it is. It may be a view:
behind ``x.view(..) + bias.unsqueeze(0)`` on a micro-batch of one row, ``x.grad``, ``bias.grad`` and
the gradient that the backward began with are one piece of memory. The next micro-batch adds to
``bias.grad`` in place, while other partitions still read the others. In a loop of plain torch all
of them have been used by then; here each cell's end is the last moment at which they can be parted.

So whoever has run a cell's backward lets parameters keep copies of what lies in memory that
travels, or in another's gradient, before anything is handed on.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gpipebal.pipeline.ledger import has_storage, storage_key

__all__ = ["NewGradients"]


class _Piece(NamedTuple):
    """Where in a storage the elements of a tensor lie, in bytes: from `begin` to before `end`."""

    begin: int
    end: int

    def overlaps(self, other: _Piece) -> bool:
        return self.begin < other.end and other.begin < self.end


class NewGradients:
    """The parameters that one partition gives gradients to, as long as they have none.

    Belongs to the partition's worker while it runs.

    Args:
        parameters: Its parameters.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._without: dict[int, nn.Parameter] = {}
        self.add(parameters)

    def add(self, parameters: Iterable[nn.Parameter]) -> None:
        """Take in parameters that have got a gradient from nobody yet, if they want one."""
        for parameter in parameters:
            if parameter.requires_grad and parameter.grad is None:
                self._without[id(parameter)] = parameter

    def part_from(self, others: Sequence[Any]) -> None:
        """Let gradients that have come into being keep copies of what others read too.

        Args:
            others: What the backward began with and what it found for others; what is no tensor
                is passed over.
        """
        found = [p for p in self._without.values() if p.grad is not None]
        if not found:
            return
        pieces: dict[int, list[_Piece]] = {}
        for other in others:
            _enter(other, pieces)
        for parameter in found:
            del self._without[id(parameter)]
            gradient = parameter.grad
            if _enter(gradient, pieces):
                assert gradient is not None
                with torch.no_grad():
                    parameter.grad = gradient.clone()


def _enter(value: Any, pieces: dict[int, list[_Piece]]) -> bool:
    """Enter where a tensor lies; tell whether it shares elements with one that lies there."""
    if not has_storage(value) or not value.numel():
        return False
    tensor: Tensor = value
    size = tensor.element_size()
    begin = int(tensor.storage_offset()) * size
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    piece = _Piece(begin, begin + (1 + sum([(n - 1) * step for n, step in steps])) * size)
    known = pieces.setdefault(storage_key(tensor), [])
    shares = any(map(piece.overlaps, known))
    known.append(piece)
    return shares
