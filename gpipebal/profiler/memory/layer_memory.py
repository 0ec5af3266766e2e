"""What is known of a layer's memory, alone and in its chain."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import nn

from gpipebal.errors import ProfileError
from gpipebal.pipeline.values.tensors import bytes_of
from gpipebal.profiler.chain.numbers import Numbers
from gpipebal.profiler.chain.value import Routes
from gpipebal.profiler.replicas.replica import kept_by
from gpipebal.skip.tracker import Key

__all__ = [
    "ChainedPeak",
    "HandedBack",
    "LayerMemory",
    "excess_gradients",
    "given_their_own",
    "held_by_skips",
]


class ChainedPeak(NamedTuple):
    """Largest memory of a backward that frees the gradients it is given, beyond what it began with.

    Attributes:
        whole: From its beginning to its end.
        until_freed: Until the last of these gradients is freed.
    """

    whole: int
    until_freed: int

    def where_they_hold(self, excess: int) -> int:
        """Return the largest memory where these gradients hold so many more bytes than theirs."""
        return max(self.until_freed, self.whole - excess)


class HandedBack(NamedTuple):
    """In which memory a layer's backward hands back the gradients of what it was given.

    Attributes:
        excess: How much more than themselves the gradients of its input value hold, in memory that
            those of skips do not hold.
        given: Whether any of these gradients is in memory that the backward was given, and whether
            all of them are.
        skips: For each skip that it pops, the storages of its gradient and their bytes, by key;
            None: it is not known what holds the gradient.
        value_in_skips: For each of these skips, how many bytes of the value's gradients are in it.
        given_keys: Keys of the storages of the gradients that the backward was given.
    """

    excess: int
    given: tuple[bool, bool]
    skips: tuple[Mapping[int, int] | None, ...]
    value_in_skips: tuple[int, ...]
    given_keys: frozenset[int]

    @classmethod
    def of(
        cls,
        found: Mapping[int, tuple[int, int, int] | None],
        n_popped: Sequence[int],
        n_inputs: int,
        given_keys: frozenset[int],
    ) -> HandedBack:
        """Put together what `handed_back` found.

        Args:
            found: For each place of an input, key and bytes of the gradient's storage, and the
                gradient's own bytes.
            n_popped: How many of the last inputs belong to each skip.
            n_inputs: How many inputs there are.
            given_keys: As the attribute.
        """
        skips: list[dict[int, int] | None] = []
        begin = n_inputs - sum(n_popped)
        value = [found[place] for place in range(begin) if place in found]
        for n_leaves in n_popped:
            mine = [found[place] for place in range(begin, begin + n_leaves) if place in found]
            known = {each[0]: each[1] for each in mine if each is not None}
            skips.append(None if None in mine else known)
            begin += n_leaves
        of_skips = {key for known in skips if known is not None for key in known}
        own: dict[int, list[int]] = {}
        for each in value:
            if each is not None and each[0] not in of_skips:
                own.setdefault(each[0], [each[1]]).append(-each[2])
        excess = sum(max(0, sum(amounts)) for amounts in own.values())
        are_given = [each is not None and each[0] in given_keys for each in value]
        given = any(are_given), bool(are_given) and all(are_given)
        in_value = [each for each in value if each is not None]
        shared = [sum(each[2] for each in in_value if each[0] in (known or ())) for known in skips]
        return cls(excess, given, tuple(skips), tuple(shared), given_keys)


@dataclass(frozen=True)
class LayerMemory:
    """Memory of one layer; storages are numbered over the whole chain.

    Attributes:
        chained_peaks: Peaks of a backward in a chain, where no gradients of parameters exist and
            where they do.
        own_chained_peaks: The same where nothing else holds the memory of the gradients that come
            in: torch may add to them in place.
        hands_back_own: For each of its inputs, by place, whether the gradient that it hands back is
            such too: if those that come in are not, and if they are.
        hands_through: Places of inputs whose gradients go back as they came, and of the outputs
            that they came for.
        hands_back: In which memory it hands back gradients.
        stashes: Whether it stashes values for later layers.
        kept_bytes: Bytes of what the layer keeps after its forward, besides its parameters:
            buffers, and tensors that are attributes of its modules.
        n_parameters: How many parameters it has after its forward.
    """

    outputs: tuple[int, ...]
    saved: tuple[int, ...]
    handed_through: tuple[int, ...]
    output_bytes: int
    output_gradient_bytes: int
    forward_peak_bytes: int
    no_grad_forward_peak_bytes: int
    written_input_bytes: int
    backward_peak_bytes: int
    accumulating_peak_bytes: int
    chained_peaks: tuple[ChainedPeak, ChainedPeak]
    own_chained_peaks: tuple[ChainedPeak, ChainedPeak]
    hands_back_own: Mapping[int, tuple[bool, bool]]
    hands_through: Mapping[int, int]
    hands_back: HandedBack
    stashes: bool
    copied_bytes: int
    kept_buffer_bytes: int
    saved_buffer_bytes: int
    kept_bytes: int
    n_parameters: int

    def columns(
        self, own: dict[str, int], name: str, layer: nn.Module, *, given_own: bool, excess: int
    ) -> dict[str, Any]:
        """Return the columns of a layer profile, with what the layer has all the time.

        Args:
            own: Columns of parameters and buffers.
            name: Name of the layer.
            layer: The caller's layer, of which a copy ran.
            given_own: What `given_their_own` says of it.
            excess: What `excess_gradients` says of it.

        Raises:
            ProfileError: the forward makes parameters, which the caller's layer does not have yet.
        """
        n_before = len(list(layer.parameters()))
        if self.n_parameters != n_before:
            raise ProfileError(
                f"layer {name!r} makes parameters in its first forward: {self.n_parameters} "
                f"(expected {n_before}, as many as before).\nFix: run model(sample) once."
            )
        columns = vars(self) | own | {"excess_gradient_bytes": excess}
        columns["hands_back_given"] = self.hands_back.given[1]
        chained = self.own_chained_peaks if given_own else self.chained_peaks
        for key, peak in zip(
            ("chained_peak_bytes", "chained_accumulating_peak_bytes"), chained, strict=True
        ):
            columns[key] = peak.where_they_hold(excess)
        del columns["chained_peaks"], columns["own_chained_peaks"]
        del columns["kept_bytes"], columns["n_parameters"]
        del columns["hands_back_own"], columns["hands_through"], columns["stashes"]
        del columns["hands_back"]
        columns["buffer_bytes"] += max(0, self.kept_bytes - sum(map(bytes_of, kept_by(layer))))
        return columns


def given_their_own(memory: Sequence[LayerMemory]) -> list[bool]:
    """Tell which layers of a chain are given gradients whose memory nothing else holds.

    The next layer's backward makes them, or hands back those that it was given. It may hand back
    views, which hold what they are views of: then a sum needs new memory. Of layers that stash a
    value, and of the last, not all gradients come from the next one: no.
    """
    found = [False] * len(memory)
    given: dict[int, bool] = {}  # of the later layer, by place
    for k in reversed(range(len(memory) - 1)):
        after, all_own = memory[k + 1], found[k + 1]
        back = {place: own[all_own] for place, own in after.hands_back_own.items()}
        back |= {place: given.get(output, False) for place, output in after.hands_through.items()}
        given = back
        found[k] = bool(given) and all(given.values()) and not memory[k].stashes
    return found


def excess_gradients(memory: Sequence[LayerMemory]) -> list[int]:
    """Return how much more than themselves the gradients hold that each layer of a chain is given.

    The next layer's backward hands back parts of larger ones, or hands on what it was given.
    """
    found = [0] * len(memory)
    for k in reversed(range(len(memory) - 1)):
        after = memory[k + 1].hands_back
        found[k] = after.excess + (found[k + 1] if after.given[0] else 0)
    return found


def held_by_skips(
    memory: Sequence[LayerMemory], routes: Routes, numbers: Numbers
) -> dict[Key, dict[str, Any]]:
    """Find out what the gradient of each skip of a chain holds, as far as it is known.

    Args:
        memory: Memory of all layers.
        routes: The skips.
        numbers: Takes the storages of the gradients.

    Returns:
        By key, fields of a `SkipProfile`.
    """
    excess, found = excess_gradients(memory), dict[Key, dict[str, Any]]()
    popped: dict[int, list[Key]] = {}
    for key, (source, destination) in routes.items():
        if source != destination:
            popped.setdefault(destination, []).append(key)
    for destination, keys in popped.items():
        back = memory[destination].hands_back
        known: dict[int, int] = {}
        for key, storages, shared in zip(keys, back.skips, back.value_in_skips, strict=True):
            if storages is None:
                continue
            for storage, n_bytes in storages.items():
                if storage not in known:
                    further = excess[destination] if storage in back.given_keys else 0
                    known[storage] = numbers.new(n_bytes + further)
            if shared and not back.given_keys.isdisjoint(storages):
                shared += excess[destination]
            found[key] = {
                "gradient_storages": tuple(known[storage] for storage in storages),
                "gradient_is_given": storages.keys() <= back.given_keys,
                "value_gradient_bytes": shared,
            }
    return found
