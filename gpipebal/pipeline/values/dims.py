"""Along which dimension each tensor of a mini-batch has its rows."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from typing import Any

import torch.utils._pytree as pytree

from gpipebal.argument_kinds import whole_number
from gpipebal.errors import BalanceError
from gpipebal.pipeline.values.microbatch import children_of, form_of

__all__ = ["Dim", "spread_dims"]

#: The dimension along which a tensor has its rows; None: it has none.
Dim = int | None

_DICTS = (dict, OrderedDict, defaultdict)


def spread_dims(dims: Any, structure: pytree.TreeSpec, name: str) -> list[Dim]:
    """Give every leaf of a pytree its dimension.

    Args:
        dims: A pytree of ints and None that is a prefix of the structure: one entry may stand
            for a whole branch.
        structure: The pytree.
        name: Name of the argument, for the error.

    Raises:
        BalanceError: `dims` is not a prefix of the structure, or has another entry.

    Example:
        >>> spread_dims((1, None), pytree.tree_flatten((0, {"a": 0, "b": 0}))[1], "in_dims")
        [1, None, None]
    """
    spread = _spread(dims, structure)
    if spread is None:
        raise BalanceError(
            f"{name} does not fit: {name}={dims!r:.200} for a value of the form "
            f"{form_of(structure, '*')} (expected ints and None in the same form; one entry may "
            "stand for a whole branch).\n"
            f"Fix: {name}=0 if every tensor has its rows along dim 0; else "
            f"{form_of(structure, 0)} with the dimension of each."
        )
    return spread


def _spread(dims: Any, structure: pytree.TreeSpec) -> list[Dim] | None:
    """Do what `spread_dims` does; None if `dims` does not fit.

    Not torch's own function: it pairs the keys of dictionaries by position, and makes an object
    of numbers, which a class may refuse that checks what it is made of.
    """
    number = whole_number(dims)
    if number is not None or dims is None:
        return [number] * structure.num_leaves
    kind = pytree._get_node_type(dims)
    if structure.is_leaf() or kind not in pytree.SUPPORTED_NODES:
        return None
    parts, context = pytree.SUPPORTED_NODES[kind].flatten_fn(dims)
    if kind in _DICTS and structure.type in _DICTS:
        by_key = dict(zip(_keys_of(kind, context), parts, strict=True))
        there = _keys_of(structure.type, structure.context)
        if by_key.keys() != set(there):
            return None
        parts = [by_key[key] for key in there]
    elif kind is not structure.type or context != structure.context:
        return None
    branches = children_of(structure)
    if len(parts) != len(branches):
        return None
    below = [_spread(part, branch) for part, branch in zip(parts, branches, strict=True)]
    return None if None in below else [dim for spread in below for dim in spread or ()]


def _keys_of(kind: type, context: Any) -> Sequence[Any]:
    """Return the keys of a dictionary from what a pytree knows of it."""
    # In a defaultdict the factory of defaults comes before them.
    keys: Sequence[Any] = context[1] if kind is defaultdict else context
    return keys
