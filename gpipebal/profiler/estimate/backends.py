"""Backends: where a device runs other kernels than the meta device does, and what they keep.

The meta device decomposes operations for which real devices have one kernel: above all attention,
whose matrix of weights a fused kernel never keeps. While a layer is estimated, such an operation is
turned into the one that the device would run. Where the result is not certain to the byte, the
reason is noted, and the layer's memory counts as approximate.

For a CPU, the tests compare all of this with measurements. For CUDA, it follows torch's own rules
for choosing kernels, and stays approximate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import sdpa_flop_count

from gpipebal.pipeline.process.blocks import SharedBlocks
from gpipebal.pipeline.process.modes import ThreadedDispatchMode
from gpipebal.profiler.estimate.acting import (
    acting,
    note,
    put_autocast_back,
    replace_autocast,
)
from gpipebal.profiler.estimate.group_norm import group_norm_in_format
from gpipebal.profiler.estimate.known_results import KnownResults
from gpipebal.profiler.estimate.results import (
    BATCH_NORMS,
    GROUPED,
    SHUFFLES,
    channels_last_of,
    in_device_order,
    in_groups,
    in_memory_of_terms,
    in_parts,
)

__all__ = ["AsWritten", "acting_as"]

_aten = torch.ops.aten

#: Recurrent layers are decomposed here, step by step; devices have kernels for them.
_RECURRENT = ("lstm.input", "lstm.data", "gru.input", "gru.data")
_PLAIN_RECURRENT = ("rnn_tanh.input", "rnn_relu.input", "rnn_tanh.data", "rnn_relu.data")
_OTHERWISE_IN_ORDER = ("group_norm", "instance_norm")
_OF_SPARSE = (_aten.clone.default, _aten.add.Tensor, _aten.add_.Tensor)
#: Make tensors of numbers of Python's.
_OF_NUMBERS = ("tensor", "new_tensor", "as_tensor", "asarray", "new")
#: For three dimensions, devices keep the memory format where the meta device does not.
_IN_SPACE = ("conv3d", "group_norm", "pad")
_BY_FORMAT = frozenset({*_OTHERWISE_IN_ORDER, *SHUFFLES, *_IN_SPACE})
_IN_PLACE_LOSSES = (
    "aten::binary_cross_entropy",
    "aten::mse_loss",
    "aten::smooth_l1_loss",
    "aten::soft_margin_loss",
)
#: These also make the gradient of the sampling grid, their second result, when it is not needed.
_SAMPLER_BACKWARDS = ("aten::grid_sampler_2d_backward", "aten::grid_sampler_3d_backward")
#: Flash attention works in half precision; with heads up to this width.
_HALVES = (torch.float16, torch.bfloat16)
_WIDEST_HEAD = 256
#: Whether a CPU's flash attention takes grouped heads: not seen with a torch before this one.
_GROUPS_ON_CPU = torch.__version__ >= "2.13"


def _are_groups_counted() -> bool:
    try:
        sdpa_flop_count((1, 2, 1, 1), (1, 1, 1, 1), (1, 1, 1, 1))
    except AssertionError:
        return False
    return True


#: Whether torch's formula for the operations of attention knows grouped heads.
_GROUPS_COUNTED = _are_groups_counted()

_installed: list[Any] = []


@contextmanager
def acting_as(device_type: str, *, has_flash: bool = True) -> Iterator[set[str]]:
    """Let operations on meta tensors in this thread be those that a kind of device runs.

    Args:
        device_type: ``"cpu"`` or ``"cuda"``.
        has_flash: Whether the CUDA device can run flash attention (Ampere or later).

    Yields:
        Reasons why memory is approximate, noted as operations run.
    """
    before = acting.device_type, acting.has_flash, acting.notes
    notes: set[str] = set()
    _blocks.enter()
    try:
        acting.device_type, acting.has_flash, acting.notes = device_type, has_flash, notes
        with _OnlyWhatIsAsked():
            yield notes
    finally:
        acting.device_type, acting.has_flash, acting.notes = before
        _blocks.leave()


def _install() -> None:
    """Give the operations kernels for meta tensors, for as long as any caller needs them."""
    replace_autocast()
    library = torch.library.Library("aten", "IMPL")
    _installed.append(library)
    kernels: dict[str, Callable[..., Any]] = {
        "scaled_dot_product_attention": _attention,
        "dropout": _dropout,
        "embedding_sparse_backward": _embedding_sparse_backward,
        "group_norm": _group_norm,
        "mish_backward": _mish_backward,
        "one_hot": _one_hot,
        "rms_norm": _rms_norm,
    }
    for name in (*_RECURRENT, *_PLAIN_RECURRENT):
        kernels[name] = _recurrent(name)
    for name, kernel in kernels.items():
        # This key comes before the operation is decomposed, and only for meta tensors.
        library.impl(name, kernel, "AutogradMeta")


def _remove() -> None:
    put_autocast_back()
    while _installed:
        _installed.pop()._destroy()


_blocks = SharedBlocks(_install, _remove)


class _OnlyWhatIsAsked(ThreadedDispatchMode):
    """Let operations make what they make on real devices, in the same memory.

    On the meta device some make more than is asked for: gradients in a backward, and batch
    statistics that are not needed. Others make less: convolutions lose the channels-last memory
    format, losses do not stay in the memory of the terms that they are the mean of, copies and sums
    of sparse tensors lose their elements, and products of groups take one dtype only.
    """

    def __init__(self) -> None:
        super().__init__()
        self._known = KnownResults()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _OF_SPARSE and args[0].layout == torch.sparse_coo:
            if func is _aten.add.Tensor and acting.device_type == "cpu":
                note("sparse_sums")
            return in_parts(func, *args)
        if func is _aten._grouped_mm.default and args[0].dtype in GROUPED:
            return in_groups(*args, **(kwargs or {}))
        if func is _aten._embedding_bag_backward.default and args[9] and len(args) > 11:
            note("padding")  # its place is the last argument, and the gradient is sparse
            return in_parts(_aten.clone.default, func(*args[:11]))
        result = self._known.of(func, args, kwargs or {})
        on_cpu = acting.device_type == "cpu"
        result = in_device_order(func, args, result, on_cpu=on_cpu)
        name = func._schema.name
        if name in _IN_PLACE_LOSSES and not result.dim():
            return in_memory_of_terms(result, args)
        if name in BATCH_NORMS and not args[5]:
            # In evaluation mode there are no statistics of the batch to be kept.
            return (result[0], *(kept.new_empty(0) for kept in result[1:3]), *result[3:])
        if isinstance(result, tuple) and name.endswith("_backward"):
            return _wanted_gradients(func, args, kwargs or {}, result)
        return result


def _wanted_gradients(
    func: Any, args: Any, kwargs: dict[str, Any], result: tuple[Any, ...]
) -> tuple[Any, ...]:
    """Leave out the gradients that a backward makes and its mask does not ask for."""
    names = [argument.name for argument in func._schema.arguments]
    if "output_mask" not in names:
        return result
    at = names.index("output_mask")
    mask = args[at] if at < len(args) else kwargs.get("output_mask", ())
    if len(mask) != len(result):
        return result
    if func._schema.name in _SAMPLER_BACKWARDS:
        mask = (mask[0], True)
    frozen_weight = func._schema.name == "aten::convolution_backward" and not mask[1]
    if frozen_weight and mask[2] and _has_one_kernel(args):
        return (result[0] if mask[0] else None, torch.empty_like(args[2]), result[2])
    return tuple(made if asked else None for made, asked in zip(result, mask, strict=True))


def _has_one_kernel(args: Sequence[Any]) -> bool:
    """Tell whether a backward of a convolution makes the weight's gradient with the bias's.

    On a CPU oneDNN does, and torch chooses it by dtype and shapes, for single pixels also by
    threads.
    """
    if acting.device_type != "cpu":
        return False
    _, image, weight, bias_sizes, *options = args[:10]
    if weight.dtype == torch.float32 and weight.shape[2:].numel() == 1:
        note("single_pixels")
        return True
    with torch._C._DisableTorchDispatch():
        operands = [
            torch.empty((), dtype=one.dtype, device="cpu").expand(one.shape)
            for one in (image, weight)
        ]
        chosen = torch._C._select_conv_backend(*operands, None, *options, bias_sizes)
    return "Slow" not in str(chosen)


class AsWritten(TorchFunctionMode):
    """Note, within `acting_as`, what can no longer be seen when operations are dispatched.

    That is autocast inside a layer, functions that other devices decompose differently, and tensors
    made of numbers, which are no operation on the meta device.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if torch.is_autocast_enabled(acting.device_type or "cpu"):
            note("autocast")
        name = getattr(func, "__name__", "")
        if args and name in _BY_FORMAT:
            self._note_format(name, channels_last_of(args[0]))
        result = func(*args, **(kwargs or {}))
        if name in _OF_NUMBERS and isinstance(result, Tensor) and result.is_meta:
            result.detach()  # an operation, which shows it
        return result

    def _note_format(self, name: str, image: torch.memory_format | None) -> None:
        """Note what devices do otherwise with an image of this format."""
        if image == torch.channels_last_3d and name in _IN_SPACE:
            note("in_space")
        if image == torch.channels_last and name in _OTHERWISE_IN_ORDER:
            note("normalised_in_order")
        if image == torch.channels_last and name in SHUFFLES and acting.device_type == "cuda":
            note("moved_in_order")


