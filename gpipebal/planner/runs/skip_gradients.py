"""Gradients of skip connections that wait in a run for the layer that stashed them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from gpipebal.memory.skips import popped_behind, value_gradient, waiting
from gpipebal.profile import Profile

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Table = NDArray[Any]

__all__ = ["SkipGradients"]


class SkipGradients:
    """What the gradients of skips hold, in runs from each of some first layers.

    In a run with the layer that stashed it a gradient may hold more than a copy of it does, which
    is what other runs have.

    Args:
        profile: Costs of all layers.
        firsts: First layers of the runs.
        kind: Type of the numbers.

    Attributes:
        held: For each skip, the bytes in every run.
        value_gradients: For layers whose output's gradient is in memory that those of skips hold,
            how many bytes more it counts in every run, and whether a skip waits there.
    """

    def __init__(self, profile: Profile, firsts: Table, kind: type) -> None:
        self._profile, self._firsts, self._kind = profile, firsts, kind
        self._alone = [profile.gradient_bytes_of(skip.storages) for skip in profile.skips]
        self.held: list[Table] = []
        self._popped: dict[int, list[int]] = {}
        for k, skip in enumerate(profile.skips):
            within: Table = np.zeros(len(firsts), dtype=kind)
            for low, n_bytes in waiting(profile, skip):
                within[firsts > low] += n_bytes
            alone = self._column([self._alone[k]])
            self.held.append(np.where(firsts <= skip.source, within, alone))
            if skip.source < skip.destination:
                self._popped.setdefault(skip.destination, []).append(k)

        self.value_gradients = dict(self._value_gradients())

    def _value_gradients(self) -> Iterator[tuple[int, tuple[Table, Table]]]:
        behind = popped_behind(self._profile, self._popped, 1, self._profile.n_layers)
        for layer, popping in behind.items():
            skips = [self._profile.skips[k] for k in self._popped[popping]]
            if any(skip.value_gradient_bytes for skip in skips):
                more, is_held = self._column([0]).repeat(len(self._firsts)), self._firsts < 0
                for low, high in pairwise([-1, *sorted({skip.source for skip in skips}), popping]):
                    rows = (self._firsts > low) & (self._firsts <= high)
                    more[rows], is_held[rows] = value_gradient(self._profile, skips, high)
                yield layer - 1, (more, is_held)

    def _column(self, numbers: Sequence[int]) -> Table:
        return np.array(numbers, dtype=self._kind)

    def popped(self, layer: int) -> Sequence[int]:
        """Return the skips that a layer pops and another one has stashed."""
        return self._popped.get(layer, ())
