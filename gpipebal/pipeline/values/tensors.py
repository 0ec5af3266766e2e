"""Questions about any tensor, dense, sparse or nested: its memory, its elements, its writes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn.parameter import is_lazy

__all__ = [
    "are_equal",
    "bytes_of",
    "copy_of",
    "has_storage",
    "is_shared",
    "once_each",
    "parts_of",
    "plain_parts",
    "storage_key",
    "storage_keys",
    "stored_parts",
    "version_of",
]


#: Integers of so many bytes.
_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def version_of(value: Any) -> int | None:
    """Tell how often a tensor has been written to; None: it counts no writes, or is no tensor."""
    # Tensors made in inference mode count none; nothing can want their gradient either.
    return value._version if isinstance(value, Tensor) and not value.is_inference() else None


def has_storage(value: Any) -> bool:
    """Tell whether a value is a tensor with a storage of its own; a lazy parameter has none yet."""
    return (
        isinstance(value, Tensor)
        and value.layout == torch.strided
        and not value.is_nested
        and not is_lazy(value)
    )


def storage_key(tensor: Tensor) -> int:
    """Return a number that two live tensors have in common only if they share a storage."""
    return tensor.untyped_storage()._cdata


def is_shared(tensor: Tensor) -> bool:
    """Tell whether anything but this tensor holds its memory; for a sparse one: yes."""
    # Private, and the only way to know: one count is the tensor's, one the handle's here.
    count = getattr(torch._C, "_storage_Use_Count", None)
    if count is None or not has_storage(tensor):
        return True
    return bool(tensor.numel()) and count(tensor.untyped_storage()._cdata) > 2


def parts_of(tensor: Tensor) -> tuple[Tensor, ...]:
    """Return the tensors with memory that a tensor is made of: itself, unless it is sparse."""
    layout = tensor.layout
    if layout == torch.strided:
        return (tensor.values(),) if tensor.is_nested else (tensor,)
    if layout == torch.sparse_coo:
        return tensor._indices(), tensor._values()
    if layout in (torch.sparse_csr, torch.sparse_bsr):
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    if layout in (torch.sparse_csc, torch.sparse_bsc):
        return tensor.ccol_indices(), tensor.row_indices(), tensor.values()
    return (tensor,)


def plain_parts(tensor: Tensor) -> tuple[Tensor, ...]:
    """Return the plain tensors whose memory a tensor has, also one that wraps others.

    Those are jagged tensors, quantised ones and the like. Not for questions of aliasing: two jagged
    tensors may have nothing in common but where their rows begin.
    """
    if type(tensor) not in (Tensor, Parameter) and hasattr(type(tensor), "__tensor_flatten__"):
        inner = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]  # type: ignore[attr-defined]
        parts = [part for one in inner if isinstance(one, Tensor) for part in plain_parts(one)]
        return tuple(parts) or (tensor,)
    return parts_of(tensor)


def stored_parts(tensor: Tensor) -> list[Tensor]:
    """Return those of its plain parts that have storages of their own."""
    return list(filter(has_storage, plain_parts(tensor)))


def storage_keys(tensors: Iterable[Tensor]) -> list[int]:
    """Return the key of each storage that tensors have; one that they share more than once."""
    return [storage_key(part) for tensor in tensors for part in stored_parts(tensor)]


def bytes_of(tensor: Tensor) -> int:
    """Return the bytes of a tensor; for a sparse or a wrapping one those of its parts."""
    return sum([part.nbytes for part in plain_parts(tensor)])


def copy_of(tensor: Tensor) -> Tensor:
    """Copy a tensor, differentiably, with its strides.

    The strides decide what layers do: for example whether `contiguous()` copies, and so what a
    later write writes to. A clone keeps them only where elements lie side by side; a clone of an
    expanded tensor would also have memory for repetitions of one element. Subclasses and
    quantised tensors clone themselves.
    """
    is_plain = type(tensor) in (Tensor, Parameter) and not tensor.is_quantized
    if not has_storage(tensor) or not is_plain or not tensor.numel():
        return tensor.clone()
    reach, has_gaps = 1, False
    for step, n in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if n > 1:
            if 0 < step < reach:  # elements overlap, as in a sliding window
                return tensor.clone()
            has_gaps = has_gaps or step != reach
            reach += (n - 1) * step
    try:
        copy: Tensor = _WithStrides.apply(tensor) if has_gaps else tensor.clone()
    except NotImplementedError:  # torch does not copy numbers of this kind, but their bits
        copy = copy_of(_bits_of(tensor)).view(tensor.dtype)
    return copy


class _WithStrides(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        copy = torch.empty_strided(
            tensor.size(), tensor.stride(), dtype=tensor.dtype, device=tensor.device
        )
        once_each(copy).copy_(once_each(tensor))
        return copy

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def once_each(tensor: Tensor) -> Tensor:
    """Return a view of a tensor that has each element once which `Tensor.expand` repeats."""
    for dim, step in enumerate(tensor.stride()):
        if not step and tensor.shape[dim] > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def are_equal(left: Tensor, right: Tensor | None) -> bool:
    """Tell whether two tensors have the same elements, of one kind, NaN being equal to NaN."""
    if right is None or left.shape != right.shape or left.layout != right.layout:
        return False
    if left.dtype != right.dtype or left.device != right.device:
        return False
    return all(map(_have_same_elements, parts_of(left), parts_of(right)))


def _have_same_elements(left: Tensor, right: Tensor) -> bool:
    if left.shape != right.shape:
        return False
    try:
        if torch.equal(left, right):
            return True
        # Only NaN is not equal to itself.
        both_no_numbers = (left != left) & (right != right)
        return bool(((left == right) | both_no_numbers).all())
    except NotImplementedError:  # torch does not compare numbers of this kind, but their bits
        return torch.equal(_bits_of(left), _bits_of(right))


def _bits_of(tensor: Tensor) -> Tensor:
    """Return the same memory as integers of the same size."""
    return tensor.view(_OF_SIZE[tensor.element_size()])
