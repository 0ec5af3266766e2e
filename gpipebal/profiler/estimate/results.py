"""Results: in which memory devices make them, where the meta device makes them in another one.

That is the order of images, losses, sparse tensors, and products of groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._prims_common import suggest_memory_format

__all__ = [
    "BATCH_NORMS",
    "GROUPED",
    "SHUFFLES",
    "channels_last_of",
    "in_device_order",
    "in_format_of",
    "in_groups",
    "in_memory_of_terms",
    "in_order_of",
    "in_parts",
]

_aten = torch.ops.aten

BATCH_NORMS = ("aten::native_batch_norm", "aten::_native_batch_norm_legit")
#: What a CPU makes of an image in any other order than channels-last is contiguous.
_NORMS_BY_FORMAT = (*BATCH_NORMS, "aten::native_batch_norm_backward")
_CONVOLUTIONS = ("aten::convolution", "aten::convolution_backward")
#: A CPU keeps the memory format of an image, by strides; for CUDA, a reason is noted only.
SHUFFLES = ("pixel_shuffle", "pixel_unshuffle", "channel_shuffle", "roll")
_PADS = tuple(f"{how}_pad{dims}d" for how in ("reflection", "replication") for dims in (2, 3))
_IN_ORDER_ON_CPU = (
    *(f"aten::{name}" for name in (*SHUFFLES, *_PADS, "max_unpool2d", "native_group_norm")),
    *(f"aten::{name}_backward" for name in (*_PADS, "native_group_norm")),
)
#: These make a contiguous gradient, however their input lies.
_CONTIGUOUS = tuple(f"aten::{name}_loss_backward" for name in ("mse", "smooth_l1", "huber"))
#: What devices multiply in groups; the meta device takes only one of them.
GROUPED = (torch.float32, torch.bfloat16, torch.float16)
#: Rows of the results begin at multiples of this many bytes.
_ALIGNMENT = 16


def in_device_order(func: Any, args: Any, result: Any, *, on_cpu: bool) -> Any:
    """Return the result of an operation with its elements in the order in which a device has them.

    Args:
        func: The operation.
        args: What it was given.
        result: What the meta device made.
        on_cpu: Whether the device is a CPU.
    """
    name = func._schema.name
    # A backward has the image after the gradient of the result, which has no say.
    at = name.endswith("_backward")
    if name in _CONVOLUTIONS and args[0].dim() == 4:
        result = in_order_of(args[at : at + 2], result)  # of the image or the weight
    if name in _IN_ORDER_ON_CPU and on_cpu:
        flat = name == "aten::roll" and not (len(args) > 2 and args[2])
        result = result if flat else in_order_of(args[at : at + 1], result)
    if name in _NORMS_BY_FORMAT and on_cpu:
        result = in_format_of(args[at], result)
    if name in _CONTIGUOUS:
        result = result.contiguous()
    if func is _aten.native_layer_norm_backward.default and result[0] is not None:
        result = (result[0].contiguous(), *result[1:])  # however its gradient lies
    return result


def in_order_of(operands: Sequence[Any], results: Any) -> Any:
    """Put results into channels-last, if one of the operands is: an image, or weights."""
    formats = {channels_last_of(one) for one in operands} - {None}
    if not formats:
        return results
    in_space = torch.channels_last_3d in formats
    dims, memory_format = (5, torch.channels_last_3d) if in_space else (4, torch.channels_last)
    ordered = [
        torch.empty_like(one, memory_format=memory_format)
        if isinstance(one, Tensor) and one.dim() == dims
        else one
        for one in (results if isinstance(results, tuple) else (results,))
    ]
    return tuple(ordered) if isinstance(results, tuple) else ordered[0]


def in_format_of(image: Tensor, results: tuple[Any, ...]) -> tuple[Any, ...]:
    """Put the first of some results into the format of an image: contiguous, or channels-last."""
    made, *others = results
    if made is None:
        return results
    memory_format = suggest_memory_format(image)
    return (torch.empty_like(made, memory_format=memory_format), *others)


def channels_last_of(value: Any) -> torch.memory_format | None:
    """Return the channels-last format that an image has, of two dimensions or of three; or None.

    As for devices, strides decide: a single pixel is contiguous either way.
    """
    if not isinstance(value, Tensor) or value.dim() not in (4, 5):
        return None
    memory_format = suggest_memory_format(value)
    return None if memory_format == torch.contiguous_format else memory_format


def in_parts(func: Any, tensor: Tensor, *added: Tensor) -> Tensor:
    """Copy a sparse tensor, or add one to it, which needs room for the elements of both.

    Where a gradient is accumulated into one, both are taken to be of the same indices, as those of
    equal micro-batches are; elsewhere to be of different ones.
    """
    parts = (tensor, *added)
    in_place = func is _aten.add_.Tensor
    n_elements = (max if in_place else sum)(one._nnz() for one in parts)
    indices, values = (
        torch.cat([part(one) for one in parts], along).narrow(along, 0, n_elements)
        for part, along in ((Tensor._indices, 1), (Tensor._values, 0))
    )
    made = torch.sparse_coo_tensor(indices, values, tensor.shape, check_invariants=False)
    if not in_place:
        return made
    tensor.data = made
    return tensor


def in_memory_of_terms(loss: Tensor, operands: Sequence[Any]) -> Tensor:
    """Return a loss as it lies in the memory of the terms that it is the mean or sum of."""
    shape = torch.broadcast_shapes(*(one.shape for one in operands[:2]))
    return loss.new_empty(shape.numel()).as_strided((), ())


def in_groups(
    one: Tensor,
    other: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Return the products of matrices by groups, as those of a mixture of experts.

    Where a matrix has no dimension for the groups, its rows or columns are divided among them.

    Raises:
        RuntimeError: as on a device, they do not fit each other.
    """
    several = [each for each in (one, other) if each.dim() == 3]
    known = {each.shape[0] for each in (*several, *([] if offs is None else [offs]))}
    torch._check(
        all(each.dim() in (2, 3) for each in (one, other))
        and one.shape[-1] == other.shape[-2]
        and (offs is None) == (len(several) == 2)
        and len(known) == 1,
        lambda: "matrices of groups do not fit each other",
    )
    shape = [one.shape[-2], other.shape[-1]]
    if len(several) != 1:
        shape = [*known, *shape]
    made = one.new_empty(0, dtype=out_dtype)
    step = _ALIGNMENT // made.element_size()
    row = -(-shape[-1] // step) * step
    strides = [shape[-2] * row, row, 1][-len(shape) :]
    return torch.empty_strided(shape, strides, dtype=made.dtype, device=one.device)
