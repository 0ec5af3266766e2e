"""How splits run under a schedule: whether they are allowed, in which modes, and how long it takes.

Where modes are open, each split is looked at in the fastest ones that its runs of layers fit in.
No others are faster: the order of actions is fixed, and without a recompute nothing in it is later.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from gpipebal.planner.schedules.costs import ScheduleCosts
from gpipebal.planner.times import order_for, recomputes_for
from gpipebal.problem import Problem
from gpipebal.schedule import CheckpointMode, counted_modes
from gpipebal.solvers import Split
from gpipebal.solvers.sets.levels import MOST_STATES, Levels, count_states

__all__ = ["Ways"]

Modes = tuple[CheckpointMode, ...]


class Ways:
    """How splits run on given devices, in the fastest modes that are open and fit.

    Attributes:
        costs: What splits cost in the slowest modes, and the bound on all of them.

    Args:
        problem: The problem.
        schedule: A known schedule.
        start: A split that fits, with its modes, and the order of the devices.
        weight_share: See `ScheduleCosts`.
    """

    def __init__(
        self,
        problem: Problem,
        schedule: str,
        start: Split,
        weight_share: Sequence[float] | None = None,
    ) -> None:
        self._problem, self._start = problem, start
        self._question = schedule, problem.n_partitions, problem.chunks
        self._counted = cache(self._counted_of)
        self._places: Sequence[int] = ()
        #: For each partition, its modes that may be of use, and where runs of layers fit in them.
        self._options: list[list[tuple[CheckpointMode, Sequence[int]]]] = []
        if not problem.is_plain:
            levels = Levels(problem, stateless=count_states(problem) > MOST_STATES)
            self._places = levels.places
            for steps, device in zip(levels.steps, start.order, strict=True):
                kind = next(step.kind for step in steps if device in levels.groups[step.group])
                options = levels.kinds[kind]
                self._options.append([(option.mode, option.fits) for option in options])
        self._has_open_modes = any(
            len({mode for mode, _ in options}) > 1 for options in self._options
        )
        # In the order of the slowest modes all others can be simulated.
        slowest = tuple(options[-1][0] for options in self._options) or start.modes
        order = order_for(*self._question, slowest)
        self.costs = ScheduleCosts(problem, order, start.order, weight_share)

    def modes_of(self, bounds: tuple[int, ...]) -> Modes | None:
        """Return the fastest modes that a split fits in; None if it is not allowed."""
        if not self._options:
            return self._start.modes
        if not all(self._places[j] >> place & 1 for j, place in enumerate(bounds)):
            return None
        modes = []
        for j, options in enumerate(self._options):
            first, end = bounds[j], bounds[j + 1]
            for mode, fits in options:
                if fits[first] >> end & 1:
                    modes.append(mode)
                    break
            else:
                return None
        return tuple(modes)

    def bottleneck_of(self, bounds: tuple[int, ...]) -> int:
        """Return the bottleneck of a split that is allowed, in exact units."""
        counted = self._counted(self._allowed_modes_of(bounds))
        return self._problem.exact_bottleneck(bounds, counted, self._start.order)

    def makespans(self, splits: Sequence[tuple[int, ...]]) -> list[float]:
        """Simulate splits that are allowed; return the makespan of each."""
        if not self._has_open_modes:
            return self.costs.makespans(splits)
        return self.costs.makespans(splits, [self._allowed_modes_of(one) for one in splits])

    def _allowed_modes_of(self, bounds: tuple[int, ...]) -> Modes:
        modes = self.modes_of(bounds)
        assert modes is not None
        return modes

    def _counted_of(self, modes: Modes) -> Modes:
        return counted_modes(modes, recomputes_for(*self._question, modes))
