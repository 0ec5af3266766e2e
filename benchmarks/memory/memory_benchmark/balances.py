"""How to cut: torchgpipe's balance, and three that the planner finds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np

from gpipebal.planner.runs.memory import RunMemory
from gpipebal.problem import Device, Memory, Problem, to_balance
from gpipebal.profile import Profile
from gpipebal.schedule import CheckpointMode
from gpipebal.solvers import split

#: Names of the balances, and what each is.
BALANCES = {
    "published": "torchgpipe's",
    "least total": "the smallest sum over the partitions",
    "least peak": "the planner's, the smallest need of the neediest partition",
    "fastest": "the planner's, the shortest predicted makespan of those that fit",
}


def find_balances(
    profile: Profile, published: Sequence[int], checkpoint: CheckpointMode, memory_limit: int
) -> dict[str, tuple[int, ...]]:
    """Find a balance of each kind, for partitions that each have a device of their own.

    They are found by the least that may wait for other partitions, whatever these are.

    Args:
        profile: Costs of the layers.
        published: torchgpipe's balance.
        checkpoint: Which micro-batches are recomputed.
        memory_limit: Bytes that a partition of the fastest balance may need.

    Raises:
        InfeasibleError: there is no such balance.
    """
    n_partitions = len(published)
    found = {"published": tuple(published)}
    if n_partitions == 1:
        return found
    memory = RunMemory(
        profile,
        chunks=profile.chunks,
        loss_inside=False,
        shared_memory=False,
        most=False,
    ).memory
    problem = Problem(
        **profile.layer_times,
        n_partitions=n_partitions,
        chunks=profile.chunks,
        checkpoint=checkpoint,
        memory=memory,
    )
    found["least total"] = least_total(memory, profile.n_layers, n_partitions, checkpoint)
    found["least peak"] = tuple(split(problem, "peak_memory").balance)
    limited = replace(problem, devices=[Device(memory_limit=memory_limit)] * n_partitions)
    found["fastest"] = tuple(split(limited, "makespan").balance)
    return found


def least_total(
    memory: Memory, n_layers: int, n_partitions: int, mode: CheckpointMode
) -> tuple[int, ...]:
    """Find the balance whose partitions need the least memory in all.

    Complexity:
        O(N^2 K) in numpy, for N layers and K partitions.

    Example:
        >>> from gpipebal.problem import layer_memory
        >>> memory = layer_memory([1] * 4, [0, 9, 0, 0], [0, 50, 2, 50], chunks=3)
        >>> least_total(memory, 4, 2, "always")
        (2, 2)
    """
    labels = memory.labels(n_partitions)
    known: dict[int, list[np.ndarray]] = {}
    # need[e]: the least for the first e layers in so many partitions; infinite: impossible.
    need = np.full(n_layers + 1, np.inf)
    need[0] = 0.0
    came_from = []
    for j in range(n_partitions):
        if labels[j] not in known:
            known[labels[j]] = [
                np.asarray(memory.rows(first, j, mode), dtype=float) for first in range(n_layers)
            ]
        after = np.full(n_layers + 1, np.inf)
        best_first = np.zeros(n_layers + 1, dtype=int)
        for first, peaks in enumerate(known[labels[j]]):
            ends = slice(first + 1, first + 1 + len(peaks))
            with_this = need[first] + peaks
            better = with_this < after[ends]
            after[ends][better] = with_this[better]
            best_first[ends][better] = first
        need = after
        came_from.append(best_first)
    bounds = [n_layers]
    for best_first in reversed(came_from):
        bounds.append(int(best_first[bounds[-1]]))
    bounds.reverse()
    assert all(a < b for a, b in pairwise(bounds))
    return tuple(to_balance(bounds))
