"""One cell, a micro-batch in a partition: what it holds, and what it needs while it works."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from gpipebal.memory.gradients import PartitionGradients
from gpipebal.memory.layer_peaks import (
    chained_peak,
    copied,
    first_forward_peak,
    forward_peak,
    peak_at_cut,
    uncopied_peak,
)
from gpipebal.memory.moment import Moment, height
from gpipebal.memory.ties import Ties
from gpipebal.plan import PeakMemory
from gpipebal.profile import LayerProfile, Profile, SkipProfile

__all__ = ["Cell", "Storages"]

#: Storages, as indices into `Profile.storages`.
Storages = frozenset[int]


@dataclass(frozen=True)
class Cell:
    """What decides the memory of the cells of one partition, which are all alike.

    Attributes:
        profile: Costs of all layers.
        first: Index of its first layer in the chain.
        end: Index after its last layer.
        loss: The loss that it computes after its layers; None: it computes none.
        shared_memory: Whether all partitions live in one memory.
    """

    profile: Profile
    first: int
    end: int
    loss: LayerProfile | None
    shared_memory: bool

    @cached_property
    def own_layers(self) -> Sequence[LayerProfile]:
        """Its layers, without the loss."""
        return self.profile.layers[self.first : self.end]

    @cached_property
    def layers(self) -> Sequence[LayerProfile]:
        """Its layers, followed by the loss if it computes that."""
        return self.own_layers if self.loss is None else (*self.own_layers, self.loss)

    @property
    def is_last(self) -> bool:
        """Whether no partition comes after it."""
        return self.end == self.profile.n_layers

    @cached_property
    def incoming(self) -> Sequence[SkipProfile]:
        """Skip connections from earlier partitions that its layers pop."""
        return [s for s in self.profile.skips if s.source < self.first <= s.destination < self.end]

    @cached_property
    def outgoing(self) -> Sequence[SkipProfile]:
        """Skip connections that its layers stash for later partitions."""
        return [s for s in self.profile.skips if self.first <= s.source < self.end <= s.destination]

    @cached_property
    def value(self) -> Storages:
        """Storages of the output of the layer before it, or of the chain's input."""
        layers = self.profile.layers
        return frozenset(layers[self.first - 1].outputs if self.first else self.profile.inputs)

    @cached_property
    def received(self) -> Storages:
        """Storages of a cell's input: the value, and the skips that come with it."""
        return self.value.union(*(skip.storages for skip in self.incoming))

    @cached_property
    def outputs(self) -> Storages:
        """Storages of the output of a cell's last layer."""
        return frozenset(self.layers[-1].outputs)

    @cached_property
    def handed(self) -> Storages:
        """Storages that a cell keeps in its graph, and a later partition is charged with."""
        if not self.shared_memory or self.is_last:
            return frozenset()
        return self.outputs.union(*(skip.storages for skip in self.outgoing))

    @cached_property
    def others(self) -> Storages:
        """Storages that no cell owns, as they exist all the time: the caller's, or a layer's.

        Where partitions do not share a memory, later ones have copies, if it is handed that far.
        """
        keepers = {**dict.fromkeys(self.profile.inputs, 0), **self.profile.keepers}
        return frozenset(s for s, k in keepers.items() if self.shared_memory or self.first <= k)

    @property
    def gives_outputs(self) -> bool:
        """Whether its outputs are kept for the caller, who computes the loss."""
        return self.is_last and self.loss is None

    @property
    def fixed(self) -> PeakMemory:
        """Parameters, buffers and optimizer state of its layers, in bytes; the rest is 0.

        The optimizer's state counts only if it is known for all layers.
        """
        states = [layer.optimizer_bytes for layer in self.own_layers]
        return PeakMemory(
            parameters=sum(layer.parameter_bytes for layer in self.own_layers),
            buffers=sum(layer.buffer_bytes for layer in self.own_layers),
            optimizer=None if None in states else sum(state or 0 for state in states),
        )

    def of_caller(self, chunks: int) -> int:
        """Bytes of the mini-batch, which the first partition has from start to end; else 0."""
        return 0 if self.first else self.profile.input_bytes(chunks)

    def of_loss(self, chunks: int) -> int:
        """Bytes that a loss inside has all the time: the target, and its parameters; else 0."""
        if self.loss is None:
            return 0
        return chunks * self.loss.buffer_bytes + self.loss.parameter_bytes

    @cached_property
    def goes_back(self) -> bool:
        """Whether it receives a gradient; a cell without one keeps nothing for its backward."""
        given = self.outputs.union(*(skip.storages for skip in self.outgoing))
        return self.loss is not None or not given or bool(self.profile.with_gradient(given))

    @cached_property
    def handed_recomputed(self) -> Storages:
        """Storages that a cell keeps for its recompute, and a later partition is charged with."""
        return self.handed & self.kept_input

    @cached_property
    def kept_input(self) -> Storages:
        """Storages of its input that a cell holds until it is recomputed."""
        return self.received if self.goes_back else frozenset()

    @cached_property
    def kept_buffers(self) -> int:
        """Bytes of the copies of buffers that a cell keeps for its recompute."""
        return sum(layer.kept_buffer_bytes for layer in self.layers)

    @cached_property
    def saved_buffers(self) -> int:
        """Bytes of those copies that the graph of a recompute keeps."""
        if not self.goes_back:
            return 0
        return sum(layer.saved_buffer_bytes for layer in self.layers)

    @cached_property
    def entering(self) -> Storages:
        """Storages of its input that are its own until the backward, whatever its layers save.

        Its graph holds those with a gradient. In one memory it is charged with others too, as long
        as a graph before it holds them.
        """
        found = self.profile.with_gradient(self.received)
        others = self.received - found
        if others and self.shared_memory:
            before = self.profile.layers[: self.first]
            found = found.union(*(others.intersection(layer.saved) for layer in before))
        return found

    @cached_property
    def graph(self) -> Storages:
        """Storages that a cell holds between its forward and its backward, if not recomputed.

        Without those of a loss inside, which stays until the end of the step.
        """
        if not self.goes_back:
            return frozenset()
        found = self.entering.union(*(layer.saved for layer in self.layers))
        return found if self.loss is None else found - self.outputs

    @cached_property
    def freed_last(self) -> Storages:
        """Storages that its backward needs to the end, or until it comes to earlier layers."""
        return self.entering.union(*(layer.saved for layer in self.own_layers[:-1]))

    @cached_property
    def ties(self) -> Ties:
        """What its layers share of their parameters, with each other and with other partitions."""
        return Ties(self.profile, self.first, self.end)

    @cached_property
    def alive(self) -> Sequence[Storages]:
        """Storages that live while each layer's forward runs, even if nothing saves them.

        Its input, and, for longer, what layers before it have stashed.
        """
        found: list[Storages] = []
        given: Storages = self.received
        popped: dict[int, set[int]] = {}
        stashed: dict[int, set[int]] = {}
        for skip in self.profile.skips:
            if skip.source != skip.destination:
                popped.setdefault(skip.destination, set()).update(skip.storages)
                stashed.setdefault(skip.source, set()).update(skip.storages)
        waiting: set[int] = set()
        for k, layer in enumerate(self.layers, start=self.first):
            found.append(given | waiting)
            given = frozenset(layer.outputs)
            waiting -= popped.get(k, set())
            waiting |= stashed.get(k, set())
        return found

    @cached_property
    def copied_inputs(self) -> Sequence[tuple[int, int]]:
        """Copies of its input, made before its layers run, because a later one writes to them.

        For each, the place of the layer that writes to it first, and its bytes. What the first
        layer writes to belongs to that layer's own peak.
        """
        writes: dict[int, int] = {}
        for k in reversed(range(len(self.own_layers))):
            writes.update(dict.fromkeys(self.received.intersection(self.own_layers[k].written), k))
        return [(k, self.profile.bytes_of([storage])) for storage, k in writes.items() if k]

    @cached_property
    def handed_through(self) -> Storages:
        """Storages that all of its layers hand through.

        With a loss inside there are none: its gradient is that of a single number.
        """
        found = self.outputs if self.loss is None else frozenset()
        return found.intersection(*(layer.handed_through for layer in self.layers))

    @cached_property
    def all_gradients(self) -> int:
        """Bytes of the gradients of all its parameters, while backwards run."""
        return sum(layer.gradient_bytes for layer in self.layers) - self.ties.counted_again

    @cached_property
    def gradients_of_step(self) -> int:
        """Bytes of these gradients when the optimizer steps."""
        return self.all_gradients - self.ties.others

    @property
    def input_gradient(self) -> int:
        """Bytes of its input value's gradients that go to the partition before it, if any."""
        if self.first:
            return self.profile.gradients_into(self.first - 1)
        return self.profile.gradient_bytes_of(self.value)

    def wants_gradient(self, layer: int) -> bool:
        """Whether anything before this layer of the chain can be trained."""
        return any(before.gradient_bytes for before in self.profile.layers[:layer])

    def bytes_of(self, storages: Storages) -> int:
        """Add up storages, without those that exist all the time."""
        return self.profile.bytes_of(storages - self.others)

    def highest(self, kind: str, recomputed: bool, gradients_exist: bool, chunks: int) -> Moment:
        """Return the highest moment of an action, with only what this cell holds.

        Args:
            kind: ``'F'``, ``'R'`` or ``'B'``.
            recomputed: Whether the micro-batch is recomputed.
            gradients_exist: Whether the parameters have gradients before the action.
            chunks: Micro-batches of a mini-batch.
        """
        key = kind, recomputed, gradients_exist, chunks
        if key not in self._highest:
            self._highest[key] = max(self._moments(*key), key=height)
        return self._highest[key]

    @cached_property
    def _highest(self) -> dict[tuple[str, bool, bool, int], Moment]:
        return {}

    def _moments(
        self, kind: str, recomputed: bool, gradients_exist: bool, chunks: int
    ) -> Iterator[Moment]:
        """Walk through one action."""
        if kind == "B":
            kept = self.kept_of(chunks, recomputed=recomputed)
            return self.backward(recomputed=recomputed, gradients_exist=gradients_exist, kept=kept)
        if kind == "R":
            return self.recompute(gradients_exist=gradients_exist)
        return self.forward(records=not recomputed, gradients_exist=gradients_exist)

    def held(self, *, recomputed: bool) -> int:
        """Bytes that a cell holds from its forward on; `recomputed`: its backward recomputes it."""
        if recomputed:
            copies = self.kept_buffers if self.goes_back else 0
            return self.bytes_of(self.kept_input - self.handed_recomputed) + copies
        return self.bytes_of(self.graph - self.handed)

    def recompute(self, *, gradients_exist: bool) -> Iterator[Moment]:
        """Walk through a recompute."""
        if self.goes_back:
            elsewhere = self.bytes_of(self.handed_recomputed)
            for moment in self.forward(records=True, gradients_exist=gradients_exist):
                activations = moment.activations - elsewhere + self.kept_buffers
                yield moment._replace(activations=activations)
        else:
            yield self._idle(gradients_exist)

    def _idle(self, gradients_exist: bool) -> Moment:
        return Moment(0, self.all_gradients if gradients_exist else 0)

    def forward(self, *, records: bool, gradients_exist: bool) -> Iterator[Moment]:
        """Walk through a forward; `records`: it makes a graph.

        One that no gradient comes back to makes a graph in any case: to see that none is needed.
        """
        gradients = self.all_gradients if gradients_exist else 0
        seen = set(self.received)
        held = self.bytes_of(self.received) + (0 if records else self.kept_buffers)
        records = records or not self.goes_back
        for k, (layer, alive) in enumerate(zip(self.layers, self.alive, strict=True)):
            peak = forward_peak(layer, records)
            if not k:
                peak = first_forward_peak(self.profile, self.first, layer, records)
            peak += self.copies_until(k)
            yield Moment(held, gradients, self.bytes_of(alive - seen) + peak)
            if records:
                held += self.bytes_of(frozenset(layer.saved) - seen)
                seen.update(layer.saved)

    def copies_until(self, k: int) -> int:
        """Return the bytes of copies of its input that exist while its layer k runs forward."""
        return sum(n_bytes for writer, n_bytes in self.copied_inputs if k <= writer)

    def kept_of(self, chunks: int, *, recomputed: bool = False) -> Storages:
        """Return the storages of outputs that outlive their graphs because the caller has them.

        The outputs of several micro-batches are copied into one piece; of a single one the caller
        gets the output itself. Outputs of a recomputed graph do not go to the caller.
        """
        keeps = chunks == 1 and self.gives_outputs and not recomputed
        return self.outputs - self.others if keeps else frozenset()

    def backward(
        self, *, recomputed: bool, gradients_exist: bool, kept: Storages = frozenset()
    ) -> Iterator[Moment]:
        """Walk through a backward.

        Args:
            recomputed: Whether its graph was made by a recompute.
            gradients_exist: Whether the parameters have gradients by then.
            kept: Storages that exist from its beginning to its end; see `kept_of`.
        """
        if not self.goes_back:
            yield self._idle(gradients_exist)
            return
        # What a recompute makes again is held by no other cell.
        elsewhere = self.handed_recomputed if recomputed else self.handed
        # What the graph does not hold is charged elsewhere too.
        there = self.entering | (kept & self.graph)
        seen = set(there | elsewhere)
        held = self.bytes_of(there - elsewhere)
        held_up_to = []
        for layer in self.layers:
            held += self.bytes_of(frozenset(layer.saved) - seen)
            held += layer.saved_buffer_bytes if recomputed else 0
            seen.update(layer.saved)
            held_up_to.append(held)
        # The gradient of the last partition's output belongs to the caller, or it is that of the
        # loss, a single number.
        started_from = 0 if self.is_last else self.profile.gradients_into(self.end - 1)
        started_from += sum(self.profile.gradient_bytes_of(s.storages) for s in self.outgoing)
        gradients = self.all_gradients if gradients_exist else 0
        # What is handed through the whole cell is copied when its backward begins.
        copies = copied(self.layers[0], gradients_exist) if self.handed_through else 0
        for k in reversed(range(len(self.layers))):
            layer = self.layers[k]
            transient = started_from + self._gradients.living(k) + (copies if k else 0)
            transient += self.backward_peak(k, layer, gradients_exist)
            summed, waiting = self.ties.beside(k, gradients_exist)
            yield Moment(held_up_to[k], gradients + waiting, transient + summed)
            if not gradients_exist:
                gradients += layer.gradient_bytes - self.ties.counted_before(k)

    def backward_peak(self, k: int, layer: LayerProfile, gradients_exist: bool) -> int:
        """Return the largest memory of a layer's backward in this cell, in the place of layer k."""
        copies = layer.cut_copied_bytes or layer.chained_cut_copied_bytes
        at_cut = self._gradients.at_cut(k) if copies else 0
        peak = peak_at_cut(uncopied_peak, layer, gradients_exist, at_cut)
        if k + 1 < len(self.layers):
            chained = peak_at_cut(chained_peak, layer, gradients_exist, at_cut)
            peak = min(peak, chained + self._gradients.kept(k))
        # What is handed through is copied only where it goes through the whole cell.
        return peak if k or not self.handed_through else peak + copied(layer, gradients_exist)

    @cached_property
    def _gradients(self) -> PartitionGradients:
        has_loss = self.loss is not None
        return PartitionGradients(self.profile, self.first, self.end, has_loss=has_loss)
