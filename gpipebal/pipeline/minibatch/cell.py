"""A cell: one micro-batch in one partition, as a small autograd graph of its own.

::

    inputs ──detach──▶ leaves ──layers──▶ outputs ──detach──▶ next partition
                         ▲                   │
    gradients of inputs ─┘◀──── backward ────┘◀── gradients of outputs

Without checkpointing the cell keeps the graph, but of its outputs only their places in the graph:
the output tensors themselves belong to the next partition. With checkpointing it keeps only its
inputs, and makes the graph in the recompute.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils._pytree import TreeSpec

from gpipebal.errors import ModelError
from gpipebal.pipeline.layers.batchnorm import SEEN, gathering
from gpipebal.pipeline.layers.buffers import Kept
from gpipebal.pipeline.process.caller import CallerState
from gpipebal.pipeline.process.phase import phase
from gpipebal.pipeline.randomness.randomness import OwnRandomness, States
from gpipebal.pipeline.randomness.seeds import MiniBatchSeed
from gpipebal.pipeline.values.gradients import without_the_rest
from gpipebal.pipeline.values.microbatch import (
    Packet,
    check_nothing_hidden,
    copied,
    detached,
    uncounted,
)
from gpipebal.pipeline.values.places import find_overlaps
from gpipebal.pipeline.values.tensors import has_storage, version_of
from gpipebal.pipeline.workers.blame import note_failed_layers, note_gaps, note_second_backward
from gpipebal.pipeline.workers.partition import Partition
from gpipebal.pipeline.workers.passes import Pass, Tail, kind_of
from gpipebal.schedule import Schedule

__all__ = ["Cell", "make_cells"]


class _ForRecompute(NamedTuple):
    """What a checkpointed cell keeps of its forward.

    Attributes:
        input: The input.
        versions: How often its leaves had been written to before the forward.
        layers: What it has to know of the layers.
        structure: The pytree of the outputs.
        promised: Which of their leaves were said to need a gradient.
        states: States of the generators that layers passed explicitly.
        draws: How often each layer has drawn random numbers.
        tail: Ran after the layers.
    """

    input: Packet
    versions: list[int | None]
    layers: Kept
    structure: TreeSpec
    promised: list[bool]
    states: States
    draws: Mapping[int | str, int]
    tail: Tail | None


class Cell:
    """One micro-batch in one partition.

    Args:
        partition: The partition.
        mode: The state of its layers when the mini-batch went in, from `Modules.mode`.
        micro_batch: Which micro-batch it is.
        seed: Seed of the mini-batch's random numbers.
        grad: Whether a backward can follow.
        input_is_shared: Whether other micro-batches may have a part of its input, which then must
            stay as it is even without a backward.
        checkpointed: Whether it is recomputed in the backward; only with `grad`.

    Attributes:
        checkpointed: As given.
    """

    def __init__(
        self,
        partition: Partition,
        mode: Hashable,
        *,
        micro_batch: int,
        seed: MiniBatchSeed,
        grad: bool,
        input_is_shared: bool,
        checkpointed: bool,
    ) -> None:
        self._partition = partition
        self._mode = mode
        self._micro_batch = micro_batch
        self._seed = seed
        self._grad = grad
        self._protect = grad or input_is_shared
        self.checkpointed = checkpointed
        self._n_inputs = 0
        self._kind: Any = None
        self.release()

    def release(self) -> None:
        """Forget all tensors."""
        self._kept: _ForRecompute | None = None
        self._leaves: list[Tensor | None] = []
        self._roots: list[tuple[GradientEdge | Tensor, torch.device] | None] = []
        self._marks: list[int | None] = []

    def forget_facts(self) -> None:
        """Let the partition find out again the facts about micro-batches of this cell's kind."""
        self._partition.forget(self._kind)

    def forward(self, packet: Packet, state: CallerState, tail: Tail | None = None) -> Packet:
        """Run the layers on the cell's input; return what goes on to the next partition.

        Args:
            packet: The input.
            state: Settings of the caller.
            tail: Runs after the layers, in the recompute too.
        """
        self._n_inputs = len(packet.leaves)
        loss = None if tail is None else tail.kind
        self._kind = kind_of(self._mode, packet, state, protect=self._protect, loss=loss)
        versions = [*map(version_of, packet.leaves)] if self.checkpointed else []
        states: States | None = [] if self.checkpointed else None
        randomness = OwnRandomness(self._seed, self._micro_batch, states)
        marks: list[int | None] = []
        try:
            with phase(checkpointing=self.checkpointed):
                result = self._partition.forward(
                    packet,
                    Pass(self._kind, state, randomness, tail, marks),
                    checkpointed=self.checkpointed,
                    protect=self._protect,
                    with_graph=self.checkpointed and self._needs_graph(tail),
                )
        except RuntimeError as error:
            if not self._partition.index:
                note_gaps(error, packet.leaves)
            raise
        self._partition.check_writes(self._kind, packet)
        if result.kept is not None and states is not None and any(result.needs_gradient):
            result.kept.writes.end_forward()
            self._kept = _ForRecompute(
                _with_copies(packet),
                versions,
                result.kept,
                result.structure,
                result.needs_gradient,
                states,
                randomness.draws,
                tail,
            )
        elif self._grad and not self.checkpointed and any(result.needs_gradient):
            self._leaves = _wanted(packet, result.inputs)
            self._roots, self._marks = _roots_of(result.leaves), marks
        check_nothing_hidden(result.leaves, f"the output of partition {self._partition.index}")
        return Packet(
            detached(result.leaves),
            result.structure,
            [self._grad and needs for needs in result.needs_gradient],
            overlaps=find_overlaps(result.leaves) | result.overlaps,
        )

    def _needs_graph(self, tail: Tail | None) -> bool:
        """Tell whether a checkpointed forward has to record a graph, to drop it afterwards."""
        return (
            self._micro_batch == 0
            or self._partition.modules.ask_for_a_graph()
            or (tail is not None and tail.asks_for_a_graph)
        )

    def recompute(self, state: CallerState, *, keep: bool) -> None:
        """Make the graph that the checkpointed forward did not record.

        Args:
            state: Settings of the caller.
            keep: Whether another backward may follow.

        Raises:
            ModelError: the kept input or a parameter was written to, or a layer does not do what it
                did before.
        """
        kept = self._kept
        if kept is None:
            return  # no output needs a gradient
        if [*map(version_of, kept.input.leaves)] != kept.versions:
            raise ModelError(_written_message(self._partition.index))
        kept.layers.writes.check()
        randomness = OwnRandomness(self._seed, self._micro_batch, kept.states, again=True)
        marks: list[int | None] = []
        with phase(recomputing=True):
            leaves, outputs = self._partition.recompute(
                kept.input,
                Pass(self._kind, state, randomness, kept.tail, marks),
                structure=kept.structure,
                promised=kept.promised,
                kept=kept.layers.again() if keep else kept.layers,
            )
        kept.layers.writes.check(recomputed=True)
        randomness.check_draws(kept.draws)
        if not keep:
            self._kept = None
        self._leaves = _wanted(kept.input, leaves)
        self._roots, self._marks = _roots_of(outputs), marks

    def backward(
        self, gradients: Sequence[Any], state: CallerState, *, keep: bool, parameters: bool
    ) -> list[Tensor | None]:
        """Run the cell's graph; return the gradient of each leaf of the input, or None.

        Args:
            gradients: The gradient of each leaf of the output, or None.
            state: Settings of the caller.
            keep: Whether another backward may follow.
            parameters: Whether parameters get gradients too; if not, only the input does.
        """
        if not self._roots:
            return [None] * self._n_inputs
        roots: list[Any] = []
        seeds = []
        for end, gradient in zip(self._roots, gradients, strict=True):
            if end is not None and gradient is not None:
                roots.append(end[0])
                # A layer may return a tensor that is on the host.
                seeds.append(gradient if gradient.device == end[1] else gradient.to(end[1]))
        wanted = [leaf for leaf in self._leaves if leaf is not None]
        keep = keep and not self.checkpointed
        if roots and (parameters or wanted):
            randomness = OwnRandomness(self._seed, self._micro_batch)
            randomness.enter_backward(self._partition.index)
            try:
                with (
                    gathering(SEEN),
                    randomness.watching(),
                    state.backward_entered(),
                    without_the_rest(wanted),
                ):
                    torch.autograd.backward(
                        roots,
                        seeds,
                        retain_graph=keep,
                        inputs=None if parameters else wanted,
                    )
            except BaseException as error:
                note_second_backward(error)
                # Only a graph that is freed completely on the way shows how far the backward got.
                if parameters and not keep:
                    nodes = [one.grad_fn if isinstance(one, Tensor) else one.node for one in roots]
                    note_failed_layers(error, nodes, self._marks, self._partition.describe)
                raise
        found = [None if leaf is None else leaf.grad for leaf in self._leaves]
        for leaf in wanted:
            leaf.grad = None
        if not keep:
            # A checkpointed cell keeps its input for a further backward, and its graph never.
            self._leaves, self._roots = [], []
        return found


