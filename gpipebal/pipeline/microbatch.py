"""What travels: the value between two partitions, as leaves and their shape.

Between partitions a value travels as a `Packet`: its leaves (tensors and anything else, in the
order of the pytree), the pytree's shape, and for every leaf whether a gradient has to come back.
A cell that takes skip connections beside its input gets one packet joined from all of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch.utils._pytree as pytree
from torch import Tensor

from gpipebal.errors import ModelError

__all__ = [
    "Call",
    "Packet",
    "check_travels",
    "flatten",
    "join_packets",
    "name_of_leaf",
    "split_packet",
    "unflatten",
]


class Packet(NamedTuple):
    """A value between two partitions, cut off from autograd.

    Attributes:
        leaves: Leaves of the pytree; tensors are detached.
        structure: How `unflatten` puts them together.
        needs_gradient: One flag per leaf: the tensor's gradient is wanted back.
        ready: What the receiver waits for before it reads the tensors (a CUDA event), or None.
    """

    leaves: list[Any]
    structure: pytree.TreeSpec
    needs_gradient: list[bool]
    ready: Any = None


class Call(NamedTuple):
    """The input of a pipeline that was called with keyword arguments."""

    input: Any
    keywords: Mapping[str, Any]


def flatten(value: Any) -> tuple[list[Any], pytree.TreeSpec]:
    """Take a pytree apart into its leaves and its shape; named tuples keep their type."""
    return pytree.tree_flatten(value)


def unflatten(leaves: Sequence[Any], structure: pytree.TreeSpec) -> Any:
    """Put a pytree together again."""
    return pytree.tree_unflatten(list(leaves), structure)


def name_of_leaf(structure: pytree.TreeSpec, index: int) -> str:
    """Say where a leaf stands in its pytree, as one would write it in Python.

    Example:
        >>> _, structure = flatten({"x": 0, "masks": (1, 2)})
        >>> name_of_leaf(structure, 2), name_of_leaf(flatten(0)[1], 0)
        ("leaf ['masks'][1]", 'the tensor')
    """
    tree = unflatten(range(structure.num_leaves), structure)
    path, _ = pytree.tree_flatten_with_path(tree)[0][index]
    return f"leaf {pytree.keystr(path)}" if path else "the tensor"


def join_packets(packets: Sequence[Packet]) -> Packet:
    """Make one packet of several: its value is the list of theirs."""
    value = [unflatten(packet.leaves, packet.structure) for packet in packets]
    leaves, structure = flatten(value)
    return Packet(
        leaves, structure, [needs for packet in packets for needs in packet.needs_gradient]
    )


def split_packet(packet: Packet) -> list[Packet]:
    """Undo `join_packets` on a packet whose value is a list."""
    packets, start = [], 0
    for part in unflatten(packet.leaves, packet.structure):
        leaves, structure = flatten(part)
        end = start + len(leaves)
        packets.append(Packet(leaves, structure, packet.needs_gradient[start:end], packet.ready))
        start = end
    return packets


def check_travels(value: Any, layer: str) -> None:
    """Refuse a value that no tensor is in: it cannot go on to the next layer as a micro-batch.

    Raises:
        ModelError: `value` holds no tensor.
    """
    if isinstance(value, Tensor):
        return
    leaves, _ = flatten(value)
    if not any(isinstance(leaf, Tensor) for leaf in leaves):
        raise ModelError(
            f"layer {layer!r} returned no tensor: got {type(value).__name__} "
            "(expected a tensor or a tuple of tensors).\n"
            "Fix: let the layer return its result as tensors."
        )
