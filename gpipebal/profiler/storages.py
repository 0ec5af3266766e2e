"""Memory of the layers: which storages each saves and hands on, and its largest need in between.

One layered round runs under a ledger of live storages and under hooks on saved tensors. A layer's
saved set is what the hooks see, and what it made and still keeps alive otherwise (tensors on the
context of a custom autograd function), without parameters and buffers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gpipebal.pipeline.ledger import Ledger, storage_key
from gpipebal.pipeline.microbatch import flatten
from gpipebal.profiler.rounds import Chain, as_leaves, backward_gradients, protect

__all__ = ["LayerMemory", "measure_memory_of_layers"]


@dataclass(frozen=True)
class LayerMemory:
    """Memory of one layer; storages are numbered over the whole chain."""

    outputs: tuple[int, ...]
    saved: tuple[int, ...]
    forward_peak_bytes: int
    backward_peak_bytes: int


class _Numbers:
    """Give storages numbers in the order in which they are first seen, and keep their bytes."""

    def __init__(self) -> None:
        self.bytes: list[int] = []
        self._number: dict[int, int] = {}

    def of(self, key: int, n_bytes: int) -> int:
        if key not in self._number:
            self._number[key] = len(self.bytes)
            self.bytes.append(n_bytes)
        return self._number[key]


def measure_memory_of_layers(
    chain: Chain,
) -> tuple[list[LayerMemory], tuple[int, ...], tuple[int, ...]]:
    """Run one layered round under a ledger.

    Returns:
        Memory of every layer, the bytes of all storages, and the storages of the chain's input.
    """
    constants = {
        storage_key(tensor)
        for layer in chain.layers
        for tensor in (*layer.parameters(), *layer.buffers())
    }
    ledger, numbers = Ledger(), _Numbers()
    leaves, structure = chain.sample
    inputs = tuple(dict.fromkeys(_number(numbers, leaf) for leaf in leaves if _is_tensor(leaf)))
    ledger.hold(leaves, 0)
    # Storages that live until the end cannot give their key to a new one.
    alive: list[Any] = list(leaves)
    tape: list[tuple[list[Any], list[Any]]] = []
    peaks: list[int] = []
    sets: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
    saved_now: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.layout == torch.strided:
            saved_now.setdefault(storage_key(tensor), tensor.untyped_storage().nbytes())
        # Not the tensor itself: an output that its own graph saves would never be freed.
        return tensor.detach()

    for k in range(len(chain.layers)):
        layer_inputs = as_leaves(leaves, wants=k > 0)
        with ledger.watch(0):
            given = [
                protect(leaf) if i in chain.written[k] else leaf
                for i, leaf in enumerate(layer_inputs)
            ]
            before, at_start = ledger.live_keys(), ledger.start_peak()
            saved_now.clear()
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                output = chain.call(k, given, structure)
        # A copy made to protect the boundary stands for the input that the layer writes to.
        peaks.append(ledger.total_peak - at_start)
        leaves, structure = flatten(output)
        alive += [leaf for leaf in leaves if _is_tensor(leaf)]
        del output, given
        outputs = tuple(
            dict.fromkeys(_number(numbers, leaf) for leaf in leaves if _is_tensor(leaf))
        )
        born = ledger.live_keys() - before - {storage_key(t) for t in leaves if _is_tensor(t)}
        keys = dict(saved_now)
        for key in sorted(born):
            keys.setdefault(key, ledger.bytes_of(key) or 0)
        saved = tuple(
            dict.fromkeys(
                numbers.of(key, n_bytes) for key, n_bytes in keys.items() if key not in constants
            )
        )
        sets.append((outputs, saved))
        tape.append((layer_inputs, leaves))
    alive.clear()
    backward_peaks = _backward_peaks(chain, tape, ledger)
    memory = [
        LayerMemory(outputs, saved, forward_peak, backward_peak)
        for (outputs, saved), forward_peak, backward_peak in zip(
            sets, peaks, backward_peaks, strict=True
        )
    ]
    return memory, tuple(numbers.bytes), inputs


def _backward_peaks(
    chain: Chain, tape: list[tuple[list[Any], list[Any]]], ledger: Ledger
) -> list[int]:
    peaks = []
    with ledger.watch(0):
        gradients = backward_gradients(tape[-1][1])
        while tape:
            inputs, outputs = tape.pop()
            roots = [
                (leaf, gradient)
                for leaf, gradient in zip(outputs, gradients, strict=True)
                if _is_tensor(leaf) and leaf.requires_grad and gradient is not None
            ]
            gradients = []
            at_start = ledger.start_peak()
            chain.run_backward(roots, chain.names[len(tape)])
            peaks.append(ledger.total_peak - at_start)
            gradients = [leaf.grad if _is_tensor(leaf) else None for leaf in inputs]
            del inputs, outputs, roots
    return peaks[::-1]


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor) and value.layout == torch.strided


def _number(numbers: _Numbers, tensor: Tensor) -> int:
    return numbers.of(storage_key(tensor), tensor.untyped_storage().nbytes())
