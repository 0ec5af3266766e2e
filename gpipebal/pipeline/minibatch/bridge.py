"""The bridge between the caller's autograd graph and the pipeline's own cells.

To the caller the pipeline is one differentiable call. Two autograd Functions make it so::

    inputs ──▶ Launch ──token──▶ Attach ──▶ outputs          forward
    inputs ◀── Launch ◀──token── Attach ◀── outputs          backward

`Attach` divides the gradients of the outputs and attaches them to the token's gradient, so that a
backward that fails leaves none of them. `Launch` runs the whole backward of the pipeline, so it
blocks; and it must not block a thread that the workers' own backwards need. The token, which is the
only output of `Launch`, is an empty CPU tensor: that makes `Launch` a CPU node, and the engine runs
CPU nodes in the thread that called ``backward()``, never in a device's thread.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from gpipebal.errors import ModelError, PipelineError
from gpipebal.pipeline.minibatch.minibatch import MiniBatch
from gpipebal.pipeline.minibatch.new_gradients import LateGradients
from gpipebal.pipeline.process import engine_state
from gpipebal.pipeline.process.caller import whole_call
from gpipebal.pipeline.values.dims import Dim, spread_dims
from gpipebal.pipeline.values.lane import Events, current_events
from gpipebal.pipeline.values.microbatch import Packet, copied, name_of_leaf, unflatten
from gpipebal.pipeline.values.parting import (
    gather_leaves,
    join_gradients,
    part_gradients,
    same_structure,
)
from gpipebal.pipeline.values.places import find_overlaps, find_shared
from gpipebal.units import count

__all__ = ["attach_outputs", "give_back"]


def attach_outputs(mini_batch: MiniBatch, inputs: Sequence[Any], out_dims: Any) -> Any:
    """Gather the outputs of a mini-batch, and give them a place in the caller's graph.

    Args:
        mini_batch: A mini-batch whose forward has run.
        inputs: Leaves of the pipeline's input, as the caller gave them.
        out_dims: Dimension along which each tensor of the output has its rows, as a prefix of the
            output's pytree.

    Returns:
        The output over the whole mini-batch.

    Raises:
        ModelError: the micro-batches' outputs cannot be joined.
        BalanceError: `out_dims` does not fit.
    """
    packets, mini_batch.outputs = mini_batch.outputs, []
    structure = same_structure([packet.structure for packet in packets])
    dims = spread_dims(out_dims, structure, "out_dims")
    with torch.no_grad():
        outputs = gather_leaves([packet.leaves for packet in packets], structure, dims)
        needs = [any(flags) for flags in zip(*(p.needs_gradient for p in packets), strict=True)]
    sizes = _sizes_along(packets, structure, dims, mini_batch.rows)
    del packets
    if not any(needs):
        return unflatten(outputs, structure)
    own = [leaf for of_partition in mini_batch.leaves for leaf in of_partition]
    if len(mini_batch.rows) == 1:
        # Autograd does not know of memory that outputs of one micro-batch share with each other,
        # with an input that they are differentiated by, or with what layers train.
        shared = {k for k in find_shared(outputs, [*inputs, *own]) if needs[k]}
        outputs = copied(outputs, find_overlaps(outputs) | shared)
    tensors = [leaf for leaf in inputs if isinstance(leaf, Tensor) and leaf.requires_grad]
    # Even if no input needs a gradient the parameters do, so the token must be in the graph.
    anchor = torch.empty(0, requires_grad=True, device="cpu")
    # Of leaves without a gradient None, to which nothing goes back.
    devices = [
        leaf.device if isinstance(leaf, Tensor) and leaf.requires_grad else None for leaf in inputs
    ]
    crossing = _Crossing(mini_batch, sizes, dims, anchor, devices, LateGradients(own))
    token = _Launch.apply(crossing, anchor, *tensors)
    wanted = [k for k, flag in enumerate(needs) if flag]
    attached = _Attach.apply(crossing, token, wanted, *(outputs[k] for k in wanted))
    for k, leaf in zip(wanted, attached, strict=True):
        outputs[k] = leaf
    return unflatten(outputs, structure)


def _sizes_along(
    packets: Sequence[Packet], structure: Any, dims: Sequence[Dim], rows: Sequence[int]
) -> list[list[int]]:
    """Return how large each micro-batch's leaves are along their dimensions; 0: without one.

    Raises:
        ModelError: a leaf does not go by the rows, so that several cannot be joined.
    """
    sizes = [
        [
            leaf.size(dim) if isinstance(leaf, Tensor) and dim is not None and leaf.dim() else 0
            for leaf, dim in zip(packet.leaves, dims, strict=True)
        ]
        for packet in packets
    ]
    for n_rows, of_micro_batch in zip(rows, sizes, strict=True):
        for k, size in enumerate(of_micro_batch):
            if n_rows and size % n_rows and len(packets) > 1:
                raise ModelError(
                    f"output does not go by rows: {name_of_leaf(structure, k)} has {size} along "
                    f"dim {dims[k]} for a micro-batch of {count(n_rows, 'row')}, so the "
                    "micro-batches cannot "
                    "be joined.\n"
                    "Fix: let the last layer return tensors with the rows along dim 0, or name "
                    "their dimension in out_dims (None: stack the micro-batches' tensors)."
                )
    return sizes


def give_back(found: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Give gradients to what a step was given, and to the caller's graph before it."""
    if found:
        torch.autograd.backward([leaf for leaf, _ in found], [gradient for _, gradient in found])


