"""Sparse gradients of parameters: who has them, and the same for stand-ins of such parameters."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

__all__ = ["GradientKind", "gradient_like", "join_kinds"]


class GradientKind(NamedTuple):
    """What a parameter's gradient looks like.

    Attributes:
        sparse_dim: Dimensions along which it is sparse; 0: it is dense.
        n_entries: Entries of a sparse one; several may be for one place.
    """

    sparse_dim: int = 0
    n_entries: int = 0

    @classmethod
    def of(cls, gradient: Tensor | None) -> GradientKind | None:
        """Describe a gradient; None: there is none."""
        if gradient is None:
            return None
        if gradient.layout != torch.sparse_coo:
            return cls()
        return cls(gradient.sparse_dim(), gradient._nnz())

    def bytes_for(self, parameter: Tensor) -> int:
        """Return the bytes of the entries of a parameter's sparse gradient."""
        in_one = math.prod(parameter.shape[self.sparse_dim :])
        return self.n_entries * in_one * parameter.element_size()


def join_kinds(
    layers: Sequence[nn.Module], kinds: Iterable[Sequence[GradientKind | None]], chunks: int
) -> dict[int, GradientKind]:
    """Find the parameters whose gradients of a whole mini-batch are sparse.

    Args:
        layers: The layers.
        kinds: For each layer, the gradients of its parameters after one micro-batch.
        chunks: How many micro-batches there are: the entries of all are kept side by side.

    Returns:
        Those gradients, by identity of the parameter.
    """
    found: dict[int, GradientKind] = {}
    for layer, of_layer in zip(layers, kinds, strict=True):
        # A layer that makes parameters in its forward is refused later on.
        for parameter, kind in zip(layer.parameters(), of_layer, strict=False):
            if kind is None:
                continue
            known = found.get(id(parameter), GradientKind(kind.sparse_dim))
            # A dense gradient makes the sum of both dense.
            sparse_dim = min(known.sparse_dim, kind.sparse_dim)
            n_entries = known.n_entries + chunks * kind.n_entries
            found[id(parameter)] = GradientKind(sparse_dim, n_entries)
    return {key: kind for key, kind in found.items() if kind.sparse_dim}


def gradient_like(kind: GradientKind | None, parameter: Tensor, *, whole: bool = False) -> Tensor:
    """Make a gradient for a stand-in of a parameter.

    Args:
        kind: What the parameter's own looks like; None: it is dense.
        parameter: The stand-in.
        whole: Whether a sparse one has an entry for every place, as many mini-batches together do.
    """
    if kind is None:
        return torch.full_like(parameter, 1e-6)
    sparse, dense = parameter.shape[: kind.sparse_dim], parameter.shape[kind.sparse_dim :]
    n_places, device = math.prod(sparse), parameter.device
    n_entries = n_places if whole else kind.n_entries
    places = torch.arange(n_entries, device=device) % max(1, n_places)
    return torch.sparse_coo_tensor(
        torch.stack(torch.unravel_index(places, sparse)),
        torch.full((n_entries, *dense), 1e-6, dtype=parameter.dtype, device=device),
        parameter.shape,
        check_invariants=False,
    )
