"""A partition as its worker runs it: a run of layers on one device, and what is known of them.

The same layers behave alike for every micro-batch of one kind, so three facts are found out once,
on the first micro-batch of a new kind, and used from then on:

* which layers draw random numbers (only those get generators of their own);
* which of the boundary tensors the first layers write to (only those are copied, so that the
  recompute and the neighbour still see them unharmed);
* which outputs need a gradient (a checkpointed forward records no graph that could tell).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from gpipebal.pipeline.caller import CallerState
from gpipebal.pipeline.microbatch import Packet, check_travels, flatten, unflatten
from gpipebal.pipeline.randomness import OwnRandomness, cell_seed

__all__ = ["ForwardResult", "Partition"]


@dataclass
class _Facts:
    """What was found out about one kind of micro-batch."""

    random_layers: frozenset[int]
    written_inputs: frozenset[int]
    outputs_need_gradient: tuple[bool, ...]


@dataclass
class ForwardResult:
    """Outputs of a run of a partition, as leaves, still in the graph if one was recorded."""

    leaves: list[Any]
    structure: Any
    needs_gradient: list[bool]
    drew: bool = False


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
    _facts: dict[Hashable, _Facts] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._modules = [module for layer in self.layers for module in layer.modules()]
        self._parameters = [p for layer in self.layers for p in layer.parameters()]

    def mode(self) -> Hashable:
        """Name the state of the layers: what may change the facts changes the mode."""
        return (
            tuple([module.training for module in self._modules]),
            tuple([parameter.requires_grad for parameter in self._parameters]),
        )

    @staticmethod
    def kind_of(mode: Hashable, packet: Packet) -> Hashable:
        """Name the kind of a micro-batch that meets layers in this mode."""
        kinds = [leaf.dtype if isinstance(leaf, Tensor) else type(leaf) for leaf in packet.leaves]
        return mode, tuple(kinds), tuple(packet.needs_gradient)

    def knows(self, kind: Hashable) -> bool:
        """Tell whether the facts of this kind of micro-batch are known."""
        return kind in self._facts

    def forward(
        self,
        leaves: Sequence[Any],
        structure: Any,
        *,
        kind: Hashable | None,
        grad: bool,
        again: bool = False,
        state: CallerState,
        seed: int,
        micro_batch: int,
    ) -> ForwardResult:
        """Run the layers on one micro-batch.

        Args:
            leaves: Leaves of the input. With `grad`, and where the kind is not known yet, those
                that need a gradient are leaves of autograd. None is written to.
            structure: Their pytree.
            kind: Kind of the micro-batch; None where no graph will ever be wanted, so that
                nothing has to be protected or found out.
            grad: Whether to record a graph.
            again: Whether this is a recompute: running statistics count each micro-batch once.
            state: Settings of the caller.
            seed: Seed of the mini-batch.
            micro_batch: Which micro-batch it is.

        Raises:
            ModelError: a layer returned no tensor.
        """
        facts = self._facts.get(kind) if kind is not None else None
        find_out = facts is None and kind is not None
        # Facts are found with a graph, because only a graph tells which outputs need a gradient.
        with state.entered(grad=grad or find_out):
            inputs = list(leaves)
            protected = range(len(inputs)) if find_out else (facts.written_inputs if facts else ())
            for k in protected:
                if isinstance(inputs[k], Tensor):
                    inputs[k] = inputs[k].clone()
            versions = [_version(leaf) for leaf in inputs]
            watched = None if facts is None else facts.random_layers
            with _still_statistics(self._modules if again else ()):
                value, drew = self._run_layers(
                    unflatten(inputs, structure), watched, seed, micro_batch
                )
            outputs, out_structure = flatten(value)
        needs = [isinstance(leaf, Tensor) and leaf.requires_grad for leaf in outputs]
        if find_out:
            facts = _Facts(
                random_layers=frozenset(drew),
                written_inputs=frozenset(
                    k
                    for k, leaf in enumerate(inputs)
                    if versions[k] is not None and _version(leaf) != versions[k]
                ),
                outputs_need_gradient=tuple(needs),
            )
            assert kind is not None
            self._facts[kind] = facts
        elif facts is not None and not grad:
            needs = list(facts.outputs_need_gradient)
        return ForwardResult(outputs, out_structure, needs, drew=bool(drew))

    def _run_layers(
        self, value: Any, watched: frozenset[int] | None, seed: int, micro_batch: int
    ) -> tuple[Any, list[int]]:
        drew = []
        for k, layer in enumerate(self.layers):
            try:
                if watched is None or k in watched:
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


@contextmanager
def _still_statistics(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Let batch normalisation normalise as before, but leave its running statistics alone."""
    tracking = [
        module
        for module in modules
        if isinstance(module, nn.modules.batchnorm._NormBase)
        and module.training
        and module.track_running_stats
    ]
    for module in tracking:
        module.track_running_stats = False
    try:
        yield
    finally:
        for module in tracking:
            module.track_running_stats = True


def _version(leaf: Any) -> int | None:
    # Tensors made in inference mode count no versions; nothing can want their gradient either.
    return leaf._version if isinstance(leaf, Tensor) and not leaf.is_inference() else None
