"""The runtime: what a pipeline needs to run but cannot copy: facts, streams and threads."""

from __future__ import annotations

import copy
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from gpipebal.errors import DuplicateLayerError
from gpipebal.pipeline.layers.attributes import unregistered_in
from gpipebal.pipeline.layers.batchnorm import DeferredBatchNorm
from gpipebal.pipeline.layers.collectives import find_talkers
from gpipebal.pipeline.layers.modules import are_same
from gpipebal.pipeline.layers.recomputed import Recomputed
from gpipebal.pipeline.randomness.random_ops import prepare
from gpipebal.pipeline.values.lane import CudaLane, Lane
from gpipebal.pipeline.workers.partition import Partition, Route
from gpipebal.pipeline.workers.tied import TiedParameters
from gpipebal.pipeline.workers.worker import WorkerPool
from gpipebal.problem.bounds import partition_of_layers
from gpipebal.skip.layout import find_skips
from gpipebal.skip.namespace import Namespace
from gpipebal.skip.skippable import Skippable

__all__ = ["Runtime", "check_shared"]


class Runtime:
    """Partitions, their devices and streams, and their workers.

    Args:
        layers: The layers of the chain by name.
        balance: Number of layers in each partition.
        devices: Device of each partition.
        streams: CUDA stream of each partition; None: one of its own.
        threads: Intra-operation threads of a CPU partition.

    Attributes:
        partitions: Runs of layers and the facts about them.
        lanes: Devices and streams.
        pool: The workers.
        tied: Parameters that several partitions use.
        talkers: Modules of the layers that talk to other processes.
    """

    def __init__(
        self,
        layers: Mapping[str, nn.Module],
        balance: Sequence[int],
        devices: Sequence[torch.device],
        streams: Sequence[Any],
        threads: int,
    ) -> None:
        prepare()
        self._layers = list(layers.values())
        check_shared(layers, balance, devices)
        self.talkers = find_talkers(layers, balance)
        self.partitions = _partitions(layers, balance, devices)
        self._skippables = [
            module
            for partition in self.partitions
            for module in partition.modules
            if isinstance(module, Skippable)
        ]
        self.lanes = [
            CudaLane(device, stream) if device.type == "cuda" else Lane(device)
            for device, stream in zip(devices, streams, strict=True)
        ]
        self._namespaces = self._find_namespaces()
        self._parameter_ids = self._find_parameter_ids()
        self.tied = TiedParameters(self.partitions, self.lanes)
        self.pool = WorkerPool(
            self.lanes, [threads if device.type == "cpu" else None for device in devices]
        )

    def can_run(self, layers: Iterable[nn.Module | None]) -> bool:
        """Tell whether it was made of these layers, in this process, and nothing has changed since.

        Args:
            layers: The layers of the chain.
        """
        return (
            self.pool.process == os.getpid()
            and not self.pool.is_given_up
            and not self.pool.is_closed
            # No layer was replaced since, nor a module inside one.
            and are_same(self._layers, list(layers))
            and all([partition.modules.are_as_made() for partition in self.partitions])
            # No skip goes another way.
            and self._namespaces == self._find_namespaces()
        )

    def has_other_parameters(self) -> bool:
        """Tell whether a partition has other parameters than when the tied ones were found.

        A buffer counts as one while it requires a gradient.
        """
        return self._parameter_ids != self._find_parameter_ids()

    def with_other_ties(self) -> Runtime:
        """Return the same runtime, with the parameters that several partitions now use."""
        other = copy.copy(self)
        other._parameter_ids = self._find_parameter_ids()
        other.tied = TiedParameters(self.partitions, self.lanes)
        return other

    def _find_namespaces(self) -> list[Mapping[str, Namespace | None]]:
        return [module._skip_namespaces for module in self._skippables]

    def _find_parameter_ids(self) -> list[list[int]]:
        return [list(map(id, partition.modules.leaves())) for partition in self.partitions]

    def follow_workers(self) -> None:
        """Let what the caller does next come after all that a failed phase has launched.

        A caller may overwrite what cells still add to: gradients, or statistics that it loads.
        """
        for lane in self.lanes:
            # The device itself may have failed, and then refuses this too.
            with suppress(RuntimeError):
                lane.give_to_caller((), lane.mark())


