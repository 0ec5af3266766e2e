"""Tensors that get new memory although copies of a layer share them.

A tensor that a layer reaches by a function is not copied. If the layer gives it new memory (a
sparse one that is written to, ``resize_``, ``tensor.data = ...``), no two threads may run copies of
it: one would read what the other has freed. `foreign` sees the operations of a layer's first
forward; here all that a thread does in a round is seen, backwards and recomputes too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, UntypedStorage, nn

from gpipebal.pipeline.values.tensors import stored_parts
from gpipebal.profiler.replicas.foreign import moves_foreign
from gpipebal.profiler.replicas.harmless import tensors_reached

__all__ = ["CommonTensors", "moves_what_others_reach"]

#: Where a tensor lies: of each of its parts the storage, which is so kept from being given to
#: another tensor, its address and its bytes.
_Places = list[tuple[UntypedStorage, int, int]]


class CommonTensors:
    """Tensors that layers have in common with copies of them, and where they lie.

    Args:
        names: Names of the layers.
        layers: The layers, or other users such as a loss.
        copies: A copy of each.
    """

    def __init__(self, names: Sequence[str], layers: Sequence[Any], copies: Sequence[Any]) -> None:
        self._of: dict[str, list[Tensor]] = {}
        self._places: dict[int, _Places] = {}
        for name, layer, copy in zip(names, layers, copies, strict=True):
            others = set(map(id, tensors_reached(copy)))
            common = [tensor for tensor in tensors_reached(layer) if id(tensor) in others]
            if common:
                self._of[name] = common
            self._places.update((id(tensor), _places_of(tensor)) for tensor in common)

    def __bool__(self) -> bool:
        return bool(self._of)

    def moved(self) -> list[str]:
        """Return the names of layers that reach a tensor which has got new memory since."""
        return [
            name
            for name, tensors in self._of.items()
            if any(not _are_same(self._places[id(one)], _places_of(one)) for one in tensors)
        ]


def moves_what_others_reach(layers: Mapping[str, nn.Module]) -> bool:
    """Tell whether a layer gives a tensor new memory, and may share it with another layer.

    Args:
        layers: The layers by name, after they have been measured.
    """
    for mover in filter(moves_foreign, layers):
        reached = set(map(id, tensors_reached(layers[mover])))
        others = (layer for name, layer in layers.items() if name != mover)
        if any(id(tensor) in reached for layer in others for tensor in tensors_reached(layer)):
            return True
    return False


def _places_of(tensor: Tensor) -> _Places:
    with torch.no_grad():
        storages = [part.untyped_storage() for part in stored_parts(tensor.detach())]
    return [(each, each.data_ptr(), each.nbytes()) for each in storages]


def _are_same(before: _Places, now: _Places) -> bool:
    return [(one._cdata, *rest) for one, *rest in before] == [
        (one._cdata, *rest) for one, *rest in now
    ]
