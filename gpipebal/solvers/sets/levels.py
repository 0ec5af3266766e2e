"""Which device may run which partition, in order or in any order.

When partitions are filled from the left, all that matters about the devices is which are still
free. In a fixed order that is known. In any order, devices of one kind are interchangeable, so all
that matters is how many of each kind have been used: this is a state. Level ``k`` has the states in
which `k` devices are used; a step uses one more device, of some kind, and leads from a state to a
state of the next level.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from math import prod
from typing import NamedTuple

import numpy as np

from gpipebal.problem import Problem, Rules
from gpipebal.schedule import CheckpointMode
from gpipebal.solvers.sets.runs import Option, behind, modes_to_try, options_of, set_of

__all__ = ["MOST_STATES", "Levels", "Step", "count_states", "in_order_if_large"]


#: With more states of devices than this, no search over them is tried.
MOST_STATES = 5_000


class Step(NamedTuple):
    """The use of one more device, of some kind: from a state to a state of the next level."""

    state: int
    kind: int
    next_state: int
    group: int


class Levels:
    """A problem in the form that the solvers with sets use.

    Attributes:
        n_layers: Number of layers.
        n_partitions: Number of partitions.
        places: For each bound, the set of places where it may stand.
        steps: For each partition, the devices that may run it.
        kinds: For each kind of partition, the ways to run it, the fastest first.
        groups: For each group of equal devices, their indices.
        modes: Checkpoint modes that each partition may have, the fastest first.
        early: Whether the last partition is charged once for the recompute of its last
            micro-batch; see `gpipebal.solvers.sets.runs.options_of`.

    Args:
        problem: The problem.
        limits: Memory limit of each device, in place of the problem's; None for none.
        known: Levels of the same problem under other limits, whose peaks are taken over.
        stateless: With any order, offer every device for every partition, whichever are used: for
            solvers that count devices in another way.
        modes: See above; None: what the problem leaves open.
        early: See above.
    """

    def __init__(
        self,
        problem: Problem,
        limits: Sequence[int | None] | None = None,
        known: Levels | None = None,
        stateless: bool = False,
        modes: Sequence[tuple[CheckpointMode, ...]] | None = None,
        early: bool = False,
    ) -> None:
        self.problem = problem
        self.n_layers, self.n_partitions = problem.n_layers, problem.n_partitions
        self.limits = problem.limits if limits is None else tuple(limits)
        rules = problem.rules or Rules()
        self.places = rules.places(self.n_layers, self.n_partitions)
        self.kinds: list[list[Option]] = []
        partitions = range(self.n_partitions)
        self.modes = modes or [modes_to_try(problem, j) for j in partitions]
        self.early = early
        self._found: dict[object, int] = {}
        self._fitting: dict[object, list[int]] = {}
        self._rows: dict[object, list[np.ndarray]] = {} if known is None else known._rows
        self._anywhere = behind(self.n_layers, rules.lengths(self.n_layers))
        self.groups = _groups(problem, self.limits)
        if not problem.any_order:
            self.steps = self._in_order()
        else:
            self.steps = self._without_states() if stateless else self._any_order()

    def _in_order(self) -> list[list[Step]]:
        group_of = {device: g for g, devices in enumerate(self.groups) for device in devices}
        return [[Step(0, self._kind(j, j), 0, group_of[j])] for j in range(self.n_partitions)]

    def _without_states(self) -> list[list[Step]]:
        firsts = [group[0] for group in self.groups]
        return [
            [Step(0, self._kind(j, device), 0, g) for g, device in enumerate(firsts)]
            for j in range(self.n_partitions)
        ]

    def _any_order(self) -> list[list[Step]]:
        sizes = [len(group) for group in self.groups]
        states: list[dict[tuple[int, ...], int]] = [{} for _ in range(self.n_partitions + 1)]
        for used in product(*(range(size + 1) for size in sizes)):
            level = states[sum(used)]
            level[used] = len(level)
        steps: list[list[Step]] = []
        for j in range(self.n_partitions):
            here = []
            for used, state in states[j].items():
                for g, size in enumerate(sizes):
                    if used[g] < size:
                        more = (*used[:g], used[g] + 1, *used[g + 1 :])
                        kind = self._kind(j, self.groups[g][0])
                        here.append(Step(state, kind, states[j + 1][more], g))
            steps.append(here)
        return steps

    def _kind(self, partition: int, device: int) -> int:
        """Return the kind of a partition on a device, made if it is new."""
        problem = self.problem
        modes = self.modes[partition]
        limit = self.limits[device]
        early = self.early and partition == self.n_partitions - 1
        labels = (0,) * self.n_partitions
        if limit is not None and problem.memory is not None:
            labels = problem.memory.labels(self.n_partitions)
        device_type = problem.costs.type_of[device]
        key = (device_type, modes, limit, labels[partition], early)
        if key not in self._found:
            fits = [self._fits(partition, labels[partition], mode, limit) for mode in modes]
            useful = _useful(fits)
            modes, fits = tuple(modes[k] for k in useful), [fits[k] for k in useful]
            self._found[key] = len(self.kinds)
            self.kinds.append(options_of(problem, device_type, modes, fits, early))
        return self._found[key]

    def _fits(
        self, partition: int, label: int, mode: CheckpointMode, limit: int | None
    ) -> list[int]:
        if limit is None:
            return self._anywhere
        key = (label, mode, limit)
        if key not in self._fitting:
            self._fitting[key] = [
                (set_of(row <= limit) << (start + 1)) & self._anywhere[start]
                for start, row in enumerate(self.rows(partition, mode))
            ]
        return self._fitting[key]

    def rows(self, partition: int, mode: CheckpointMode) -> list[np.ndarray]:
        """Return the peaks of all runs, start by start; see `gpipebal.problem.Memory`."""
        memory = self.problem.memory
        assert memory is not None
        key = (memory.labels(self.n_partitions)[partition], mode)
        if key not in self._rows:
            self._rows[key] = [
                np.asarray(memory.rows(start, partition, mode)) for start in range(self.n_layers)
            ]
        return self._rows[key]

    def devices_of(self, groups: Sequence[int]) -> tuple[int, ...]:
        """Name a device for each partition, given their groups."""
        free = [iter(devices) for devices in self.groups]
        return tuple(next(free[group]) for group in groups)


def _useful(fits: Sequence[list[int]]) -> list[int]:
    """Return the modes that allow something which no faster mode does; the first in any case.

    Example:
        >>> _useful([[0b1], [0b1], [0b11]])
        [0, 2]
    """
    useful, allowed = [0], fits[0]
    for k, more in enumerate(fits[1:], 1):
        if any(new & ~old for new, old in zip(more, allowed, strict=True)):
            useful.append(k)
            allowed = [new | old for new, old in zip(more, allowed, strict=True)]
    return useful


def count_states(problem: Problem) -> int:
    """Count the states of all levels.

    Example:
        >>> from gpipebal.problem import Device
        >>> fast, slow = Device(), Device(slowness=2)
        >>> count_states(Problem([1] * 4, [1] * 4, [0] * 4, 3, devices=[fast, slow, fast]))
        4
        >>> devices = [fast, slow, fast]
        >>> count_states(
        ...     Problem([1] * 4, [1] * 4, [0] * 4, 3, devices=devices, any_order=True)
        ... )
        6
    """
    if not problem.any_order:
        return problem.n_partitions + 1
    return prod(len(group) + 1 for group in _groups(problem, problem.limits))


def in_order_if_large(problem: Problem) -> Problem:
    """Keep the given order of devices of too many kinds: what fits in it fits in any order too."""
    return replace(problem, any_order=False) if count_states(problem) > MOST_STATES else problem


def _groups(problem: Problem, limits: Sequence[int | None]) -> list[list[int]]:
    """Put equal devices together."""
    groups: dict[object, list[int]] = {}
    for device, (kind, limit) in enumerate(zip(problem.costs.type_of, limits, strict=True)):
        groups.setdefault((kind, limit), []).append(device)
    return list(groups.values())
