"""A mini-batch that knows where its rows are: what a pipeline is called with, or a target.

The profiler needs micro-batches of any size from it, laid out in memory as the pipeline passes them
to the first layer: on its own device as views into the mini-batch, with their gaps. A layer may
copy what has gaps, so they are kept; only the rows count as the micro-batch's bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from gpipebal.errors import BalanceError, ProfileError
from gpipebal.pipeline.minibatch.inputs import leaves_of_call
from gpipebal.pipeline.values.dims import Dim, spread_dims
from gpipebal.pipeline.values.microbatch import Call, check_nothing_hidden, flatten, unflatten
from gpipebal.pipeline.values.parting import chunk_sizes, count_rows, scatter_leaves
from gpipebal.pipeline.values.tensors import copy_of, has_storage, once_each, parts_of

__all__ = ["Batch"]

_META = torch.device("meta")


@dataclass(frozen=True)
class Batch:
    """A mini-batch, as leaves.

    Attributes:
        leaves: Its leaves: tensors and anything else.
        structure: Their pytree.
        dims: Dimension along which each leaf has its rows; None: it has none, and every
            micro-batch gets all of it.
        what: Its name in errors.
        as_given: The dimensions as the user gave them: for a sample, those of the input and of
            keyword arguments.
    """

    leaves: Sequence[Any]
    structure: Any
    dims: Sequence[Dim]
    what: str
    as_given: Any = 0

    @classmethod
    def sample(
        cls,
        sample: Any,
        keywords: Mapping[str, Any] | None = None,
        in_dims: Any = 0,
        keyword_dims: Mapping[str, Any] | None = None,
    ) -> Batch:
        """Take apart what a pipeline is called with, as the pipeline does.

        Raises:
            BalanceError: a dimension does not fit.
            ModelError: it has tensors inside an object that is not a pytree.
        """
        given = leaves_of_call(sample, keywords or {}, in_dims, keyword_dims or {})
        check_nothing_hidden(given[0], "the sample")
        return cls(*given, what="sample", as_given=(in_dims, dict(keyword_dims or {})))

    @classmethod
    def target(cls, target: Any, dims: Any = 0) -> Batch | None:
        """Take a target apart, as a step does; None: there is no target.

        Raises:
            BalanceError: a dimension does not fit.
            ModelError: what has rows has tensors inside an object that is not a pytree.
        """
        if target is None:
            return None
        leaves, structure = flatten(target)
        spread = spread_dims(dims, structure, "target_dims")
        # What is not divided may be anything, as in a pipeline.
        divided = [leaf for leaf, dim in zip(leaves, spread, strict=True) if dim is not None]
        check_nothing_hidden(divided, "the target")
        return cls(leaves, structure, spread, what="target", as_given=dims)

    @property
    def value(self) -> Any:
        """All of it, as its user gave it; with keyword arguments a `Call`."""
        return unflatten(self.leaves, self.structure)

    @property
    def tensors(self) -> list[Tensor]:
        """Its tensors."""
        return [leaf for leaf in self.leaves if isinstance(leaf, Tensor)]

    @property
    def is_whole(self) -> bool:
        """Whether none of its tensors is divided: every micro-batch gets all of it."""
        return all(dim is None for _, dim in self._each_tensor())

    def count_rows(self) -> int:
        """Return the rows that all its tensors have.

        Raises:
            ModelError: no tensor has rows, or two have different ones.
        """
        argument = "target_dims" if self.what == "target" else "in_dims or keyword_dims"
        given = (self.leaves, self.structure, self.dims)
        return count_rows(*given, what=self.what, argument=argument)

    def parted(self, chunks: int) -> list[int]:
        """Divide its rows into micro-batches.

        Raises:
            ModelError: it cannot be divided.
            ProfileError: it has no rows.
        """
        rows = self.count_rows()
        if not rows:
            raise ProfileError(
                f"{self.what} has no rows, so there is nothing to measure (expected 1 or more).\n"
                "Fix: give a mini-batch of the size that training has."
            )
        return chunk_sizes(rows, chunks)

    def parts(self, sizes: Sequence[int]) -> list[Batch]:
        """Return its micro-batches, as views.

        Args:
            sizes: Rows of each.
        """
        parts = scatter_leaves(self.leaves, sizes, self.dims)
        return [replace(self, leaves=leaves) for leaves in parts]

    def first_of(self, sizes: Sequence[int]) -> Batch:
        """Return the first of its micro-batches.

        Args:
            sizes: Rows of each.

        Raises:
            ModelError: it cannot be divided.
            BalanceError: it has other rows.
        """
        if self.is_whole:
            return self  # a loss is given all of it for each micro-batch
        rows = self.count_rows()
        if rows != sum(sizes):
            raise BalanceError(
                f"{self.what} has other rows than the sample: {rows} (expected {sum(sizes)}).\n"
                "Fix: give one target per row, or name its dimension in target_dims."
            )
        return self.first(sizes[0])

    def first(self, rows: int) -> Batch:
        """Return the first rows, as views."""
        return self._with([_first_of(leaf, dim, rows) for leaf, dim in self._each_tensor()])

    def repeated(self, rows: int, have: int) -> Batch:
        """Return a number of rows: from the first on, and then from the first again.

        Args:
            rows: Rows wanted.
            have: Rows that there are; a tensor with another number of them is left as it is.
        """
        if rows == have:
            return self
        return self._with([_repeated(*pair, rows, have) for pair in self._each_tensor()])

    def without_memory(self, rows: int, have: int) -> Batch:
        """Return a number of rows as tensors on the meta device, laid out as by `copied_to`.

        Args:
            rows: Rows wanted.
            have: Rows that there are; a tensor with another number of them is left as it is.
        """
        return self._with([_without_memory(*pair, rows, have) for pair in self._each_tensor()])

    def to(self, device: torch.device) -> Batch:
        """Bring its tensors to a device, cut off from autograd; those already there stay."""
        return self._with(
            [leaf.detach().to(device, copy=leaf.is_inference()) for leaf in self.tensors]
        )

    def copied_to(self, device: torch.device) -> Batch:
        """Copy its tensors to a device, cut off from autograd.

        Copies on the same device keep their strides, as views into the mini-batch have them.
        """
        return self._with(
            [
                copy_of(leaf) if leaf.device == device else leaf.to(device, copy=True)
                for leaf in map(Tensor.detach, self.tensors)
            ]
        )

    def described(self) -> dict[str, Any]:
        """Say where rows are, if that is not dim 0 of all tensors; of keyword arguments by name."""
        value, keywords = self.call()
        pairs = zip(self.leaves, self.dims, strict=True)
        own = _dims_of(pairs, value)
        named = {name: _dims_of(pairs, part) for name, part in keywords.items()}
        known: dict[str, Any] = {}
        if any(dim != 0 for dim in own):
            known["in_dims"] = own
        if others := {name: dims for name, dims in named.items() if any(d != 0 for d in dims)}:
            known["keyword_dims"] = others
        return known

    def call(self) -> tuple[Any, dict[str, Any]]:
        """Return the input that a pipeline is called with, and the keyword arguments."""
        value = self.value
        return (value.input, dict(value.keywords)) if isinstance(value, Call) else (value, {})

    def constants(self, storages: Sequence[int]) -> tuple[int, ...]:
        """Return the storages that all micro-batches have in common.

        Args:
            storages: Numbers of the storages of a micro-batch, one for each tensor that has one.
        """
        dims = [dim for leaf, dim in self._each_tensor() if has_storage(leaf)]
        return tuple(number for number, dim in zip(storages, dims, strict=True) if dim is None)

    def _each_tensor(self) -> list[tuple[Tensor, Dim]]:
        pairs = zip(self.leaves, self.dims, strict=True)
        return [(leaf, dim) for leaf, dim in pairs if isinstance(leaf, Tensor)]

    def _with(self, tensors: Sequence[Tensor]) -> Batch:
        """Return the same with other tensors."""
        left = iter(tensors)
        leaves = [next(left) if isinstance(leaf, Tensor) else leaf for leaf in self.leaves]
        return replace(self, leaves=leaves)


def _dims_of(pairs: Iterator[tuple[Any, Dim]], part: Any) -> list[Dim]:
    """Take the leaves of a part, and return the dimensions of its tensors, counted from 0."""
    own = islice(pairs, len(flatten(part)[0]))
    tensors = ((leaf, dim) for leaf, dim in own if isinstance(leaf, Tensor))
    return [None if dim is None else dim % leaf.dim() for leaf, dim in tensors]


def _rows_of(leaf: Tensor, dim: Dim) -> int | None:
    """Return how many rows a tensor has; None: it does not have the dimension."""
    if dim is None or not -leaf.dim() <= dim < leaf.dim():
        return None
    return leaf.shape[dim]


def _first_of(leaf: Tensor, dim: Dim, rows: int) -> Tensor:
    return leaf if dim is None else leaf.narrow(dim, 0, rows)


def _repeated(leaf: Tensor, dim: Dim, rows: int, have: int) -> Tensor:
    if dim is None or _rows_of(leaf, dim) != have:
        return leaf
    return leaf.index_select(dim, torch.arange(rows, device=leaf.device) % have)


def _without_memory(leaf: Tensor, dim: Dim, rows: int, have: int) -> Tensor:
    if dim is None or _rows_of(leaf, dim) != have:
        return _like(leaf, _META)
    if rows <= have:
        return _like(leaf.narrow(dim, 0, rows), _META)
    shape = list(leaf.shape)
    shape[dim] = rows
    return torch.empty(shape, dtype=leaf.dtype, device=_META)


def _like(leaf: Tensor, device: torch.device) -> Tensor:
    """Make a tensor with the layout of a view; one that overlaps with itself becomes dense."""
    if leaf.layout == torch.sparse_coo:  # of itself torch makes one without elements
        indices, values = (torch.empty_like(part, device=device) for part in parts_of(leaf))
        return torch.sparse_coo_tensor(
            indices,
            values,
            leaf.shape,
            check_invariants=False,
            is_coalesced=leaf.is_coalesced(),
        )
    if not _is_strided(leaf):
        return torch.empty_like(leaf, device=device)
    once = once_each(leaf)
    made = torch.empty_strided(once.shape, once.stride(), dtype=leaf.dtype, device=device)
    return made.expand(leaf.shape)


def _is_strided(leaf: Tensor) -> bool:
    """Tell whether a tensor is plain, and repeats its elements only along whole dimensions.

    `Tensor.expand` makes such tensors; windows that overlap, as of `Tensor.unfold`, are different.
    """
    if type(leaf) not in (Tensor, nn.Parameter) or not has_storage(leaf) or leaf.is_quantized:
        return False
    once = once_each(leaf)
    span = 1 + sum((n - 1) * step for n, step in zip(once.shape, once.stride(), strict=True))
    return once.numel() <= span
