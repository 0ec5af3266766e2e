"""A partition as its worker runs it: a run of layers on one device, and facts about them.

The same layers behave alike for every micro-batch of one kind, so three facts are found out once,
on the first micro-batch of a new kind, and used from then on:

* which of the boundary tensors the first layers write to (only those are copied, so that the
  recompute and the neighbour still see them unharmed; `input_writes` finds layers that begin to);
* which buffers the layers write to (only those, and small ones in any case, are copied for a
  recompute, which then starts from the same buffers as the forward, and leaves no trace in them:
  batch normalisation counts each micro-batch once);
* which outputs need a gradient (a checkpointed forward records no graph that could tell).

Which outputs need a gradient is looked at again in the first micro-batch of every mini-batch, and
in every micro-batch as long as no output needs one. If layers compute otherwise without a graph,
as torch's attention does in evaluation mode, every forward records one. A layer that changes in
another way is noticed in the recompute, before it can make a wrong gradient.

Which outputs are copied before they are sent is decided in every forward (`returned`).
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence, Set
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec

from gpipebal.errors import ModelError
from gpipebal.pipeline.layers.buffers import Buffers, Kept
from gpipebal.pipeline.layers.cached_weights import forget_cached_weights
from gpipebal.pipeline.layers.modules import Modules
from gpipebal.pipeline.layers.recomputed import Recomputed
from gpipebal.pipeline.layers.returned import ReturnedTensors
from gpipebal.pipeline.process import engine_state
from gpipebal.pipeline.values.microbatch import (
    Call,
    Packet,
    check_travels,
    copied,
    flatten,
    form_of,
    have_same_places,
    unflatten,
    which_need_gradient,
)
from gpipebal.pipeline.values.places import find_shared
from gpipebal.pipeline.values.tensors import version_of
from gpipebal.pipeline.workers.blame import note_no_graph
from gpipebal.pipeline.workers.inbox import InboxClosedError
from gpipebal.pipeline.workers.input_writes import ONE_BY_ONE, LateWrites, Watch
from gpipebal.pipeline.workers.passes import MOST_KINDS, Facts, ForwardResult, Pass, was_written
from gpipebal.skip.skippable import Skippable
from gpipebal.skip.tracker import Key, Skips, using

__all__ = ["Partition", "Route"]


class Route(NamedTuple):
    """A skip connection between two partitions: what one stashes, the other pops."""

    key: Key
    source: int
    destination: int


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
        foreign_buffers: Buffers that layers of several partitions have, by ``id``.
        unregistered: Modules that its layers, and no others, have in lists or objects.
        running: Index, in the partition, of the layer that runs or ran last; their number means the
            loss.
        is_given_up: Whether its worker hangs and has been given up: it must start no other layer.
        modules: All modules in its layers.
        buffers: Their buffers.
    """

    index: int
    names: Sequence[str]
    layers: Sequence[nn.Module]
    first: int
    device: torch.device
    incoming: Sequence[Route] = ()
    outgoing: Sequence[Route] = ()
    foreign_buffers: Set[int] = frozenset()
    unregistered: Sequence[nn.Module] = ()
    running: int = 0
    is_given_up: bool = False
    _facts: dict[Hashable, Facts] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.modules = Modules(self.layers)
        self.buffers = Buffers(self.modules, self.foreign_buffers, self.unregistered)
        self._returned = ReturnedTensors([*self.modules, *self.unregistered], self.buffers)
        self._skips = any(isinstance(module, Skippable) for module in self.modules)
        self._late_writes = LateWrites(self.layers, self.index)

    def give_up(self) -> None:
        """Start no other layer, and give the layers their buffers back: the worker hangs."""
        self.is_given_up = True
        self.buffers.give_back()
        for layer in self.layers:
            if isinstance(layer, Recomputed):
                layer.give_back()

    def forget(self, kind: Hashable) -> None:
        """Let the facts about this kind of micro-batch be found out again."""
        self._facts.pop(kind, None)

    def forward(
        self, packet: Packet, run: Pass, *, checkpointed: bool, protect: bool, with_graph: bool
    ) -> ForwardResult:
        """Run the layers on one micro-batch.

        Args:
            packet: The input.
            run: What the pass depends on. If the caller wants gradients a graph is recorded.
            checkpointed: Whether a recompute follows: no graph is recorded, buffers are copied.
            protect: Whether the input is read later, so that it must stay as it is.
            with_graph: Whether to record a graph although a recompute follows: to see which outputs
                need a gradient (a layer may have been frozen or thawed in a way that its parameters
                do not show), or because layers compute otherwise without one.

        Raises:
            ModelError: a layer returned no tensor, or writes to a buffer that layers of another
                partition have too.
        """
        # Read once: another mini-batch may have them forgotten in between.
        facts = self._facts.get(run.kind)
        if facts is None:
            return self._first_forward(packet, run, checkpointed=checkpointed, protect=protect)
        if checkpointed and not any(facts.outputs_need_gradient):
            # Nothing would be recomputed, so it would go unnoticed if this micro-batch takes
            # another way through a layer. Where nothing can need a gradient there is no graph.
            with_graph = True
        record = run.state.grad_enabled and (not checkpointed or with_graph)
        kept = self.buffers.keep() if checkpointed else None
        counts = self._returned.count(run.state)
        with run.state.entered(grad=record):
            leaves = packet.as_leaves(grad=record)
            try:
                outputs, structure = flatten(
                    self._run_protected(leaves, packet, run, facts)
                    if protect
                    else self._run_layers(unflatten(leaves, packet.structure), run)
                )
            except RuntimeError as error:
                if not record and checkpointed:
                    note_no_graph(error)
                raise
            outputs = self._returned.send(outputs, counts, run.state)
        needs = which_need_gradient(outputs)
        if with_graph:
            if tuple(needs) != facts.outputs_need_gradient:
                # Other kinds may have changed too: another loss follows the layers, say.
                self._facts.clear()
                self._facts[run.kind] = replace(facts, outputs_need_gradient=tuple(needs))
        elif checkpointed:
            needs = list(facts.outputs_need_gradient)
            if len(needs) != len(outputs):
                # As many as there are rows, for example. A needless promise does no harm.
                needs = [_may_need_gradient(leaf) for leaf in outputs]
        overlaps = find_shared(outputs, [leaves[k] for k in packet.overlaps])
        return ForwardResult(leaves, outputs, structure, needs, kept, overlaps)

    def _first_forward(
        self, packet: Packet, run: Pass, *, checkpointed: bool, protect: bool
    ) -> ForwardResult:
        """Run the layers on the first micro-batch of a kind, and find out the facts about it."""
        # Also if it is recomputed: only a graph tells which outputs need a gradient.
        record = run.state.grad_enabled
        kept = self.buffers.keep() if checkpointed else None
        before = self.buffers.copies(alone=not protect)
        with run.state.entered(grad=record):
            leaves = packet.as_leaves(grad=record)
            # Where the input is not read later, others may now write next to it in its storage:
            # views of one tensor have one count of writes.
            inputs = copied(leaves, range(len(leaves)) if protect else packet.overlaps)
            versions = [version_of(leaf) for leaf in inputs]
            counts = self._returned.count(run.state, first=True)
            try:
                outputs, structure = flatten(
                    self._run_layers(unflatten(inputs, packet.structure), run)
                )
            except RuntimeError as error:
                if protect:  # all are copies
                    self._check_error(error, packet, range(len(inputs)))
                raise
            outputs = self._returned.send(outputs, counts, run.state)
        needs = which_need_gradient(outputs)
        changed = self.buffers.note_changed(before)
        written_inputs = frozenset(
            k for k, leaf in enumerate(inputs) if was_written(leaves[k], leaf, versions[k])
        )
        self._remember(run.kind, Facts(written_inputs, tuple(needs)))
        kept = kept.with_copies(changed) if kept is not None else None
        overlaps = find_shared(outputs, [inputs[k] for k in packet.overlaps])
        return ForwardResult(leaves, outputs, structure, needs, kept, overlaps)

    def check_writes(self, kind: Hashable, packet: Packet) -> None:
        """Make sure that layers do not write, as far as is known, to what others will read.

        Raises:
            ModelError: a layer does.
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
        self,
        packet: Packet,
        run: Pass,
        *,
        structure: TreeSpec,
        promised: Sequence[bool],
        kept: Kept,
    ) -> tuple[list[Any], list[Any]]:
        """Run the layers on a checkpointed micro-batch again, now with a graph.

        Args:
            packet: The input.
            run: What the pass depends on, as in the forward.
            structure: The pytree of the outputs in the forward.
            promised: Which of their leaves were said to need a gradient.
            kept: What it kept of the layers before the forward.

        Returns:
            Leaves of the input, and leaves of the output.

        Raises:
            ModelError: a layer does not do what it did in the forward.
        """
        facts = self._facts.get(run.kind)
        leaves = packet.as_leaves()
        self.buffers.check(kept)
        with run.state.entered(grad=True), self.buffers.replaced(kept):
            outputs, found = flatten(self._run_protected(leaves, packet, run, facts))
        self.buffers.check_own()
        if not have_same_places(structure, found):
            # Gradients are told apart by where they are in the pytree.
            self.forget(run.kind)
            raise ModelError(
                f"partition {self.index} cannot be recomputed: its output was "
                f"{form_of(structure, '*')} in the forward, and is {form_of(found, '*')} now.\n"
                "Fix: let its layers return the same values, in the same order and under the same "
                "keys, always; or checkpoint='never'."
            )
        needs = which_need_gradient(outputs)
        # An output that was promised needlessly gets a gradient that goes nowhere.
        more = [need and not promise for need, promise in zip(needs, promised, strict=True)]
        if any(more):
            self.forget(run.kind)
            raise ModelError(
                f"partition {self.index} cannot be recomputed: an output needs a gradient that "
                "needed none when this kind of micro-batch was first seen.\n"
                "Fix: run the mini-batch again, which examines its layers again; if they change "
                "from call to call, use checkpoint='never'."
            )
        return leaves, outputs

    def describe(self, k: int) -> str:
        """Name a layer, or the loss, in an error."""
        if k == len(self.layers):
            return "the loss"
        return f"layer {self.names[k]!r} (layer {self.first + k} of the chain)"

    def _remember(self, kind: Hashable, facts: Facts) -> None:
        self._facts[kind] = facts
        while len(self._facts) > MOST_KINDS:
            # The oldest: a dictionary keeps its order.
            self._facts.pop(next(iter(self._facts), None), None)

    def _run_protected(
        self, leaves: Sequence[Any], packet: Packet, run: Pass, facts: Facts | None
    ) -> Any:
        """Run the layers on leaves of an input that is read again, and on copies where they write.

        The copies live no longer than the layers need them: no variable here holds them.

        Raises:
            ModelError: a layer has begun to write to the input.
        """
        written, watch = self._late_writes.copied(packet, facts), Watch(packet.leaves)
        try:
            value = self._run_layers(
                unflatten(copied(leaves, written), packet.structure), run, watch
            )
        except RuntimeError as error:
            self._check_error(error, packet, written)
            raise
        self._late_writes.check(watch, self.describe, loss=run.tail is not None)
        return value

    def _check_error(self, error: RuntimeError, packet: Packet, copied: Collection[int]) -> None:
        """Make sure that an error of a layer does not come from a write to the input."""
        self._late_writes.check_error(error, self.running, self.describe, packet, copied)

    def _run_layers(self, value: Any, run: Pass, watch: Watch | None = None) -> Any:
        forget_cached_weights(self.modules)
        randomness, tail, marks = run.randomness, run.tail, run.marks
        skips = None
        if self._skips:
            arrived: list[Any] = []
            if self.incoming:
                value, *arrived = value
            keys = [route.key for route in self.incoming]
            skips = Skips(dict(zip(keys, arrived, strict=True)))
            del arrived
        k = -1
        try:
            with randomness.watching(), using(skips) if skips is not None else nullcontext():
                for k, layer in enumerate(self.layers):
                    if self.is_given_up:
                        raise InboxClosedError
                    self.running = k
                    if watch is not None and k < ONE_BY_ONE:
                        watch.look()
                    marks.append(engine_state.next_node())
                    randomness.enter_layer(self.first + k)
                    if isinstance(value, Call):
                        value = layer(value.input, **value.keywords)
                    else:
                        value = layer(value)
                    if not isinstance(value, Tensor):
                        check_travels(value, self.names[k], cut=False)
                if tail is not None:
                    self.running = k = len(self.layers)
                    marks.append(engine_state.next_node())
                    randomness.enter_layer(self.first + k)
                    value = tail.run(value)
                if watch is not None:
                    watch.look()
        except BaseException as error:
            with suppress(Exception):  # the error's own class may refuse a note
                error.add_note("before its first layer" if k < 0 else f"in {self.describe(k)}")
            raise
        if skips is not None and self.outgoing:
            return [value, *(skips.load(route.key) for route in self.outgoing)]
        return value


def _may_need_gradient(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and (leaf.is_floating_point() or leaf.is_complex())