def _taken_apart(operation: Any, *args: Any, **kwargs: Any) -> Any:
    """Run torch's own decomposition of an operation, in C++, as if it had no kernel.

    `OpOverload.decompose` would prefer decompositions in Python that compilers use.
    """
    return operation._op_dk(torch._C.DispatchKey.CompositeImplicitAutograd, *args, **kwargs)


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """Choose as torch does between one fused kernel and matrix products."""
    as_written = (query, key, value, attn_mask, dropout_p, is_causal)
    options: dict[str, Any] = {"scale": scale, "enable_gqa": enable_gqa}
    kind = acting.device_type
    fits = query.dim() == 4 and min(query.shape) > 0 and min(key.shape) > 0
    grouped = fits and query.shape[1] != key.shape[1]
    fits = fits and _heads_fit(query, key, value, enable_gqa=enable_gqa)
    fits = fits and all(one.stride(-1) == 1 for one in (query, key, value))
    if grouped and kind == "cpu" and not _GROUPS_ON_CPU:
        note("grouped_heads")
        fits = False
    alike = query.shape[-1] == key.shape[-1] == value.shape[-1]
    masked = attn_mask is not None
    free_mask = attn_mask is None or (not attn_mask.requires_grad and attn_mask.dim() in (2, 4))
    flash = torch.backends.cuda.flash_sdp_enabled()  # of a CPU too
    if kind == "cpu" and flash and fits and alike and free_mask and not dropout_p:
        return _aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, is_causal, attn_mask=_added(attn_mask, query), scale=scale
        )[0]
    if kind == "cuda":
        note("attention")
        flash = flash or torch.backends.cuda.cudnn_sdp_enabled()
        half = query.dtype in _HALVES
        narrow = alike and query.shape[-1] <= _WIDEST_HEAD
        if flash and fits and narrow and half and not masked and acting.has_flash:
            if grouped and not _GROUPS_COUNTED:
                copies = query.shape[1] // key.shape[1]
                key, value = (one.repeat_interleave(copies, 1) for one in (key, value))
            return _aten._scaled_dot_product_flash_attention(
                query, key, value, dropout_p, is_causal, scale=scale
            )[0]
        efficient = torch.backends.cuda.mem_efficient_sdp_enabled() and not grouped
        if efficient and fits and (half or query.dtype == torch.float32):
            keeps = torch.is_grad_enabled() and any(t.requires_grad for t in as_written[:3])
            mask = _added(attn_mask, query)
            if mask is not None:
                mask = mask.expand(*query.shape[:3], key.shape[2])
            return _aten._scaled_dot_product_efficient_attention(
                query, key, value, mask, keeps, dropout_p, is_causal, scale=scale
            )[0]
    return _taken_apart(_aten.scaled_dot_product_attention.default, *as_written, **options)


