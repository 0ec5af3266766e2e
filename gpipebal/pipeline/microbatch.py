"""Micro-batches: part a mini-batch along dim 0, and join the outputs again.

Between partitions a value travels as a `Packet`: its leaves (tensors and anything else, in the
order of the pytree), the pytree's shape, and for every leaf whether a gradient has to come back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from gpipebal.errors import ModelError

__all__ = ["Packet", "chunk_sizes", "flatten", "gather", "scatter", "unflatten"]


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


def flatten(value: Any) -> tuple[list[Any], pytree.TreeSpec]:
    """Take a pytree apart into its leaves and its shape; named tuples keep their type."""
    return pytree.tree_flatten(value)


def unflatten(leaves: Sequence[Any], structure: pytree.TreeSpec) -> Any:
    """Put a pytree together again."""
    return pytree.tree_unflatten(list(leaves), structure)


def chunk_sizes(rows: int, chunks: int) -> list[int]:
    """Part `rows` into ``max(1, min(chunks, rows))`` sizes that differ by at most one.

    Example:
        >>> chunk_sizes(7, 4), chunk_sizes(2, 4), chunk_sizes(0, 4)
        ([2, 2, 2, 1], [1, 1], [0])
    """
    n_chunks = max(1, min(chunks, rows))
    small, n_large = divmod(rows, n_chunks)
    return [small + 1] * n_large + [small] * (n_chunks - n_large)


def count_rows(leaves: Sequence[Any]) -> int:
    """Return the rows that all tensors of a mini-batch have along dim 0.

    Raises:
        ModelError: there is no tensor, one has no dim 0, or two have different rows.
    """
    rows: int | None = None
    for index, leaf in enumerate(leaves):
        if not isinstance(leaf, Tensor):
            continue
        if leaf.dim() == 0:
            raise ModelError(
                f"input tensor cannot be parted: leaf {index} has no dimensions "
                "(expected rows along dim 0).\n"
                "Fix: give it one value per row, or make it a Python number."
            )
        if rows is not None and leaf.shape[0] != rows:
            raise ModelError(
                f"input tensors have different rows: leaf {index} has {leaf.shape[0]} "
                f"(expected {rows}, as the tensors before it).\n"
                "Fix: give every tensor the same size along dim 0."
            )
        rows = leaf.shape[0]
    if rows is None:
        kinds = ", ".join(type(leaf).__name__ for leaf in leaves) or "nothing"
        raise ModelError(
            f"input has no tensor: got {kinds} (expected a tensor or a tuple of tensors).\n"
            "Fix: pass the mini-batch as tensors with its rows along dim 0."
        )
    return rows


def scatter(value: Any, chunks: int) -> list[Any]:
    """Part a mini-batch into micro-batches along dim 0.

    Every tensor is cut into views of the same rows; other leaves go to every micro-batch as
    they are.

    Args:
        value: A tensor, or a pytree of tensors with the same rows along dim 0.
        chunks: Micro-batches wanted, 1 or more; a mini-batch of fewer rows gives one per row.

    Returns:
        ``max(1, min(chunks, rows))`` micro-batches of the same structure, as equal as possible.

    Raises:
        ModelError: there is no tensor, or two tensors have different rows.

    Example:
        >>> [tuple(part.shape) for part in scatter(torch.zeros(5, 3), 2)]
        [(3, 3), (2, 3)]
    """
    leaves, structure = flatten(value)
    return [unflatten(part, structure) for part in scatter_leaves(leaves, chunks)]


def scatter_leaves(leaves: Sequence[Any], chunks: int) -> list[list[Any]]:
    """Do what `scatter` does on the leaves alone: one list of leaves per micro-batch."""
    sizes = chunk_sizes(count_rows(leaves), chunks)
    columns = [
        leaf.split(sizes) if isinstance(leaf, Tensor) else [leaf] * len(sizes) for leaf in leaves
    ]
    return [list(part) for part in zip(*columns, strict=True)]


def gather(outputs: Sequence[Any]) -> Any:
    """Join the micro-batches' outputs along dim 0.

    Tensors are concatenated; of other leaves the first micro-batch's is kept.

    Raises:
        ModelError: the outputs have different structures, or a tensor has no dim 0.

    Example:
        >>> gather([torch.zeros(3, 2), torch.zeros(2, 2)]).shape
        torch.Size([5, 2])
    """
    parts = [flatten(output) for output in outputs]
    structure = parts[0][1]
    for index, (_, other) in enumerate(parts):
        if other != structure:
            raise ModelError(
                f"outputs of the micro-batches differ: micro-batch {index} gave {other} "
                f"(expected {structure}, as micro-batch 0).\n"
                "Fix: let the last layer return the same structure for every micro-batch."
            )
    return unflatten(gather_leaves([leaves for leaves, _ in parts]), structure)


def gather_leaves(parts: Sequence[Sequence[Any]]) -> list[Any]:
    """Do what `gather` does on the leaves alone: one list of leaves per micro-batch."""
    joined = []
    for index, column in enumerate(zip(*parts, strict=True)):
        first = column[0]
        if not isinstance(first, Tensor) or len(column) == 1:
            joined.append(first)
        elif first.dim() == 0:
            raise ModelError(
                f"output tensor cannot be joined: leaf {index} has no dimensions "
                "(expected rows along dim 0).\n"
                "Fix: let the last layer return one value per row."
            )
        else:
            joined.append(torch.cat(column))
    return joined


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
