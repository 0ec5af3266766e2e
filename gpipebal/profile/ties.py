"""Which layers of a model have parameters in common."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gpipebal.profile.fingerprint import is_uninitialized
from gpipebal.profile.layer import TieProfile

__all__ = ["find_ties"]

#: Methods that return what sparse tensors are made of, by their layout.
_INSIDE: Mapping[str, tuple[str, ...]] = {
    "torch.sparse_coo": ("_indices", "_values"),
    "torch.sparse_csr": ("crow_indices", "col_indices", "values"),
    "torch.sparse_bsr": ("crow_indices", "col_indices", "values"),
    "torch.sparse_csc": ("ccol_indices", "row_indices", "values"),
    "torch.sparse_bsc": ("ccol_indices", "row_indices", "values"),
}


def find_ties(layers: Sequence[Any]) -> tuple[TieProfile, ...]:
    """Find the parameters that several layers have, and which layers those are.

    Args:
        layers: `torch.nn.Module`s. Only their methods are called, so this needs no torch.
            Parameters of lazy layers that have no shape yet are left out.
    """
    users: dict[int, list[int]] = {}
    parameters: dict[int, Any] = {}
    for index, layer in enumerate(layers):
        for parameter in layer.parameters():
            if is_uninitialized(parameter):
                continue
            users.setdefault(id(parameter), []).append(index)
            parameters[id(parameter)] = parameter
    by_layers: dict[tuple[int, ...], list[Any]] = {}
    for key, indices in users.items():
        if len(indices) > 1:
            by_layers.setdefault(tuple(indices), []).append(parameters[key])
    return tuple(
        TieProfile(
            indices,
            parameter_bytes=sum(_bytes_of(p) for p in tied),
            gradient_bytes=sum(_bytes_of(p) for p in tied if p.requires_grad),
        )
        for indices, tied in by_layers.items()
    )


def _bytes_of(tensor: Any) -> int:
    """Return the bytes of a tensor; of one that is made of others, sparse or quantised, theirs."""
    inner = getattr(type(tensor), "__tensor_flatten__", None)
    names = _INSIDE.get(str(tensor.layout), ()) if inner is None else inner(tensor)[0]
    if not names:
        return int(tensor.nbytes)
    values = (getattr(tensor, name) for name in names)
    return sum(_bytes_of(value() if callable(value) else value) for value in values)
