"""Memory of the gradients on their way back through a chain: who makes it, and who still holds it.

A layer's backward is given the gradients of what it has output and stashed, and hands back those of
what it was given. These lie in memory that it makes, each by itself or as parts of one larger
tensor, or in the memory that it was given. So memory of gradients lives from the backward that
makes it to the last one that is given a part of it: that of the layer before, of an earlier one if
those between hand it on, or of one that has stashed a skip connection, which waits longest.

What a profile does not tell of a value is taken to lie in memory of its own, except where a layer
hands it through.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from gpipebal.profile.layer import SkipProfile
    from gpipebal.profile.profile import Profile

__all__ = ["GradientCopy", "GradientFlow", "GradientMemory", "StashedSum", "find_flow"]


class GradientMemory(NamedTuple):
    """Memory that gradients lie in.

    Attributes:
        n_bytes: Its bytes.
        maker: The layer whose backward makes it; the number of layers: that of the loss.
        lowest_value: The first layer that is given it for its output; `maker`: none is.
        sources: Layers that have stashed a value whose gradient lies in it, in ascending order.
        copied: Ranges of layers, by the first and the one behind the last. A partition that begins
            with one of them copies what these are given of it as soon as it is there: they hand it
            through. So the first layer that holds it is the one behind them.
    """

    n_bytes: int
    maker: int
    lowest_value: int
    sources: tuple[int, ...] = ()
    copied: tuple[tuple[int, int], ...] = ()

    @property
    def lowest(self) -> int:
        """The first layer of the chain that is given any of it."""
        return min((self.lowest_value, *self.sources))

    def until(self, first: int) -> int:
        """Return the first layer that is given any of it, in partitions from a layer on.

        What a layer before the partition has stashed does not hold it: that gets a copy.
        """
        own = (source for source in self.sources if source >= first)
        behind = (stop for low, stop in self.copied if low <= first < stop)
        return min((next(behind, self.lowest_value), *own))


class GradientCopy(NamedTuple):
    """A copy of the gradient of a partition's input, made because others hold its memory too.

    Partitions have it that begin with a layer which hands the input through, and end behind all
    that do. Where only the input's gradient is in that memory, or all layers hand it through, the
    layers' own peaks tell of copies.

    Attributes:
        n_bytes: Its bytes.
        first: The first of the layers that hand the input through.
        last: The last one: from its backward on the copy is there.
    """

    n_bytes: int
    first: int
    last: int


class StashedSum(NamedTuple):
    """A sum of what comes back to a tensor from a layer and from a skip, which waits.

    Attributes:
        n_bytes: Its bytes.
        source: The last layer that has stashed the tensor: a partition with it makes the sum ...
        maker: ... if it has this layer too.
        since: The first layer that finds it beside its own; from there on all up to `until`.
        until: The first layer that does not.
    """

    n_bytes: int
    source: int
    maker: int
    since: int
    until: int


@dataclass(frozen=True)
class GradientFlow:
    """Memory of all gradients of a chain.

    Attributes:
        memory: Each piece of memory.
        given: For each layer, the places in `memory` of what its backward is given, for its output
            and for what it has stashed; and nothing for a loss after the last layer.
        skips: For each skip connection, the places in `memory` of its gradient.
        copies: Copies of gradients of what partitions are given.
        sums: Sums that exist before the backward of the layer that has stashed a tensor.
    """

    memory: tuple[GradientMemory, ...]
    given: tuple[tuple[int, ...], ...]
    skips: tuple[tuple[int, ...], ...]
    copies: tuple[GradientCopy, ...]
    sums: tuple[StashedSum, ...]


@dataclass
class _Holders:
    """Who holds a piece of memory, as far as it is known: layers and skips."""

    n_bytes: int
    makers: list[int] = field(default_factory=list)
    given: list[int] = field(default_factory=list)
    sources: set[int] = field(default_factory=set)
    copied: tuple[tuple[int, int], ...] = ()

    def as_memory(self) -> GradientMemory:
        """Return what is known in the end."""
        maker = max(self.makers)
        lowest = min(self.given, default=maker)
        return GradientMemory(self.n_bytes, maker, lowest, tuple(sorted(self.sources)), self.copied)


def find_flow(profile: Profile) -> GradientFlow:
    """Find the memory of all gradients of a chain.

    Complexity:
        O(n) for n storages that layers and skips name; and for each layer that is given a stashed
        storage O(s) for the s skips that have it.

    Example:
        >>> from gpipebal.profile import Profile
        >>> find_flow(Profile.from_costs([1.0, 1.0], output_bytes=[8, 2])).memory
        (GradientMemory(n_bytes=2, maker=2, lowest_value=1, sources=(), copied=()), \
GradientMemory(n_bytes=8, maker=1, lowest_value=0, sources=(), copied=()))
    """
    holders: dict[Hashable, _Holders] = {}
    given: list[list[Hashable]] = [[] for _ in range(profile.n_layers + 1)]
    of_skips: list[list[Hashable]] = []
    for k, pieces in _of_values(profile):
        for key, n_bytes in pieces:
            one = holders.setdefault(key, _Holders(n_bytes))
            one.makers.append(k + 1)
            one.given.append(k)
            given[k].append(key)
    for index, skip in enumerate(profile.skips):
        of_skips.append([])
        if skip.source == skip.destination:
            continue
        pieces = [(storage, profile.storages[storage]) for storage in skip.gradient_storages or ()]
        if skip.gradient_storages is None:
            pieces = [(("skip", index), profile.gradient_bytes_of(skip.storages))]
        for key, n_bytes in dict(pieces).items():
            one = holders.setdefault(key, _Holders(n_bytes))
            one.makers.append(skip.destination)
            one.sources.add(skip.source)
            given[skip.source].append(key)
            of_skips[-1].append(key)
    copies = list(_copies(profile))
    for key, ranges in _copied_at_once(profile, copies).items():
        holders[key].copied = tuple(ranges)
    place = {key: index for index, key in enumerate(holders)}
    return GradientFlow(
        tuple(one.as_memory() for one in holders.values()),
        tuple(tuple(place[key] for key in dict.fromkeys(keys)) for keys in given),
        tuple(tuple(place[key] for key in keys) for keys in of_skips),
        tuple(copy for _, copy in copies),
        tuple(_sums(profile)),
    )


def _copies(profile: Profile) -> Iterator[tuple[int, GradientCopy]]:
    """Yield storages of inputs that layers hand through, with the copies of their gradients."""
    layers = profile.layers
    last_of: dict[int, int] = {}
    for k in reversed(range(profile.n_layers - 1)):
        through = profile.with_gradient(layers[k].handed_through)
        last_of = {storage: last_of.get(storage, k) for storage in through}
        before = layers[k - 1].handed_through if k else ()
        for storage in sorted(through.difference(before)):
            last = last_of[storage]
            n_bytes, held = profile.storages[storage], layers[last].gradient_storages
            if held is None:
                continue
            alone = profile.bytes_of(held) == profile.gradients_into(last)
            if not alone or n_bytes not in (profile.storages[one] for one in held):
                yield storage, GradientCopy(n_bytes, k, last)


def _copied_at_once(
    profile: Profile, copies: Iterable[tuple[int, GradientCopy]]
) -> dict[int, list[tuple[int, int]]]:
    """Find the memory of gradients that partitions let go of early, by storage.

    Returns:
        What `GradientMemory.copied` says of each.
    """
    copied: dict[int, set[int]] = {}
    for storage, copy in copies:
        for k in range(copy.first, copy.last + 1):
            copied.setdefault(k, set()).add(storage)
    found: dict[int, list[tuple[int, int]]] = {}
    for k in sorted(copied):
        layer = profile.layers[k]
        # Nothing else lies there, and of all that does a copy is counted.
        if copied[k] >= profile.with_gradient(layer.handed_through):
            alone = set(layer.through_gradient_storages)
            for storage in alone.intersection(layer.gradient_storages or ()):
                ranges = found.setdefault(storage, [])
                if ranges and ranges[-1][1] == k:
                    ranges[-1] = ranges[-1][0], k + 1
                else:
                    ranges.append((k, k + 1))
    return found


def _sums(profile: Profile) -> Iterator[StashedSum]:
    """Yield sums of what comes back from layers and from skips.

    Of several gradients of a tensor, the first to come is that of the skip. Autograd adds to it
    what a layer hands back, piece by piece, in memory of its own. A layer that pops what it is
    given too hands back both at once.
    """
    stashed: dict[int, list[SkipProfile]] = {}
    for skip in profile.skips:
        for storage in profile.with_gradient(skip.storages):
            stashed.setdefault(storage, []).append(skip)
    for k in range(1, profile.n_layers if stashed else 1):
        outputs = [one for one in profile.layers[k - 1].outputs if one in stashed]
        skips = {id(s): s for one in outputs for s in stashed[one] if s.source < k}.values()
        sources = [skip.source for skip in skips if k < skip.destination]
        more = profile.layers[k].stashed_sum_bytes
        if sources and more:
            yield StashedSum(more, max(sources), k, k, k + 1)
        for skip in skips:
            if skip.destination == k and skip.source + 1 < k:
                n_bytes = profile.bytes_of(set(outputs).intersection(skip.storages))
                yield StashedSum(n_bytes, skip.source, k, skip.source + 1, k)


def _of_values(profile: Profile) -> Iterator[tuple[int, list[tuple[Hashable, int]]]]:
    """Yield each layer, the last one first, and what the gradients of its output lie in."""
    # Of the layer behind: the key and bytes of each output's gradient, if they had to be guessed.
    behind: dict[int | None, tuple[Hashable, int]] = {}
    for k in reversed(range(profile.n_layers)):
        layer = profile.layers[k]
        if layer.gradient_storages is not None:
            behind = {}
            known = dict.fromkeys(layer.gradient_storages)
            yield k, [(storage, profile.storages[storage]) for storage in known]
            continue
        through = profile.layers[k + 1].handed_through if behind else ()
        outputs, found = profile.with_gradient(layer.outputs), dict[int | None, Any]()
        for storage in sorted(outputs & behind.keys() & set(through)):
            found[storage] = behind[storage]
        # What is output twice has two gradients.
        further = max(0, profile.further_gradients(k))
        if found and behind.get(None, (None, 0))[1] == further > 0:
            found[None] = behind[None]
        elif further:
            found[None] = ("further", k), further
        left = profile.gradients_into(k) - sum(n_bytes for _, n_bytes in found.values())
        for storage in sorted(outputs - found.keys()):
            # A part of something larger has a smaller gradient.
            found[storage] = ("value", k, storage), max(0, min(profile.storages[storage], left))
            left -= found[storage][1]
        behind = found
        yield k, list(found.values())
