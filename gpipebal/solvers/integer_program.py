"""An integer program over runs, for problems that no other solver covers: HiGHS, with its gap.

One variable, 0 or 1, says for each partition, device, run and checkpoint mode whether it is
chosen. Runs that are chosen form a path from the first layer to the last (what arrives at a place
leaves it), every device is used as often as there are devices of its kind, and the makespan is at
least what each path through the pipeline takes. That is linear, whatever the runs cost and
whichever are allowed; the price is N^2 K / 2 variables.
"""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from itertools import islice
from math import ceil
from typing import TYPE_CHECKING, Any, NamedTuple, assert_never

import numpy as np

from gpipebal.errors import BalanceError
from gpipebal.objectives import TimeObjective
from gpipebal.problem import Problem
from gpipebal.solvers.deadline import NO_DEADLINE, Deadline
from gpipebal.solvers.sets.levels import Levels, Step
from gpipebal.solvers.sets.reachability import BestPath, Path, Search
from gpipebal.solvers.sets.runs import Option

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["MOST_RUNS", "solve_integer_program"]

#: Most variables that are handed to HiGHS: more take too much memory and time.
MOST_RUNS = 300_000

#: How far HiGHS' bound may be off, as a fraction: it works to feasibility tolerances.
_TOLERANCE = Fraction(1, 10**6)

#: The value of the split that is known, as HiGHS sees it: its tolerances are absolute. The others
#: are for programs that it fails at, which it then mostly does not.
_SCALES = (1_000, 10_000, 100)

#: The status with which `scipy.optimize.milp` returns from a program that it has solved, from one
#: without a solution, and from one that HiGHS gave up because of its own arithmetic.
_OPTIMAL, _INFEASIBLE, _FAILED = 0, 2, 4


#: How long HiGHS works at most before it looks at the clock again, in seconds for each run: in its
#: presolve, and for its first cuts. About 0.00007 were measured for each of the two.
_BETWEEN_LOOKS = 1e-4


class _Run(NamedTuple):
    """A variable: one run in one partition, on one kind of device, in one mode."""

    level: int
    step: Step
    option: Option
    start: int
    end: int


def solve_integer_program(
    problem: Problem, objective: TimeObjective, deadline: Deadline = NO_DEADLINE
) -> BestPath | None:
    """Find the best split with HiGHS; None if there is no split.

    Args:
        problem: The problem.
        objective: ``'makespan'`` or ``'bottleneck'``.
        deadline: When it is up, the best split so far is returned, with its bound. Where
            HiGHS would not look at the clock in time, only the relaxation is solved, in which runs
            may be chosen in part, unless no split is known: it tells a bound.

    Returns:
        The bound is exact for integers up to some hundred thousand; otherwise it is below the value
        by the solver's tolerance, 1e-6 of the value.

    Raises:
        BalanceError: there are more than `MOST_RUNS` runs; or time is up, or HiGHS failed, and no
            split is known.

    Complexity:
        Exponential at worst; 0.1 to some seconds for 20 layers in 4 partitions.

    Source:
        HiGHS through `scipy.optimize.milp`: Huangfu and Hall, "Parallelizing the dual revised
        simplex method", Mathematical Programming Computation 10(1), 2018. The formulation is own.
    """
    levels = Levels(problem, stateless=True)
    # The best bottleneck in the given order of devices is a split to begin with, mostly.
    in_order = Search(Levels(replace(problem, any_order=False)))
    known = in_order.smallest("load").path
    if known is None and not problem.any_order:
        return None
    value = None if known is None else _exact(problem, known, objective)
    # A run that alone takes longer than a whole split is of no use.
    useful = (
        run
        for run in _runs(levels)
        if value is None or run.option.load.of(run.start, run.end) <= value
    )
    runs = list(islice(useful, MOST_RUNS + 1))
    if len(runs) > MOST_RUNS:
        # In one order a more special algorithm runs by itself, which has no such bound.
        fix = "any_order=False" if problem.any_order else "method='auto'"
        raise BalanceError(
            f"integer program is too large: more than {MOST_RUNS} runs (expected no more).\n"
            f"Fix: {fix}; or fewer layers "
            "(open fewer nested ones), devices of fewer kinds, a smaller max_layers or a larger "
            "min_layers."
        )
    # Without a split, any scale will do: that of all layers on the slowest device.
    most = [
        max(map(sum, zip(*(s[-1:] for s in sums), strict=True))) for sums in problem.costs.types
    ]
    unit = max(max(most) if value is None else value, 1)
    while True:
        is_late = deadline.is_up
        found = _solve(levels, runs, objective, unit, deadline, needs_path=known is None)
        path, dual, is_sure = found or (None, Fraction(0), False)
        if path is not None:
            exact = _exact(problem, path, objective)
            if value is None or exact <= value:
                known, value = path, exact
        if known is None or value is None:
            if is_sure:
                return None
            raise _nothing_found(deadline, failed=found is None)
        if 2 * value >= unit or value == 0 or is_late:
            break
        # HiGHS took what is small compared with the first value for nothing: once more, enlarged.
        unit = value
        runs = [run for run in runs if run.option.load.of(run.start, run.end) <= value]
    # Rounded up: sums are whole numbers, so where the tolerance is less than one nothing is lost.
    bound = ceil(dual - Fraction(unit) * _TOLERANCE)
    bound = max(bound, Search(levels).least("load") if objective == "bottleneck" else 0)
    return BestPath(value, min(bound, value), known)