def _added(mask: Tensor | None, query: Tensor) -> Tensor | None:
    """Return a mask as fused kernels take it: as what is added to the products."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    added = torch.zeros_like(mask, dtype=query.dtype)
    return added.masked_fill(mask.logical_not(), -torch.inf)


def _heads_fit(query: Tensor, key: Tensor, value: Tensor, *, enable_gqa: bool) -> bool:
    """Tell whether a fused kernel takes heads and batches of these numbers."""
    if not query.shape[0] == key.shape[0] == value.shape[0]:
        return False
    of_query, of_key, of_value = query.shape[1], key.shape[1], value.shape[1]
    if not enable_gqa:
        return of_query == of_key == of_value
    return of_key == of_value and of_query % of_key == 0


def _dropout(input: Tensor, p: float, train: bool) -> Any:
    """Keep a mask of bytes on CUDA; on a CPU one in the dtype of the input."""
    if acting.device_type == "cuda" and train and 0 < p < 1 and input.numel():
        return torch.native_dropout(input, p, train)[0]
    return _taken_apart(_aten.dropout.default, input, p, train)


def _embedding_sparse_backward(
    grad: Tensor, indices: Tensor, num_weights: int, padding_idx: int, scale_grad_by_freq: bool
) -> Any:
    """Copy what is no padding, beside a mask: all, for the values would tell how much it is."""
    if padding_idx != -1:
        note("padding")
        is_picked = indices != padding_idx
        indices = indices.clone(memory_format=torch.contiguous_format).view(-1)
        grad = grad.clone(memory_format=torch.contiguous_format).view(-1, grad.shape[-1])
        del is_picked
    operation = _aten.embedding_sparse_backward.default
    return _taken_apart(operation, grad, indices, num_weights, -1, scale_grad_by_freq)


def _mish_backward(grad_output: Tensor, input: Tensor) -> Tensor:
    """Every device has one kernel for this; any that reads two tensors and makes one serves."""
    return grad_output * input


def _one_hot(indices: Tensor, num_classes: int = -1) -> Tensor:
    """Write ones into zeros, as devices do; how many classes there are, the values would tell."""
    if num_classes < 0:
        return _taken_apart(_aten.one_hot.default, indices, num_classes)
    made = indices.new_zeros((*indices.shape, num_classes))
    return made.scatter_(-1, indices.unsqueeze(-1), 1) if made.numel() else made


def _group_norm(input: Tensor, num_groups: int, *args: Any, **kwargs: Any) -> Any:
    """Let an image be in channels-last on a CPU, and make it contiguous elsewhere."""
    if acting.device_type != "cpu" or channels_last_of(input) is None:
        return _taken_apart(_aten.group_norm.default, input, num_groups, *args, **kwargs)
    return group_norm_in_format(input, num_groups, *args, **kwargs)


def _rms_norm(*args: Any, **kwargs: Any) -> Any:
    if acting.device_type == "cuda":
        note("rms_norm")
    return _taken_apart(_aten.rms_norm.default, *args, **kwargs)


def _recurrent(name: str) -> Callable[..., Any]:
    packet, overload = name.split(".")
    operation = getattr(getattr(_aten, packet), overload)

    def run(*args: Any, **kwargs: Any) -> Any:
        note("recurrent")
        return _taken_apart(operation, *args, **kwargs)

    return run