def make_cells(
    partitions: Sequence[Partition],
    schedule: Schedule,
    seed: MiniBatchSeed,
    *,
    grad: bool,
    input_is_shared: bool,
) -> list[list[Cell]]:
    """Make the cells of a mini-batch: for each partition, one for each micro-batch.

    Those that the schedule recomputes are checkpointed; the other arguments are those of `Cell`.
    """
    recomputed = {action[::2] for row in schedule.rows for action in row if action.kind == "R"}
    cells = []
    for partition in partitions:
        mode = partition.modules.mode()
        cells.append(
            [
                Cell(
                    partition,
                    mode,
                    micro_batch=i,
                    seed=seed,
                    grad=grad,
                    input_is_shared=input_is_shared,
                    checkpointed=grad and (partition.index, i) in recomputed,
                )
                for i in range(schedule.chunks)
            ]
        )
    return cells


def _written_message(partition: int) -> str:
    """Say what to do about a write to the input of a checkpointed micro-batch."""
    if not partition:
        return (
            "a checkpointed micro-batch cannot be recomputed: its input was written to after the "
            "forward.\n"
            "Fix: do not change the mini-batch before the backward; or checkpoint='never'."
        )
    return (
        f"a checkpointed micro-batch of partition {partition} cannot be recomputed: its input was "
        "written to after the forward, perhaps by a layer of this partition, or of one before it, "
        "that has kept the tensor.\n"
        "Fix: let layers keep a clone() of what they write to later; or checkpoint='never'."
    )


