"""The size of every run of layers: parameters by a factor, and what its layers save."""

from __future__ import annotations

from math import ceil
from typing import Any

import numpy as np

from gpipebal.problem import Memory
from gpipebal.profile import Profile
from gpipebal.schedule import CheckpointMode

__all__ = ["sizes_of"]


def sizes_of(profile: Profile, param_scale: float) -> Memory:
    """Return the size of every run, without a schedule, transients, or what waits.

    Args:
        profile: Costs of the layers.
        param_scale: Bytes held per byte of parameters.

    Returns:
        ``param_scale`` times the run's parameters, and for each micro-batch of the profile what
        its layers save, a storage that several of them save once.

    Example:
        >>> profile = Profile.from_costs([1.0] * 2, parameter_bytes=[5, 5], saved_bytes=[7, 1])
        >>> sizes_of(profile, 2.0).rows(0, 0, "never").tolist()
        [17, 28]
    """
    scaled = [ceil(param_scale * layer.parameter_bytes) for layer in profile.layers]
    saved = [frozenset(layer.saved) for layer in profile.layers]
    most = sum(scaled) + profile.chunks * sum(profile.storages)
    kind = np.int64 if most < 2**60 else object

    def rows(first: int, partition: int, mode: CheckpointMode) -> Any:
        # What a layer of the run keeps in any case is not its graph's.
        counted = {storage for storage, k in profile.keepers.items() if k >= first}
        size, sizes = 0, []
        for fixed, storages in zip(scaled[first:], saved[first:], strict=True):
            size += fixed + profile.chunks * profile.bytes_of(storages - counted)
            counted |= storages
            sizes.append(size)
        return np.array(sizes, dtype=kind)

    return Memory(rows, alike="all")
