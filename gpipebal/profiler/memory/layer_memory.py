"""What is known of a layer's memory, alone and in its chain."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

from torch import nn

from gpipebal.errors import ProfileError
from gpipebal.pipeline.values.tensors import bytes_of
from gpipebal.profile import LayerProfile
from gpipebal.profiler.chain.numbers import Numbers, distinct_numbers
from gpipebal.profiler.chain.value import SkipEnds
from gpipebal.profiler.memory.backward_peaks import BackwardPeaks
from gpipebal.profiler.memory.layer_run import BackwardRun, GivenMemory
from gpipebal.profiler.memory.sparse_gradients import GradientKind
from gpipebal.profiler.replicas.replica import kept_by
from gpipebal.skip.tracker import Key

__all__ = [
    "ChainGradients",
    "GivenGradients",
    "LayerMemory",
    "number_gradients",
]


#: What a layer profile has; the rest of what is known of a layer's memory makes some of it.
_COLUMNS = frozenset(field.name for field in fields(LayerProfile))
#: What is numbered over the whole chain.
_NUMBERED = ("outputs", "saved", "handed_through", "kept_outputs", "written")


@dataclass(frozen=True)
class LayerMemory:
    """Memory of one layer; storages are numbered over the whole chain.

    What is not described here is as in `LayerProfile`.

    Attributes:
        peaks: Its backward: its largest memory, and in which memory it is given gradients and
            hands them back.
        n_inputs: How many inputs it has, with those that it pops.
        n_outputs: How many outputs, with those that it stashes.
        popped: How many of the last inputs belong to each skip that it pops.
        stashed: How many of the last outputs belong to each skip that it stashes.
        kept_bytes: Bytes of what the layer keeps after its forward, besides its parameters:
            buffers, and tensors that are attributes of its modules.
        parameter_gradients: What the gradient of each of its parameters looks like; None: there is
            none.
    """

    outputs: tuple[int, ...]
    saved: tuple[int, ...]
    handed_through: tuple[int, ...]
    kept_outputs: tuple[int, ...]
    written: tuple[int, ...]
    output_bytes: int
    output_gradient_bytes: int
    forward_peak_bytes: int
    forward_moments: tuple[int, ...]
    no_grad_forward_peak_bytes: int
    no_grad_forward_moments: tuple[int, ...]
    written_input_bytes: int
    peaks: BackwardPeaks
    n_inputs: int
    n_outputs: int
    popped: tuple[int, ...]
    stashed: tuple[int, ...]
    kept_buffer_bytes: int
    saved_buffer_bytes: int
    kept_bytes: int
    parameter_gradients: tuple[GradientKind | None, ...]

    def renumbered(self, number_of: Callable[[int], int], numbers: Numbers) -> LayerMemory:
        """Return the memory of a layer like this one, elsewhere in a chain.

        Args:
            number_of: Returns the number that a storage has there.
            numbers: Numbers of all storages there.
        """
        known: dict[str, Any] = {
            name: tuple(map(number_of, getattr(self, name))) for name in _NUMBERED
        }
        output_bytes = sum(numbers.bytes[number] for number in known["outputs"])
        return replace(self, **known, output_bytes=output_bytes)

    def columns(
        self,
        own: dict[str, int],
        name: str,
        layer: nn.Module,
        given: GivenGradients,
    ) -> dict[str, Any]:
        """Return the columns of a layer profile, with what the layer has all the time.

        Args:
            own: Columns of parameters and buffers.
            name: Name of the layer.
            layer: The caller's layer, of which a copy ran.
            given: The gradients that its backward is given.

        Raises:
            ProfileError: the forward makes parameters, which the caller's layer does not have yet.
        """
        n_before = len(list(layer.parameters()))
        n_after = len(self.parameter_gradients)
        if n_after != n_before:
            raise ProfileError(
                f"layer {name!r} makes parameters in its first forward: {n_after} "
                f"(expected {n_before}, as many as before).\nFix: run model(sample) once."
            )
        columns = {name: each for name, each in vars(self).items() if name in _COLUMNS}
        columns |= own
        columns["gradient_storages"] = given.storages
        columns["through_gradient_storages"] = given.through
        columns |= self.peaks.columns(given_own=given.own, memory=given.memory)
        columns["buffer_bytes"] += max(0, self.kept_bytes - sum(map(bytes_of, kept_by(layer))))
        return columns


class GivenGradients(NamedTuple):
    """Gradients that a layer's backward is given, and in which memory they are.

    Attributes:
        storages: Storages that those for its output lie in; None: it is not known.
        through: Those of them in which nothing lies but gradients of what it passes on.
        memory: Their memory: without those of what it stashes, and with them.
        own: Whether nothing else holds this memory.
    """

    storages: tuple[int, ...] | None
    through: tuple[int, ...]
    memory: tuple[GivenMemory, ...]
    own: bool


class ChainGradients(NamedTuple):
    """What the gradients of a chain lie in.

    Attributes:
        layers: For each layer, what its backward is given.
        skips: For each skip, storages of its gradient; None: it is not known.
    """

    layers: Sequence[GivenGradients]
    skips: Mapping[Key, tuple[int, ...] | None]


def _given_their_own(memory: Sequence[LayerMemory]) -> list[bool]:
    """Tell which layers of a chain are given gradients whose memory nothing else holds.

    The next layer's backward makes them, or hands back those that it was given. It may hand back
    views, which hold what they are views of: then a sum needs new memory. Of layers that stash a
    value, and of the last, not all gradients come from the next one: no.
    """
    found = [False] * len(memory)
    given: dict[int, bool] = {}  # of the later layer, by place
    for k in reversed(range(len(memory) - 1)):
        given = memory[k + 1].peaks.hands_back_own(given, found[k + 1])
        found[k] = bool(given) and all(given.values()) and not memory[k].stashed
    return found


def number_gradients(
    memory: Sequence[LayerMemory], routes: SkipEnds, numbers: Numbers
) -> ChainGradients:
    """Number the memory of all gradients of a chain, from its end to its beginning.

    What a layer hands back in memory that it was given has the number of that.

    Args:
        memory: Memory of all layers.
        routes: The skips.
        numbers: Takes the storages.
    """
    layers, own = list[GivenGradients](), _given_their_own(memory)
    skips: dict[Key, _Numbered] = {}
    value: _Numbered | None = None
    for k in reversed(range(len(memory))):
        layer, backward = memory[k], memory[k].peaks.held
        stashed = [key for key, ends in routes.items() if ends[0] == k != ends[1]]
        popped = [key for key, ends in routes.items() if ends[1] == k != ends[0]]
        place = layer.n_outputs - sum(layer.stashed)
        if value is None:
            value = {p: numbers.new(n) for p, (_, n) in backward.given.items() if p < place}
        arrived = dict(value)
        for key, n_leaves in zip(stashed, layer.stashed, strict=True):
            arrived |= {place + p: number for p, number in skips[key].items()}
            place += n_leaves
        # What it has stashed may be popped in another partition, and then comes by itself.
        given = _given_memory(value, arrived, numbers=numbers)
        through = _of_passed_on(value, backward.passed_on)
        layers.append(GivenGradients(_distinct(value), through, given, own[k]))
        back = _handed_back(backward, arrived, numbers)
        place = layer.n_inputs - sum(layer.popped)
        value = {p: number for p, number in back.items() if p < place}
        for key, n_leaves in zip(popped, layer.popped, strict=True):
            skips[key] = {p - place: back[p] for p in back if place <= p < place + n_leaves}
            place += n_leaves
    by_skip = {key: _distinct(numbered) for key, numbered in skips.items()}
    return ChainGradients(layers[::-1], by_skip)


#: Numbers of the storages of gradients, by place of the tensor; None: it has none of its own.
#: What gets no gradient is left out.
_Numbered = dict[int, int | None]


def _distinct(numbered: _Numbered) -> tuple[int, ...] | None:
    """Return the numbers, each once; None: one is not known."""
    return None if None in numbered.values() else distinct_numbers(numbered.values())


def _of_passed_on(numbered: _Numbered, passed_on: Collection[int]) -> tuple[int, ...]:
    """Return the numbers of what nothing lies in but gradients of what is passed on."""
    others = {number for place, number in numbered.items() if place not in passed_on}
    known = distinct_numbers(numbered.values()) if None not in numbered.values() else ()
    return tuple(number for number in known if number not in others)


def _given_memory(*found: _Numbered, numbers: Numbers) -> tuple[GivenMemory, ...]:
    """Say in which memory gradients are, in one or another case."""
    return tuple(
        GivenMemory({p: (n, numbers.bytes[n]) for p, n in each.items() if n is not None})
        for each in found
    )


def _handed_back(backward: BackwardRun, arrived: _Numbered, numbers: Numbers) -> _Numbered:
    """Number what a layer hands back, by place of the input."""
    known = {
        key: number
        for place, (key, _) in backward.given.items()
        if (number := arrived.get(place)) is not None
    }
    found: _Numbered = {}
    for place, each in backward.hands_back.items():
        if each is not None and each.key not in known:
            known[each.key] = numbers.new(each.n_bytes)
        found[place] = None if each is None else known[each.key]
    return found
