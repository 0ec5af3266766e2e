"""Outputs of a mini-batch, derived from that of its first micro-batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from gpipebal.errors import ModelError
from gpipebal.pipeline.values.dims import Dim, spread_dims
from gpipebal.pipeline.values.microbatch import name_of_leaf
from gpipebal.pipeline.values.parting import gather_leaves
from gpipebal.profiler.chain.failures import memory_for
from gpipebal.profiler.chain.numbers import Arrived
from gpipebal.profiler.chain.value import Value

__all__ = ["Outputs", "dims_of_leaves"]


@dataclass(frozen=True)
class Outputs:
    """The outputs of all micro-batches, as far as the first one tells.

    Attributes:
        first: Output of the first micro-batch, the largest.
        sizes: Rows of each micro-batch.
        dims: Dimension along which each tensor has its rows, as `GPipe` takes ``out_dims``.
    """

    first: Arrived
    sizes: Sequence[int]
    dims: Any = 0

    def joined(self) -> Value:
        """Join stand-ins for all of them, made from the first.

        Raises:
            BalanceError: `dims` does not fit.
            ModelError: a tensor cannot be joined.
            ProfileError: there is not enough memory.
        """
        value = self.first.value
        dims = dims_of_leaves(self.dims, value.leaves, value.structure)
        parts = [self._leaves_of(rows, dims) for rows in self.sizes]
        with memory_for("the gathered output"):
            leaves = gather_leaves(parts, value.structure, dims)
        joined = [
            leaf.detach().requires_grad_(old.requires_grad) if isinstance(leaf, Tensor) else leaf
            for leaf, old in zip(leaves, value.leaves, strict=True)
        ]
        return Value(joined, value.structure)

    def _leaves_of(self, rows: int, dims: Sequence[Dim]) -> list[Any]:
        pairs = zip(self.first.value.leaves, dims, strict=True)
        return [_part(leaf, dim, rows, self.sizes[0]) for leaf, dim in pairs]


def dims_of_leaves(dims: Any, leaves: Sequence[Any], structure: Any) -> list[Dim]:
    """Return the dimension along which each leaf of an output is joined; None: it is stacked.

    Raises:
        BalanceError: `dims` does not fit.
        ModelError: a tensor does not have its dimension.
    """
    found: list[Dim] = []
    for index, dim in enumerate(spread_dims(dims, structure, "out_dims")):
        leaf = leaves[index]
        # A leaf without rows can only be stacked.
        has_rows = dim is not None and isinstance(leaf, Tensor) and leaf.dim() > 0
        if has_rows and not -leaf.dim() <= dim < leaf.dim():
            raise ModelError(
                f"output tensor cannot be joined: {name_of_leaf(structure, index)} has shape "
                f"{tuple(leaf.shape)} (expected rows along dim {dim}).\n"
                "Fix: name its dimension in out_dims (None: the micro-batches' tensors are "
                "stacked)."
            )
        found.append(dim if has_rows else None)
    return found


def _part(leaf: Any, dim: Dim, rows: int, of_rows: int) -> Any:
    """Cut the output of a micro-batch down to that of a smaller one."""
    if not isinstance(leaf, Tensor):
        return leaf
    if dim is None or rows == of_rows:
        return leaf.detach()
    return leaf.detach().narrow(dim, 0, rows * leaf.shape[dim] // of_rows)
