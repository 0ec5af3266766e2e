"""The best split under a schedule without a closed form: 1F1B, interleaved, zero bubble.

Under such a schedule a simulator tells what a split costs. `search_schedule` begins with splits
that are good for other reasons, moves cuts as long as that helps, and has a bound that no split can
beat (`gpipebal.planner.schedules.lower_bound`). The bound also tells which splits could still be
better than the best one found: if they are few, all are tried, and the result is proven.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from random import Random

from gpipebal.planner.schedules.costs import ScheduleCosts
from gpipebal.planner.schedules.ways import Ways
from gpipebal.planner.times import order_for
from gpipebal.problem import Problem
from gpipebal.schedule import Checkpoint, check_known_schedule, partitions_on_each
from gpipebal.solvers import Split, find, select_method, split
from gpipebal.solvers.deadline import Deadline

__all__ = ["bound_of", "search_schedule"]

#: Splits that are simulated at most, and actions in them, unless told otherwise.
MOST_TRIALS, MOST_ACTIONS = 20_000, 2 * 10**8
#: Actions between two looks at the clock.
_AT_ONCE = 2**20
#: Times that differ only by this fraction may be equal: sums are rounded.
_ROUNDING = 1e-12
#: How often the search begins again near the best split.
_MOST_BEGINNINGS = 200
#: With up to this many partitions, whole runs of neighbouring cuts are moved too.
MOST_FOR_RUNS = 16


def search_schedule(
    problem: Problem,
    schedule: str,
    *,
    weight_share: Sequence[float] | None = None,
    most_trials: int | None = None,
    time_limit: float | None = None,
) -> Split | None:
    """Search the split with the least makespan under any known schedule.

    Among splits of equal makespan, of those that were tried, it takes the one with the smallest
    bottleneck, then the one with the leftmost cuts. The result depends on the question only, unless
    a time limit ended the search.

    Args:
        problem: Times of the layers, number of partitions, chunks, checkpoint modes; devices (one
            for each partition), links, memory limits and rules are kept. With checkpoint ``'auto'``
            every split has the fastest modes that it fits in. Devices in any order have the one of
            the split with the least bottleneck.
        schedule: One of `gpipebal.schedule.ALL_SCHEDULES`. Every device has as many
            partitions as the schedule is meant for: 2 with ``'interleaved_1f1b'``, say, else 1.
        weight_share: Which share of each layer's backward is the gradient of its weights, where a
            schedule does backwards in two parts; None: half.
        most_trials: How many splits are simulated at most; None: 20,000, or as many as have 200
            million actions together, but no fewer than 200.
        time_limit: Seconds after which the best split so far is returned.

    Returns:
        A Split, ``'optimal'`` if its makespan meets the bound or no split that could be better was
        left out (to within the rounding of the simulator's sums), else ``'feasible'``.
        Its method is ``'schedule enumeration'`` or ``'schedule search'``. None if no split fits
        the devices and keeps the rules.

    Raises:
        UnsupportedPlanError: an unknown schedule.
        BalanceError: partitions that cannot be distributed evenly over the devices, or a number of
            chunks that the schedule cannot have.

    Complexity:
        O(K m) for each split that is tried, with K partitions and m micro-batches, some hundred of
        them at a time; and the bound, O(P K log N) for N layers and P probes.

    Source:
        Fan et al., "DAPPLE", PPoPP 2021, and Liu et al., "AutoPipe", CLUSTER 2022, move cuts from a
        balanced start too. Differs: a proven bound, and a search through all that it leaves.

    Example:
        >>> problem = Problem([3, 1, 2, 2], [3, 1, 2, 2], [0] * 4, 2, 4, "never")
        >>> found = search_schedule(problem, "1f1b")
        >>> found.balance, found.value, found.status
        ([2, 2], 40.0, 'optimal')
    """
    schedule = check_known_schedule(schedule)
    partitions_on_each(schedule, problem.n_partitions)  # raises before anything is searched
    deadline = Deadline(time_limit)
    start = find(problem, "bottleneck", time_limit=time_limit)
    if start is None:
        return None
    ways = Ways(problem, schedule, start, weight_share)
    costs = ways.costs
    if most_trials is None:
        most_trials = max(200, min(MOST_TRIALS, MOST_ACTIONS // costs.n_actions))
    tried = _Tried(ways, start.bounds, most_trials, deadline)
    least, at_bound = costs.relaxed.smallest()
    tried.add([start.bounds, at_bound])
    # Moving cuts is what mostly helps, so it has most of the time.
    tried.add(_other_starts(problem, None if time_limit is None else time_limit / 4))
    lower_bound = costs.to_time(least)
    enough = lower_bound * (1 + _ROUNDING)
    _descend(tried, tried.bounds)
    # Where the order of the devices is open, only one order was tried.
    can_all = not problem.any_order
    exhausted = can_all and tried.value > enough and _try_all_that_remain(tried, costs)
    if tried.value > enough and not exhausted:
        _look_around(tried, enough)
        exhausted = can_all and _try_all_that_remain(tried, costs)
    value = tried.value
    modes = ways.modes_of(tried.bounds)
    assert modes is not None
    proven = exhausted or value <= enough
    return replace(
        start,
        bounds=tried.bounds,
        modes=modes,
        value=value,
        lower_bound=value if proven else min(lower_bound, value),
        method="schedule enumeration" if exhausted else "schedule search",
    )


def bound_of(
    problem: Problem, schedule: str, *, weight_share: Sequence[float] | None = None
) -> float:
    """Bound the makespan of every split under a schedule from below, without a search.

    Args:
        problem: As for `search_schedule`, like the others.
        schedule: One of `gpipebal.schedule.ALL_SCHEDULES`.
        weight_share: Which share of each layer's backward is the gradient of its weights.

    Raises:
        UnsupportedPlanError, BalanceError: as `search_schedule`.

    Complexity:
        O(K m + P K log N) for N layers, K partitions, m micro-batches and P probes.

    Example:
        >>> bound_of(Problem([3, 1, 2, 2], [3, 1, 2, 2], [0] * 4, 2, 4, "never"), "1f1b")
        40.0
    """
    # Where modes are open no recompute counts.
    modes: Checkpoint = "never" if problem.checkpoint == "auto" else problem.checkpoint
    order = order_for(schedule, problem.n_partitions, problem.chunks, modes)
    costs = ScheduleCosts(problem, order, range(problem.n_partitions), weight_share)
    return costs.to_time(costs.relaxed.smallest()[0])


def _descend(tried: _Tried, bounds: tuple[int, ...]) -> None:
    """Move cuts, each time to the best split around, until none is better."""
    while tried.left:
        around = list(_moved(bounds))
        tried.add(around)
        known = [(value, one) for one in around if (value := tried.values.get(one)) is not None]
        best = min(known, default=None)
        if best is None or best >= (tried.values[bounds], bounds):
            return
        bounds = best[1]


def _look_around(tried: _Tried, enough: float) -> None:
    """Begin again near the best split, with several cuts moved at random, as often as it pays."""
    random = Random(0)
    spared = tried.left // 2
    for _ in range(_MOST_BEGINNINGS):
        if tried.left <= spared or tried.value <= enough:
            return
        bounds = list(tried.bounds)
        for cut in range(1, len(bounds) - 1):
            if random.random() < 0.5:
                place = bounds[cut] + random.choice((-3, -2, -1, 1, 2, 3))
                bounds[cut] = min(max(place, bounds[cut - 1] + 1), bounds[cut + 1] - 1)
        start = tuple(bounds)
        if start not in tried.values:
            tried.add([start])
            if start in tried.values:
                _descend(tried, start)


def _other_starts(problem: Problem, time_limit: float | None) -> list[tuple[int, ...]]:
    """Return the best split under GPipe, if it is quickly found."""
    method = select_method(problem)
    if problem.chunks == 1 or method == "integer program":
        return []
    return [split(problem, method=method, time_limit=time_limit).bounds]


class _Tried:
    """The splits that were simulated, and the best of them.

    Attributes:
        values: The makespan of each of them.
        bounds: The best one.
        value: Its makespan.
    """

    def __init__(
        self, ways: Ways, start: tuple[int, ...], most_trials: int, deadline: Deadline
    ) -> None:
        self._ways = ways
        self._deadline = deadline
        self._left = most_trials
        # All at once is fastest, but time may be up in between.
        at_once = max(1, _AT_ONCE // ways.costs.n_actions)
        self._at_once = most_trials if deadline.left is None else at_once
        self.values: dict[tuple[int, ...], float] = {}
        self.bounds, self.value = start, float("inf")
        self._bottleneck = 0

    @property
    def left(self) -> int:
        """How many more splits may be tried; none when time is up."""
        return 0 if self._deadline.is_up and self.values else self._left

    def add(self, splits: Iterable[tuple[int, ...]]) -> None:
        """Try splits that are allowed and new, as long as any may be tried."""
        new: list[tuple[int, ...]] = []
        left = self.left
        for bounds in splits:
            if len(new) == left:
                break
            if bounds not in self.values and self._ways.modes_of(bounds) is not None:
                new.append(bounds)
        new = list(dict.fromkeys(new))
        for first in range(0, len(new), self._at_once):
            if self.left:
                self._simulate(new[first : first + self._at_once])

    def _simulate(self, new: Sequence[tuple[int, ...]]) -> None:
        self._left -= len(new)
        values = self._ways.makespans(new)
        self.values.update(zip(new, values, strict=True))
        least = min(values)
        if least > self.value:
            return
        rank = min(
            (self._ways.bottleneck_of(bounds), bounds)
            for value, bounds in zip(values, new, strict=True)
            if value == least
        )
        if least < self.value or rank < (self._bottleneck, self.bounds):
            self.value, (self._bottleneck, self.bounds) = least, rank

    def is_done(self, bounds: tuple[int, ...]) -> bool:
        """Whether a split was tried, or need not be: it is not allowed."""
        return bounds in self.values or self._ways.modes_of(bounds) is None


def _moved(bounds: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Move one cut by 1, 2, 4, ... layers, or neighbouring cuts together by one."""
    n_cuts = len(bounds) - 2
    for cut in range(1, n_cuts + 1):
        for sign in (-1, 1):
            step = 1
            while bounds[cut - 1] < bounds[cut] + sign * step < bounds[cut + 1]:
                yield (*bounds[:cut], bounds[cut] + sign * step, *bounds[cut + 1 :])
                step *= 2
    for first in range(1, n_cuts):
        for last in range(first + 1, n_cuts + 1):
            # With many cuts only pairs, and all up to or from a cut.
            if n_cuts >= MOST_FOR_RUNS and last > first + 1 and first > 1 and last < n_cuts:
                continue
            for sign in (-1, 1):
                edge = bounds[first - 1] if sign < 0 else bounds[last + 1]
                if bounds[first if sign < 0 else last] + sign != edge:
                    middle = (place + sign for place in bounds[first : last + 1])
                    yield (*bounds[:first], *middle, *bounds[last + 1 :])


def _try_all_that_remain(tried: _Tried, costs: ScheduleCosts) -> bool:
    """Try every split that the bound does not exclude, if they are few; return whether it did."""
    better = costs.to_units(tried.value * (1 - _ROUNDING))
    remaining = costs.relaxed.splits_within(better, tried.left)
    if remaining is None:
        return False
    tried.add(remaining)
    # Time may have been up before they were tried.
    return all(map(tried.is_done, remaining))
