"""The best plan of a pipeline with several replicas: its makespan, and adding up gradients.

A partition adds up its gradients with those of the same partition of the other replicas as soon as
its own last backward is done, while earlier partitions still work. So the mini-batch ends with the
latest of these additions, which need not be that of the first partition, though that one works
longest. `best_replicated` minimises that time over all splits::

    time = max(end of j's last backward + time to add up j's gradients, over partitions j)

Where there are few ways to cut a chain, all are looked at. Where there are many: the first
partition's last backward ends with the makespan, and then its gradients are added up. So all splits
whose first partition ends at the same layer have a common bound: their least makespan, plus that
addition. The group with the least bound is searched first, split by split in the order of their
makespans, until no group's bound is below the best time that was found. Where adding up takes long,
another bound counts: over all splits, the least value of the largest sum of a partition's addition
and the earliest end that a partition which begins at its first layer can have.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import NamedTuple

from gpipebal.errors import BalanceError
from gpipebal.plan import Plan
from gpipebal.planner.execution import Way
from gpipebal.planner.plans import fits, plan_of_split
from gpipebal.planner.posing import Posed
from gpipebal.planner.search.all_ways import all_ways
from gpipebal.planner.search.descent import Descent
from gpipebal.problem import Link, Problem, Rules, to_bounds
from gpipebal.profile import Profile
from gpipebal.schedule import CheckpointMode
from gpipebal.solvers import Split, iter_best_splits, split_any_cost

__all__ = ["Additions", "Replicated", "all_reduce_time", "best_replicated", "last_ends"]

#: Up to this many ways to run a replica all are looked at; and how many of them at most are
#: assembled to see whether they fit.
_MOST_WAYS, _MOST_ASSEMBLED = 5_000, 200
#: Runs of layers, for each partition, up to which the bound by additions is worked out.
_MOST_RUNS = 2 * 10**6
#: What the rounding of a few sums may make of a bound, as a fraction.
_ROUNDING = 1e-12


def all_reduce_time(n_bytes: int, replicas: int, link: Link | None) -> float:
    """Predict how long replicas take to add up gradients in a ring.

    Every replica sends and receives ``2 (d - 1)`` times one d-th of the bytes: first to add up the
    parts, then to pass the sums round.

    Example:
        >>> all_reduce_time(400, 4, Link(bandwidth=100.0, latency=0.5))
        9.0
    """
    if replicas == 1 or link is None or not n_bytes:
        return 0.0
    steps = 2 * (replicas - 1)
    return steps * (link.latency + n_bytes / replicas / link.bandwidth)


class Additions:
    """How long adding up the gradients of a run of layers takes.

    The gradient of a tied parameter is added up in the partition of the parameter's first layer:
    the other partitions of the pipeline have sent theirs there by then.

    Args:
        profile: Costs of the layers.
        replicas: How many pipelines there are.
        link: What connects the same partition of different replicas; None: it takes no time.
    """

    def __init__(self, profile: Profile, replicas: int, link: Link | None) -> None:
        sizes = [layer.gradient_bytes for layer in profile.layers]
        for tie in profile.ties:
            for layer in tie.layers[1:]:
                sizes[layer] -= tie.gradient_bytes
        self._sums = list(accumulate(sizes, initial=0))
        self._replicas, self._link = replicas, link

    def of_run(self, start: int, end: int) -> float:
        """Return the seconds for the layers from `start` to ``end - 1``."""
        return all_reduce_time(self._sums[end] - self._sums[start], self._replicas, self._link)

    def of(self, bounds: Sequence[int]) -> list[float]:
        """Return the seconds for every partition of a split."""
        return [self.of_run(start, end) for start, end in pairwise(bounds)]


class Replicated(NamedTuple):
    """The best plan that was found for one replica.

    Attributes:
        plan: The plan.
        time: Seconds until all gradients are added up.
        lower_bound: No plan takes less.
        additions: Seconds of adding up, for each partition.
    """

    plan: Plan
    time: float
    lower_bound: float
    additions: Sequence[float]


def last_ends(
    problem: Problem, bounds: Sequence[int], modes: Sequence[CheckpointMode], order: Sequence[int]
) -> list[float]:
    """Return when the last backward of each partition ends under GPipe.

    The first of them is the makespan: see `Problem.makespan` for the formula.

    Complexity:
        O(K) for K partitions; O(K**2) where every micro-batch is recomputed.

    Example:
        >>> problem = Problem([1, 1], [2, 1], [0, 0], 2, chunks=3, checkpoint="never")
        >>> last_ends(problem, (0, 1, 2), ["never"] * 2, (0, 1))
        [11, 7]
    """
    costs, repeats = problem.costs, problem.chunks - 1
    parts = costs.parts(bounds, modes, order)
    there, back = costs.send, costs.give_back
    # Where copies keep devices busy, the copy of a gradient is part of the backward, its last part.
    copied = [0 if costs.overlaps else back[start] for start in bounds]
    if not costs.overlaps:
        there = back = (0,) * len(there)
    ends, last = [0] * len(parts), len(parts) - 1
    once = slowest = 0
    for k, part in enumerate(parts):
        once += there[bounds[k]] + part.forward
        slowest = max(slowest, there[bounds[k]], part.forward)
        # A path that turns around later takes no less, except by a recompute that it leaves out.
        if k < last and not part.last_recompute:
            continue
        # The path that turns around in partition k, back to it and to those before it.
        way, again = once + part.last_recompute + repeats * slowest, 0
        for j in range(k, -1, -1):
            way += parts[j].backward
            again = max(again, parts[j].backward + parts[j].recompute)
            ends[j] = max(ends[j], way + repeats * again - copied[j])
            way += back[bounds[j]]
            again = max(again, back[bounds[j]])
    return [problem.to_time(end) for end in ends]


def best_replicated(
    posed: Posed, plan: Plan, additions: Additions, most_tried: int, known: float = math.inf
) -> Replicated:
    """Find the plan of one replica with which all gradients are added up earliest.

    Args:
        posed: The question that a replica's plan answers, for its makespan under GPipe.
        plan: The plan with the least makespan that is known.
        additions: How long adding up takes.
        most_tried: Most splits that are looked at.
        known: A time that another plan has: only plans that take less are of interest.

    Returns:
        The best plan that was found, and a bound that holds for all: below the least time that is
        known if not all splits that could be better were looked at.

    Complexity:
        Up to K solves for each split that is looked at and K partitions.
    """
    return _BestReplica(posed, plan, additions, known).answer(most_tried)


class _BestReplica:
    """One search; see `best_replicated`."""

    def __init__(self, posed: Posed, plan: Plan, additions: Additions, known: float) -> None:
        self._posed, self._first, self._additions = posed, plan, additions
        self._descent = Descent(posed)
        self._known = known
        self._order = tuple(range(posed.problem.n_partitions))  # devices are alike
        self._plan, self._time = plan, self._time_of(to_bounds(plan.balance), plan.modes)
        # The least bound of splits that cannot be looked at any further.
        self._left_out = math.inf

    def answer(self, most_tried: int) -> Replicated:
        """Move cuts as long as that helps; then search the groups, the most promising first."""
        self._descend()
        heap = [(bound, end, self._splits(end)) for bound, end in self._groups()]
        heapq.heapify(heap)
        proven, n_tried = -math.inf, 0
        if heap[0][0] < min(self._time, self._known) and most_tried:
            ways = all_ways(self._posed, _MOST_WAYS)
            proven = self._bound_by_additions() if ways is None else self._best_of_all(ways)
        while (
            heap and max(proven, heap[0][0]) < min(self._time, self._known) and n_tried < most_tried
        ):
            bound, end, splits = heapq.heappop(heap)
            n_tried += 1
            found = next(splits, None)
            if found is None:
                continue
            addition = self._additions.of_run(0, end)
            bound = max(bound, found.lower_bound + addition)
            if bound < min(self._time, self._known):
                self._try(found, bound)
                heapq.heappush(heap, (bound, end, splits))
        bound = min([self._left_out, *(group[0] for group in heap[:1])])
        bound = min(self._time, max(bound, proven))
        additions = self._additions.of(to_bounds(self._plan.balance))
        return Replicated(self._plan, self._time, bound, additions)

    def _descend(self) -> None:
        """Move cuts of the best plan, each time to the best split around it."""
        rules = self._posed.problem.rules or Rules()
        while True:
            bounds, modes = to_bounds(self._plan.balance), self._plan.modes
            around = [
                (self._time_of(moved, modes), moved)
                for j in range(1, len(bounds) - 1)
                for cut in range(bounds[j - 1] + 1, bounds[j + 1])
                if rules.keeps(moved := (*bounds[:j], cut, *bounds[j + 1 :]))
            ]
            before = self._time
            time, moved = min(around, default=(before, bounds))
            if time < before:
                self._try(self._split_of(moved, modes), math.inf)
            if self._time == before:
                return

    def _best_of_all(self, ways: Sequence[Way]) -> float:
        """Take the best of all ways that fits; return a bound on all."""
        timed = [(self._time_of(way.bounds, way.modes), k) for k, way in enumerate(ways)]
        n_assembled = 0
        # Of equally fast ones the first: ways are listed with those first that recompute least.
        for time, k in sorted(timed):
            if time >= min(self._time, self._known):
                return time
            if not self._may_fit(ways[k]):
                continue
            if n_assembled == _MOST_ASSEMBLED:
                return time
            n_assembled += 1
            self._try(self._split_of(ways[k].bounds, ways[k].modes), math.inf)
        return self._time

    def _may_fit(self, way: Way) -> bool:
        """Whether a way keeps the limits with the least that may wait for other partitions."""
        memory = self._posed.problem.memory
        runs = zip(pairwise(way.bounds), way.modes, self._posed.problem.limits, strict=True)
        return memory is None or all(
            memory.fits(start, end, j, mode, limit)
            for j, ((start, end), mode, limit) in enumerate(runs)
        )

    def _bound_by_additions(self) -> float:
        """Bound the time of all splits by additions; and go on from the split with that bound."""
        problem, posed = self._posed.problem, self._posed
        n_layers, n, repeats = problem.n_layers, problem.n_partitions, problem.chunks - 1
        if n_layers**2 * n > _MOST_RUNS:
            return -math.inf
        (sums, *_) = problem.costs.types
        again = list(sums.backward)
        if repeats and not posed.is_open and "never" not in problem.costs.modes(None):
            least = problem.costs.least_recompute(0)
            again = [b + r for b, r in zip(again, least, strict=True)]
        largest_forward = max(b - a for a, b in pairwise(sums.forward))
        largest = list(accumulate((b - a for a, b in pairwise(again[::-1])), min))[::-1]
        once = sums.forward[-1] + repeats * max(largest_forward, -(-sums.forward[-1] // n))

        def earliest(j: int, start: int) -> float:
            """Bound the end of partition j's last backward from below, if it begins at `start`."""
            slowest = max(-largest[start], -(-(again[-1] - again[start]) // (n - j)))
            units = once + sums.backward[-1] - sums.backward[start] + repeats * slowest
            return problem.to_time(units) * (1 - _ROUNDING)

        ends = [[earliest(j, start) for start in range(n_layers)] for j in range(n)]
        rules = problem.rules or Rules()

        def cost(start: int, end: int, j: int) -> float:
            return ends[j][start] + self._additions.of_run(start, end)

        bound, bounds = split_any_cost(cost, n_layers, n, rules=rules)
        self._try(self._split_of(bounds, self._plan.modes), math.inf)
        self._descend()
        return bound

    def _split_of(self, bounds: Sequence[int], modes: Sequence[CheckpointMode]) -> Split:
        makespan = self._posed.problem.makespan(bounds, modes, self._order)
        return Way(bounds, modes, self._order).split(makespan, 0.0, self._plan.method)

    def _time_of(self, bounds: Sequence[int], modes: Sequence[CheckpointMode]) -> float:
        problem = self._posed.problem
        ends = last_ends(problem, bounds, modes, self._order)
        return max(map(sum, zip(ends, self._additions.of(bounds), strict=True)))

    def _try(self, found: Split, bound: float) -> None:
        """Take a split if it is better, and fits."""
        time = self._time_of(found.bounds, found.modes)
        if self._posed.is_open and time > bound:
            # With other modes the same cuts may take less.
            self._left_out = min(self._left_out, bound)
        if time >= self._time:
            return
        plan = plan_of_split(self._posed, found)
        if self._posed.is_open and not fits(plan):
            self._left_out = min(self._left_out, bound)
        plan = self._descent.with_better_modes(plan)
        time = self._time_of(found.bounds, plan.modes)
        if time < self._time and fits(plan):
            self._plan, self._time = self._with_bound(plan), time

    def _with_bound(self, plan: Plan) -> Plan:
        """Give a plan the bound that is known on its own value, the makespan."""
        note = "Chosen for the time until all replicas have added up their gradients."
        plan = plan.with_bound(self._first.lower_bound)
        return replace(plan, notes=(*plan.notes, note))

    def _groups(self) -> Iterator[tuple[float, int]]:
        """Yield bounds, and where the first partition of a group ends."""
        problem = self._posed.problem
        rules = problem.rules or Rules()
        n_layers, n_partitions = problem.n_layers, problem.n_partitions
        last = n_layers - n_partitions + 1
        for end in range(1 if n_partitions > 1 else n_layers, last + 1):
            if end in rules.uncut or not rules.allows(0, end, 0):
                continue
            makespan = max(self._first.lower_bound, self._least_makespan(end))
            yield makespan + self._additions.of_run(0, end), end

    def _least_makespan(self, end: int) -> float:
        """Bound the makespan where the first partition ends at a layer, without a search.

        It does its forwards and backwards one by one, and the others share the rest evenly.
        """
        problem = self._posed.problem
        (sums, *_) = problem.costs.types
        others, units = max(1, problem.n_partitions - 1), 0
        for column in (sums.forward, sums.backward):
            own, rest = column[end], column[-1] - column[end]
            units += column[-1] + (problem.chunks - 1) * max(own, -(-rest // others))
        return problem.to_time(units)

    def _splits(self, end: int) -> Iterator[Split]:
        """Produce the splits of a group, from the one with the least makespan on."""
        problem = self._posed.problem
        rules = problem.rules or Rules()
        if problem.n_partitions > 1:
            pin = (*rules.pinned, (end - 1, 0), (end, 1))
            problem = replace(problem, rules=replace(rules, pin=pin))
        try:
            yield from iter_best_splits(problem)
        except BalanceError:
            # There is no next best one where every micro-batch is recomputed.
            bound = self._first.lower_bound + self._additions.of_run(0, end)
            self._left_out = min(self._left_out, bound)