def _with_copies(packet: Packet) -> Packet:
    """Copy tensors that count no writes: a write before the recompute could not be detected."""
    which = uncounted(packet.leaves)
    if not which:
        return packet
    with torch.inference_mode():
        return packet._replace(leaves=copied(packet.leaves, which))


def _wanted(packet: Packet, leaves: Sequence[Any]) -> list[Tensor | None]:
    """Keep the leaves whose gradient is wanted; the memory of others is not the cell's.

    A layer may want one for itself, and let its input require a gradient that no receiver waits
    for.
    """
    return [
        leaf if needs else None for leaf, needs in zip(leaves, packet.needs_gradient, strict=True)
    ]


def _roots_of(outputs: Sequence[Any]) -> list[tuple[GradientEdge | Tensor, torch.device] | None]:
    """Return where a backward starts, and on which device, for each output that has a gradient."""
    return [
        (_edge(leaf), leaf.device) if isinstance(leaf, Tensor) and leaf.requires_grad else None
        for leaf in outputs
    ]


def _edge(tensor: Tensor) -> GradientEdge | Tensor:
    """Return where the gradient of a tensor goes."""
    if tensor.is_nested and tensor.layout is torch.strided:
        # The engine asks an edge for one shape, and such a tensor has several.
        return tensor
    if tensor.grad_fn is None and not has_storage(tensor):
        # torch would ask for a view, which a sparse tensor does not have.
        clone = tensor.clone().grad_fn
        assert clone is not None
        node, output = clone.next_functions[0]
        assert node is not None
        return GradientEdge(node, output)
    return get_gradient_edge(tensor)