def _nothing_found(deadline: Deadline, *, failed: bool) -> BalanceError:
    if failed:
        return BalanceError(
            "no split was found: HiGHS gave up because of its own arithmetic (expected a split, or "
            "a proof that there is none).\n"
            "Fix: any_order=False, devices in the order in which they are to be used."
        )
    return BalanceError(
        f"no split was found in time: time_limit={deadline.time_limit} (expected enough for HiGHS "
        "to find a first one, or to prove that there is none).\n"
        "Fix: a larger time_limit, or any_order=False."
    )


def _exact(problem: Problem, path: Path, objective: TimeObjective) -> int:
    if objective == "makespan":
        of = problem.costs.makespan
    elif objective == "bottleneck":
        of = problem.costs.bottleneck
    else:
        assert_never(objective)
    return of(path.bounds, path.modes, path.order)


def _runs(levels: Levels) -> Iterator[_Run]:
    n_layers, n_partitions = levels.n_layers, levels.n_partitions
    for k, steps in enumerate(levels.steps):
        # One variable for all states: how often a device is used is a constraint of its own.
        kinds = {(step.kind, step.group): step for step in steps}
        for step in kinds.values():
            for option in levels.kinds[step.kind]:
                for start in range(k, n_layers - (n_partitions - k) + 1) if k else (0,):
                    if not levels.places[k] >> start & 1:
                        continue
                    ends = option.fits[start] & levels.places[k + 1]
                    last = n_layers - (n_partitions - k - 1)
                    for end in range(start + 1, last + 1):
                        if ends >> end & 1:
                            yield _Run(k, step, option, start, end)


def _solve(
    levels: Levels,
    runs: list[_Run],
    objective: TimeObjective,
    unit: int,
    deadline: Deadline,
    *,
    needs_path: bool,
) -> tuple[Path | None, Fraction, bool] | None:
    """Hand the program to HiGHS, and where that fails, once more with all times scaled.

    Without the time for it, and if no path is needed, HiGHS is given the relaxation only.

    Returns:
        The path it found, if any; its bound; and where there is no path, whether there is none.
        None if HiGHS failed at every scale.
    """
    for scale in _SCALES:
        program = _Program(levels, runs, objective, unit, scale)
        left = deadline.left
        between = _BETWEEN_LOOKS * len(runs)
        if left is None or needs_path:
            found = program.solve(left)
        elif left > 2 * between:
            found = program.solve(left - between)
        else:
            found = program.solve(left, is_whole=False)
        if found is not None:
            return found
    return None


