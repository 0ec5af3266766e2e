"""Exact search over splits when longer runs may be allowed where shorter ones are not.

Filling partitions as far as a limit allows is wrong as soon as a longer first partition can spoil
the second: memory that depends on where a partition begins, copies at cuts, devices of different
speed. What stays true is that only the place of a cut matters for what follows. So a probe does
not walk one path, it works out for every cut all places from which the end of the chain can be
reached. The places worth looking at are few: how far partitions can extend at most, from the left
and from the right, leaves a window for each cut.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import accumulate
from operator import and_, or_
from typing import NamedTuple, TypeAlias

from gpipebal.problem.costs import least_sums
from gpipebal.schedule import CheckpointMode
from gpipebal.solvers.bisection import floor, smallest_limit
from gpipebal.solvers.deadline import NO_DEADLINE, Deadline
from gpipebal.solvers.sets.levels import Levels, Step
from gpipebal.solvers.sets.runs import Cost, Option

__all__ = ["BestPath", "Found", "Path", "Search", "TimeIsUpError", "Windows"]

#: The first and the last place of each bound.
Windows: TypeAlias = Sequence[tuple[int, int]]


class Path(NamedTuple):
    """A split, the device of each partition, and how each partition is run."""

    bounds: tuple[int, ...]
    order: tuple[int, ...]
    options: tuple[Option, ...]

    @property
    def runs(self) -> Iterator[tuple[Option, int, int]]:
        """How each partition is run, its first layer, and the layer after its last."""
        return zip(self.options, self.bounds, self.bounds[1:], strict=False)

    @property
    def modes(self) -> tuple[CheckpointMode, ...]:
        """Checkpoint mode of each partition."""
        return tuple(option.mode for option in self.options)

    def most(self, dimension: str) -> int:
        """Return the largest cost of a partition in a dimension."""
        return max(getattr(option, dimension).of(start, end) for option, start, end in self.runs)


class BestPath(NamedTuple):
    """The best value found, the proven bound below it, and the split; equal if the search ended."""

    value: int
    lower_bound: int
    path: Path


class Found(NamedTuple):
    """The smallest limit, the proven bound below it, and a path; without one, only the bound."""

    value: int
    lower_bound: int
    path: Path | None


class TimeIsUpError(Exception):
    """A search has found nothing yet, and has no time left."""


class Search:
    """Finds splits that keep limits, and the smallest limits that some split keeps.

    Complexity:
        A probe takes O(w log N + w N / 64) steps for N layers and windows of w places in all, which
        are N at most where limits are close to the smallest; and O(K log N) for K partitions. Sets
        and hulls of all runs are made once, in O(N log N + N N / 64).

    Source:
        Own. Pinar, Tabak and Aykanat, "One-dimensional partitioning for heterogeneous systems:
        theory and practice", JPDC 68(11), 2008, has probes for devices of different speed, which
        suffice where partitions may be empty and nothing else is limited.

    Example:
        >>> from gpipebal.problem import Device, Problem
        >>> devices = [Device(), Device(slowness=10), Device()]
        >>> problem = Problem([1, 1, 100, 1], [0] * 4, [0] * 4, 3, devices=devices)
        >>> found = Search(Levels(problem)).smallest("load")
        >>> found.value, found.path.bounds
        (101, (0, 1, 2, 4))
    """

    def __init__(self, levels: Levels) -> None:
        self.levels = levels
        self._kinds_of = [sorted({step.kind for step in steps}) for steps in levels.steps]
        self.used = sorted({kind for kinds in self._kinds_of for kind in kinds})
        self._least: dict[str, int] = {}
        #: Searches are given up when it is up.
        self.deadline = NO_DEADLINE

    def check_time(self) -> None:
        """Give up if time is up.

        Raises:
            TimeIsUpError: it is.
        """
        if self.deadline.is_up:
            raise TimeIsUpError

    def windows(self, limits: Mapping[str, int]) -> Windows | None:
        """Return the first and last place that each bound may have; None if there is no split.

        A split that keeps all limits has its bounds there, but not every place is on a split.
        """
        n_layers, n_partitions = self.levels.n_layers, self.levels.n_partitions
        last = [0]
        for k, kinds in enumerate(self._kinds_of, 1):  # k: bound
            furthest = max([self._last_end(kind, last[-1], limits) for kind in kinds])
            place = min(furthest, n_layers - n_partitions + k)
            if place < k:
                return None
            last.append(place)
        if last[-1] < n_layers:
            return None
        first = [n_layers]
        for k in range(n_partitions - 1, -1, -1):
            nearest = [self._first_start(kind, first[-1], limits) for kind in self._kinds_of[k]]
            first.append(max(min(nearest), k))
        first.reverse()
        if first[0] > 0 or any(one > two for one, two in zip(first, last, strict=True)):
            return None
        return list(zip(first, last, strict=True))

    def _last_end(self, kind: int, start: int, limits: Mapping[str, int]) -> int:
        """Bound the last end of runs from this start or an earlier one."""
        ends = []
        for option, hull in self._hulls[kind]:
            within = [getattr(option, d).last_end(start, limit) for d, limit in limits.items()]
            ends.append(min(hull[start] - 1, *within) if within else hull[start] - 1)
        return max(ends)

    def _first_start(self, kind: int, end: int, limits: Mapping[str, int]) -> int:
        """Bound the first start of runs to this end or a later one."""
        starts = []
        for option, hull in self._hulls[kind]:
            within = [getattr(option, d).first_start(end, limit) for d, limit in limits.items()]
            starts.append(max([bisect_left(hull, end + 1), *within]))
        return min(starts)

    @cached_property
    def _hulls(self) -> dict[int, list[tuple[Option, list[int]]]]:
        """Each option with one more than the last end that fits from each start or before."""
        return {
            kind: [
                (option, list(accumulate(map(int.bit_length, option.fits), max)))
                for option in self.levels.kinds[kind]
            ]
            for kind in self.used
        }

    def starts(self, windows: Windows) -> dict[int, tuple[range, ...]]:
        """Return, for each kind, where partitions of that kind may begin: ranges, left to right."""
        merged: dict[int, list[range]] = {kind: [] for kind in self.used}
        for kinds, (first, last) in zip(self._kinds_of, windows, strict=False):
            stop = min(last + 1, self.levels.n_layers)
            for kind in kinds:
                ranges = merged[kind]
                if ranges and first <= ranges[-1].stop:
                    ranges[-1] = range(ranges[-1].start, stop)
                else:
                    ranges.append(range(first, stop))
        return {kind: tuple(ranges) for kind, ranges in merged.items()}

    def reachable(
        self, limits: Mapping[str, int]
    ) -> tuple[dict[int, list[int]], list[dict[int, int]]] | None:
        """Work out where partitions within all limits can end, and from where the end is reached.

        Returns:
            For each kind and start, the set of ends that some option allows, of starts that a split
            can have; and for each bound and state, the set of places from which the end of the
            chain is reached. None if there is no split.
        """
        windows = self.windows(limits)
        if windows is None:
            return None
        allowed = self._allowed(limits, windows)
        reached = self._backward_sets(allowed, windows)
        return None if reached is None else (allowed, reached)

    def _allowed(self, limits: Mapping[str, int], windows: Windows) -> dict[int, list[int]]:
        """Return, for each kind and start, the set of ends that some option allows.

        Starts that are in no window have none.
        """
        sets = {}
        for kind, starts in self.starts(windows).items():
            ends = [0] * self.levels.n_layers
            for option in self.levels.kinds[kind]:
                within = [getattr(option, d).within(limit, starts) for d, limit in limits.items()]
                for some, *columns in zip(starts, *within, strict=True):
                    found = option.fits[some.start : some.stop]
                    for column in columns:
                        found = list(map(and_, found, column))
                    joined = map(or_, ends[some.start : some.stop], found)
                    ends[some.start : some.stop] = joined
            sets[kind] = ends
        return sets

    def _backward_sets(
        self, allowed: Mapping[int, Sequence[int]], windows: Windows
    ) -> list[dict[int, int]] | None:
        """Return, for each bound and state, the set of places from which the end is reached.

        None if that is impossible from the start of the chain.
        """
        levels = self.levels
        reached: list[dict[int, int]] = [{0: levels.places[-1]}]
        for k in range(levels.n_partitions - 1, -1, -1):  # k: partition
            self.check_time()
            behind, here = reached[-1], dict[int, int]()
            first, last = windows[k]
            for state, kind, next_state, _ in levels.steps[k]:
                target = behind.get(next_state)
                if target:
                    ends = allowed[kind]
                    found = "".join(
                        ["1" if ends[i] & target else "0" for i in range(last, first - 1, -1)]
                    )
                    places = (int(found, 2) << first) & levels.places[k]
                    if places:
                        here[state] = here.get(state, 0) | places
            if not here:
                return None
            reached.append(here)
        reached.reverse()
        return reached

    def probe(self, limits: Mapping[str, int]) -> Path | None:
        """Find the split with the leftmost cuts that keeps all limits; None if there is none."""
        found = self.reachable(limits)
        if found is None:
            return None
        allowed, reached = found
        bounds, steps, state = [0], list[Step](), 0
        for k, choices in enumerate(self.levels.steps):
            best: tuple[int, Step] | None = None
            for step in choices:
                ends = 0
                if step.state == state:
                    ends = allowed[step.kind][bounds[-1]] & reached[k + 1].get(step.next_state, 0)
                if ends:
                    end = (ends & -ends).bit_length() - 1
                    if best is None or end < best[0]:
                        best = end, step
            assert best is not None
            bounds.append(best[0])
            steps.append(best[1])
            state = best[1].next_state
        return self.path(bounds, steps, limits)

    def follow(
        self,
        choices: Sequence[Mapping[tuple[int, int], tuple[int, Step]]],
        limits: Mapping[str, int],
    ) -> Path:
        """Walk through tables from the left: for each partition, by state and start, what is next.

        Args:
            choices: The end of the partition and the step that runs it; the last partition's first,
                as tables are filled.
            limits: What every partition keeps.
        """
        bounds, steps, state = [0], list[Step](), 0
        for chosen in reversed(choices):
            end, step = chosen[state, bounds[-1]]
            bounds.append(end)
            steps.append(step)
            state = step.next_state
        return self.path(bounds, steps, limits)

    def path(self, bounds: Sequence[int], steps: Sequence[Step], limits: Mapping[str, int]) -> Path:
        """Choose the fastest way to run each partition that keeps all limits."""
        options = []
        for step, start, end in zip(steps, bounds, bounds[1:], strict=False):
            options.append(
                next(
                    option
                    for option in self.levels.kinds[step.kind]
                    if option.fits[start] >> end & 1
                    and all(getattr(option, d).of(start, end) <= n for d, n in limits.items())
                )
            )
        order = self.levels.devices_of([step.group for step in steps])
        return Path(tuple(bounds), order, tuple(options))

    def least(self, dimension: str) -> int:
        """Bound the smallest limit from below: by what it is if every run of layers is allowed."""
        if dimension not in self._least:
            costs = [
                getattr(option, dimension)
                for kind in self.used
                for option in self.levels.kinds[kind]
            ]
            sums = least_sums([cost.layers for cost in costs])
            n_partitions = self.levels.n_partitions
            self._least[dimension] = smallest_limit(
                sums, sums, n_partitions, at_least=floor(sums, n_partitions)
            ).value
        return self._least[dimension]

    def smallest(
        self,
        dimension: str,
        limits: Mapping[str, int] | None = None,
        *,
        at_least: int | None = None,
        at_most: int | None = None,
        deadline: Deadline = NO_DEADLINE,
    ) -> Found:
        """Find the smallest limit in a dimension that some split keeps along with other limits.

        Args:
            dimension: What is limited: ``'forward'``, ``'backward_phase'`` or ``'load'``.
            limits: Limits in other dimensions.
            at_least: A known lower bound; None: none.
            at_most: Give up as soon as the smallest limit is proven to exceed this.
            deadline: When any split will do.

        Returns:
            The value (equal to its lower bound, unless the deadline is up) and the leftmost split
            found with it; or no split, if every one exceeds `at_most`, or none keeps `limits`.

        Complexity:
            About log2(N) probes and some more; see `Search`.
        """
        others = dict(limits or {})
        costs: list[tuple[int, Cost]] = [
            (kind, getattr(option, dimension))
            for kind in self.used
            for option in self.levels.kinds[kind]
        ]
        lower = max(self.least(dimension), 0 if at_least is None else at_least)
        most = max(cost.of(0, self.levels.n_layers) for _, cost in costs)
        most = max([most, *(max(cost.ends) - min(cost.starts) for _, cost in costs)])
        most = max([most, *(max(cost.floor) for _, cost in costs if cost.floor is not None)])
        highest = most if at_most is None else min(at_most, most)
        upper: int | None = None
        best = None
        trial, step = lower, max(lower // (4 * self.levels.n_partitions), 1)
        # Only what begins in these windows can be in a split with a smaller limit than the best.
        windows = self.windows({**others, dimension: highest})
        while windows is not None and lower <= highest and (upper is None or lower < upper):
            if deadline.is_up:
                if upper is not None:
                    break
                trial = highest
            path = self.probe({**others, dimension: trial})
            if path is not None:
                best, upper = path, path.most(dimension)
                windows = self.windows({**others, dimension: upper - 1})
            else:
                starts = self.starts(windows)
                higher = [cost.above(trial, starts[kind]) for kind, cost in costs]
                lower = min([cost for cost in higher if cost is not None], default=highest + 1)
                # Beyond that, runs from elsewhere may be in a split too.
                lower = min(lower, highest + 1)
            if upper is None:
                trial = min(max(lower, trial + step), max(highest, lower))
                step *= 4
            else:
                trial = (lower + upper) // 2
        if windows is None:
            lower = max(lower, highest + 1) if upper is None else upper
        if best is None or upper is None:
            return Found(lower, lower, None)
        return Found(upper, min(lower, upper), best)
