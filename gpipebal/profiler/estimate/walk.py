"""Walk along a chain without memory, layer after layer; identical layers are run once.

A layer runs by itself, on stand-ins for what arrives at it, so the result depends only on the layer
and the shapes of its input. Another layer like it, with the same input, gets the same result with
its own storages in place of those of the first.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from torch import Tensor, nn

from gpipebal.errors import ModelError
from gpipebal.profiler.chain.numbers import Arrived, Numbers, distinct_numbers
from gpipebal.profiler.chain.value import Value
from gpipebal.profiler.estimate.approximate import note_fast_paths
from gpipebal.profiler.estimate.backends import AsWritten, acting_as
from gpipebal.profiler.estimate.constants import Constants
from gpipebal.profiler.estimate.costs import Costs, find_costs
from gpipebal.profiler.estimate.refused import without_values
from gpipebal.profiler.estimate.stand_ins import META, Leaf, stand_in_for
from gpipebal.profiler.memory.layer_memory import LayerMemory
from gpipebal.profiler.memory.storages import measure_layer_memory
from gpipebal.profiler.replicas.harmless import tensors_reached
from gpipebal.profiler.replicas.identity import Alike
from gpipebal.profiler.replicas.reads import names_read
from gpipebal.profiler.survey import Survey, Trail
from gpipebal.profiler.training import Training
from gpipebal.rates import DeviceRates
from gpipebal.skip.tracker import Key

__all__ = ["Walk", "acting_as_device", "as_on_device"]

#: Leaves of a value, each a description of a tensor, or what is not a tensor.
_Leaves = tuple[Any, ...]


@dataclass(frozen=True)
class _Found:
    """What running a layer gave; its storages are numbered from its first input on."""

    memory: LayerMemory
    costs: Costs
    new_bytes: tuple[int, ...]
    outputs: _Leaves
    structure: Any
    stashed: tuple[tuple[_Leaves, Any], ...]


@dataclass
class _OnItsWay:
    """A value between two layers: leaves, pytree, and the skips that wait."""

    leaves: _Leaves
    structure: Any
    skips: dict[Key, tuple[_Leaves, Any]] = field(default_factory=dict)


class Walk:
    """Walks along one chain, at any number of sizes.

    Args:
        training: The chain; its layers are only looked at.
        rates: Rates of the device.
        told: Called after each layer.
    """

    def __init__(self, training: Training, rates: DeviceRates, told: Callable[[], None]) -> None:
        self._training, self._rates, self._told = training, rates, told
        self._names, self._layers = training.names, training.modules
        self._known = Alike[_Found](self._layers)

    @property
    def n_run(self) -> int:
        """How many layers were run, over all sizes."""
        return self._known.count

    def along(self, start: Value) -> tuple[Survey, list[Costs]]:
        """Walk along the chain with a micro-batch.

        Args:
            start: What goes in, without memory.

        Returns:
            What is known of the chain, and the costs of every layer.

        Raises:
            ProfileError: a layer failed.
        """
        trail, costs = Trail(), list[Costs]()
        first = trail.start(start)
        arrived = _OnItsWay(_described(start.leaves, first.numbers), start.structure)
        for k in range(len(self._layers)):
            memory, of_layer, arrived = self._layer(k, arrived, trail.numbers)
            trail.memory.append(memory)
            trail.flops.append(of_layer.flops)
            costs.append(of_layer)
            _note(arrived.leaves, trail.numbers)
            for name, (source, _) in self._training.routes.items():
                if source == k and name in arrived.skips:
                    leaves = arrived.skips[name][0]
                    _note(leaves, trail.numbers)
                    trail.skips[name] = distinct_numbers(_numbers_of(leaves))
            self._told()
        value = Value(_make(arrived.leaves, {}), arrived.structure)
        end = Arrived(value, _numbers_of(arrived.leaves), {})
        return trail.end(self._training.routes, end), costs

    def _layer(
        self, k: int, arrived: _OnItsWay, numbers: Numbers
    ) -> tuple[LayerMemory, Costs, _OnItsWay]:
        routes = self._training.routes
        own = [key for key, (i, j) in routes.items() if i != j and k in (i, j)]
        popped = [key for key in own if routes[key][1] == k]
        stashed = [key for key in own if routes[key][0] == k]
        given = [(arrived.leaves, arrived.structure), *(arrived.skips[key] for key in popped)]
        # Numbers of the layer's own for the storages that arrive at it, by those of the chain.
        inner: dict[int, int] = {}
        known_as = [
            _renumbered(leaves, lambda number: inner.setdefault(number, len(inner)))
            for leaves, _ in given
        ]
        # The first layer's input never needs a gradient, and only the last layer's output is
        # joined; skips have names.
        key: Hashable = (
            k == 0,
            str(self._training.out_dims_of(k)),
            tuple(popped),
            tuple(stashed),
            tuple(map(_hashable, known_as)),
            tuple(str(structure) for _, structure in given),
        )
        found = self._known.find(k, key)
        if found is None:
            here = _OnItsWay(known_as[0], arrived.structure)
            for skip, leaves in zip(popped, known_as[1:], strict=True):
                here.skips[skip] = (leaves, arrived.skips[skip][1])
            reading = names_read() if self._known.differ[k] else nullcontext()
            layer = stand_in_for(self._names[k], self._layers[k])
            with reading as names:
                if not self._training.keep_modes:
                    layer.train()  # what its parts do then may depend on its options
                found = self._run(k, layer, here, stashed, len(inner))
            self._known.add(k, key, found, names)
        outer = [*inner, *map(numbers.new, found.new_bytes)]
        passed = _OnItsWay(_renumbered(found.outputs, outer.__getitem__), found.structure)
        passed.skips = {name: skip for name, skip in arrived.skips.items() if name not in popped}
        for name, (leaves, structure) in zip(stashed, found.stashed, strict=True):
            passed.skips[name] = (_renumbered(leaves, outer.__getitem__), structure)
        return found.memory.renumbered(outer.__getitem__, numbers), found.costs, passed

    def _run(
        self,
        k: int,
        layer: nn.Module,
        arrived: _OnItsWay,
        stashed: Sequence[Key],
        n_inputs: int,
    ) -> _Found:
        name = self._names[k]
        made: dict[int, Any] = {}
        views = [
            i for i, leaf in enumerate(arrived.leaves) if isinstance(leaf, Leaf) and leaf.is_view
        ]
        value = Value(_make(arrived.leaves, made), arrived.structure, views=frozenset(views))
        held = _numbers_of(arrived.leaves)
        skips: dict[Key, list[int | None]] = {}
        for key, (leaves, structure) in arrived.skips.items():
            value.skips[key] = (_make(leaves, made), structure)
            skips[key] = _numbers_of(leaves)
        here = Arrived(value, held, skips)
        inner = Numbers()
        n_bytes = {
            leaf.storage: leaf.storage_bytes
            for leaves in (arrived.leaves, *(skip[0] for skip in arrived.skips.values()))
            for leaf in leaves
            if isinstance(leaf, Leaf)
        }
        for number in range(n_inputs):
            inner.new(n_bytes[number])
        constants = Constants(tensors_reached(layer))
        with without_values(f"layer {name!r}"), acting_as_device(self._rates) as notes:
            chain = self._training.chain_of(k, layer, META, value)
            chain.within = partial(as_on_device, constants)
            chain.find_written(0, value)
            costs = find_costs(chain, value, self._rates)
            memory, passed = measure_layer_memory(chain, 0, here, inner, constants.stand_ins)
        note_fast_paths(layer, notes)
        notes |= set(costs.approximate)
        return _Found(
            memory,
            replace(costs, approximate=tuple(sorted(notes))),
            tuple(inner.bytes[n_inputs:]),
            _described(passed.value.leaves, passed.numbers, passed.value.views),
            passed.value.structure,
            tuple(
                (
                    _described(passed.value.skips[key][0], passed.skips[key]),
                    passed.value.skips[key][1],
                )
                for key in stashed
            ),
        )


def acting_as_device(rates: DeviceRates) -> AbstractContextManager[set[str]]:
    """Return a context in which operations are those of a device; see `acting_as`."""
    return acting_as(rates.device_type, has_flash=bool(rates.has_flash))


@contextmanager
def as_on_device(constants: Constants) -> Iterator[None]:
    """Run a layer's own code as on a device: new tensors have no memory, and constants neither.

    Every attribute that is read of a tensor passes here, so the profiler's own code is outside.
    """
    with AsWritten(), META, constants:
        yield


def _renumbered(leaves: _Leaves, number_of: Callable[[int], int]) -> _Leaves:
    return tuple(
        replace(leaf, storage=number_of(leaf.storage)) if isinstance(leaf, Leaf) else leaf
        for leaf in leaves
    )


def _described(
    leaves: Sequence[Any], numbers: Sequence[int | None], views: Container[int] = ()
) -> _Leaves:
    return tuple(
        Leaf.of(leaf, number, is_view=i in views) if number is not None else _checked(leaf)
        for i, (leaf, number) in enumerate(zip(leaves, numbers, strict=True))
    )


def _checked(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        raise ModelError(
            f"a tensor between two layers has no strides: layout={leaf.layout} (expected "
            "torch.strided).\nFix: profile_model(model, sample, method='measure')."
        )
    return leaf


def _make(leaves: _Leaves, made: dict[int, Any]) -> list[Any]:
    return [leaf.make(made) if isinstance(leaf, Leaf) else leaf for leaf in leaves]


def _numbers_of(leaves: _Leaves) -> list[int | None]:
    return [leaf.storage if isinstance(leaf, Leaf) else None for leaf in leaves]


def _note(leaves: _Leaves, numbers: Numbers) -> None:
    needs = [isinstance(leaf, Leaf) and leaf.needs_gradient for leaf in leaves]
    numbers.note(_numbers_of(leaves), needs)


def _hashable(leaves: _Leaves) -> Hashable:
    """Make a key of what arrives: tensors by description, other leaves by type and value."""
    return tuple(leaf if isinstance(leaf, Leaf) else (type(leaf), _value(leaf)) for leaf in leaves)


def _value(leaf: Any) -> Hashable:
    return leaf if isinstance(leaf, (bool, int, float, str, bytes, type(None))) else id(leaf)
