"""Deep copies, also of what `copy.deepcopy` alone refuses.

Tensors that belong to a graph, such as what a layer keeps of an earlier forward, are copied by
value. Objects that cannot be copied, such as locks and open files, are shared with the copy. Those
that read values while they are copied, such as generators of random numbers, are copied by value
also where other tensors are copied without values.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable
from contextlib import suppress
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from gpipebal.contents import attribute_values, contents_of, pairs_of

__all__ = ["deep_copy"]


def deep_copy(value: Any, memo: dict[int, Any], copying: TorchFunctionMode | None = None) -> Any:
    """Copy a value with all that it is made of.

    Args:
        value: The value; it is only looked at.
        memo: Which copy replaces which object, by identity, as `copy.deepcopy` takes it; copies
            made here are added.
        copying: Copies tensors; None: tensors of a graph are cut off from it.

    Raises:
        Exception: what `copy.deepcopy` says of a module or tensor that it cannot copy.

    Example:
        >>> import torch
        >>> layer = nn.Linear(2, 2)
        >>> layer.kept = layer(torch.ones(1, 2))
        >>> torch.equal(deep_copy(layer, {}).kept, layer.kept)
        True
    """
    return _copy(value, memo, set(), _Cut() if copying is None else copying)


class _Cut(TorchFunctionMode):
    """Copies tensors that belong to a graph without their graph."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is Tensor.__deepcopy__ and not args[0].is_leaf:
            tensor, memo = args
            if id(tensor) not in memo:
                memo[id(tensor)] = tensor.detach().clone()
            return memo[id(tensor)]
        return func(*args, **(kwargs or {}))


def _copy(value: Any, memo: dict[int, Any], seen: set[int], copying: TorchFunctionMode) -> Any:
    """Copy a value; the smallest parts of it that cannot be copied are shared.

    Args:
        value: The value.
        memo: Copies of objects by identity; those made here are added.
        seen: Values that are being taken apart already.
        copying: Copies tensors.
    """
    try:
        return _attempt(value, memo, copying)
    except Exception:
        if id(value) in seen:
            return None  # it is being taken apart, and is copied there
        seen.add(id(value))
        if _copies_itself(value):
            with suppress(Exception):
                return _attempt(value, memo, _Cut())
        for part in _parts_of(value):
            _copy(part, memo, seen, copying)
        try:
            return _attempt(value, memo, copying)
        except Exception:
            if isinstance(value, (nn.Module, Tensor)):
                raise  # what a copy writes to must not be the original's
            memo[id(value)] = value
            return value


def _copies_itself(value: Any) -> bool:
    """Tell whether an object's class says how it is copied, for which it may read values."""
    kind = type(value)
    if issubclass(kind, (nn.Module, Tensor, Collection)):
        return False
    ways = ("__setstate__", "__deepcopy__", "__reduce__", "__reduce_ex__")
    return any(getattr(kind, way, None) is not getattr(object, way, None) for way in ways)


def _attempt(value: Any, memo: dict[int, Any], copying: TorchFunctionMode) -> Any:
    """Copy a value; if that fails leave nothing of it in the memo."""
    trial = _Trial(memo)
    with copying:
        copied = copy.deepcopy(value, trial)
    new = dict(trial)  # without the reference to the memo, which would make a cycle
    # The originals, which `copy.deepcopy` keeps alive under the id of its memo: an id that is free
    # again when `trial` is gone.
    originals = new.pop(id(trial), [])
    memo.update(new)
    memo.setdefault(id(memo), []).append(originals)
    return copied


class _Trial(dict[int, Any]):
    """A memo that has all entries of another one, and leaves that one alone.

    A copy of the other would grow with the part of the chain copied so far, for every layer.
    """

    def __init__(self, known: dict[int, Any]) -> None:
        super().__init__()
        self._known = known

    def __contains__(self, key: object) -> bool:
        return super().__contains__(key) or key in self._known

    def __missing__(self, key: int) -> Any:
        return self._known[key]

    def get(self, key: int, default: Any = None) -> Any:
        try:
            return self[key]
        except KeyError:
            return default


def _parts_of(value: Any) -> Iterable[Any]:
    pairs = pairs_of(value)
    if pairs is not None:
        return [part for pair in pairs for part in pair]
    contents = contents_of(value)
    return attribute_values(value) if contents is None else contents
