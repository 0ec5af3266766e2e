"""The target of a training step: divided like the input, and kept from harm by the loss.

A loss is the caller's own function, which may do more with its target than read it:

* write to it. If the loss will be computed again, or if every micro-batch gets the whole target, it
  then works on a copy; which tensors it writes to is found out on the first micro-batch;
* differentiate by it, if it comes from a graph (a teacher that is trained too). So it is cut off
  like an input, and its gradient goes back to the caller's graph with the input's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from gpipebal.errors import BalanceError, ModelError
from gpipebal.pipeline.process.phase import is_checkpointing, is_recomputing
from gpipebal.pipeline.values.dims import Dim, spread_dims
from gpipebal.pipeline.values.lane import Events, Lane, current_events
from gpipebal.pipeline.values.microbatch import (
    check_nothing_hidden,
    detached,
    flatten,
    name_of_leaf,
    unflatten,
    which_need_gradient,
)
from gpipebal.pipeline.values.parting import (
    check_arrays,
    count_rows,
    paired_gradients,
    scatter_leaves,
)
from gpipebal.pipeline.values.tensors import copy_of, version_of

__all__ = ["Target"]


class Target:
    """The target of a mini-batch, divided into micro-batches and cut off from the caller's graph.

    The worker of the last partition uses it micro-batch by micro-batch; the caller makes it, and
    asks for the gradients when the workers have ended.

    Args:
        target: A tensor or a pytree of tensors. Other leaves, such as None, go to every micro-batch
            as they are.
        dims: Dimension along which each of them has its rows, as a prefix of the pytree.
        rows: Rows of each micro-batch.

    Raises:
        BalanceError: it has other rows than the input.
        ModelError: its tensors have different rows, or are hidden in an object.
    """

    def __init__(self, target: Any, dims: Any, rows: Sequence[int]) -> None:
        self._leaves, self._structure = flatten(target)
        self._dims = spread_dims(dims, self._structure, "target_dims")
        self._rows = list(rows)
        parted = [x for x, dim in zip(self._leaves, self._dims, strict=True) if dim is not None]
        check_nothing_hidden(parted, "the target")
        _check_rows(self._leaves, self._structure, self._dims, rows)
        grad = torch.is_grad_enabled()
        self._wanted = [grad and need for need in which_need_gradient(self._leaves)]
        self._parts = [
            [_counting_alone(leaf, dim) for leaf, dim in zip(part, self._dims, strict=True)]
            for part in scatter_leaves(detached(self._leaves), rows, self._dims)
        ]
        self._shared = [dim is None and len(self._rows) > 1 for dim in self._dims]
        # Which tensors the loss writes to, or may write to undetected; None: not known yet.
        self._written: frozenset[int] | None = None
        # Leaves of autograd in the graph of each micro-batch's loss, then their gradients.
        self._lent: dict[int, list[Tensor | None]] = {}
        self._gradients: dict[int, list[Tensor | None]] = {}

    def events(self) -> Events:
        """Return what a lane must wait for before it reads the target."""
        return current_events(self._parts[0])

    def receive(self, i: int, lane: Lane, ready: Events) -> list[Any]:
        """Bring the target of micro-batch `i` to the lane's device; called by its worker."""
        return lane.receive(self._parts[i], ready, of_caller=True)

    @contextmanager
    def lent(self, i: int, leaves: Sequence[Any]) -> Iterator[Any]:
        """Lend the target of micro-batch `i`, which is in `leaves`, to the loss for a block.

        Raises:
            ModelError: the loss has written to a tensor that it did not write to in the first
                micro-batch.
        """
        again = is_checkpointing() or is_recomputing()
        lent = list(leaves)
        roots: list[Tensor | None] = [None] * len(lent)
        protected = set()
        for k, leaf in enumerate(leaves):
            if not isinstance(leaf, Tensor):
                continue
            if self._wanted[k]:
                lent[k] = roots[k] = leaf.detach().requires_grad_()
            if again or self._shared[k] or self._wanted[k]:
                protected.add(k)
                # A tensor of inference mode counts no versions, so it is always copied.
                if self._written is None or k in self._written or leaf.is_inference():
                    lent[k] = copy_of(lent[k])
        if any(self._wanted):
            # If lent several times the last one counts: the recompute's, if there is one.
            self._lent[i] = roots
        versions = [version_of(leaf) for leaf in lent]
        yield unflatten(lent, self._structure)
        written = frozenset(k for k, leaf in enumerate(lent) if version_of(leaf) != versions[k])
        for k in written:
            # What was moved to another device is a copy, and a leaf without rows is no part.
            is_part = lent[k] is self._parts[i][k] and self._dims[k] is not None
            if is_part and not self._leaves[k].is_inference():
                # Graphs of the caller's that have saved the whole are told.
                increment_version(self._leaves[k])
        if self._written is None:
            # A copy made in inference mode hides writes to it: there may have been some.
            unseen = (k for k in protected if versions[k] is None)
            self._written = written.union(unseen)
        for k in written - self._written:
            if k in protected:
                raise ModelError(
                    f"loss_fn writes to its target in some micro-batches only: "
                    f"{name_of_leaf(self._structure, k)} of micro-batch {i} (expected always or "
                    "never, so that a copy can be made before).\n"
                    "Fix: let loss_fn work on target.clone()."
                )

    def leaves_of(self, i: int) -> Sequence[Tensor | None]:
        """Return the leaves of autograd that are the target in the loss of micro-batch `i`."""
        return self._lent.get(i, ())

    def keep_gradients(self, i: int) -> Sequence[Tensor | None]:
        """Take and return what the backward of micro-batch `i` found; called by its worker."""
        leaves = self._lent.pop(i, None)
        if leaves is None:
            return ()
        found = self._gradients[i] = [None if leaf is None else leaf.grad for leaf in leaves]
        return found

    def gradients(self, lane: Lane) -> list[tuple[Tensor, Tensor]]:
        """Return the target's tensors with their gradients; called in the caller's thread."""
        found, self._gradients = self._gradients, {}
        received = [found[i] for i in range(len(self._rows))] if found else []
        for gradients in received:
            lane.give_to_caller(gradients, ())
        return paired_gradients(self._leaves, received, self._rows, self._dims)


def _counting_alone(leaf: Any, dim: Dim) -> Any:
    """Return a part of a tensor that counts by itself how often it is written to.

    Parts have no element in common. As views they would have one count, and the graph of one
    micro-batch's loss would take a write to another's for one to its own.
    """
    return leaf.data if isinstance(leaf, Tensor) and dim is not None else leaf


def _check_rows(
    leaves: Sequence[Any], structure: Any, dims: Sequence[Dim], sizes: Sequence[int]
) -> None:
    rows = sum(sizes)
    words: dict[str, Any] = {"what": "target", "argument": "target_dims", "chunks": len(sizes)}
    if all(dim is None or not isinstance(x, Tensor) for x, dim in zip(leaves, dims, strict=True)):
        check_arrays(leaves, structure, dims, rows, **words)
        return
    found = count_rows(leaves, structure, dims, **words)
    if found != rows:
        raise BalanceError(
            f"target has other rows than the input: {found} (expected {rows}).\n"
            "Fix: give one target per row, or name its dimension in target_dims."
        )
