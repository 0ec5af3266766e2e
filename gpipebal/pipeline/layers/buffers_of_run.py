"""The buffers of a run of layers that is recomputed by itself, and those of a loss."""

from __future__ import annotations

from collections.abc import Hashable, Sequence, Set

from torch import nn

from gpipebal.pipeline.layers.attributes import unregistered_in
from gpipebal.pipeline.layers.buffers import Buffers, Copies, Kept
from gpipebal.pipeline.layers.cached_weights import forget_cached_weights
from gpipebal.pipeline.layers.modules import Modules

__all__ = ["BuffersOfRun", "buffers_of_run"]


class BuffersOfRun(Buffers):
    """The buffers of a run's layers, and the modes in which writes to them have been looked for."""

    def __init__(
        self,
        modules: Modules,
        foreign: Set[int] = frozenset(),
        unregistered: Sequence[nn.Module] = (),
    ) -> None:
        super().__init__(modules, foreign, unregistered)
        self._seen: set[Hashable] = set()

    def mode(self) -> Hashable:
        """Return the modes of all modules."""
        return tuple([module.training for module in self.modules])

    def begin(self) -> Copies:
        """Begin a forward whose recompute computes all weights again: it finds none in the cache.

        Returns:
            What `copies` does.
        """
        forget_cached_weights(self._modules)
        return self.copies()

    def copies(self, *, alone: bool = False) -> Copies:
        """Copy the large buffers, if writes to them have not been looked for yet."""
        return {} if self.mode() in self._seen else super().copies(alone=alone)

    def with_changed(self, kept: Kept, before: Copies) -> Kept:
        """Return what is kept, with those that turned out to be written to."""
        self._seen.add(self.mode())
        return kept.with_copies(self.note_changed(before))


def buffers_of_run(layers: Sequence[nn.Module], foreign: Set[int]) -> BuffersOfRun:
    """Return the buffers of a run's layers, and of modules that these have without registering.

    Args:
        layers: The layers.
        foreign: Buffers, and unregistered modules, that other workers may use, by ``id``.
    """
    unregistered = [module for module in unregistered_in(layers) if id(module) not in foreign]
    return BuffersOfRun(Modules(layers), foreign, unregistered)