class _Program:
    """The program at one scale, in floating-point numbers.

    Its variables are the runs, then the value, then for each level the largest forward and the
    largest backward up to it.
    """

    def __init__(
        self,
        levels: Levels,
        runs: list[_Run],
        objective: TimeObjective,
        unit: int,
        scale: int,
    ) -> None:
        self._levels, self._runs = levels, runs
        self._unit, self._scale = unit, scale
        n_runs, n_partitions = len(runs), levels.n_partitions
        self._of_level: list[list[int]] = [[] for _ in range(n_partitions)]
        for v, run in enumerate(runs):  # v: variable
            self._of_level[run.level].append(v)
        self._value = n_runs
        self._forwards = range(n_runs + 1, n_runs + 1 + n_partitions)
        self._n_variables = n_runs + 1 + 2 * n_partitions
        self._backwards = range(n_runs + 1 + n_partitions, self._n_variables)
        #: Entries of a sparse matrix; and for each of its rows the least and the most of its sum.
        self._rows, self._columns, self._values = list[int](), list[int](), list[float]()
        self._lower, self._upper = list[float](), list[float]()
        for k in range(n_partitions):
            self._add_path(k)
        if levels.problem.any_order:
            for g, devices in enumerate(levels.groups):
                uses = {v: 1.0 for v, run in enumerate(runs) if run.step.group == g}
                self._add(uses, len(devices), len(devices))
        for k in range(n_partitions):
            if objective == "bottleneck":
                self._add_at_least(self._value, self._costs(k, "load"))
            elif objective == "makespan":
                self._add_makespan(k)
            else:
                assert_never(objective)

    def solve(
        self, time_limit: float | None, *, is_whole: bool = True
    ) -> tuple[Path | None, Fraction, bool] | None:
        """Hand the program to HiGHS; see `_solve`. None if HiGHS failed.

        Args:
            time_limit: Seconds for it; None: as many as it needs.
            is_whole: Whether each run is chosen or not; else it may be chosen in part, so that only
                a bound is found.
        """
        from scipy.optimize import Bounds, LinearConstraint, milp  # loaded only where it is used
        from scipy.sparse import csr_matrix

        n_runs, n_variables = len(self._runs), self._n_variables
        goal = np.zeros(n_variables)
        goal[self._value] = 1
        whole = np.zeros(n_variables)
        whole[:n_runs] = is_whole
        top = np.full(n_variables, np.inf)
        top[:n_runs] = 1
        shape = (len(self._lower), n_variables)
        matrix = csr_matrix((self._values, (self._rows, self._columns)), shape=shape)
        options: dict[str, Any] = {"mip_rel_gap": 0.0, "presolve": is_whole}
        if time_limit is not None:
            options["time_limit"] = max(time_limit, 0.01)
        result = milp(
            goal,
            integrality=whole,
            bounds=Bounds(np.zeros(n_variables), top),
            constraints=LinearConstraint(matrix, self._lower, self._upper),
            options=options,
        )
        if result.status == _FAILED and result.x is None:
            return None
        if not is_whole:
            known = result.fun if result.status == _OPTIMAL else 0.0
            return None, Fraction(float(known)) * self._unit / self._scale, False
        dual = result.get("mip_dual_bound")
        usable = dual is not None and np.isfinite(dual)
        bound = Fraction(float(dual)) * self._unit / self._scale if usable else Fraction(0)
        if result.x is None:
            return None, bound, result.status == _INFEASIBLE
        return self._path(np.flatnonzero(result.x[:n_runs] > 0.5).tolist()), bound, True

    def _path(self, chosen: list[int]) -> Path:
        runs = sorted((self._runs[v] for v in chosen), key=lambda run: run.level)
        bounds = (0, *(run.end for run in runs))
        order = self._levels.devices_of([run.step.group for run in runs])
        return Path(bounds, order, tuple(run.option for run in runs))

    def _add(self, entries: dict[int, float], lower: float, upper: float) -> None:
        """Add the row ``lower <= sum of entries <= upper``."""
        self._rows += [len(self._lower)] * len(entries)
        self._columns += entries.keys()
        self._values += entries.values()
        self._lower.append(lower)
        self._upper.append(upper)

    def _add_path(self, k: int) -> None:
        """Let a partition have one run, which begins where that of the partition before ends."""
        self._add(dict.fromkeys(self._of_level[k], 1.0), 1, 1)
        if not k:
            return
        balance: dict[int, dict[int, float]] = {}
        for v in self._of_level[k - 1]:
            balance.setdefault(self._runs[v].end, {})[v] = 1.0
        for v in self._of_level[k]:
            balance.setdefault(self._runs[v].start, {})[v] = -1.0
        for entries in balance.values():
            self._add(entries, 0, 0)

    def _add_makespan(self, k: int) -> None:
        """Let the makespan be at least what the path that turns around in a partition takes."""
        for maxima, dimension in ((self._forwards, "forward"), (self._backwards, "backward_phase")):
            self._add_at_least(maxima[k], self._costs(k, dimension))
            if k:
                self._add({maxima[k]: 1.0, maxima[k - 1]: -1.0}, 0, np.inf)
        early = {
            v: self._scaled(_early(self._levels, self._runs[v]))
            for v in self._of_level[k]
            if self._runs[v].option.mode == "always"
        }
        if k < len(self._of_level) - 1 and not early:
            return  # a path that turns around earlier and recomputes nothing is no longer
        passed: dict[int, float] = {}
        for before in range(k + 1):
            passed |= self._costs(before, "once")
        for v, recompute in early.items():
            passed[v] += recompute
        repeats = float(self._levels.problem.chunks - 1)
        passed |= {self._forwards[k]: repeats, self._backwards[k]: repeats}
        self._add_at_least(self._value, passed)

    def _add_at_least(self, bounded: int, costs: dict[int, float]) -> None:
        """Let a variable be at least the sum of the chosen costs."""
        self._add({v: -cost for v, cost in costs.items()} | {bounded: 1.0}, 0, np.inf)

    def _costs(self, k: int, dimension: str) -> dict[int, float]:
        """Return a cost of each run of a level."""
        runs = ((v, self._runs[v]) for v in self._of_level[k])
        return {
            v: self._scaled(getattr(run.option, dimension).of(run.start, run.end))
            for v, run in runs
        }

    def _scaled(self, cost: int) -> float:
        return cost * self._scale / self._unit


def _early(levels: Levels, run: _Run) -> int:
    """Return the recompute of the last micro-batch of a run that recomputes all."""
    device = levels.groups[run.step.group][0]
    return levels.problem.costs.part(run.start, run.end, device, "always").last_recompute