class _Crossing:
    """What the two Functions share about one mini-batch."""

    def __init__(
        self,
        mini_batch: MiniBatch,
        sizes: list[list[int]],
        dims: list[Dim],
        anchor: Tensor,
        gradient_devices: list[torch.device | None],
        late: LateGradients,
    ) -> None:
        self.mini_batch = mini_batch
        self.sizes = sizes
        self.dims = dims
        self.gradient_devices = gradient_devices
        # Runs only if the backward wants gradients of leaves, such as parameters, in general.
        self.sentinel = get_gradient_edge(anchor).node
        self._late = late
        # If the graph is kept, several threads may each run a backward of it.
        self._turn = threading.Lock()

    def part(self, found: dict[int, Tensor | None]) -> list[list[Tensor | None]]:
        """Divide the gradients of the outputs, given by leaf, into those of each micro-batch."""
        columns = [
            part_gradients(found.get(k), [sizes[k] for sizes in self.sizes], dim)
            for k, dim in enumerate(self.dims)
        ]
        return [list(row) for row in zip(*columns, strict=True)]

    def backward(
        self, gradients: list[list[Tensor | None]], ready: Events
    ) -> list[list[Tensor | None]]:
        """Run the mini-batch's backward; return the gradients of its inputs by micro-batch.

        Args:
            gradients: Those of the outputs, by micro-batch.
            ready: What to wait for before reading them.
        """
        # A layer that waited for its turn would wait for the backward that runs it.
        self.mini_batch.runtime.pool.check_caller()
        with self._turn:
            parameters = engine_state.will_run(self.sentinel)
            if parameters:
                lane = self.mini_batch.lanes[-1]
                self._late.part(lambda one: lane.give_to_caller([one], ready))
            return self.mini_batch.backward(
                gradients,
                ready,
                keep=engine_state.keeps_graph(),
                parameters=parameters,
            )


class _Launch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, crossing: _Crossing, anchor: Tensor, *inputs: Tensor) -> Tensor:
        ctx.crossing = crossing
        ctx.set_materialize_grads(False)
        return _token()

    @staticmethod
    @whole_call
    def backward(ctx: Any, token: Tensor) -> tuple[Tensor | None, ...]:
        crossing: _Crossing = ctx.crossing
        # Taken from the token, so that they are freed before gradients are joined.
        received = crossing.backward(*token.__dict__.pop("arrived"))
        mini_batch = crossing.mini_batch
        gradients = join_gradients(received, mini_batch.rows, mini_batch.dims)
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
        # Not the tensors themselves: torch would take the outputs for views that must not be
        # written to.
        return tuple(output.detach() for output in outputs)

    @staticmethod
    @whole_call
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        if torch.is_grad_enabled():
            raise PipelineError(
                "a pipeline's backward cannot be differentiated: create_graph=True.\n"
                "Fix: call backward() or torch.autograd.grad() without create_graph, or use the "
                "plain model for gradients of gradients."
            )
        crossing: _Crossing = ctx.crossing
        parts = crossing.part(dict(zip(ctx.wanted, gradients, strict=True)))
        token = _token()
        # This may be a device's thread: its current stream is the one that made the gradients.
        # The lane of a partition of the host marks nothing on a card, where its output may be.
        ready = [*crossing.mini_batch.lanes[-1].follow_caller(), *current_events(gradients)]
        token.__dict__["arrived"] = parts, ready
        return (None, token, None, *([None] * len(gradients)))


def _token() -> Tensor:
    # The engine passes a gradient on unchanged only if it has the type of the forward's tensor.
    return torch.empty(0, dtype=torch.float32, device="cpu")
