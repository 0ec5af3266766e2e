"""A way to run a chain made better, one change after the other.

Solvers know the least that waits in a partition for others, or the most; what really waits depends
on all cuts, and only a whole plan tells it. So what a solver finds is where the search for a plan
begins: cuts are moved, modes changed, and devices exchanged, as long as that helps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise, product
from typing import NamedTuple

from gpipebal.plan import Plan
from gpipebal.planner.execution import Way
from gpipebal.planner.plans import plan_of_split, value_of
from gpipebal.planner.posing import Posed
from gpipebal.planner.search.row_peaks import RowPeaks
from gpipebal.problem import Rules
from gpipebal.schedule import CHECKPOINT_MODES
from gpipebal.solvers.deadline import NO_DEADLINE, Deadline

__all__ = ["Descent", "Found", "Standing"]

#: How many changes of a way are tried, those first that may be best, before it is left as it is.
_MOST_TRIED = 100
#: How many walks through a partition's row of the schedule answer a question, ...
_MOST_WALKS = 2_000
#: ... where a bound takes as long as this part of a walk, ...
_BOUND = 1 / 50
#: ... and a layer of a run that has not been walked through before as long as this.
_LAYER = 1 / 40
#: Costs of runs that are remembered, where they are the caller's own.
_MOST_COSTS = 2**16


class Standing(NamedTuple):
    """How good a way is: the less the better, entry by entry.

    Attributes:
        over: How many bytes partitions are above their limits, or below, the highest first; empty
            if none is above.
        value: What is minimised, in the unit of the plan's value.
        peaks: The peaks of all partitions in bytes, the highest first, if the highest is minimised.
    """

    over: tuple[int, ...]
    value: float
    peaks: tuple[int, ...]

    @property
    def fits(self) -> bool:
        """Whether all partitions keep their limits."""
        return not self.over


class Found(NamedTuple):
    """A way, and how good it is."""

    standing: Standing
    way: Way


class Descent:
    """Changes of ways that answer a question.

    Args:
        posed: The question.
        rows: What is known about the memory of partitions; None: nothing.
    """

    def __init__(self, posed: Posed, rows: RowPeaks | None = None) -> None:
        question = posed.question
        if question.cost is not None:
            # The caller's own cost may take long, and changes have most of their runs in common.
            question = replace(question, cost=lru_cache(_MOST_COSTS)(question.cost))
            posed = replace(posed, question=question)
        self._posed, self._question = posed, question
        self._is_peak = posed.question.minimised == "peak_memory"
        self._rows = RowPeaks(posed) if rows is None else rows
        self._walked: set[tuple[int, int]] = set()
        self._walks_left = float(_MOST_WALKS)

    def from_here(self, way: Way, deadline: Deadline, *, same_cuts: bool = False) -> Found | None:
        """Change a way as long as it gets better.

        Args:
            way: Where to begin.
            deadline: When it is up, a way that fits is good enough.
            same_cuts: Whether cuts stay where they are.

        Returns:
            A way that no single change makes better, as far as changes were tried; None if `way`
            is not allowed.

        Complexity:
            For each step up to `_MOST_TRIED` walks through the schedule, and a bound for all
            changes: as many as there are layers, and some for each partition. For all ways of a
            question together about `_MOST_WALKS` walks.
        """
        standing = self._standing(way, self._peaks(way))
        if standing is None:
            return None
        found: Found | None = Found(standing, way)
        while found is not None:
            best = found
            found = self._better(best, deadline, same_cuts)
        return best

    def with_better_modes(self, plan: Plan) -> Plan:
        """Change modes, or the order of devices, where they are open, as long as that helps.

        Returns:
            A plan with the same cuts, bound and notes that fits, if one is found; else `plan`.

        Complexity:
            That of `from_here`, for each plan anew: each is asked about its own cuts.
        """
        if not self._posed.is_open:
            return plan
        self._walks_left = float(_MOST_WALKS)
        way = Way.of(plan)
        found = self.from_here(way, NO_DEADLINE, same_cuts=True)
        if found is None or found.way is way or not found.standing.fits:
            return plan
        value = found.standing.value
        bound = min(plan.lower_bound, value)
        split = found.way.split(value, bound, plan.method)
        return replace(plan_of_split(self._posed, split).with_bound(bound), notes=plan.notes)

    def _better(self, now: Found, deadline: Deadline, same_cuts: bool) -> Found | None:
        """Find a change that makes a way better, the most promising first."""
        fits, least = now.standing.fits, list[tuple[Standing, Way]]()
        for way in self._changed(now.way, same_cuts):
            self._walks_left -= _BOUND * len(way.modes)
            if self._walks_left < 0 or (fits and deadline.is_up):
                return None
            bound = self._bound(way, now.standing)
            if bound is not None and bound < now.standing:
                least.append((bound, way))
        for _, way in sorted(least, key=lambda one: one[0])[:_MOST_TRIED]:
            if (fits and deadline.is_up) or self._walks_left < 0:
                break
            if fits and not self._is_peak:
                # Quicker to know than its memory.
                self._walks_left -= len(way.modes) if self._question.is_searched else 0
                value = value_of(self._posed, way)
                if value is None or value >= now.standing.value:
                    continue
            standing = self._standing(way, self._peaks(way))
            if standing is not None and standing < now.standing:
                return Found(standing, way)
        return None

    def _bound(self, way: Way, now: Standing) -> Standing | None:
        """Bound the standing of a way by the least that waits in it; None if it is worse."""
        memory = self._posed.problem.memory
        least: list[int] = []
        if memory is not None:
            runs = enumerate(zip(pairwise(way.bounds), way.modes, strict=True))
            least = [int(memory.rows(a, j, mode)[b - a - 1]) for j, ((a, b), mode) in runs]
        over = self._over(way, least)
        if over > now.over:
            return None
        if over and not self._is_peak:
            return Standing(over, 0.0, ())
        if self._question.is_searched and not self._is_peak:
            return Standing(over, self._least_makespan(way), ())
        return self._standing(way, least)

    def _least_makespan(self, way: Way) -> float:
        """Bound the makespan under any schedule: a partition begins after those before it."""
        problem = self._posed.problem
        before = most = 0
        for part in problem.costs.parts(way.bounds, self._posed.counted(way.modes), way.order):
            work = problem.chunks * (part.forward + part.backward)
            most = max(most, before + work + (problem.chunks - 1) * part.recompute)
            before += part.forward
        return problem.to_time(most)

    def _standing(self, way: Way, peaks: Sequence[int]) -> Standing | None:
        """Tell how good a way is with these peaks; None if it is not allowed."""
        if self._is_peak:
            in_order = tuple(sorted(peaks, reverse=True))
            return Standing(self._over(way, peaks), float(in_order[0]), in_order)
        value = value_of(self._posed, way)
        return None if value is None else Standing(self._over(way, peaks), value, ())

    def _over(self, way: Way, peaks: Sequence[int]) -> tuple[int, ...]:
        """Return how far partitions with these peaks are above their limits; see `Standing`."""
        if not self._posed.problem.is_limited:
            return ()
        limits = [self._posed.problem.limits[k] for k in way.order]
        over = [peak - most for peak, most in zip(peaks, limits, strict=True) if most is not None]
        return tuple(sorted(over, reverse=True)) if max(over) > 0 else ()

    def _peaks(self, way: Way) -> list[int]:
        """Return the peak memory of every partition; nothing if nobody asks for it."""
        if self._posed.problem.memory is None:
            return []
        self._walks_left -= len(way.modes)
        for run in pairwise(way.bounds):
            if run not in self._walked:
                self._walked.add(run)
                self._walks_left -= _LAYER * (run[1] - run[0])
        return [self._rows.peak(j, way.bounds, way.modes) for j in range(len(way.modes))]

    def _changed(self, way: Way, same_cuts: bool) -> Iterator[Way]:
        """Yield the ways that differ by one change.

        A cut is somewhere else between its neighbours; two neighbouring cuts are one layer from
        where they were; a partition has another mode; or two neighbours exchange their devices.
        """
        bounds, modes, order = tuple(way.bounds), tuple(way.modes), tuple(way.order)
        rules, n = self._posed.problem.rules or Rules(), len(modes)
        for moved in () if same_cuts else _moved(bounds):
            if rules.keeps(moved):
                yield Way(moved, modes, order)
        if self._question.checkpoint == "auto":
            for j, mode in product(range(n), CHECKPOINT_MODES):
                if mode != modes[j]:
                    yield Way(bounds, (*modes[:j], mode, *modes[j + 1 :]), order)
        devices = self._posed.problem.devices
        if self._question.any_order and devices is not None:
            for j, (one, two) in enumerate(pairwise(order)):
                if devices[one] != devices[two]:
                    yield Way(bounds, modes, (*order[:j], two, one, *order[j + 2 :]))


def _moved(bounds: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Yield splits with one cut anywhere else, or two neighbouring ones a layer away.

    Example:
        >>> list(_moved((0, 1, 3, 4)))
        [(0, 2, 3, 4), (0, 1, 2, 4)]
    """
    for k in range(1, len(bounds) - 1):  # k: cut
        for cut in range(bounds[k - 1] + 1, bounds[k + 1]):
            if cut != bounds[k]:
                yield (*bounds[:k], cut, *bounds[k + 1 :])
    for k in range(1, len(bounds) - 2):
        for one, two in product((-1, 1), repeat=2):
            moved = (*bounds[:k], bounds[k] + one, bounds[k + 1] + two, *bounds[k + 2 :])
            if all(a < b for a, b in pairwise(moved[k - 1 : k + 3])):
                yield moved
