"""The runs of layers that plans can have whose value is below a goal.

A run that by itself needs too much memory, or takes too long, is in no such plan. Nor is one from
which no others lead on to the end of the chain. How far the ones that are left reach tells how many
partitions there are at the least between two layers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from math import ceil
from operator import and_, or_

import numpy as np

from gpipebal.planner.posing import Posed
from gpipebal.planner.schedules.lower_bound import Relaxed
from gpipebal.planner.search.lower_bounds import parts_of_bound
from gpipebal.problem import Rules
from gpipebal.schedule import CHECKPOINT_MODES, CheckpointMode, modes_of
from gpipebal.solvers.sets.runs import behind, options_of, set_of

__all__ = ["LeftRuns", "units_below"]


class LeftRuns:
    """The runs that are left, as sets of ends.

    Attributes:
        ends: For each partition, by mode and first layer, the set of ends.

    Args:
        posed: The question, with memory.
        order: Device of each partition, as an index into the question's.
        goal: What the value of plans has to be below.
        relaxed: What runs cost at the least under the schedule, by their modes; None: the schedule
            is GPipe's, or its time is not what is minimised.
        most: The most that this may be.
        known: What is known of runs that fit, with `relaxed`: the same for all goals.

    Complexity:
        O(n^2 / 64) for n layers, for each mode and partition; where runs have costs under the
        schedule, O(n log n) more.
    """

    def __init__(
        self,
        posed: Posed,
        order: Sequence[int],
        goal: float,
        relaxed: Mapping[CheckpointMode, Relaxed] | None = None,
        most: int = 0,
        known: dict[object, list[int]] | None = None,
    ) -> None:
        self._question, self._problem, self._goal = posed.question, posed.problem, goal
        problem, question, memory = posed.problem, posed.question, posed.problem.memory
        assert memory is not None
        self._memory, self._n_layers = memory, problem.n_layers
        n, rules = problem.n_partitions, problem.rules or Rules()
        places = rules.places(self._n_layers, n)
        self._anywhere = behind(self._n_layers, rules.lengths(self._n_layers))
        given = None if question.checkpoint == "auto" else modes_of(question.checkpoint, n)
        self.ends: list[dict[CheckpointMode, list[int]]] = []
        #: For each partition and first layer, the furthest end; and that of all layers up to it.
        self._far: list[list[int]] = []
        self._reach: list[list[int]] = []
        known = {} if known is None else known
        labels, alive = memory.labels(n), 1 << self._n_layers
        for j in reversed(range(n)):
            sets, device = {}, order[j]
            for mode in CHECKPOINT_MODES if given is None else (given[j],):
                kind = labels[j], mode, problem.costs.type_of[device], problem.limits[device]
                if kind not in known:
                    known[kind] = self._in_time(self._that_fit(j, mode, device), mode, device)
                # Only runs that begin at a place for a cut, and that others lead on from.
                left = [
                    ends & alive if places[j] >> first & 1 else 0
                    for first, ends in enumerate(known[kind])
                ]
                if relaxed is not None:
                    for first, ends in enumerate(left):
                        if ends:
                            end = relaxed[mode].furthest(j, first, ends.bit_length() - 1, most)
                            left[first] = ends & ((2 << end) - 1)
                sets[mode] = left
            far = [max(of_modes).bit_length() - 1 for of_modes in zip(*sets.values(), strict=True)]
            alive = sum(1 << first for first, end in enumerate(far) if end > 0)
            self.ends.insert(0, sets)
            self._far.insert(0, far)
            self._reach.insert(0, list(accumulate(far, max)))

    def _that_fit(self, j: int, mode: CheckpointMode, device: int) -> list[int]:
        """Return the ends of runs that need no more memory than they may, by their first layer."""
        limit = self._problem.limits[device]
        if self._question.minimised == "peak_memory":
            below = ceil(self._goal) - 1
            limit = below if limit is None else min(limit, below)
        if limit is None:
            return self._anywhere
        rows = (np.asarray(self._memory.rows(k, j, mode)) for k in range(self._n_layers))
        return [
            (set_of(row <= limit) << (first + 1)) & self._anywhere[first]
            for first, row in enumerate(rows)
        ]

    def _in_time(self, fits: list[int], mode: CheckpointMode, device: int) -> list[int]:
        """Return those of them that do not take too long by themselves, by bottleneck or GPipe."""
        question, problem = self._question, self._problem
        is_gpipe, is_makespan = question.schedule == "gpipe", question.minimised == "makespan"
        if question.minimised == "peak_memory" or (
            is_makespan and (not is_gpipe or problem.chunks == 1)
        ):
            return fits
        units = units_below(problem.scale, self._goal)
        once, (forward, backward) = parts_of_bound(problem)
        both = (units - once) // max(1, problem.chunks - 1)
        # Which recomputes count depends on the schedule.
        counted: CheckpointMode = mode if is_gpipe else "never"
        kept, starts = [0] * self._n_layers, [range(self._n_layers)]
        for way in options_of(problem, problem.costs.type_of[device], [counted], [fits]):
            limits = [(way.load, units)]
            if is_makespan:
                limits = [(way.forward, both - backward), (way.backward_phase, both - forward)]
            ends = way.fits
            for cost, most in limits:
                ends = list(map(and_, ends, cost.within(most, starts)[0]))
            kept = list(map(or_, kept, ends))
        return kept

    def leads_on(self, bounds: Sequence[int]) -> bool:
        """Tell whether any way that is left may have these first bounds, by the last of them."""
        j = len(bounds) - 1
        return j == len(self.ends) or self._far[j][bounds[-1]] > 0

    def after(self, bounds: Sequence[int]) -> tuple[int, ...]:
        """Return how far each later partition reaches at most, if these are the first bounds."""
        ends: list[int] = []
        for j in range(len(bounds) - 1, len(self.ends)):
            ends.append(self._reach[j][ends[-1]] if ends else self._far[j][bounds[-1]])
        return tuple(ends)


def units_below(scale: int, goal: float) -> int:
    """Return the largest whole number of a problem's units that is below a goal in its unit.

    Example:
        >>> units_below(4, 1.5), units_below(4, 1.6)
        (5, 6)
    """
    top, below = goal.as_integer_ratio()
    return -(-top * scale // below) - 1
