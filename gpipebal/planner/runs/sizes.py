"""The size of every run of layers: parameters by a factor, and what its layers save."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from math import ceil

import numpy as np

from gpipebal.planner.runs.chain import LayerChain
from gpipebal.planner.runs.storage_tables import StorageTables
from gpipebal.problem import Memory
from gpipebal.profile import Profile, StepTerms
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
    layers = tuple(replace(layer, outputs=(), output_bytes=0) for layer in profile.layers)
    bare = replace(
        profile,
        layers=layers,
        inputs=(),
        common_inputs=(),
        skips=(),
        step=StepTerms(),
        other_sizes=(),
    )
    chain = LayerChain(bare, None)
    large = profile.chunks * sum(profile.storages) >= 2**60
    saved = StorageTables(chain, range(len(layers)), object if large else np.int64).saved
    scaled = [ceil(param_scale * layer.parameter_bytes) for layer in layers]
    fixed = np.array(list(accumulate(scaled, initial=0)))

    def rows(first: int, partition: int, mode: CheckpointMode) -> Sequence[int]:
        size = fixed[first + 1 :] - fixed[first] + profile.chunks * saved[first, first + 1 :]
        return size

    return Memory(rows, alike="all")
