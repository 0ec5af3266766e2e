"""Divide a mini-batch into micro-batches, and join their outputs.

Every tensor of a mini-batch has its rows along one dimension, dim 0 unless another is named. A
tensor whose dimension is None has no rows: every micro-batch gets all of it (an input), or the
micro-batches' tensors are stacked (an output)::

    dim 0      (6, 3) ──▶ (2, 3) (2, 3) (2, 3) ──▶ (6, 3)
    dim 1      (3, 6) ──▶ (3, 2) (3, 2) (3, 2) ──▶ (3, 6)
    None       (3, 3) ──▶ (3, 3) (3, 3) (3, 3) ──▶ (3, 3, 3)
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch
import torch.utils._pytree as pytree
from torch import Tensor

from gpipebal.errors import ModelError, RowsError
from gpipebal.pipeline.values.dims import Dim, spread_dims
from gpipebal.pipeline.values.microbatch import flatten, name_of_leaf, unflatten
from gpipebal.schedule import check_count

__all__ = [
    "check_arrays",
    "chunk_sizes",
    "count_rows",
    "gather",
    "gather_leaves",
    "join_gradients",
    "paired_gradients",
    "part_gradients",
    "same_structure",
    "scatter",
    "scatter_leaves",
]


def chunk_sizes(rows: int, chunks: int) -> list[int]:
    """Divide `rows` into ``max(1, min(chunks, rows))`` sizes that differ by at most one.

    Example:
        >>> chunk_sizes(7, 4), chunk_sizes(2, 4), chunk_sizes(0, 4)
        ([2, 2, 2, 1], [1, 1], [0])
    """
    n_chunks = max(1, min(chunks, rows))
    small, n_large = divmod(rows, n_chunks)
    return [small + 1] * n_large + [small] * (n_chunks - n_large)


def count_rows(
    leaves: Sequence[Any],
    structure: pytree.TreeSpec,
    dims: Sequence[Dim],
    *,
    what: str = "input",
    argument: str = "in_dims",
    chunks: int | None = None,
) -> int:
    """Return the rows that all tensors of a mini-batch have.

    Args:
        leaves: Leaves of the mini-batch.
        structure: Its pytree, to name a leaf in an error.
        dims: Dimension of each leaf.
        what: What the leaves are, for an error.
        argument: The argument that can name their dimensions, for an error.
        chunks: Micro-batches wanted; None: not known, perhaps several.

    Raises:
        ModelError: no tensor has rows, one lacks the dimension, or a numpy array has rows that
            would have to be divided.
        RowsError: two have different rows (a ModelError).
    """
    rows: int | None = None
    for index, (leaf, dim) in enumerate(zip(leaves, dims, strict=True)):
        if not isinstance(leaf, Tensor) or dim is None:
            continue
        if not _has_dim(leaf, dim):
            raise ModelError(
                f"{what} tensor cannot be divided: {name_of_leaf(structure, index)} has "
                f"{_shape_in_words(leaf)} (expected rows along dim {dim}).\n"
                "Fix: give it one value per row, make it a Python number, or name its dimension in "
                f"{argument} (None: every micro-batch gets all of it)."
            )
        if leaf.layout != torch.strided or leaf.is_nested:
            raise ModelError(
                f"{what} tensor cannot be divided: {name_of_leaf(structure, index)} is "
                f"{'nested' if leaf.is_nested else leaf.layout} (expected a dense tensor).\n"
                f"Fix: make it dense, or name it in {argument} as None: every micro-batch gets all "
                "of it."
            )
        if rows is not None and leaf.shape[dim] != rows:
            raise RowsError(
                f"{what} tensors have different rows: {name_of_leaf(structure, index)} has "
                f"{leaf.shape[dim]} along dim {dim} (expected {rows}, as the tensors before it).\n"
                f"Fix: give every tensor the same rows, or name its dimension in {argument} (None: "
                "every micro-batch gets all of it)."
            )
        rows = leaf.shape[dim]
    if rows is None:
        kinds = ", ".join(type(leaf).__name__ for leaf in leaves) or "nothing"
        if any(isinstance(leaf, Tensor) for leaf in leaves):
            raise ModelError(
                f"{what} has no tensor with rows: every dimension is None (expected that of one "
                f"tensor at least).\nFix: name the dimension of its rows in {argument}."
            )
        raise ModelError(
            f"{what} has no tensor with rows: got {kinds} (expected a tensor or a tuple of "
            "tensors).\nFix: pass the mini-batch as tensors with its rows along dim 0."
        )
    check_arrays(leaves, structure, dims, rows, what=what, argument=argument, chunks=chunks)
    return rows


def check_arrays(
    leaves: Sequence[Any],
    structure: pytree.TreeSpec,
    dims: Sequence[Dim],
    rows: int,
    *,
    what: str,
    argument: str,
    chunks: int | None,
) -> None:
    """Make sure that no numpy array has rows that several micro-batches would all get.

    Args:
        leaves: Leaves of the mini-batch.
        structure: Its pytree, to name a leaf in an error.
        dims: Dimension of each leaf.
        rows: Rows of the mini-batch.
        what: What the leaves are, for an error.
        argument: The argument that can name their dimensions, for an error.
        chunks: Micro-batches wanted; None: not known, perhaps several.

    Raises:
        ModelError: one has as many as the tensors.
    """
    if chunks == 1 or rows < 2:
        return  # nothing is divided
    for index, (leaf, dim) in enumerate(zip(leaves, dims, strict=True)):
        if not isinstance(leaf, np.ndarray) or dim is None or not -leaf.ndim <= dim < leaf.ndim:
            continue
        if leaf.shape[dim] == rows:
            where = "it" if structure.is_leaf() else name_of_leaf(structure, index)
            raise ModelError(
                f"{what} cannot be divided: {where} is a numpy array of shape {leaf.shape} "
                "(expected a tensor).\n"
                "Fix: make it one by torch.from_numpy, or name its dimension in "
                f"{argument} as None: every micro-batch gets all of it."
            )


def scatter(value: Any, chunks: int, dims: Any = 0) -> list[Any]:
    """Divide a mini-batch into micro-batches.

    Every tensor is cut into views along its dimension; tensors without one, and other leaves, go
    to every micro-batch as they are.

    Args:
        value: A tensor, or a pytree of tensors with the same rows.
        chunks: Micro-batches wanted, 1 or more; a mini-batch of fewer rows gives one per row.
        dims: Dimension along which each tensor has its rows, as a prefix of the pytree.

    Returns:
        ``max(1, min(chunks, rows))`` micro-batches of the same structure, as equal as possible.

    Raises:
        ModelError: there is no tensor with rows.
        RowsError: two tensors have different rows (a ModelError).
        BalanceError: `dims` does not fit, or `chunks` is not a whole number of 1 or more.

    Example:
        >>> [tuple(part.shape) for part in scatter(torch.zeros(5, 3), 2)]
        [(3, 3), (2, 3)]
    """
    leaves, structure = flatten(value)
    spread = spread_dims(dims, structure, "dims")
    chunks = check_count("chunks", chunks)
    sizes = chunk_sizes(
        count_rows(leaves, structure, spread, argument="dims", chunks=chunks), chunks
    )
    return [unflatten(part, structure) for part in scatter_leaves(leaves, sizes, spread)]


def scatter_leaves(
    leaves: Sequence[Any], sizes: Sequence[int], dims: Sequence[Dim]
) -> list[list[Any]]:
    """Do what `scatter` does on the leaves alone: one list of leaves per micro-batch."""
    columns = [
        leaf.split(list(sizes), dim=dim)
        if isinstance(leaf, Tensor) and dim is not None
        else [leaf] * len(sizes)
        for leaf, dim in zip(leaves, dims, strict=True)
    ]
    # Not by zip: a target may have no leaves.
    return [[column[i] for column in columns] for i in range(len(sizes))]


def gather(outputs: Sequence[Any], dims: Any = 0) -> Any:
    """Join the micro-batches' outputs.

    Tensors are concatenated along their dimension, or stacked where that is None; of other leaves
    the first micro-batch's is kept.

    Args:
        outputs: One value per micro-batch, of one or more.
        dims: Dimension along which each tensor has its rows, as a prefix of the pytree.

    Raises:
        ModelError: there are no outputs; or they have different structures, a tensor lacks its
            dimension, or a leaf is a tensor in some micro-batches only.
        BalanceError: `dims` does not fit.

    Example:
        >>> gather([torch.zeros(3, 2), torch.zeros(2, 2)]).shape
        torch.Size([5, 2])
        >>> gather([torch.tensor(1.0), torch.tensor(2.0)], None)
        tensor([1., 2.])
    """
    parts = [flatten(output) for output in outputs]
    if not parts:
        raise ModelError(
            "there is nothing to join: outputs=[] (expected the output of one micro-batch or "
            "more).\nFix: gather([model(part) for part in scatter(value, chunks)])."
        )
    structure = same_structure([found for _, found in parts])
    spread = spread_dims(dims, structure, "dims")
    return unflatten(gather_leaves([leaves for leaves, _ in parts], structure, spread), structure)


def same_structure(structures: Sequence[pytree.TreeSpec]) -> pytree.TreeSpec:
    """Return the pytree that the outputs of all micro-batches have.

    Raises:
        ModelError: two have different ones.
    """
    for index, structure in enumerate(structures):
        if structure != structures[0]:
            raise ModelError(
                f"outputs of the micro-batches differ: micro-batch {index} gave {structure} "
                f"(expected {structures[0]}, as micro-batch 0).\n"
                "Fix: let the last layer return the same structure for every micro-batch."
            )
    return structures[0]


def gather_leaves(
    parts: Sequence[Sequence[Any]], structure: pytree.TreeSpec, dims: Sequence[Dim]
) -> list[Any]:
    """Do what `gather` does on the leaves alone: one list of leaves per micro-batch."""
    joined = []
    for index, (column, dim) in enumerate(zip(zip(*parts, strict=True), dims, strict=True)):
        first, is_alone = column[0], len(column) == 1
        for i, leaf in enumerate(column):
            if isinstance(leaf, Tensor) != isinstance(first, Tensor):
                raise ModelError(
                    f"outputs of the micro-batches differ: {name_of_leaf(structure, index)} is a "
                    f"{type(leaf).__name__} in micro-batch {i} (expected a "
                    f"{type(first).__name__}, as in micro-batch 0).\n"
                    "Fix: let the last layer return a tensor for every micro-batch, or for none."
                )
        if not isinstance(first, Tensor):
            joined.append(first)
        elif dim is None:
            _check_shapes(column, None, structure, index)
            joined.append(torch.stack(column))
        elif is_alone and (_has_dim(first, dim) or first.dim() == dim == 0):
            # The only micro-batch is the mini-batch; a tensor without rows stays as it is.
            joined.append(first)
        elif not _has_dim(first, dim):
            raise ModelError(
                f"output tensor cannot be joined: {name_of_leaf(structure, index)} has "
                f"{_shape_in_words(first)} (expected rows along dim {dim}).\n"
                "Fix: let the last layer return one value per row, or out_dims=None to stack the "
                "micro-batches' values."
            )
        else:
            _check_shapes(column, dim, structure, index)
            joined.append(torch.cat(column, dim=dim))
    return joined


def _check_shapes(
    column: Sequence[Tensor], dim: Dim, structure: pytree.TreeSpec, index: int
) -> None:
    """Refuse tensors that cannot be joined: they may differ along `dim` only."""

    def shape_of(tensor: Tensor) -> list[int | None]:
        shape: list[int | None] = list(tensor.shape)
        if dim is not None and _has_dim(tensor, dim):
            shape[dim] = None
        return shape

    for i, tensor in enumerate(column):
        # Shapes of nested tensors are left to torch to compare.
        if not tensor.is_nested and shape_of(tensor) != shape_of(column[0]):
            raise ModelError(
                f"outputs of the micro-batches differ: {name_of_leaf(structure, index)} has shape "
                f"{tuple(tensor.shape)} in micro-batch {i} (expected that of micro-batch 0, "
                f"{tuple(column[0].shape)}, but for the rows).\n"
                "Fix: let the last layer return the same shape for every micro-batch, padded say."
            )


def part_gradients(
    gradient: Tensor | None, sizes: Sequence[int], dim: Dim
) -> Sequence[Tensor | None]:
    """Divide the gradient of a joined output as `gather_leaves` joined it."""
    if gradient is None:
        return [None] * len(sizes)
    if dim is not None and len(sizes) == 1:
        return [gradient]
    if gradient.layout not in (torch.strided, torch.sparse_coo):
        gradient = gradient.to_dense()  # torch can divide only those two
    if dim is None:
        return gradient.unbind()
    if not gradient.is_sparse:
        return gradient.split(list(sizes), dim=dim)
    dim %= gradient.dim()
    begins = accumulate(sizes[:-1], initial=0)
    return [gradient.narrow_copy(dim, *piece) for piece in zip(begins, sizes, strict=True)]


def join_gradients(
    received: Sequence[Sequence[Tensor | None]], rows: Sequence[int], dims: Sequence[Dim]
) -> list[Tensor | None]:
    """Join the gradients of the micro-batches' inputs; where only some have one, add zeros.

    Args:
        received: For each micro-batch, the gradient of each leaf of its input.
        rows: Rows of each micro-batch.
        dims: Dimension of each leaf. Where it is None the leaf went to all micro-batches, and its
            gradient is the sum of theirs.
    """
    joined: list[Tensor | None] = []
    for column, dim in zip(zip(*received, strict=True), dims, strict=True):
        found = [gradient for gradient in column if gradient is not None]
        if len(column) == 1 or not found:
            joined.append(column[0] if len(column) == 1 else None)
        elif dim is None:
            joined.append(sum(found[1:], found[0]))
        else:
            parts = [
                _zeros(found[0], n_rows, dim) if gradient is None else gradient
                for gradient, n_rows in zip(column, rows, strict=True)
            ]
            joined.append(torch.cat(parts, dim=dim))
    return joined


def paired_gradients(
    leaves: Sequence[Any],
    received: Sequence[Sequence[Tensor | None]],
    rows: Sequence[int],
    dims: Sequence[Dim],
) -> list[tuple[Tensor, Tensor]]:
    """Join gradients as `join_gradients` does; return leaves that have one, each with its own.

    Args:
        leaves: Leaves of the mini-batch. A gradient goes to where its leaf is.
        received: As there; empty: there are no gradients.
        rows: As there.
        dims: As there.
    """
    gradients = join_gradients(received, rows, dims) if received else [None] * len(leaves)
    return [
        (leaf, gradient.to(leaf.device))
        for leaf, gradient in zip(leaves, gradients, strict=True)
        if gradient is not None
    ]


def _has_dim(tensor: Tensor, dim: int) -> bool:
    return -tensor.dim() <= dim < tensor.dim()


def _shape_in_words(tensor: Tensor) -> str:
    return f"shape {tuple(tensor.shape)}" if tensor.dim() else "no dimensions"


def _zeros(like: Tensor, rows: int, dim: int) -> Tensor:
    shape = list(like.shape)
    shape[dim] = rows
    return like.new_zeros(shape)
