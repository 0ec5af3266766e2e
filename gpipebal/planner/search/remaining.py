"""All that could still be better than a plan, gone through: the last step to a proof.

Bounds of single runs leave a gap where only all cuts tell how much waits. But once a plan is known,
they exclude many runs: see `left_runs`. The ways that are left are gone through from the left,
partition by partition. How much waits in one of them for later ones depends on how many these have
to pass it on, which are fewest if each gets as many layers as it may. So a partition's peak is
bounded as soon as its own layers are known, and exact when those are that take what it makes. Open
modes stay open until all cuts are known: those in which a partition needs too much are left out,
whatever the modes of the others are, and the fastest of the rest bound the time.

If none of the ways is better, the plan is the best. If there are too many, the same is tried with
lower goals: that no way is below a value between the bound and the plan's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import reduce
from math import ceil
from operator import or_
from typing import NamedTuple

from gpipebal.plan import Plan
from gpipebal.planner.execution import Way
from gpipebal.planner.plans import plan_of_split, value_of
from gpipebal.planner.schedules.costs import ScheduleCosts
from gpipebal.planner.schedules.lower_bound import rows_of
from gpipebal.planner.search.all_ways import MOST_ORDERS, device_orders
from gpipebal.planner.search.left_runs import LeftRuns, units_below
from gpipebal.planner.search.lower_bounds import parts_of_bound
from gpipebal.planner.search.row_peaks import Modes, RowPeaks
from gpipebal.planner.times import order_for
from gpipebal.schedule import CHECKPOINT_MODES, Checkpoint, CheckpointMode, modes_of
from gpipebal.simulator import weight_shares
from gpipebal.solvers.deadline import Deadline

__all__ = ["proven"]

#: How many walks through a partition's row of the schedule a proof may take, or one of many, ...
_MOST_WALKS, _FEW_WALKS = 6_000, 1_200
#: ... where looking at the beginning of a way takes as long as this part of one; a row that is
#: simulated as this; and a set of ends as this, where runs have a bound of their own or not.
_LOOK, _ROW, _BOUNDED_SET, _SET = 1 / 25, 1 / 4, 1 / 100, 1 / 300
#: Which share of the walks that are left each goal may take: at first the plan's value; if there
#: are too many ways, lower ones; at last the plan's value again, from where that search ended.
_SHARES = (1 / 3, *(1 / 4,) * 4, 1)
#: Simulated times that differ by this fraction may be equal: sums are rounded.
_ROUNDING = 1e-12


def proven(rows: RowPeaks, plan: Plan, deadline: Deadline, *, thorough: bool = True) -> Plan:
    """Prove that no plan is better, or find one that is; or raise the bound as far as is quick.

    Args:
        rows: The question, and what is known about the memory of partitions.
        plan: A plan that fits.
        deadline: When it is up, nothing more is looked at.
        thorough: Whether it may take `_MOST_WALKS`, and not only `_FEW_WALKS`.

    Returns:
        The plan, or a better one, with a bound that is not below the plan's.

    Complexity:
        That of `LeftRuns` for each goal, and up to `_MOST_WALKS` walks through rows.

    Source:
        Land and Doig, "An Automatic Method of Solving Discrete Programming Problems", Econometrica
        28(3), 1960: branch and bound. Here a branch is the end of one more partition, or, when all
        ends are known, the mode of one.
    """
    posed = rows.posed
    orders = device_orders(posed, MOST_ORDERS)
    if not plan.gap or orders is None or posed.question.cost is not None:
        return plan
    going = _Going(rows, deadline, _MOST_WALKS if thorough else _FEW_WALKS)
    low, high, goal = plan.lower_bound, plan.value, plan.value
    for share in _SHARES:
        is_own = goal >= plan.value or share == 1
        better, is_done = going.through(orders, plan.value if is_own else goal, share, is_own)
        if better is not None:
            value, way = better
            plan = plan_of_split(posed, way.split(value, min(low, value), plan.method))
            high = min(high, plan.value)
        if is_done and (is_own or goal >= plan.value):
            return plan.with_bound(plan.value)
        if is_done:
            # Below a lower goal nothing is left, to within the rounding of simulated times.
            low = max(low, going.surely_below(goal))
            high = plan.value if goal >= high else high
        else:
            high = min(goal, high)
        goal = (low + high) / 2
        if posed.question.minimised == "peak_memory":
            goal = ceil(goal)
    return plan.with_bound(min(low, plan.value))


class _Beginning(NamedTuple):
    """The first partitions of a way, some of whose modes are still open.

    Attributes:
        bounds: Their bounds.
        modes: The modes that each of them may have; the last of these takes least time.
        forward: At least so long takes the slowest forward, ...
        backward: ... and the slowest backward.
    """

    bounds: tuple[int, ...]
    modes: tuple[Modes, ...]
    forward: int
    backward: int

    @property
    def fastest(self) -> tuple[CheckpointMode, ...]:
        """Of each partition the mode that takes least time."""
        return tuple([modes[-1] for modes in self.modes])


class _Going:
    """Goes through ways that are left.

    Args:
        rows: The question, and what is known about the memory of partitions.
        deadline: When it is up, nothing more is looked at.
        most_walks: How many walks through rows it may take.
    """

    def __init__(self, rows: RowPeaks, deadline: Deadline, most_walks: int) -> None:
        self._rows, posed = rows, rows.posed
        self._posed, self._question, self._problem = posed, posed.question, posed.problem
        self._deadline = deadline
        question = posed.question
        self._is_peak = question.minimised == "peak_memory"
        self._has_phases = question.schedule == "gpipe" and question.minimised == "makespan"
        self._once, self._slowest = parts_of_bound(posed.problem)
        is_auto = question.checkpoint == "auto"
        asked: Checkpoint = "never" if question.checkpoint == "auto" else question.checkpoint
        self._modes = modes_of(asked, posed.problem.n_partitions)
        self._open_modes = CHECKPOINT_MODES if is_auto else tuple(dict.fromkeys(self._modes))
        self._fitting: dict[object, list[int]] = {}
        #: By the order of devices, where the search for anything better than the plan ended.
        self._waiting: dict[tuple[int, ...], list[_Beginning]] = {}
        self._walks_left, self._kept = most_walks + rows.n_walks, 0.0
        n_sets = posed.problem.n_layers * len(self._modes) * len(self._open_modes)
        self._for_sets = n_sets * (_BOUNDED_SET if question.is_searched else _SET)

    def surely_below(self, goal: float) -> float:
        """Return what a value has to be below, so that it is below a goal however it is rounded."""
        return goal * (1 - _ROUNDING) if self._question.is_searched else goal

    def through(
        self, orders: Sequence[tuple[int, ...]], goal: float, share: float, goes_on: bool
    ) -> tuple[tuple[float, Way] | None, bool]:
        """Look for ways whose value is below a goal.

        Args:
            orders: Orders of the devices.
            goal: The value.
            share: How much of the walks that are left, but for sets, may be used.
            goes_on: Whether to go on where the last such search ended, whose goal was no lower.

        Returns:
            The best that was found with its value, if any; and whether no other is below the goal.
        """
        best: tuple[float, Way] | None = None
        self._walks_left -= self._for_sets * len(orders)
        self._kept = (1 - share) * max(0, self._walks_left - self._rows.n_walks)
        for order in orders:
            if self._is_out:
                return best, False
            first = [_Beginning((0,), (), *self._slowest)]
            waiting = self._waiting.setdefault(order, first) if goes_on else first
            for value, way in self._better(order, goal, waiting):
                best, goal = (value, way), value
        return best, not self._is_out

    @property
    def _is_out(self) -> bool:
        return self._walks_left - self._rows.n_walks < self._kept or self._deadline.is_up

    def _better(
        self, order: tuple[int, ...], goal: float, waiting: list[_Beginning]
    ) -> Iterator[tuple[float, Way]]:
        """Yield better and better ways to run the chain on devices in an order.

        All go on from those that are `waiting`; if there are too many, some still are in the end.
        """
        left = self._left(order, goal)
        waiting[:] = [now for now in waiting if left.leads_on(now.bounds)]
        while waiting and not self._is_out:
            self._walks_left -= _LOOK
            now = self._narrowed(waiting.pop(), left, order, goal)
            if now is None or self._is_slow(now, goal):
                continue
            j, n_open = len(now.modes), sum([len(modes) > 1 for modes in now.modes])
            if j < len(order):
                waiting += self._continued(now, left, order[j])
                continue
            way = Way(now.bounds, now.fastest, order)
            # Of open modes this is a bound of the time, and says nothing of the memory.
            if n_open and self._is_peak:
                waiting += self._parted(now)
                continue
            value = self._value_of(way)
            if value >= self.surely_below(goal):
                continue
            if n_open:
                waiting += self._parted(now)
            else:
                yield value, way
                goal = value

    def _left(self, order: tuple[int, ...], goal: float) -> LeftRuns:
        if not self._question.is_searched:
            return LeftRuns(self._posed, order, goal)
        schedule, problem, n = self._question.schedule, self._problem, len(order)
        actions = {mode: order_for(schedule, n, problem.chunks, mode) for mode in self._open_modes}
        shares = weight_shares(self._posed.profile)
        costs = ScheduleCosts(problem, actions[self._open_modes[0]], order, shares)
        relaxed = {
            mode: replace(costs.relaxed, rows=rows_of(rows)) for mode, rows in actions.items()
        }
        most = costs.to_units(self.surely_below(goal))
        return LeftRuns(self._posed, order, goal, relaxed, most, self._fitting)

    def _continued(self, now: _Beginning, left: LeftRuns, device: int) -> Iterator[_Beginning]:
        """Yield a beginning with one more partition."""
        costs, start = self._problem.costs, now.bounds[-1]
        sets = {mode: ends[start] for mode, ends in left.ends[len(now.modes)].items()}
        ends = reduce(or_, sets.values())
        while ends:
            end = ends.bit_length() - 1
            ends ^= 1 << end
            modes = tuple([mode for mode, some in sets.items() if some >> end & 1])
            forward, backward = now.forward, now.backward
            if self._has_phases:
                part = costs.part(start, end, device, modes[-1])
                forward = max(forward, part.forward)
                backward = max(backward, part.backward + part.recompute)
            yield _Beginning((*now.bounds, end), (*now.modes, modes), forward, backward)

    def _parted(self, now: _Beginning) -> Iterator[_Beginning]:
        """Yield all partitions with one mode of the first in which several are open."""
        j = [len(modes) > 1 for modes in now.modes].index(True)
        for mode in now.modes[j]:
            yield now._replace(modes=(*now.modes[:j], (mode,), *now.modes[j + 1 :]))

    def _is_slow(self, now: _Beginning, goal: float) -> bool:
        """Whether GPipe's makespan is not below the goal, however a way goes on."""
        repeated = (self._problem.chunks - 1) * (now.forward + now.backward)
        units = units_below(self._problem.scale, goal)
        return self._has_phases and self._once + repeated > units

    def _value_of(self, way: Way) -> float:
        if self._is_peak:
            return max(self._rows.peak(j, *way[:2]) for j in range(len(way.order)))
        self._walks_left -= _ROW * len(way.order) if self._question.is_searched else 0
        value = value_of(self._posed, way)
        assert value is not None
        return value

    def _narrowed(
        self, now: _Beginning, left: LeftRuns, order: tuple[int, ...], goal: float
    ) -> _Beginning | None:
        """Leave out the modes in which limits are not kept, with the least that waits for others.

        None: none are left for some partition.
        """
        bounds, modes = (*now.bounds, *left.after(now.bounds)), list(now.modes)
        for j in reversed(range(len(modes))):
            limits = [self._problem.limits[order[j]], ceil(goal) - 1 if self._is_peak else None]
            most = min([limit for limit in limits if limit is not None], default=None)
            if most is not None and not self._rows.leave_fitting(j, bounds, modes, most):
                return None
        return now._replace(modes=tuple(modes))
