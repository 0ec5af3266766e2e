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

    found = _least(problem, [0] * len(own), limits)
    if found is None:
        return None
    peak, search = found
    settled = least_bottleneck(search)
    assert settled is not None
    return peak, settled.path


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

    found = _least(problem, [limit or 0 for limit in own], limits)
    if found is None:
        return None
    more, search = found
    path = search.probe({})
    assert path is not None
    return more, path


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
    problem: Problem, less: Sequence[int], limits: Callable[[int], Sequence[int | None]]
) -> tuple[int, Search] | None:
    """Find the smallest of all peaks, less an amount per device, with which some split fits.

    Returns:
        That number, and a search under its limits; None if no split fits.
    """
    levels, memory = Levels(problem), problem.memory
    assert memory is not None
    labels = memory.labels(problem.n_partitions)
    seen: dict[object, np.ndarray] = {}
    for j in range(problem.n_partitions):
        for mode in modes_to_try(problem, j):
            for amount in set(less) if problem.any_order else (less[j],):
                key = (labels[j], mode, amount)
                if key not in seen:
                    seen[key] = _distinct(levels.rows(j, mode)) - amount
    candidates = _distinct(list(seen.values()))

    def search(k: int) -> Search:
        return Search(Levels(problem, limits(int(candidates[k])), levels))

    def fits(k: int) -> bool:
        return search(k).probe({}) is not None

    if not len(candidates) or not fits(len(candidates) - 1):
        return None
    k = bisect_left(range(len(candidates) - 1), True, key=fits)
    return int(candidates[k]), search(k)


def _distinct(rows: Sequence[np.ndarray]) -> np.ndarray:
    """Put all numbers in order, each once.

    `numpy.unique` looks numbers up in a table first, which takes many times as long where nearly
    all are distinct.

    Example:
        >>> _distinct([np.array([3, 1]), np.array([2, 1])])
        array([1, 2, 3])
    """
    numbers = np.sort(np.concatenate(rows))
    is_new = np.ones(len(numbers), dtype=bool)
    np.not_equal(numbers[1:], numbers[:-1], out=is_new[1:])
    return numbers[is_new]
