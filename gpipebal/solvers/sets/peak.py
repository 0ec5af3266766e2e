"""Peak memory: the smallest limit, or the smallest shortage, that some split can do with.

Peaks of runs are arbitrary numbers, so the answer is one of them: they are all put in order, and
that list is bisected with a search for each candidate.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from gpipebal.problem import Problem
from gpipebal.solvers.sets.levels import Levels
from gpipebal.solvers.sets.reachability import Path, Search
from gpipebal.solvers.sets.runs import modes_to_try
from gpipebal.solvers.sets.staircase import least_bottleneck

__all__ = ["Lack", "least_peak", "least_shortage", "worst_lack"]


class Lack(NamedTuple):
    """A partition on a device with a limit: what it needs, and its layers from start to end - 1."""

    partition: int
    device: int
    limit: int
    peak: int
    start: int
    end: int


def least_peak(problem: Problem) -> tuple[int, Path] | None:
    """Make the largest peak memory of a partition as small as possible; None if there is no split.

    Minimises the largest number of bytes that a partition needs, over all splits that keep every
    device's limit. Among the minimisers: smallest bottleneck, least sum of squared partition
    times, leftmost cuts.

    Returns:
        Bytes, and the split.

    Complexity:
        O(N^2 log N) for N layers, to put all peaks in order, and a search for each of about
        2 log2(N) candidates.

    Example:
        >>> from gpipebal.problem import layer_memory
        >>> memory = layer_memory([1, 1, 6, 1], [0] * 4, [0] * 4, chunks=2)
        >>> problem = Problem([1] * 4, [1] * 4, [0] * 4, 2, chunks=2, memory=memory)
        >>> value, path = least_peak(problem)
        >>> value, path.bounds
        (7, (0, 2, 4))
    """
    own = problem.limits

    def limits(peak: int) -> list[int | None]:
        return [peak if limit is None else min(peak, limit) for limit in own]

    known = Levels(problem)
    found = _least(problem, known, [0] * len(own), limits)
    if found is None:
        return None
    settled = least_bottleneck(Search(Levels(problem, limits(found), known)))
    assert settled is not None
    return found, settled.path


def least_shortage(problem: Problem) -> tuple[int, Path] | None:
    """Find by how much every device's limit must grow for a split to fit.

    Returns:
        Bytes, 0 or less if some split fits already, and a split that then fits; None if no memory
        would help.

    Example:
        >>> from gpipebal.problem import Device, layer_memory
        >>> memory = layer_memory([1, 1, 6, 1], [0] * 4, [0] * 4, chunks=2)
        >>> devices = [Device(memory_limit=4), Device(memory_limit=4)]
        >>> problem = Problem([1] * 4, [1] * 4, [0] * 4, 2, 2, devices=devices, memory=memory)
        >>> least_shortage(problem)[0]
        3
    """
    own = problem.limits

    def limits(more: int) -> list[int | None]:
        return [None if limit is None else limit + more for limit in own]

    known = Levels(problem)
    found = _least(problem, known, [limit or 0 for limit in own], limits)
    if found is None:
        return None
    path = Search(Levels(problem, limits(found), known)).probe({})
    assert path is not None
    return found, path


def worst_lack(problem: Problem, path: Path) -> Lack:
    """Find the partition of a path that lacks most memory, on a device with a limit."""
    memory = problem.memory
    assert memory is not None
    lacks = []
    for j, (device, (option, start, end)) in enumerate(zip(path.order, path.runs, strict=True)):
        limit = problem.limits[device]
        if limit is not None:
            peak = int(memory.rows(start, j, option.mode)[end - start - 1])
            lacks.append(Lack(j, device, limit, peak, start, end))
    return max(lacks, key=lambda one: one.peak - one.limit)


def _least(
    problem: Problem,
    levels: Levels,
    less: Sequence[int],
    limits: Callable[[int], Sequence[int | None]],
) -> int | None:
    """Find the smallest of all peaks, less an amount per device, with which some split fits."""
    seen: dict[object, np.ndarray] = {}
    assert problem.memory is not None
    labels = problem.memory.labels(problem.n_partitions)
    amounts = set(less) if problem.any_order else None
    for j in range(problem.n_partitions):
        for mode in modes_to_try(problem, j):
            for amount in (less[j],) if amounts is None else amounts:
                key = (labels[j], mode, amount)
                if key not in seen:
                    seen[key] = np.unique(np.concatenate(levels.rows(j, mode))) - amount
    candidates = np.unique(np.concatenate(list(seen.values())))

    def fits(k: int) -> bool:
        search = Search(Levels(problem, limits(int(candidates[k])), levels))
        return search.probe({}) is not None

    if not len(candidates) or not fits(len(candidates) - 1):
        return None
    return int(candidates[bisect_left(range(len(candidates) - 1), True, key=fits)])
