"""Group normalisation of images in channels-last, as a CPU differentiates it.

Torch's own formula makes contiguous copies of the gradient and the image on the meta device; on a
CPU both stay in the format of the image.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch._prims_common import suggest_memory_format

__all__ = ["group_norm_in_format"]

_aten = torch.ops.aten


def group_norm_in_format(
    image: Tensor,
    n_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> Tensor:
    """Normalise an image in its own memory format, forwards and backwards.

    Args:
        image: An image whose strides are near channels-last.
        n_groups: How many groups of channels there are.
        weight: Scales of the channels.
        bias: Added to the channels.
        eps: Added to the variances.
        cudnn_enabled: Is of no use to a CPU.

    Returns:
        The normalised image.
    """
    image = image.contiguous(memory_format=suggest_memory_format(image))
    rows, channels, *sizes = image.shape
    numbers = (rows, channels, math.prod(sizes), n_groups)
    if torch.is_grad_enabled():
        return _GroupNorm.apply(image, weight, bias, numbers, eps)
    return _aten.native_group_norm(image, weight, bias, *numbers, eps)[0]


class _GroupNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        image: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        numbers: tuple[int, ...],
        eps: float,
    ) -> Tensor:
        made, mean, deviation = _aten.native_group_norm(image, weight, bias, *numbers, eps)
        ctx.save_for_backward(image, weight, mean, deviation)
        ctx.numbers, ctx.eps = numbers, eps
        return made

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        image, weight, mean, deviation = ctx.saved_tensors
        asked = ctx.needs_input_grad[:3]
        if torch.is_grad_enabled():  # It will be differentiated again: torch's formula can be.
            made = _aten.native_group_norm(image, weight, None, *ctx.numbers, ctx.eps)[0]
            needed = [
                one for one, is_asked in zip((image, weight), asked, strict=False) if is_asked
            ]
            found = iter(
                torch.autograd.grad(made, needed, gradient, create_graph=True) if needed else ()
            )
            of_bias = gradient.transpose(0, 1).flatten(1).sum(1) if asked[2] else None
            return (
                *(next(found) if is_asked else None for is_asked in asked[:2]),
                of_bias,
                None,
                None,
            )
        gradient = gradient.contiguous(memory_format=suggest_memory_format(image))
        gradients = _aten.native_group_norm_backward(
            gradient, image, mean, deviation, weight, *ctx.numbers, list(asked)
        )
        return (*gradients, None, None)
