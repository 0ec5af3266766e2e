"""What goes from layer to layer, copied or brought to another device as it lies in memory."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor

from gpipebal.pipeline.values.tensors import has_storage, storage_key
from gpipebal.profiler.chain.gradients import needs_gradient
from gpipebal.profiler.chain.value import Value, as_leaves
from gpipebal.skip.tracker import Key

__all__ = ["value_copied", "value_to"]

#: A copy begins at a multiple of so many bytes, as kernels want to find tensors.
_ALIGNED = 16


def value_to(value: Value, device: torch.device, only: Sequence[Key] | None = None) -> Value:
    """Bring a value to a device, with all skips that wait, or only some of them.

    Strides decide what a layer does, for example whether `contiguous()` copies. So tensors keep
    theirs, and the memory that they have in common.
    """
    keys = [key for key in value.skips if only is None or key in only]
    parts = [value.leaves, *(value.skips[key][0] for key in keys)]
    gone = iter(_leaves_to(list(chain(*parts)), device))
    leaves, *waiting = [list(islice(gone, len(part))) for part in parts]
    skips = {key: (own, value.skips[key][1]) for key, own in zip(keys, waiting, strict=True)}
    return Value(leaves, value.structure, value.skips | skips, value.views)


def value_copied(value: Value) -> Value:
    """Copy a value where it is, without the skips that wait, in the same way."""
    return Value(_leaves_to(value.leaves, None), value.structure, {}, value.views)


def _leaves_to(leaves: Sequence[Any], device: torch.device | None) -> list[Any]:
    """Bring leaves to a device; None: copy each where it is."""
    gone = as_leaves(leaves, wants=False)
    together: dict[int, list[int]] = {}
    for place, leaf in enumerate(gone):
        if _is_plain(leaf) and leaf.device != device:
            together.setdefault(storage_key(leaf), []).append(place)
        elif isinstance(leaf, Tensor):
            gone[place] = leaf.clone() if device is None else leaf.to(device)
    for places in together.values():
        copies = _copied_together([gone[place] for place in places], device)
        for place, copy in zip(places, copies, strict=True):
            gone[place] = copy
    return [
        leaf.requires_grad_() if wants else leaf
        for leaf, wants in zip(gone, map(needs_gradient, leaves), strict=True)
    ]


def _is_plain(leaf: Any) -> bool:
    """Tell whether a leaf is a tensor that is no more than a layout of some bytes."""
    if not has_storage(leaf) or type(leaf) is not Tensor or leaf.is_quantized:
        return False
    return bool(leaf.numel()) and not leaf.is_conj() and not leaf.is_neg()


def _copied_together(leaves: Sequence[Tensor], device: torch.device | None) -> list[Tensor]:
    """Copy the bytes from the first to the last of tensors in one storage, and lay them out."""
    starts = [leaf.storage_offset() * leaf.itemsize for leaf in leaves]
    ends = [start + _reach(leaf) for start, leaf in zip(starts, leaves, strict=True)]
    begin = min(starts) // _ALIGNED * _ALIGNED
    held = leaves[0].untyped_storage()
    stretch = torch.empty(0, dtype=torch.uint8, device=held.device)
    stretch = stretch.set_(held, begin, (max(ends) - begin,), (1,))
    stretch = stretch.to(device or held.device, copy=True)
    return [
        torch.empty(0, dtype=leaf.dtype, device=stretch.device).set_(
            stretch.untyped_storage(), (start - begin) // leaf.itemsize, leaf.shape, leaf.stride()
        )
        for start, leaf in zip(starts, leaves, strict=True)
    ]


def _reach(leaf: Tensor) -> int:
    """Return the bytes from a tensor's first element to the end of its last."""
    steps = zip(leaf.shape, leaf.stride(), strict=True)
    return leaf.itemsize * (1 + sum((n - 1) * step for n, step in steps))