def _partitions(
    layers: Mapping[str, nn.Module], balance: Sequence[int], devices: Sequence[torch.device]
) -> list[Partition]:
    names, chain = list(layers), list(layers.values())
    of_layer = partition_of_layers(balance)
    routes = [
        Route(key, of_layer[source], of_layer[destination])
        for key, (source, destination) in find_skips(layers).items()
    ]
    users: dict[int, set[int]] = {}
    for layer, j in zip(chain, of_layer, strict=True):
        for buffer in layer.buffers():
            users.setdefault(id(buffer), set()).add(j)
    shared = frozenset(key for key, several in users.items() if len(several) > 1)
    unregistered, elsewhere = _unregistered(chain, balance)
    for layer in chain:
        if isinstance(layer, Recomputed):
            layer.keep_off(shared | elsewhere)
    return [
        Partition(
            j,
            names[first:end],
            chain[first:end],
            first,
            devices[j],
            [r for r in routes if r.destination == j and r.source != j],
            [r for r in routes if r.source == j and r.destination != j],
            shared,
            unregistered[j],
        )
        for j, (first, end) in enumerate(_places(balance))
    ]


def _places(balance: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield where the layers of each partition begin and end in the chain."""
    return pairwise(accumulate(balance, initial=0))


def _unregistered(
    chain: Sequence[nn.Module], balance: Sequence[int]
) -> tuple[list[list[nn.Module]], set[int]]:
    """List, by partition, the modules that its layers and no others have in lists or objects.

    Returns:
        These modules; and those that others have too, by ``id``.
    """
    found = [unregistered_in(chain[first:end]) for first, end in _places(balance)]
    times = Counter(id(module) for of_partition in found for module in of_partition)
    times.update({id(module) for layer in chain for module in layer.modules()})
    alone = [[module for module in modules if times[id(module)] == 1] for modules in found]
    elsewhere = {id(module) for modules in found for module in modules if times[id(module)] > 1}
    return alone, elsewhere


def check_shared(
    layers: Mapping[str, nn.Module], balance: Sequence[int], devices: Sequence[torch.device]
) -> None:
    """Make sure that what layers share can be shared: on one device, and with one writer.

    Raises:
        DuplicateLayerError: two partitions on different devices have one parameter or buffer, or
            two partitions have one deferred batch normalisation, or a lazy parameter.
    """
    of_layer = partition_of_layers(balance)
    owner: dict[int, tuple[str, int]] = {}
    for (name, layer), j in zip(layers.items(), of_layer, strict=True):
        items: list[tuple[str, Any]] = [("parameter", p) for p in layer.parameters()]
        items += [("buffer", b) for b in layer.buffers()]
        items += [
            ("deferred batch normalisation", m)
            for m in layer.modules()
            if isinstance(m, DeferredBatchNorm)
        ]
        for what, item in items:
            other, k = owner.setdefault(id(item), (name, j))
            if k != j and is_lazy(item):
                raise DuplicateLayerError(
                    f"a {what} without values stands twice in the chain: in layer {other!r} of "
                    f"partition {k} and in layer {name!r} of partition {j}.\n"
                    "Fix: run the model once, on a sample, before you make a pipeline of it; or "
                    "choose a balance that has both layers in one partition."
                )
            if k == j or (isinstance(item, torch.Tensor) and devices[j] == devices[k]):
                continue
            where = f"on {devices[k]} and {devices[j]}" if devices[j] != devices[k] else "in both"
            raise DuplicateLayerError(
                f"a {what} stands twice in the chain: in layer {other!r} of partition {k} and in "
                f"layer {name!r} of partition {j}, {where} (module with duplicate children is not "
                "supported across devices).\n"
                "Fix: choose a balance that has both layers in one partition, or devices that have "
                "both partitions on one device."
            )
