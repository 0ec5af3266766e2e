"""A partition as its worker runs it: a run of layers on one device, and what is known of them.

The same layers behave alike for every micro-batch of one kind, so four facts are found out once,
on the first micro-batch of a new kind, and used from then on:

* which layers draw random numbers (only those get generators of their own);
* which of the boundary tensors the first layers write to (only those are copied, so that the
  recompute and the neighbour still see them unharmed);
* which buffers the layers write to (only those are copied for a recompute, which then starts from
  the same buffers as the forward, and leaves no trace in them: batch normalisation counts each
  micro-batch once);
* which outputs need a gradient (a checkpointed forward records no graph that could tell).

Which outputs need a gradient is looked at again in the first micro-batch of every mini-batch. A
layer that changes otherwise is noticed in the recompute, before it can make a wrong gradient.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from gpipebal.errors import ModelError
from gpipebal.pipeline.caller import CallerState
from gpipebal.pipeline.microbatch import Packet, check_travels, flatten, unflatten
from gpipebal.pipeline.randomness import OwnRandomness, cell_seed

__all__ = ["Buffers", "Facts", "ForwardResult", "Partition"]

#: Copies of buffers, by the module that has them and their name there.
Buffers = Mapping[tuple[nn.Module, str], Tensor]


@dataclass
class Facts:
    """What was found out about one kind of micro-batch."""

    random_layers: frozenset[int]
    written_inputs: frozenset[int]
    written_buffers: frozenset[tuple[nn.Module, str]]
    outputs_need_gradient: tuple[bool, ...]


@dataclass
class ForwardResult:
    """Outputs of a run of a partition, as leaves, still in the graph if one was recorded.

    Attributes:
        leaves: Leaves of the output.
        structure: Their pytree.
        needs_gradient: Which of them need a gradient.
        drew: Whether a watched layer drew random numbers.
        watched: Which layers were watched for that.
        buffers: Written buffers as they were before, for a recompute; empty in a recompute.
    """

    leaves: list[Any]
    structure: Any
    needs_gradient: list[bool]
    drew: bool
    watched: frozenset[int]
    buffers: Buffers


@dataclass(eq=False)
class Partition:
    """Layers of one partition, in order.

    Attributes:
        index: Which partition it is.
        names: Names of its layers.
        layers: The layers themselves.
        first: Index of its first layer in the whole chain.
        device: Where its layers live.
    """

    index: int
    names: Sequence[str]
    layers: Sequence[nn.Module]
    first: int
    device: torch.device
    _facts: dict[Hashable, Facts] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._modules = list(
            dict.fromkeys(module for layer in self.layers for module in layer.modules())
        )

        self._all_layers = frozenset(range(len(self.layers)))

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

    @staticmethod
    def kind_of(mode: Hashable, packet: Packet, state: CallerState, grad: bool) -> Hashable:
        """Name the kind of a micro-batch that meets layers in this mode."""
        kinds = [
            (leaf.dtype, leaf.dim()) if isinstance(leaf, Tensor) else _name(leaf)
            for leaf in packet.leaves
        ]
        return (
            mode,
            str(packet.structure) if len(kinds) > 1 else None,
            tuple(kinds),
            tuple(packet.needs_gradient),
            state.autocast,
            grad,
        )

    def facts(self, kind: Hashable) -> Facts | None:
        """Return what is known of this kind of micro-batch; None: it is to be found out."""
        return self._facts.get(kind)

    def forget(self, kind: Hashable) -> None:
        """Let the facts of this kind of micro-batch be found out anew."""
        self._facts.pop(kind, None)

    def forward(
        self,
        leaves: Sequence[Any],
        structure: Any,
        *,
        kind: Hashable,
        facts: Facts | None,
        grad: bool,
        protect: bool,
        state: CallerState,
        seed: int,
        micro_batch: int,
        keep_buffers: bool = False,
        look: bool = False,
    ) -> ForwardResult:
        """Run the layers on one micro-batch.

        Args:
            leaves: Leaves of the input. With `grad` or `look`, and without `facts`, those that
                need a gradient are leaves of autograd. With `protect` none is written to.
            structure: Their pytree.
            kind: Kind of the micro-batch, from `kind_of`.
            facts: What is known of it, as the caller of this saw it when it made `leaves`: in
                between another mini-batch may have let it be forgotten.
            grad: Whether to record a graph.
            protect: Whether a graph is or will be wanted, so that the input must stay as it is.
            state: Settings of the caller.
            seed: Seed of the mini-batch.
            micro_batch: Which micro-batch it is.
            keep_buffers: Whether it will be recomputed, so that written buffers are copied.
            look: Whether to record a graph only to see which outputs need a gradient: a layer may
                have been frozen or thawed in a way that its parameters do not show.

        Raises:
            ModelError: a layer returned no tensor.
        """
        find_out = facts is None
        buffers: Buffers = {}
        if find_out and protect:
            buffers = _copies(self._buffer_places())
        elif facts is not None and keep_buffers:
            buffers = _copies(facts.written_buffers)
        # Facts are found with a graph, because only a graph tells which outputs need a gradient.
        with state.entered(grad=grad or look or (find_out and protect)):
            inputs = list(leaves)
            written: Sequence[int] | frozenset[int] = (
                range(len(inputs)) if facts is None else facts.written_inputs
            )
            for k in written if protect else ():
                if isinstance(inputs[k], Tensor):
                    inputs[k] = inputs[k].clone()
            versions = [_version(leaf) for leaf in inputs]
            watched = self._all_layers if facts is None else facts.random_layers
            value, drew = self._run_layers(unflatten(inputs, structure), watched, seed, micro_batch)
            outputs, out_structure = flatten(value)
        needs = [isinstance(leaf, Tensor) and leaf.requires_grad for leaf in outputs]
        if facts is None:
            # By value, because torch's batch normalisation writes without counting a version.
            own = {place: place[0]._buffers[place[1]] for place in buffers}
            buffers = {p: b for p, b in buffers.items() if not _equal(b, own[p])}
            facts = Facts(
                random_layers=frozenset(drew),
                written_inputs=frozenset(
                    k
                    for k, leaf in enumerate(inputs)
                    if versions[k] is not None and _version(leaf) != versions[k]
                ),
                written_buffers=frozenset(buffers),
                outputs_need_gradient=tuple(needs),
            )
            self._facts[kind] = facts
        elif look:
            facts.outputs_need_gradient = tuple(needs)
        elif protect and not grad:
            needs = list(facts.outputs_need_gradient)
        return ForwardResult(outputs, out_structure, needs, bool(drew), watched, buffers)

    def recompute(
        self,
        leaves: Sequence[Any],
        structure: Any,
        *,
        kind: Hashable,
        promised: Sequence[bool],
        watched: frozenset[int],
        buffers: Buffers,
        watch_all: bool,
        state: CallerState,
        seed: int,
        micro_batch: int,
    ) -> list[Any]:
        """Run the layers on a checkpointed micro-batch again, now with a graph.

        Args:
            leaves: Leaves of the input; those that need a gradient are leaves of autograd.
            structure: Their pytree.
            kind: Kind of the micro-batch.
            promised: Which outputs were said to need a gradient.
            watched: Which layers were watched in the forward.
            buffers: Written buffers as they were before the forward.
            watch_all: Whether a layer may have drawn random numbers without being watched.
            state: Settings of the caller.
            seed: Seed of the mini-batch.
            micro_batch: Which micro-batch it is.

        Returns:
            Leaves of the output.

        Raises:
            ModelError: a layer does not do what it did in the forward.
        """
        facts = self._facts.get(kind)
        written = frozenset(range(len(leaves))) if facts is None else facts.written_inputs
        with state.entered(grad=True), _replaced(buffers):
            inputs = [
                leaf.clone() if k in written and isinstance(leaf, Tensor) else leaf
                for k, leaf in enumerate(leaves)
            ]
            value, drew = self._run_layers(
                unflatten(inputs, structure),
                self._all_layers if watch_all else watched,
                seed,
                micro_batch,
            )
        outputs, _ = flatten(value)
        needs = [isinstance(leaf, Tensor) and leaf.requires_grad for leaf in outputs]
        strangers = [self.names[k] for k in drew if k not in watched]
        if needs != list(promised) or strangers:
            self.forget(kind)
            what = (
                f"layer {strangers[0]!r} draws random numbers, and did not when this kind of "
                "micro-batch was first seen"
                if strangers
                else "other outputs need a gradient than when this kind of micro-batch was first "
                "seen"
            )
            raise ModelError(
                f"partition {self.index} cannot be recomputed: {what}.\n"
                "Fix: run the mini-batch again, its layers are looked at anew; if they change from "
                "call to call, use checkpoint='never'."
            )
        return outputs

    def _buffer_places(self) -> list[tuple[nn.Module, str]]:
        return [
            (module, name)
            for module in self._modules
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]

    def _run_layers(
        self, value: Any, watched: frozenset[int], seed: int, micro_batch: int
    ) -> tuple[Any, list[int]]:
        drew = []
        for k, layer in enumerate(self.layers):
            try:
                if k in watched:
                    with OwnRandomness(cell_seed(seed, self.first + k, micro_batch)) as randomness:
                        value = layer(value)
                    if randomness.drew:
                        drew.append(k)
                else:
                    value = layer(value)
                check_travels(value, self.names[k])
            except BaseException as error:
                error.add_note(f"in layer {self.names[k]!r} (layer {self.first + k} of the chain)")
                raise
        return value, drew


def _copies(places: Iterable[tuple[nn.Module, str]]) -> Buffers:
    copies = {}
    for module, name in places:
        buffer = module._buffers[name]
        if buffer is not None:
            copies[module, name] = buffer.detach().clone()
    return copies


def _equal(left: Tensor, right: Tensor | None) -> bool:
    return right is not None and left.shape == right.shape and torch.equal(left, right)


@contextmanager
def _replaced(buffers: Buffers) -> Iterator[None]:
    """Let modules see other buffers, and put their own back."""
    own = {place: place[0]._buffers[place[1]] for place in buffers}
    for (module, name), tensor in buffers.items():
        module._buffers[name] = tensor
    try:
        yield
    finally:
        for (module, name), buffer in own.items():
            module._buffers[name] = buffer


def _name(leaf: Any) -> Hashable:
    """Name a leaf that is no tensor: by its value if that can be compared, else by its kind."""
    if isinstance(leaf, (bool, int, float, str)):
        return (type(leaf).__name__, leaf)
    return type(leaf).__qualname__


def _version(leaf: Any) -> int | None:
    # Tensors made in inference mode count no versions; nothing can want their gradient either.
    return leaf._version if isinstance(leaf, Tensor) and not leaf.is_inference() else None
