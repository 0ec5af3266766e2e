"""Survey: walk along a chain once, to find out all that needs no repeats.

This is: which inputs layers write to, the memory of every layer, and floating-point operations.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from gpipebal.pipeline.values.tensors import plain_parts
from gpipebal.profile import SkipProfile
from gpipebal.profiler.chain.chain import Chain
from gpipebal.profiler.chain.gradients import needs_gradient
from gpipebal.profiler.chain.moving import value_copied
from gpipebal.profiler.chain.numbers import Arrived, Numbers, distinct_numbers
from gpipebal.profiler.chain.value import SkipEnds, Value
from gpipebal.profiler.memory.flops import flops_of
from gpipebal.profiler.memory.layer_memory import (
    ChainGradients,
    LayerMemory,
    number_gradients,
)
from gpipebal.profiler.memory.storages import measure_layer_memory
from gpipebal.profiler.replicas.replica import replicate, stand_ins
from gpipebal.skip.tracker import Key

__all__ = ["Scout", "Survey", "Trail", "Twin", "known_for_others", "survey"]


@dataclass
class Survey:
    """The costs of one size of micro-batch, without its times.

    Attributes:
        memory: Memory of every layer.
        flops: Floating-point operations of every layer; None: they could not be counted.
        numbers: Numbers of all storages.
        inputs: Storages of the chain's input.
        outputs: What came out at the end.
        skips: Skips between layers.
        gradients: Storages of the gradients between layers.
    """

    memory: list[LayerMemory]
    flops: list[int | None]
    numbers: Numbers
    inputs: tuple[int, ...]
    outputs: Arrived
    skips: tuple[SkipProfile, ...]
    gradients: ChainGradients


class Twin(NamedTuple):
    """A layer on a trail, for others that are like it.

    Attributes:
        layer: Its index.
        inputs: Numbers of the storages of its input.
        passed: What it handed on.
    """

    layer: int
    inputs: list[int | None]
    passed: Arrived


@dataclass
class Trail:
    """What is known of the first layers of a chain, at one size of micro-batch.

    Attributes:
        arrived: What goes into the next layer.
        inputs: Storages of the chain's input.
        numbers: Numbers of all storages so far.
        memory: Memory of these layers.
        flops: Their floating-point operations.
        skips: Storages of the skips that they stash.
        at_other_rows: Memory of the layers with another number of rows, as far as it is known.
    """

    arrived: Arrived
    inputs: tuple[int, ...]
    numbers: Numbers
    at_other_rows: Sequence[LayerMemory] = ()
    memory: list[LayerMemory] = field(default_factory=list)
    flops: list[int | None] = field(default_factory=list)
    skips: dict[Key, tuple[int, ...]] = field(default_factory=dict)

    @classmethod
    def start(cls, value: Value, at_other_rows: Sequence[LayerMemory] = ()) -> Trail:
        """Begin with the chain's input."""
        numbers = Numbers()
        arrived = Arrived.first(value, numbers)
        return cls(arrived, arrived.storages, numbers, at_other_rows)

    def pass_layer(self, chain: Chain, k: int, arrived: Arrived) -> None:
        """Find out all about the next layer that needs no repeats.

        Args:
            chain: A chain with the layer.
            k: Index of the layer in it.
            arrived: What goes into it, where the layer is.

        Raises:
            ProfileError: the layer failed.
        """
        flops = flops_of(chain, k, arrived.value)
        n_before = len(self.memory)
        known = self.at_other_rows[n_before].peaks if n_before < len(self.at_other_rows) else None
        found = measure_layer_memory(chain, k, arrived, self.numbers, at_other_rows=known)
        memory, passed = found
        self.add(memory, flops, passed)

    def add(self, memory: LayerMemory, flops: int | None, passed: Arrived) -> None:
        """Add what was found out about the next layer, and what it hands on."""
        self.memory.append(memory)
        self.flops.append(flops)
        for key, numbers in passed.skips.items():
            self.skips.setdefault(key, distinct_numbers(numbers))
        self.arrived = passed

    def repeat(self, twin: Twin) -> None:
        """Go on after a layer that is like an earlier one."""
        arrived = self.arrived
        known = dict(zip(twin.inputs, arrived.numbers, strict=True))

        def own(number: int) -> int:
            found = known.get(number)
            if found is None:
                found = known[number] = self.numbers.new(self.numbers.bytes[number])
            return found

        value, numbers = twin.passed.value, twin.passed.numbers
        if arrived.skips:  # among these there may be the twin's own tensors, with their numbers
            value = value_copied(value)
        handed = [None if number is None else own(number) for number in numbers]
        self.numbers.note(handed, map(needs_gradient, value.leaves))
        passed = Arrived(replace(value, skips=arrived.value.skips), handed, arrived.skips)
        memory = self.memory[twin.layer].renumbered(own, self.numbers)
        self.add(memory, self.flops[twin.layer], passed)

    def end(self, routes: SkipEnds) -> Survey:
        """Number the gradients, now that all layers are known.

        Args:
            routes: The skips of the chain.
        """
        gradients = number_gradients(self.memory, routes, self.numbers)
        skips = _describe_skips(routes, self.skips, gradients)
        known = (self.memory, self.flops, self.numbers, self.inputs, self.arrived)
        return Survey(*known, skips, gradients)


