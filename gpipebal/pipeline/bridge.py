"""The bridge between the caller's autograd graph and the pipeline's own cells.

To the caller the pipeline is one differentiable call. Two autograd Functions make it so::

    inputs ──▶ Launch ──token──▶ Attach ──▶ outputs          forward
    inputs ◀── Launch ◀──token── Attach ◀── outputs          backward

`Attach` only stores the gradients of the outputs. `Launch` runs the whole backward of the pipeline,
so it blocks; and it must not block a thread that the workers' own backwards need. The token, which
is all that comes out of `Launch`, is an empty CPU tensor: that makes `Launch` a CPU node, and the
engine runs CPU nodes in the thread that called ``backward()``, never in a device's thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from gpipebal.errors import ModelError, PipelineError
from gpipebal.pipeline import engine_state
from gpipebal.pipeline.microbatch import gather_leaves
from gpipebal.pipeline.minibatch import MiniBatch

__all__ = ["attach_outputs"]


def attach_outputs(mini_batch: MiniBatch, inputs: Sequence[Any]) -> list[Any]:
    """Gather the outputs of a mini-batch, and give them a place in the caller's graph.

    Args:
        mini_batch: A mini-batch whose forward has run.
        inputs: Leaves of the pipeline's input, as the caller gave them.

    Returns:
        Leaves of the output, over the whole mini-batch.
    """
    packets, mini_batch.outputs = mini_batch.outputs, []
    sizes = [
        [leaf.shape[0] if isinstance(leaf, Tensor) and leaf.dim() else 0 for leaf in packet.leaves]
        for packet in packets
    ]
    structures = {packet.structure for packet in packets}
    if len(structures) > 1:
        raise ModelError(
            f"outputs of the micro-batches differ: {' and '.join(map(str, structures))} (expected "
            "one structure).\n"
            "Fix: let the last layer return the same structure for every micro-batch."
        )
    for rows, leaves in zip(mini_batch.rows, sizes, strict=True):
        for k, size in enumerate(leaves):
            if rows and size % rows:
                raise ModelError(
                    f"output leaf {k} does not go by rows: a micro-batch of {rows} rows gave "
                    f"{size} along dim 0, so the micro-batches cannot be joined.\n"
                    "Fix: let the last layer return tensors with the rows along dim 0."
                )
    with torch.no_grad():
        outputs = gather_leaves([packet.leaves for packet in packets])
        needs = [any(flags) for flags in zip(*(p.needs_gradient for p in packets), strict=True)]
    del packets
    if not any(needs):
        return outputs
    tensors = [leaf for leaf in inputs if isinstance(leaf, Tensor) and leaf.requires_grad]
    # Even if no input needs a gradient the parameters do, so the token must be in the graph.
    anchor = torch.empty(0, requires_grad=True, device="cpu")
    crossing = _Crossing(mini_batch, sizes, anchor, [_gradient_device(leaf) for leaf in inputs])
    token = _Launch.apply(crossing, anchor, *tensors)
    wanted = [k for k, flag in enumerate(needs) if flag]
    attached = _Attach.apply(crossing, token, wanted, *(outputs[k] for k in wanted))
    for k, leaf in zip(wanted, attached, strict=True):
        outputs[k] = leaf
    return outputs


def _gradient_device(leaf: Any) -> torch.device | None:
    return leaf.device if isinstance(leaf, Tensor) and leaf.requires_grad else None


class _Crossing:
    """What the two Functions share about one mini-batch."""

    def __init__(
        self,
        mini_batch: MiniBatch,
        sizes: list[list[int]],
        anchor: Tensor,
        gradient_devices: list[torch.device | None],
    ) -> None:
        self.mini_batch = mini_batch
        self.sizes = sizes
        self.gradient_devices = gradient_devices
        # Runs only if the backward wants gradients of leaves, such as parameters, in general.
        self.sentinel = get_gradient_edge(anchor).node
        self.gradients: dict[int, Tensor] = {}
        self.ready: Any = None

    def by_micro_batch(self) -> list[list[Tensor | None]]:
        """Part the gradients of the outputs as the outputs were joined."""
        n_leaves = len(self.sizes[0])
        columns: list[Sequence[Tensor | None]] = []
        for k in range(n_leaves):
            gradient = self.gradients.get(k)
            if gradient is None:
                columns.append([None] * len(self.sizes))
            elif len(self.sizes) == 1:
                columns.append([gradient])
            else:
                columns.append(gradient.split([sizes[k] for sizes in self.sizes]))
        self.gradients = {}
        return [list(row) for row in zip(*columns, strict=True)]


class _Launch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, crossing: _Crossing, anchor: Tensor, *inputs: Tensor) -> Tensor:
        ctx.crossing = crossing
        ctx.set_materialize_grads(False)
        return torch.empty(0, device="cpu")

    @staticmethod
    def backward(ctx: Any, _token: Tensor | None) -> tuple[Tensor | None, ...]:
        crossing: _Crossing = ctx.crossing
        if torch.is_grad_enabled():
            raise PipelineError(
                "a pipeline's backward cannot be differentiated: create_graph=True.\n"
                "Fix: call backward() or torch.autograd.grad() without create_graph, or use the "
                "plain model for gradients of gradients."
            )
        received = crossing.mini_batch.backward(
            crossing.by_micro_batch(),
            crossing.ready,
            keep=engine_state.keeps_graph(),
            parameters=engine_state.will_run(crossing.sentinel),
        )
        gradients = _join(received, crossing.mini_batch.rows)
        # A gradient goes back to where its input was, which need not be the first device.
        wanted = [
            gradient if gradient is None else gradient.to(device)
            for gradient, device in zip(gradients, crossing.gradient_devices, strict=True)
            if device is not None
        ]
        return (None, None, *wanted)


class _Attach(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, crossing: _Crossing, token: Tensor, wanted: list[int], *outputs: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.crossing = crossing
        ctx.wanted = wanted
        ctx.set_materialize_grads(False)
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        crossing: _Crossing = ctx.crossing
        crossing.gradients = {
            k: gradient
            for k, gradient in zip(ctx.wanted, gradients, strict=True)
            if gradient is not None
        }
        # This may be a device's thread: its current stream is the one that made the gradients.
        crossing.ready = crossing.mini_batch.lanes[-1].follow_caller()
        return (None, torch.empty(0, device="cpu"), None, *([None] * len(gradients)))


def _join(received: Sequence[Sequence[Tensor | None]], rows: Sequence[int]) -> list[Tensor | None]:
    """Join the gradients of the micro-batches' inputs; where only some have one, add zeros."""
    joined: list[Tensor | None] = []
    for column in zip(*received, strict=True):
        like = next((gradient for gradient in column if gradient is not None), None)
        if like is None or len(column) == 1:
            joined.append(like)
            continue
        parts = [
            like.new_zeros((n_rows, *like.shape[1:])) if gradient is None else gradient
            for gradient, n_rows in zip(column, rows, strict=True)
        ]
        joined.append(torch.cat(parts))
    return joined
