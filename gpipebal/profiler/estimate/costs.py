"""Costs: what operations on meta tensors would take on a device.

Every operation costs the larger of two times, its arithmetic at the device's peak rate and its
bytes at the device's bandwidth (the roofline of Williams, Waterman and Patterson, 2009), and the
time of a launch. Views are free.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from gpipebal.pipeline.process.modes import ThreadedDispatchMode
from gpipebal.pipeline.process.phase import phase
from gpipebal.pipeline.values.tensors import parts_of, storage_key
from gpipebal.profiler.chain.chain import Chain
from gpipebal.profiler.chain.value import Value, roots_of
from gpipebal.profiler.estimate.approximate import BY_OPERATION
from gpipebal.profiler.memory.flops import flops_of_operation
from gpipebal.rates import DeviceRates

__all__ = ["Costs", "OperationCosts", "find_costs"]

#: Make a tensor and write nothing.
_MAKERS = {
    "aten::empty",
    "aten::empty_like",
    "aten::empty_strided",
    "aten::empty_permuted",
    "aten::new_empty",
    "aten::new_empty_strided",
    "aten::set_",
    "aten::resize_",
}
#: Write a tensor without reading their first argument.
_WRITERS = {
    *(f"aten::{name}_" for name in ("bernoulli", "copy", "fill", "normal", "uniform", "zero")),
    *(f"aten::{name}_like" for name in ("full", "ones", "rand", "randint", "randn", "zeros")),
    *(f"aten::new_{name}" for name in ("full", "ones", "zeros")),
}
#: Look only at the shape of their second argument.
_BY_SHAPE = {
    *(f"aten::nll_loss{dims}_backward" for dims in ("", "2d")),
    *(f"aten::max_pool{dims}d_with_indices_backward" for dims in (2, 3)),
    *(f"aten::adaptive_max_pool{dims}d_backward" for dims in (2, 3)),
    *(f"aten::_adaptive_avg_pool{dims}d_backward" for dims in (2, 3)),
    *(f"aten::avg_pool{dims}d_backward" for dims in (2, 3)),
    *(f"aten::reflection_pad{dims}d_backward" for dims in (1, 2, 3)),
    *(f"aten::replication_pad{dims}d_backward" for dims in (1, 2, 3)),
}
#: Read only some rows of their first argument.
_PICKERS = {
    "aten::embedding",
    "aten::gather",
    "aten::index",
    "aten::index_select",
    "aten::nll_loss2d_forward",
    "aten::nll_loss_forward",
    "aten::take",
}
#: Read as many rows of a table as there are indices: where both are among the arguments.
_TABLES = {
    "aten::_embedding_bag": (0, 1),
    "aten::_embedding_bag_forward_only": (0, 1),
    "aten::_embedding_bag_per_sample_weights_backward": (1, 2),
    "aten::embedding_renorm_": (0, 1),
}
#: Write only some rows of their first argument.
_PUTTERS = {
    "aten::index_add_",
    "aten::index_copy_",
    "aten::index_put_",
    "aten::scatter_",
    "aten::scatter_add_",
}
#: Keep statistics, of a dtype that differs by device if the input is in half precision.
_NORMS = {
    "aten::native_batch_norm",
    "aten::_native_batch_norm_legit",
    "aten::native_group_norm",
    "aten::native_layer_norm",
}
_HALVES = (torch.float16, torch.bfloat16)


class OperationCosts(ThreadedDispatchMode):
    """A context that adds up what the operations in it would cost on a device.

    Args:
        rates: Peak rates of the device.

    Attributes:
        seconds: Time on the device.
        flops: Floating-point operations of matrix products, convolutions and attention.
        launches: Operations that the device is given.
        operations: Names of all operations that ran; for those that normalise half precision, also
            a name with a suffix that says so.
    """

    def __init__(self, rates: DeviceRates) -> None:
        super().__init__()
        self.rates = rates
        self.seconds = 0.0
        self.flops = 0
        self.launches = 0
        self.operations: set[str] = set()

    @property
    def host_seconds(self) -> float | None:
        """Time that the host needs to launch the operations; None: the host does the work."""
        return None if self.rates.host_time is None else self.launches * self.rates.host_time

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        name = func._schema.name
        self.operations.add(name)
        if name in _NORMS and any(t.dtype in _HALVES for t in _tensors(args)):
            self.operations.add(f"{name} in half precision")
        if name not in _MAKERS:
            self._add(func, name, args, kwargs, result)
        return result

    def _add(self, func: Any, name: str, args: Any, kwargs: dict[str, Any], result: Any) -> None:
        inputs, outputs = _tensors((args, kwargs)), _tensors(result)
        given = {storage_key(tensor) for tensor in inputs}
        made = [one for one in outputs if func._schema.is_mutable or storage_key(one) not in given]
        if outputs and not made:
            return  # a view
        picked = _picked_by_sparse((args, kwargs))
        if picked:
            n_bytes = sum(_extent(one, picked.get(one.shape)) for one in (*inputs, *made))
        else:
            n_bytes = _bytes_of(name, inputs, outputs)
        flops = flops_of_operation(func.overloadpacket, args, kwargs, result)
        self.flops += flops
        self.launches += 1
        arithmetic = flops / self._rate(name, inputs) if flops else 0.0
        self.seconds += self.rates.launch_time + max(arithmetic, n_bytes / self.rates.bandwidth)

    def _rate(self, name: str, inputs: Iterable[Tensor]) -> float:
        dtype = next((t.dtype for t in inputs if t.dtype.is_floating_point), torch.float32)
        key = str(dtype).removeprefix("torch.")
        if dtype == torch.float32 and _uses_tensorfloat32(name):
            key = "tensorfloat32"
        return self.rates.flops_of(key)


class Costs(NamedTuple):
    """What a layer costs in time.

    Attributes:
        times: Columns of a layer profile that say how long it takes. The backward adds to gradients
            that exist already, as most of a mini-batch's do.
        flops: Its floating-point operations.
        approximate: Why its memory may be approximate.
    """

    times: dict[str, Any]
    flops: int
    approximate: tuple[str, ...]


def find_costs(chain: Chain, value: Value, rates: DeviceRates) -> Costs:
    """Count what the only layer of a chain costs in time.

    Raises:
        ProfileError: it failed.
    """
    without_graph = OperationCosts(rates)
    with torch.no_grad(), phase(checkpointing=True):
        _, given = chain.prepare(0, value, wants=False)
        with without_graph:
            chain.call(0, given, value)
    for _ in range(2):  # the second backward finds gradients
        forward, backward = OperationCosts(rates), OperationCosts(rates)
        inputs, given = chain.prepare(0, value, wants=True)
        with forward:
            passed = chain.call(0, given, value)
        roots = roots_of(chain.outputs(0, passed), chain.gradients(0, passed))
        with backward:
            chain.run_backward(roots, inputs, chain.names[0])
        del inputs, passed, roots
    for parameter in chain.layers[0].parameters():
        parameter.grad = None
    operations = forward.operations | backward.operations | without_graph.operations
    reasons = BY_OPERATION[rates.device_type]
    times = {
        "forward_time": forward.seconds,
        "backward_time": backward.seconds,
        "recompute_time": forward.seconds,
        "no_grad_forward_time": without_graph.seconds,
        "forward_host_time": forward.host_seconds,
        "backward_host_time": backward.host_seconds,
    }
    approximate = sorted({str(reasons[name]) for name in operations & reasons.keys()})
    return Costs(times, forward.flops, tuple(approximate))


def _uses_tensorfloat32(name: str) -> bool:
    """Tell whether torch's settings allow tensor cores for products in float32."""
    # However they were set: torch's older names for them raise if the newer ones were used.
    if "convolution" in name:
        return bool(torch.backends.cudnn.conv.fp32_precision == "tf32")  # type: ignore[attr-defined]
    return bool(torch.backends.cuda.matmul.fp32_precision == "tf32")


