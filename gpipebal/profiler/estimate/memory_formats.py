"""Memory formats: in which order devices make images, where the meta device makes another one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._prims_common import suggest_memory_format

__all__ = ["in_format_of", "in_order_of", "is_channels_last", "is_channels_last_3d"]


def in_order_of(operands: Sequence[Any], results: Any) -> Any:
    """Put results into channels-last, if one of the operands is: an image, or weights."""
    if not any(map(is_channels_last, operands)):
        return results
    ordered = [
        torch.empty_like(one, memory_format=torch.channels_last)
        if isinstance(one, Tensor) and one.dim() == 4
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


def is_channels_last(value: Any) -> bool:
    """Tell whether it is, as devices do: by strides; a single pixel is contiguous either way."""
    return (
        isinstance(value, Tensor)
        and value.dim() == 4
        and suggest_memory_format(value) == torch.channels_last
    )


def is_channels_last_3d(value: Any) -> bool:
    """Tell whether it is, for three dimensions."""
    return (
        isinstance(value, Tensor)
        and value.dim() == 5
        and suggest_memory_format(value) == torch.channels_last_3d
    )
