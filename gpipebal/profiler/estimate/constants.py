"""Constants: tensors that a layer or a loss uses through a function, such as tables and masks.

They are not the layer's own, so its stand-in has them as they are, with values. Among themselves
they are used as they are; where one meets a tensor without values, a stand-in takes its place. So
it does where a list of numbers picks elements: torch makes a tensor of it, which nobody would see.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from gpipebal.pipeline.values.tensors import has_storage, storage_key
from gpipebal.profiler.estimate.stand_ins import META

__all__ = ["Constants"]


_PICK = frozenset({Tensor.__getitem__, Tensor.__setitem__})


class Constants(TorchFunctionMode):
    """Puts stand-ins in the place of tensors with values that meet tensors without.

    Those that need a gradient are left as they are: what belongs to another layer is not seen.

    Args:
        tensors: All tensors that a layer can use; those without values are left out.

    Attributes:
        stand_ins: A stand-in for each storage of these tensors.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        super().__init__()
        self._constants = {storage_key(one): one for one in tensors if _has_values(one)}
        self._storages: dict[int, Any] = {}
        self.stand_ins = [self._stand_in(one) for one in self._constants.values()]

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _PICK and args[0].is_meta:
            args = (args[0], _with_rows(args[1]), *args[2:])
        if self._constants:
            leaves, structure = pytree.tree_flatten((args, kwargs))
            if any(isinstance(leaf, Tensor) and leaf.is_meta for leaf in leaves):
                placed = [self._stand_in(leaf) if _has_values(leaf) else leaf for leaf in leaves]
                args, kwargs = pytree.tree_unflatten(placed, structure)
        return func(*args, **kwargs)

    def _stand_in(self, tensor: Tensor) -> Tensor:
        """Return a stand-in; for a view of a constant a view of that one's."""
        key = storage_key(tensor)
        # What was computed from constants has other memory each time.
        storages = self._storages if key in self._constants else {}
        if key not in storages:
            n_bytes = tensor.untyped_storage().nbytes()
            storages[key] = torch.empty(n_bytes, dtype=torch.uint8, device=META).untyped_storage()
        made = torch.empty(0, dtype=tensor.dtype, device=META)
        return made.set_(storages[key], tensor.storage_offset(), tensor.shape, tensor.stride())


def _with_rows(picked: Any) -> Any:
    """Put stand-ins in the place of lists of whole numbers in an index."""
    if isinstance(picked, tuple):
        return tuple(map(_with_rows, picked))
    if isinstance(picked, list) and picked and all(type(one) is int for one in picked):
        return torch.empty(len(picked), dtype=torch.int64, device=META)
    return picked


def _has_values(leaf: Any) -> bool:
    """Tell whether it is a plain tensor with values, and without a gradient."""
    return (
        type(leaf) in (Tensor, nn.Parameter)
        and not leaf.is_meta
        and not leaf.requires_grad
        and leaf.layout == torch.strided
        and not leaf.is_quantized  # none can be made without values
        and has_storage(leaf)
    )
