"""A partition as its worker runs it: a run of layers on one device, and what is known of them.

The same layers behave alike for every micro-batch of one kind, so four facts are found out once,
on the first micro-batch of a new kind, and used from then on:

* which of the boundary tensors the first layers write to (only those are copied, so that the
  recompute and the neighbour still see them unharmed), and which of the outputs are buffers that
  the next micro-batch will write to (copied likewise);
* which buffers the layers write to (only those, and small ones in any case, are copied for a
  recompute, which then starts from the same buffers as the forward, and leaves no trace in them:
  batch normalisation counts each micro-batch once);
* which outputs need a gradient (a checkpointed forward records no graph that could tell).

Which outputs need a gradient is looked at again in the first micro-batch of every mini-batch, and
in every one as long as none does. A layer that changes otherwise is noticed in the recompute,
before it can make a wrong gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from gpipebal.errors import ModelError
from gpipebal.pipeline.blame import failed_layers, next_node, note_no_graph
from gpipebal.pipeline.buffers import Buffers, BufferSlot, Kept
from gpipebal.pipeline.caller import CallerState
from gpipebal.pipeline.facts import MOST_KINDS, Facts, was_written
from gpipebal.pipeline.inbox import InboxClosedError
from gpipebal.pipeline.microbatch import Call, Packet, check_travels, flatten, unflatten
from gpipebal.pipeline.randomness import OwnRandomness
from gpipebal.pipeline.tensors import version_of
from gpipebal.skip.skippable import is_skippable
from gpipebal.skip.tracker import Key, Skips, using

__all__ = ["ForwardResult", "Partition", "Pass", "Route", "Tail"]

#: What runs behind the layers of the last partition, if the pipeline computes the loss.
Tail = Callable[[Any], Tensor]


class Route(NamedTuple):
    """A skip connection between two partitions: what one stashes, the other pops."""

    key: Key
    source: int
    destination: int


class Pass(NamedTuple):
    """What one pass of a micro-batch through the layers goes by.

    Attributes:
        kind: Kind of the micro-batch, from `kind_of`.
        state: Settings of the caller.
        randomness: Random numbers of the micro-batch.
        tail: Runs behind the layers.
        marks: Takes the number of autograd's next node before each layer.
    """

    kind: Hashable
    state: CallerState
    randomness: OwnRandomness
    tail: Tail | None
    marks: list[int]


@dataclass
class ForwardResult:
    """Outputs of a run of a partition, as leaves, still in the graph if one was recorded.

    Attributes:
        inputs: Leaves of the input, those of the graph if one was recorded.
        leaves: Leaves of the output.
        structure: Their pytree.
        needs_gradient: Which of them need a gradient.
        kept: What a recompute needs of the buffers; None if there will be none.
    """

    inputs: list[Any]
    leaves: list[Any]
    structure: Any
    needs_gradient: list[bool]
    kept: Kept | None


@dataclass(eq=False)
class Partition:
    """Layers of one partition, in order.

    Attributes:
        index: Which partition it is.
        names: Names of its layers.
        layers: The layers themselves.
        first: Index of its first layer in the whole chain.
        device: Where its layers live.
        incoming: Skip connections that come in from other partitions. If there are any, the
            partition's input is the list of the value and what they bring.
        outgoing: Skip connections that go out to other partitions, likewise.
        foreign_buffers: Buffers that layers of other partitions have too.
        running: The layer of its own that runs, or ran last; their number stands for the loss.
        is_given_up: Whether its worker hangs and has been given up: it must start no other layer.
        buffers: The buffers of its layers.
    """

    index: int
    names: Sequence[str]
    layers: Sequence[nn.Module]
    first: int
    device: torch.device
    incoming: Sequence[Route] = ()
    outgoing: Sequence[Route] = ()
    foreign_buffers: frozenset[BufferSlot] = frozenset()
    running: int = 0
    is_given_up: bool = False
    _facts: dict[Hashable, Facts] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._modules = list(
            dict.fromkeys(module for layer in self.layers for module in layer.modules())
        )
        # Views of the modules' dictionaries, which follow what happens to them: every step looks.
        self._child_views = [module._modules.values() for module in self._modules]
        self._parameter_views = [module._parameters.values() for module in self._modules]
        # An embedding may keep its rows short: to do so again changes nothing.
        self._written_views = [
            module._parameters.values()
            for module in self._modules
            if getattr(module, "max_norm", None) is None
        ]
        self._children = self._nested()
        self._parameters = self._parameter_ids()
        self.buffers = Buffers(self._modules, self.foreign_buffers)
        self._skips = any(is_skippable(module) for module in self._modules)

    def mode(self) -> Hashable:
        """Name the state of the layers: what may change the facts changes the mode."""
        return (
            tuple([module.training for module in self._modules]),
            tuple(
                [
                    parameter.requires_grad
                    for module in self._modules
                    for parameter in module._parameters.values()
                    if parameter is not None
                ]
            ),
        )

    def parameters(self) -> list[nn.Parameter]:
        """List the parameters of its layers, one that is shared as often as it stands there."""
        return [p for p in chain.from_iterable(self._parameter_views) if p is not None]

    def is_as_made(self) -> bool:
        """Tell whether all modules inside the layers are the ones that were there at first."""
        return self._nested() == self._children

    def has_other_parameters(self) -> bool:
        """Tell whether a parameter has been replaced since this was last asked."""
        before, self._parameters = self._parameters, self._parameter_ids()
        return self._parameters != before

    def _nested(self) -> list[nn.Module | None]:
        return list(chain.from_iterable(self._child_views))

    def _parameter_ids(self) -> list[int]:
        return list(map(id, chain.from_iterable(self._parameter_views)))

    def versions(self) -> Hashable:
        """Name modules and parameters, and how often each parameter has been written to.

        A recompute needs all of them unchanged.
        """
        found = (p for p in self.parameters() if not is_lazy(p) and not p.is_inference())
        return tuple(
            [id(module) for module in self._nested()]
            + [
                (id(one), one._version, one.data_ptr() if one.layout is torch.strided else 0)
                for one in found
            ]
        )

    def frozen_writes(self) -> int:
        """Count the writes to parameters that are not trained: autograd looks after the others."""
        found = (p for p in chain.from_iterable(self._written_views) if p is not None)
        frozen = (p for p in found if not (p.requires_grad or is_lazy(p) or p.is_inference()))
        return sum(parameter._version for parameter in frozen)

    def forget(self, kind: Hashable) -> None:
        """Let the facts of this kind of micro-batch be found out anew."""
        self._facts.pop(kind, None)

    def forward(
        self, packet: Packet, run: Pass, *, checkpointed: bool, protect: bool, look: bool
    ) -> ForwardResult:
        """Run the layers on one micro-batch.

        Args:
            packet: The input.
            run: What the pass goes by. If the caller wants gradients a graph is recorded.
            checkpointed: Whether a recompute follows: no graph is recorded, buffers are copied.
            protect: Whether somebody reads the input later, so that it must stay as it is.
            look: Whether to record a graph only to see which outputs need a gradient: a layer may
                have been frozen or thawed in a way that its parameters do not show.

        Raises:
            ModelError: a layer returned no tensor, or writes to a buffer that layers of another
                partition have too.
        """
        # Asked once: in between another mini-batch may let it be forgotten.
        facts = self._facts.get(run.kind)
        if checkpointed and facts is not None and not any(facts.outputs_need_gradient):
            # Nothing would be recomputed, and so nobody would notice that this micro-batch goes
            # another way through a layer. Where nothing can need a gradient there is no graph.
            look = True
        # Facts are found with a graph, because only a graph tells which outputs need a gradient.
        record = run.state.grad_enabled and (not checkpointed or look or facts is None)
        leaves = packet.as_leaves() if record else packet.leaves
        kept = self.buffers.keep() if checkpointed else None
        before = self.buffers.copies(alone=not protect) if facts is None else {}
        with run.state.entered(grad=record):
            inputs = list(leaves)
            copied: Sequence[int] | frozenset[int] = ()
            if protect:
                copied = range(len(inputs)) if facts is None else facts.written_inputs
            elif facts is None:
                # Others may write to what lies beside this meanwhile: views of one tensor have one
                # count of writes.
                copied = packet.overlaps
            for k in copied:
                if isinstance(inputs[k], Tensor):
                    inputs[k] = inputs[k].clone()
            versions = [version_of(leaf) for leaf in inputs]
            counts = self.buffers.counts() if facts is None else {}
            # Copies that the layers write to live no longer than the layers need them.
            given = [unflatten(inputs, packet.structure)]
            inputs = inputs if facts is None else []
            try:
                value = self._run_layers(given.pop(), run)
            except RuntimeError as error:
                if checkpointed and not record:
                    note_no_graph(error)
                raise
            outputs, out_structure = flatten(value)
            # The next micro-batch writes to them while others still read.
            written = self.buffers.find_written(outputs, counts) if facts is None else ()
            for k in facts.written_outputs if facts is not None else written:
                outputs[k] = outputs[k].clone()
        needs = [isinstance(leaf, Tensor) and leaf.requires_grad for leaf in outputs]
        if facts is None:
            changed = self.buffers.look(before)
            if kept is not None:
                kept = kept.with_copies(changed)
            facts = Facts(
                written_inputs=frozenset(
                    k for k, leaf in enumerate(inputs) if was_written(leaves[k], leaf, versions[k])
                ),
                outputs_need_gradient=tuple(needs),
                written_outputs=tuple(written),
            )
            self._remember(run.kind, facts)
        elif look:
            facts.outputs_need_gradient = tuple(needs)
        elif checkpointed:
            needs = list(facts.outputs_need_gradient)
        return ForwardResult(leaves, outputs, out_structure, needs, kept)

    def check_writes(self, kind: Hashable, packet: Packet) -> None:
        """Make sure that no layer has written to a tensor that others will read.

        Raises:
            ModelError: one has.
        """
        if not packet.overlaps:
            return
        facts = self._facts.get(kind)
        if facts is not None and packet.overlaps & facts.written_inputs:
            self.forget(kind)
            raise ModelError(
                f"a layer of partition {self.index} writes to a tensor whose memory is also that "
                "of another value on its way between partitions (two views of one tensor, or a "
                "tensor and its skip).\n"
                "Fix: choose a balance that has the layer that makes both in one partition with "
                "the one that writes, or let either work on a clone()."
            )

    def recompute(
        self, packet: Packet, run: Pass, *, promised: Sequence[bool], kept: Kept
    ) -> tuple[list[Any], list[Any]]:
        """Run the layers on a checkpointed micro-batch again, now with a graph.

        Args:
            packet: The input.
            run: What the pass goes by: as the forward did.
            promised: Which outputs were said to need a gradient.
            kept: The buffers as they were before the forward.

        Returns:
            Leaves of the input, and leaves of the output.

        Raises:
            ModelError: a layer does not do what it did in the forward.
        """
        facts = self._facts.get(run.kind)
        leaves = packet.as_leaves()
        written = frozenset(range(len(leaves))) if facts is None else facts.written_inputs
        self.buffers.check(kept)
        with run.state.entered(grad=True), self.buffers.replaced(kept):
            given = [
                leaf.clone() if k in written and isinstance(leaf, Tensor) else leaf
                for k, leaf in enumerate(leaves)
            ]
            given = [unflatten(given, packet.structure)]
            outputs, _ = flatten(self._run_layers(given.pop(), run))
        needs = [isinstance(leaf, Tensor) and leaf.requires_grad for leaf in outputs]
        # One that was promised for nothing gets a gradient that goes nowhere.
        more = [need and not promise for need, promise in zip(needs, promised, strict=False)]
        if any(more) or len(needs) != len(promised):
            self.forget(run.kind)
            raise ModelError(
                f"partition {self.index} cannot be recomputed: an output needs a gradient that "
                "needed none when this kind of micro-batch was first seen.\n"
                "Fix: run the mini-batch again, its layers are looked at anew; if they change from "
                "call to call, use checkpoint='never'."
            )
        return leaves, outputs

    def note_failed_backward(
        self, error: BaseException, roots: Sequence[Any], marks: Sequence[int]
    ) -> None:
        """Note in an error in whose layers' backward it came up, as far as that can be told.

        Args:
            error: What a backward raised that has not kept its graph.
            roots: The nodes that it started from.
            marks: What the pass through the layers noted of autograd's nodes.
        """
        # Whatever happens here, the error itself is what the caller needs.
        with suppress(Exception):
            found = failed_layers(roots, marks, error)
            if found is not None:
                first, last = (self._describe(k) for k in found)
                between = f" or before it, down to {first}" if first != last else ""
                error.add_note(f"in the backward of {last}{between}")

    def _describe(self, k: int) -> str:
        if k == len(self.layers):
            return "the loss"
        return f"layer {self.names[k]!r} (layer {self.first + k} of the chain)"

    def _remember(self, kind: Hashable, facts: Facts) -> None:
        self._facts[kind] = facts
        while len(self._facts) > MOST_KINDS:
            # The oldest: a dictionary keeps its order.
            self._facts.pop(next(iter(self._facts)), None)

    def _run_layers(self, value: Any, run: Pass) -> Any:
        randomness, tail, marks = run.randomness, run.tail, run.marks
        skips = None
        if self._skips:
            arrived: list[Any] = []
            if self.incoming:
                value, *arrived = value
            keys = [route.key for route in self.incoming]
            skips = Skips(dict(zip(keys, arrived, strict=True)))
            del arrived
        where = "before its first layer"
        try:
            with randomness.watching(), using(skips) if skips is not None else nullcontext():
                for k, layer in enumerate(self.layers):
                    if self.is_given_up:
                        raise InboxClosedError
                    self.running = k
                    where = f"in {self._describe(k)}"
                    marks.append(next_node())
                    randomness.enter_layer(self.first + k)
                    if isinstance(value, Call):
                        value = layer(value.input, **value.keywords)
                    else:
                        value = layer(value)
                    check_travels(value, self.names[k], cut=False)
                if tail is not None:
                    where, self.running = "in the loss", len(self.layers)
                    marks.append(next_node())
                    randomness.enter_layer(self.first + len(self.layers))
                    value = tail(value)
        except BaseException as error:
            error.add_note(where)
            raise
        if skips is not None and self.outgoing:
            return [value, *(skips.load(route.key) for route in self.outgoing)]
        return value
