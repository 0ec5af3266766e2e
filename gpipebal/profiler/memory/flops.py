"""Floating-point operations of a forward, by torch's own formulas."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from gpipebal.errors import GpipebalError
from gpipebal.pipeline.process.eager import EagerDispatchMode
from gpipebal.profiler.chain.chain import Chain
from gpipebal.profiler.chain.value import Value

__all__ = ["FlopCounter", "flops_of", "flops_of_operation"]


def _mkldnn_rnn(input: Tensor, w_input: Tensor, w_hidden: Tensor, *_: Any, **__: Any) -> int:
    return _of_tokens(input, [w_input, w_hidden])


def _cudnn_rnn(input: Tensor, weights: Sequence[Tensor], *_: Any, **__: Any) -> int:
    return _of_tokens(input, weights)


def _of_tokens(input: Tensor, weights: Sequence[Tensor]) -> int:
    """Multiply and add every matrix with every token, whatever its place in the sequence."""
    tokens = input.numel() // max(1, input.shape[-1])
    return 2 * tokens * sum(weight.numel() for weight in weights if weight.dim() == 2)


def _grouped_mm(one: Tensor, other: Tensor, *_: Any, **__: Any) -> int:
    """Multiply each row with all columns of its group; of two rows of matrices, one with one."""
    n_products = one.shape[0] if one.dim() == other.dim() == 3 else 1
    return 2 * n_products * one.shape[-2] * one.shape[-1] * other.shape[-1]


def _trilinear(
    one: Tensor,
    other: Tensor,
    third: Tensor,
    expand1: Sequence[int],
    expand2: Sequence[int],
    expand3: Sequence[int],
    summed: Sequence[int],
    *_: Any,
    **__: Any,
) -> int:
    """Multiply two tensors, and what is left of that with the third, as in a bilinear layer."""
    first, second, last = (
        _with_ones(tensor, places)
        for tensor, places in ((one, expand1), (other, expand2), (third, expand3))
    )
    product = torch.broadcast_shapes(first, second)
    # What the third tensor does not have is summed by then.
    left = [1 if k in summed and k in expand3 else n for k, n in enumerate(product)]
    return 2 * (math.prod(product) + math.prod(torch.broadcast_shapes(left, last)))


def _with_ones(tensor: Tensor, places: Sequence[int]) -> list[int]:
    """Return the shape of a tensor with dimensions of size one in these places."""
    shape = list(tensor.shape)
    for place in sorted(places):
        shape.insert(place, 1)
    return shape


_aten = torch.ops.aten
#: Kernels of whole algorithms that torch's own table leaves out; on a CPU attention is the same.
_MORE: dict[Any, Callable[..., int]] = {
    _aten._scaled_dot_product_flash_attention_for_cpu: (
        flop_registry[_aten._scaled_dot_product_flash_attention]
    ),
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: (
        flop_registry[_aten._scaled_dot_product_flash_attention_backward]
    ),
    _aten.mkldnn_rnn_layer: _mkldnn_rnn,
    _aten._cudnn_rnn: _cudnn_rnn,
    _aten._grouped_mm: _grouped_mm,
    _aten._trilinear: _trilinear,
}


def flops_of_operation(packet: Any, args: Any, keywords: dict[str, Any], result: Any) -> int:
    """Return the floating-point operations of one operation of torch's; 0: next to none.

    Args:
        packet: The operation.
        args: Its arguments.
        keywords: Its keyword arguments.
        result: What it made.
    """
    if (more := _MORE.get(packet)) is not None:
        return int(more(*args, **keywords))
    formula = flop_registry.get(packet)
    return 0 if formula is None else int(formula(*args, **keywords, out_val=result))


def flops_of(chain: Chain, k: int, value: Value) -> int | None:
    """Count the floating-point operations of a layer's forward; None: torch cannot."""
    try:
        with torch.no_grad(), FlopCounter() as counter:
            _, given = chain.prepare(k, value, wants=False)
            chain.call(k, given, value)
    except GpipebalError:
        return None  # where the layer itself fails, its next run says so
    return counter.total


class FlopCounter(EagerDispatchMode):
    """Count the floating-point operations of a block.

    The formulas are those of `torch.utils.flop_counter`, for matrix products, convolutions and
    attention; for kernels that it does not know, those of the products inside. All other operations
    cost next to nothing compared with these, and are not counted. torch's own `FlopCounterMode`
    would also set hooks on all modules of the process, and the counts by module that these give are
    not needed here. The fast path that torch's attention layers have in evaluation mode is one
    operation without a formula, so they are counted without it.

    Attributes:
        total: Floating-point operations so far.
    """

    def __init__(self) -> None:
        super().__init__()
        self.total = 0
        self._had_fast_path: list[bool] = []

    def __enter__(self) -> Self:
        self._had_fast_path.append(torch.backends.mha.get_fastpath_enabled())
        torch.backends.mha.set_fastpath_enabled(False)
        super().__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        torch.backends.mha.set_fastpath_enabled(self._had_fast_path.pop())

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        keywords = kwargs or {}
        result = func(*args, **keywords)
        self.total += flops_of_operation(func._overloadpacket, args, keywords, result)
        return result
