"""Walk along a chain without memory, layer after layer; identical layers are run once.

A layer runs by itself, on stand-ins for what arrives at it, so the result depends only on the layer
and the shapes of its input. Another layer like it, with the same input, gets the same result with
its own storages in place of those of the first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial

from torch import Tensor

from gpipebal.errors import ModelError
from gpipebal.pipeline.values.tensors import has_storage
from gpipebal.profiler.chain.chain import Chain
from gpipebal.profiler.chain.numbers import Arrived, Numbers
from gpipebal.profiler.chain.value import Value
from gpipebal.profiler.estimate.approximate import note_fast_paths
from gpipebal.profiler.estimate.backends import AsWritten, acting_as
from gpipebal.profiler.estimate.constants import Constants
from gpipebal.profiler.estimate.costs import Costs, find_costs
from gpipebal.profiler.estimate.refused import without_values
from gpipebal.profiler.estimate.stand_ins import META, stand_in_for
from gpipebal.profiler.memory.layer_memory import LayerMemory
from gpipebal.profiler.memory.storages import measure_layer_memory
from gpipebal.profiler.replicas.harmless import tensors_reached
from gpipebal.profiler.replicas.identity import Alike
from gpipebal.profiler.replicas.reads import names_read
from gpipebal.profiler.survey import Survey, Trail, Twin
from gpipebal.profiler.training import Training
from gpipebal.rates import DeviceRates

__all__ = ["Walk", "run_on_stand_ins"]


class Walk:
    """Walks along one chain, at any number of sizes.

    Args:
        training: The chain; its layers are only looked at.
        rates: Rates of the device.
        told: Called after each layer.

    Attributes:
        n_run: How many layers were run, over all sizes.
    """

    def __init__(self, training: Training, rates: DeviceRates, told: Callable[[], None]) -> None:
        self.n_run = 0
        self._training, self._rates, self._told = training, rates, told
        self._twins = Alike[Twin](training.modules)

    def along(self, start: Value) -> tuple[Survey, list[Costs]]:
        """Walk along the chain with a micro-batch.

        Args:
            start: What goes in, without memory.

        Returns:
            What is known of the chain, and the costs of every layer.

        Raises:
            ProfileError: a layer failed.
        """
        trail, costs = Trail.start(start), list[Costs]()
        _check_strides(start)
        self._twins.forget()  # they are numbered by size
        for k in range(len(self._training.layers)):
            arrived = trail.arrived
            kind = self._training.kind_of_input(k, arrived)
            twin = None if kind is None else self._twins.find(k, kind)
            if twin is not None:
                costs.append(costs[twin.layer])
                trail.repeat(twin)
            else:
                memory, passed, of_layer, reads = self._run(k, arrived, trail.numbers)
                costs.append(of_layer)
                if kind is not None:
                    self._twins.add(k, kind, Twin(k, arrived.numbers, passed), reads)
                trail.add(memory, of_layer.flops, passed)
            self._told()
        return trail.end(self._training.routes), costs

    def _run(
        self, k: int, arrived: Arrived, numbers: Numbers
    ) -> tuple[LayerMemory, Arrived, Costs, set[str] | None]:
        """Run a layer; return its memory, its output and its costs, and what it has read."""
        self.n_run += 1
        name, module = self._training.names[k], self._training.modules[k]
        layer = stand_in_for(name, module)
        with names_read() if self._twins.differ[k] else nullcontext() as reads:
            if not self._training.keep_modes:
                layer.train()  # what its parts do then may depend on its options
            chain = self._training.chain_of(k, layer, META, arrived.value)
            constants = Constants(tensors_reached(layer))
            with without_values(f"layer {name!r}"):
                memory, passed, costs = run_on_stand_ins(
                    chain, arrived, numbers, self._rates, constants
                )
        _check_strides(passed.value)
        return memory, passed, costs, reads


def run_on_stand_ins(
    chain: Chain,
    arrived: Arrived,
    numbers: Numbers,
    rates: DeviceRates,
    constants: Constants,
    there: Sequence[Tensor] = (),
) -> tuple[LayerMemory, Arrived, Costs]:
    """Run the only layer of a chain as on a device.

    Args:
        chain: The chain.
        arrived: What goes into the layer.
        numbers: Numbers of all storages so far; new ones are added.
        rates: Rates of the device.
        constants: Tensors that the layer uses besides its own.
        there: Stand-ins of further tensors that exist all the time.

    Returns:
        Its memory, its output, and its costs.

    Raises:
        ProfileError: it failed.
    """
    chain.within = partial(_as_on_device, constants)
    with acting_as(rates.device_type, has_flash=bool(rates.has_flash)) as notes:
        chain.find_written(0, arrived.value)
        costs = find_costs(chain, arrived.value, rates)
        there = [*there, *constants.stand_ins]
        memory, passed = measure_layer_memory(chain, 0, arrived, numbers, there)
    note_fast_paths(chain.layers[0], notes)
    approximate = tuple(sorted(notes.union(costs.approximate)))
    return memory, passed, costs._replace(approximate=approximate)


@contextmanager
def _as_on_device(constants: Constants) -> Iterator[None]:
    """Run a layer's own code as on a device: new tensors have no memory, and constants neither.

    Every attribute that is read of a tensor passes here, so the profiler's own code is outside.
    """
    with AsWritten(), META, constants:
        yield


def _check_strides(value: Value) -> None:
    """Refuse what is on its way between layers and has no strides.

    Raises:
        ModelError: a tensor has none.
    """
    for leaf in value.leaves_with(value.skips):
        if isinstance(leaf, Tensor) and not has_storage(leaf):
            raise ModelError(
                f"a tensor between two layers has no strides: layout={leaf.layout} (expected "
                "torch.strided).\nFix: profile_model(model, sample, method='measure')."
            )