class Scout:
    """Lets a private copy of each layer take its turn in a chain, and notes what it writes to.

    Args:
        chain: Takes the notes of inputs that are written to; its layers are the caller's, and are
            not run.
        keep_modes: Whether parts of layers stay in training or evaluation mode; else all are
            trained.

    Attributes:
        writers: Layers that write to their own parameters, as some embeddings do.
    """

    def __init__(self, chain: Chain, *, keep_modes: bool) -> None:
        self.writers: set[int] = set()
        self._chain = chain
        self._modules = list(chain.layers)
        self._keep_modes = keep_modes
        self._known = stand_ins(chain.layers, chain.device)

    def before(self, k: int, value: Value) -> None:
        """Let the copy of layer k take its place; `value` goes into it."""
        chain, name = self._chain, self._chain.names[k]
        for parameter in self._known.values():
            parameter.grad = None
        copied = replicate(
            [name],
            [self._modules[k]],
            chain.device,
            private=(0,),
            keep_modes=self._keep_modes,
            known=self._known,
        )[0]
        chain.layers[k] = copied
        if chain.find_written(k, value):
            self.writers.add(k)

    def behind(self, k: int) -> None:
        """Compare the copy of layer k, which has run several times, with the layer."""
        copied, module = self._chain.layers[k], self._modules[k]
        if any(map(_differ, copied.parameters(), module.parameters())):
            self.writers.add(k)
        self._chain.layers[k] = module


def _differ(mine: Tensor, theirs: Tensor) -> bool:
    # On another device, a replica has values of its own anyway.
    if mine.device != theirs.device:
        return False
    pairs = zip(plain_parts(mine.detach()), plain_parts(theirs.detach()), strict=True)
    return any(not torch.equal(one, other) for one, other in pairs)


def known_for_others(memory: Sequence[LayerMemory], rows: int) -> Sequence[LayerMemory]:
    """Return what walks with other numbers of rows may know of the memory with so many.

    Nothing if it is a single row: each part of that is without gaps, so it can make no difference
    whether gradients are parts of something larger.
    """
    return memory if rows > 1 else ()


def survey(
    chain: Chain,
    routes: SkipEnds,
    scout: Scout | None = None,
    at_other_rows: Sequence[LayerMemory] = (),
) -> Survey:
    """Walk along a chain.

    Args:
        chain: The chain.
        routes: Its skips.
        scout: Has private copies of the layers run; None: they run themselves.
        at_other_rows: Memory of the layers with another number of rows, if it is known.

    Raises:
        ProfileError: a layer failed.
    """
    trail = Trail.start(chain.start, at_other_rows)
    for k in range(len(chain.layers)):
        if scout is not None:
            scout.before(k, trail.arrived.value)
        trail.pass_layer(chain, k, trail.arrived)
        if scout is not None:
            scout.behind(k)
    return trail.end(routes)


def _describe_skips(
    routes: SkipEnds,
    storages: dict[Key, tuple[int, ...]],
    gradients: ChainGradients,
) -> tuple[SkipProfile, ...]:
    """Describe the skips between layers; a namespace is named by its place among the others.

    Args:
        routes: The skips.
        storages: Those of their tensors.
        gradients: The storages of their gradients.
    """
    spaces = list(dict.fromkeys(space for space, _ in routes if space is not None))
    return tuple(
        SkipProfile(
            name if space is None else f"{name}@{spaces.index(space)}",
            *routes[space, name],
            storages=storages[space, name],
            gradient_storages=gradients.skips.get((space, name)),
        )
        for space, name in routes
        if (space, name) in storages
    )
