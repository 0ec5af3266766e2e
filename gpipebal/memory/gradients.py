"""Gradients in a partition: what lives of them while each of its layers runs backwards.

Memory of gradients lives as `gpipebal.profile.gradients` says, as far as the backward of the
partition makes it. What comes to the partition's end, from the caller or from later partitions, is
there from the beginning of the backward to its end, each gradient in memory of its own; parts of it
that layers hand on need no memory. What goes to earlier partitions is a copy, which waits for the
end of the backward.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

from gpipebal.profile import Profile, SkipProfile

__all__ = ["PartitionGradients", "SumAtStart", "sums_at_start"]


class SumAtStart(NamedTuple):
    """The sum of several gradients of one tensor that a backward starts from.

    Attributes:
        storage: The tensor's storage.
        n_bytes: Bytes of the sum.
        source: The last layer that has stashed the tensor for a later partition: the backwards of
            layers after it find the sum beside everything else.
        last_first: The last layer that a partition may begin with to start from two such gradients.
    """

    storage: int
    n_bytes: int
    source: int
    last_first: int


def sums_at_start(
    profile: Profile, end: int, outgoing: Iterable[SkipProfile]
) -> Iterator[SumAtStart]:
    """Yield what a backward adds up before it has run a layer, in partitions that end at a place.

    Layers may stash one tensor several times, or return it too. Autograd then adds up the gradients
    that have come for it as soon as the backward starts.

    Args:
        profile: Costs of all layers.
        end: Index after the partition's last layer.
        outgoing: Skips from a layer before the end to one after it.
    """
    sources: dict[int, list[int]] = {}
    for skip in outgoing:
        for storage in profile.with_gradient(skip.storages):
            sources.setdefault(storage, []).append(skip.source)
    outputs = profile.layers[end - 1].outputs
    for storage, stashed in sorted(sources.items()):
        given = sorted([*stashed, *([end - 1] if storage in outputs else [])])
        if len(given) > 1 and max(stashed) < end - 1:
            yield SumAtStart(storage, profile.bytes_of([storage]), max(stashed), given[-2])


class PartitionGradients:
    """Memory of gradients in one partition; layers are counted from its first.

    Args:
        profile: Costs of all layers.
        first: Index of the partition's first layer in the chain.
        end: Index after its last layer.
        has_loss: Whether it computes the loss after its layers.
    """

    def __init__(self, profile: Profile, first: int, end: int, *, has_loss: bool) -> None:
        self._profile, self._first, self._end = profile, first, end
        self._flow = profile.gradient_flow
        # What is made behind this is what the backward starts from.
        self._stop = end + has_loss
        changes = [0] * (self._stop - first + 1)

        def lives(last: int, maker: int, n_bytes: int) -> None:
            changes[max(last, first) - first] += n_bytes
            changes[maker - first] -= n_bytes

        for one in self._flow.memory:
            if first < one.maker < self._stop:
                lives(one.until(first), one.maker, one.n_bytes)
        for skip in profile.skips:
            if skip.source < first < skip.destination < end:
                lives(first, skip.destination, profile.gradient_bytes_of(skip.storages))
        for copy in self._flow.copies:
            if copy.first <= first <= copy.last < self._stop - 1:
                lives(first, copy.last + 1, copy.n_bytes)
        for sum_ in self._flow.sums:
            if first <= sum_.source and sum_.maker < end:
                lives(sum_.since, sum_.until, sum_.n_bytes)
        self._living = list(accumulate(changes))
        outgoing = [s for s in profile.skips if first <= s.source < end <= s.destination]
        self._sums = list(sums_at_start(profile, end, outgoing))

    def living(self, k: int) -> int:
        """Return the bytes that live while layer k runs backwards, without its own.

        Without the gradients that the backward starts from, too.
        """
        sums = sum(one.n_bytes for one in self._sums if one.source < self._first + k)
        return self._living[k] + sums

    def kept(self, k: int) -> int:
        """Return the bytes of what layer k's backward is given that others hold beyond it."""
        layer, found = self._first + k, 0
        for place in self._flow.given[layer]:
            one = self._flow.memory[place]
            if one.maker >= self._stop or (k and one.until(self._first) < layer):
                found += one.n_bytes
        return found

    def at_cut(self, k: int) -> int | None:
        """Return the bytes of what layer k is given and the partition is given too.

        Gradients of that are kept apart. So is that of what the layer pops, if other layers give it
        the same as its value.

        Returns:
            None: all that it is given, and all that is made of it.
        """
        layer, profile = self._first + k, self._profile
        value = profile.with_gradient(profile.layers[layer - 1].outputs if k else ())
        popped = self._popped.get(layer, ())
        twice = [s for s in popped if s.source + 1 < layer and not value.isdisjoint(s.storages)]
        if not k or twice:
            return None
        given = value.union(*(profile.with_gradient(skip.storages) for skip in popped))
        received = set(profile.layers[self._first - 1].outputs if self._first else ())
        received.update(*(s.storages for s in self._incoming if s.destination <= layer))
        both = given & received
        # Of what is given twice there are two gradients.
        is_further = bool(both) and profile.further_gradients(layer - 1) > 0
        return None if is_further else profile.bytes_of(both)

    @cached_property
    def _incoming(self) -> Sequence[SkipProfile]:
        """Skip connections from earlier partitions."""
        skips = self._profile.skips
        return [s for s in skips if s.source < self._first <= s.destination < self._end]

    @cached_property
    def _popped(self) -> Mapping[int, Sequence[SkipProfile]]:
        """Skip connections by the layer that pops them."""
        found: dict[int, list[SkipProfile]] = {}
        for skip in self._profile.skips:
            if skip.source < skip.destination:
                found.setdefault(skip.destination, []).append(skip)
        return found