def _bytes_of(name: str, inputs: list[Tensor], outputs: list[Tensor]) -> int:
    written = sum(map(_extent, outputs))
    if name in _PICKERS:
        # As much is read of the first as is written.
        return 2 * written + sum(map(_extent, inputs[1:]))
    if name in _PUTTERS:
        return 3 * sum(map(_extent, inputs[1:]))
    if name in _TABLES:
        table, indices = (inputs[place] for place in _TABLES[name])
        of_row = table.shape[1] * table.element_size()
        looked_up = min(indices.numel() * of_row, _extent(table))
        beside = sum(_extent(tensor) for tensor in inputs if tensor is not table)
        return beside + looked_up + (looked_up if name.endswith("_") else written)
    if name in _BY_SHAPE:
        inputs = [*inputs[:1], *inputs[2:]]
    first = 1 if name in _WRITERS else 0
    return written + sum(map(_extent, inputs[first:]))


def _extent(tensor: Tensor, most: int | None = None) -> int:
    """Return the bytes of memory that a tensor covers: less than its elements if it is expanded.

    Args:
        tensor: The tensor.
        most: The most of it that is of use; None: all of it.
    """
    covered = int(min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes()))
    return covered if most is None else min(covered, most)


def _picked_by_sparse(tree: Any) -> dict[torch.Size, int]:
    """Return the bytes of values of sparse tensors in a tree, by shape.

    A tensor of such a shape that meets one is worked on where that has elements, and nowhere else.
    """
    picked: dict[torch.Size, int] = {}
    for leaf in pytree.tree_leaves(tree):
        if isinstance(leaf, Tensor) and leaf.layout == torch.sparse_coo:
            picked[leaf.shape] = max(leaf._values().nbytes, picked.get(leaf.shape, 0))
    return picked


def _tensors(tree: Any) -> list[Tensor]:
    """Return the plain tensors in a tree; of sparse ones the indices and values."""
    tensors = [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]
    return [
        part
        for tensor in tensors
        if tensor.layout in (torch.strided, torch.sparse_coo)
        for part in (parts_of(tensor) if tensor.layout == torch.sparse_coo else (tensor,))
    ]
