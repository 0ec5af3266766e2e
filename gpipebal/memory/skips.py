"""Skip connections in a partition: what waits there for a layer that pops it, or for a gradient.

The gradient of what a layer pops waits for the layer that stashed it, or, if that is in another
partition, for the end of the backward; there it is a copy. That of a skip to a later partition is
one of those that the backward started from, and so may be that of one that is popped: as a part.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence

from gpipebal.profile import Profile, SkipProfile

__all__ = ["InnerSkips", "popped_behind", "value_gradient", "waiting"]


def waiting(profile: Profile, skip: SkipProfile) -> Sequence[tuple[int, int]]:
    """Return what a skip's gradient holds while it waits in a partition with the stashing layer.

    What gradients of several skips have in common counts for the one that waits longest.

    Args:
        profile: Costs of all layers.
        skip: One of its skips.

    Returns:
        Bytes, each behind the last layer that a partition may not begin with or after, if it is
        that skip for which they count there; -1: none.
    """
    if skip.gradient_storages is None:
        return [(-1, profile.gradient_bytes_of(skip.storages))]
    others = [other for other in profile.skips if other.destination == skip.destination]
    longer = [other for other in others if (other.source, other.name) < (skip.source, skip.name)]
    return [
        (
            max((o.source for o in longer if storage in (o.gradient_storages or ())), default=-1),
            profile.storages[storage],
        )
        for storage in set(skip.gradient_storages)
    ]


def popped_behind(
    profile: Profile, popped: Container[int], first: int, end: int
) -> Mapping[int, int]:
    """Find the layers that hand back what a popping layer has handed back for its value.

    Args:
        profile: Costs of all layers.
        popped: The layers that pop what others have stashed.
        first: The first layer to look at.
        end: Index after the last one.

    Returns:
        By layer, the popping one: itself, or the next one that it hands on a gradient of.
    """
    stashing = {skip.source for skip in profile.skips if skip.source != skip.destination}
    found: dict[int, int] = {}
    for k in range(end - 1, first - 1, -1):
        if k in popped:
            found[k] = k
        # What a layer stashes has another gradient.
        elif k + 1 in found and k not in stashing and profile.layers[k].hands_back_given:
            found[k] = found[k + 1]
    return found


def value_gradient(profile: Profile, popped: Sequence[SkipProfile], first: int) -> tuple[int, bool]:
    """Say how the gradient of a popping layer's value counts, if the skips' hold its memory.

    Where one of these waits in the partition, it holds what both have in common: the value's does
    not count again. Where none does, the value's holds it alone, until it is used up.

    Args:
        profile: Costs of all layers.
        popped: The skips that the layer pops and others have stashed.
        first: First layer of the partition.

    Returns:
        How many bytes more the value's gradient counts, and whether a skip holds any of it.
    """
    more, seen, is_held = 0, set[int](), False
    for skip in sorted(popped, key=lambda skip: skip.source < first):
        holds = set(skip.gradient_storages or ())
        # What several skips hold counts for one of them.
        if skip.value_gradient_bytes and holds.isdisjoint(seen):
            is_within = skip.source >= first
            more += (0 if is_within else profile.bytes_of(holds)) - skip.value_gradient_bytes
            is_held = is_held or is_within
        seen |= holds
    return more, is_held


class InnerSkips:
    """Skips that layers of a partition stash or pop; layers are counted from its first.

    What a layer stashes for itself does not count.

    Args:
        profile: Costs of all layers.
        first: Index of the partition's first layer in the chain.
        end: Index after its last layer.
        from_start: For each layer, whether its gradient is what the backward starts from, or a part
            of that.
    """

    def __init__(self, profile: Profile, first: int, end: int, from_start: Sequence[bool]) -> None:
        self._profile, self._first, self._from_start = profile, first, from_start
        skips = [skip for skip in profile.skips if skip.source != skip.destination]
        self._popped = self._by_place(
            (skip.destination, skip) for skip in skips if first <= skip.destination < end
        )
        self._stashed = self._by_place(
            (skip.source, skip) for skip in skips if first <= skip.source < end
        )
        self._within = self._by_place(
            (skip.source, skip) for skip in skips if first <= skip.source and skip.destination < end
        )
        popping = [first + k for k in self._popped]
        behind = popped_behind(profile, popping, first, end)
        self._behind = {k - first: layer - first for k, layer in behind.items()}

    def _by_place(
        self, skips: Iterable[tuple[int, SkipProfile]]
    ) -> Mapping[int, Sequence[SkipProfile]]:
        """Group skips by the layer that each is paired with."""
        found: dict[int, list[SkipProfile]] = {}
        for layer, skip in skips:
            found.setdefault(layer - self._first, []).append(skip)
        return found

    def popped(self, k: int) -> Sequence[frozenset[int]]:
        """Return the storages of each skip that a layer pops."""
        return [frozenset(skip.storages) for skip in self._popped.get(k, ())]

    def stashed(self, k: int) -> Sequence[frozenset[int]]:
        """Return the storages of each skip that a layer stashes."""
        return [frozenset(skip.storages) for skip in self._stashed.get(k, ())]

    def begins_to_wait(self, k: int) -> int:
        """Return the bytes of gradients that wait once a layer's backward is done."""
        return sum(map(self._waiting, self._popped.get(k, ())))

    def waited_for(self, k: int) -> int:
        """Return the bytes of gradients that no longer wait then."""
        return sum(map(self._waiting, self._within.get(k, ())))

    def value_gradient(self, k: int) -> tuple[int, bool]:
        """Return what `value_gradient` says of the gradient that layer k's backward hands back."""
        popped = self._popped.get(self._behind.get(k, k), ())
        return value_gradient(self._profile, popped, self._first)

    def _waiting(self, skip: SkipProfile) -> int:
        if skip.source < self._first:
            return self._profile.gradient_bytes_of(skip.storages)
        if skip.gradient_is_given and self._from_start[skip.destination - self._first]:
            return 0
        return sum(n_bytes for low, n_bytes in waiting(self._profile, skip) if low < self._first)
