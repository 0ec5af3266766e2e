"""Walk along a chain without memory, layer after layer; identical layers are run once.

A layer runs by itself, on stand-ins for what arrives at it, so the result depends only on the layer
and the shapes of its input. Another layer like it, with the same input, gets the same result with
its own storages in place of those of the first.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Hashable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, nn

from gpipebal.errors import ModelError
from gpipebal.profiler.chain.chain import Chain
from gpipebal.profiler.chain.numbers import Arrived, Numbers
from gpipebal.profiler.chain.value import SkipEnds, Value
from gpipebal.profiler.estimate.backends import acting_as, note_fast_paths
from gpipebal.profiler.estimate.constants import Constants
from gpipebal.profiler.estimate.costs import Costs, find_costs
from gpipebal.profiler.estimate.refused import without_values
from gpipebal.profiler.estimate.stand_ins import META, Leaf, stand_in_for
from gpipebal.profiler.memory.layer_memory import LayerMemory
from gpipebal.profiler.memory.storages import measure_layer_memory
from gpipebal.profiler.replicas.harmless import tensors_reached
from gpipebal.profiler.replicas.identity import Alike
from gpipebal.profiler.replicas.reads import names_read
from gpipebal.rates import DeviceRates
from gpipebal.skip.tracker import Key

__all__ = ["Estimate", "Walk", "acting_as_device"]

#: Leaves of a value, each a description of a tensor, or what is not a tensor.
_Leaves = tuple[Any, ...]


@dataclass(frozen=True)
class Estimate:
    """What one layer costs at one size; storages are numbered over the whole chain."""

    memory: LayerMemory
    costs: Costs


@dataclass(frozen=True)
class _Found:
    """What running a layer gave; its storages are numbered from its first input on."""

    estimate: Estimate
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
        names: Names of the layers.
        layers: The caller's layers; they are only looked at.
        routes: Skips of the chain.
        rates: Rates of the device.
        told: Called after each layer.
        keep_modes: Whether the layers stay in training or evaluation mode; else all are trained.
        out_dims: Dimension along which the outputs of the last layer are joined; see `Chain`.

    Attributes:
        routes: Skips of the chain.
    """

    def __init__(
        self,
        names: Sequence[str],
        layers: Sequence[nn.Module],
        routes: SkipEnds,
        rates: DeviceRates,
        told: Callable[[], None] = lambda: None,
        *,
        keep_modes: bool = True,
        out_dims: Any = None,
    ) -> None:
        self._names = names
        self._layers = layers
        self.routes = routes
        self._rates = rates
        self._told = told
        self._keep_modes = keep_modes
        self._out_dims = out_dims
        self._known = Alike[_Found](layers)

    @property
    def n_run(self) -> int:
        """How many layers were run, over all sizes."""
        return self._known.count

    def along(
        self, start: Value, numbers: Numbers
    ) -> tuple[list[Estimate], tuple[int, ...], Arrived, dict[Key, tuple[int, ...]]]:
        """Walk along the chain with a micro-batch.

        Args:
            start: What goes in, without memory.
            numbers: Takes the storages of the chain.

        Returns:
            Every layer, the storages of the chain's input, what comes out at the end, and the
            storages of every skip.

        Raises:
            ProfileError: a layer failed.
        """
        first = Arrived.first(start, numbers)
        arrived = _OnItsWay(_described(start.leaves, first.numbers), start.structure)
        estimates: list[Estimate] = []
        skips: dict[Key, tuple[int, ...]] = {}
        for k in range(len(self._layers)):
            estimate, arrived = self._layer(k, arrived, numbers)
            estimates.append(estimate)
            _note(arrived.leaves, numbers)
            for name, (source, _) in self.routes.items():
                if source == k and name in arrived.skips:
                    _note(arrived.skips[name][0], numbers)
                    skips[name] = _storages_of(arrived.skips[name][0])
            self._told()
        made: dict[int, Any] = {}
        leaves = _make(arrived.leaves, made)
        held = [leaf.storage if isinstance(leaf, Leaf) else None for leaf in arrived.leaves]
        end = Arrived(Value(leaves, arrived.structure), held, {})
        return estimates, first.storages, end, skips

    def _layer(self, k: int, arrived: _OnItsWay, numbers: Numbers) -> tuple[Estimate, _OnItsWay]:
        own = [key for key, (i, j) in self.routes.items() if i != j and k in (i, j)]
        popped = [key for key in own if self.routes[key][1] == k]
        stashed = [key for key in own if self.routes[key][0] == k]
        given = [(arrived.leaves, arrived.structure), *(arrived.skips[key] for key in popped)]
        local = _Renumbering()
        known_as = tuple((local.down(leaves), str(structure)) for leaves, structure in given)
        # The first layer's input never needs a gradient, and only the last layer's output is
        # joined; skips have names.
        key: Hashable = (
            k == 0,
            str(self._dims_of(k)),
            tuple(popped),
            tuple(stashed),
            _hashable(known_as),
        )
        found = self._known.find(k, key)
        if found is None:
            here = _OnItsWay(known_as[0][0], arrived.structure)
            for skip, (leaves, _) in zip(popped, known_as[1:], strict=True):
                here.skips[skip] = (leaves, arrived.skips[skip][1])
            reading = names_read() if self._known.differ[k] else nullcontext()
            layer = stand_in_for(self._names[k], self._layers[k])
            with reading as names:
                if not self._keep_modes:
                    layer.train()  # what its parts do then may depend on its options
                found = self._run(k, layer, here, stashed, len(local.outer))
            self._known.add(k, key, found, names)
        outer = [*local.outer, *(numbers.new(n_bytes) for n_bytes in found.new_bytes)]
        memory = found.estimate.memory
        outputs = tuple(outer[number] for number in memory.outputs)
        estimate = replace(
            found.estimate,
            memory=replace(
                memory,
                outputs=outputs,
                output_bytes=sum(numbers.bytes[number] for number in outputs),
                saved=tuple(outer[number] for number in memory.saved),
                handed_through=tuple(outer[number] for number in memory.handed_through),
                kept_outputs=tuple(outer[number] for number in memory.kept_outputs),
                written=tuple(outer[number] for number in memory.written),
            ),
        )
        passed = _OnItsWay(_up(found.outputs, outer), found.structure)
        passed.skips = {name: skip for name, skip in arrived.skips.items() if name not in popped}
        for name, (leaves, structure) in zip(stashed, found.stashed, strict=True):
            passed.skips[name] = (_up(leaves, outer), structure)
        return estimate, passed

    def _dims_of(self, k: int) -> Any:
        return self._out_dims if k == len(self._layers) - 1 else None

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
        with without_values(f"layer {name!r}"), acting_as_device(self._rates) as notes, constants:
            chain = Chain(
                [name],
                [layer],
                META,
                value,
                routes=self.routes,
                first=k,
                out_dims=self._dims_of(k),
            )
            chain.find_written(0, value)
            costs = find_costs(chain, value, self._rates)
            memory, passed = measure_layer_memory(chain, 0, here, inner, constants.stand_ins)
        note_fast_paths(layer, notes)
        notes |= set(costs.approximate)
        return _Found(
            Estimate(memory, replace(costs, approximate=tuple(sorted(notes)))),
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


@contextmanager
def acting_as_device(rates: DeviceRates) -> Iterator[set[str]]:
    """Run layers as a device would: its kernels, and new tensors without memory too."""
    with acting_as(rates.device_type, has_flash=bool(rates.has_flash)) as notes, META:
        yield notes


class _Renumbering:
    """Numbers of a layer's own for the storages that arrive at it.

    Attributes:
        outer: Their numbers in the whole chain.
    """

    def __init__(self) -> None:
        self.outer: list[int] = []

    def down(self, leaves: _Leaves) -> _Leaves:
        """Renumber descriptions."""
        return tuple(
            replace(leaf, storage=self._of(leaf.storage)) if isinstance(leaf, Leaf) else leaf
            for leaf in leaves
        )

    def _of(self, number: int) -> int:
        if number not in self.outer:
            self.outer.append(number)
        return self.outer.index(number)


def _up(leaves: _Leaves, outer: Sequence[int]) -> _Leaves:
    return tuple(
        replace(leaf, storage=outer[leaf.storage]) if isinstance(leaf, Leaf) else leaf
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


def _storages_of(leaves: _Leaves) -> tuple[int, ...]:
    return tuple(dict.fromkeys(leaf.storage for leaf in leaves if isinstance(leaf, Leaf)))


def _hashable(known_as: tuple[Any, ...]) -> Hashable:
    """Make a key of what arrives: tensors by description, other leaves by type and value."""
    return tuple(
        (
            tuple(
                leaf if isinstance(leaf, Leaf) else (type(leaf), _value(leaf)) for leaf in leaves
            ),
            structure,
        )
        for leaves, structure in known_as
    )


def _value(leaf: Any) -> Hashable:
    return leaf if isinstance(leaf, (bool, int, float, str, bytes, type(None))) else id(leaf)
