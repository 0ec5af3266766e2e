"""The best splits of a problem, one after the other."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, islice

from gpipebal.errors import BalanceError
from gpipebal.problem import Problem
from gpipebal.schedule import check_count, modes_of
from gpipebal.solvers.dispatch import (
    GENERAL,
    Objective,
    Split,
    applicable,
    search,
    select_method,
    split_of,
)
from gpipebal.solvers.infeasible import explain_infeasible
from gpipebal.solvers.levels import Levels
from gpipebal.solvers.ranked import ranked
from gpipebal.solvers.reachability import Path

__all__ = ["best_splits", "iter_best_splits"]


def best_splits(problem: Problem, k: int, objective: Objective = "makespan") -> list[Split]:
    """Find the k best splits, no two with the same bounds; fewer if there are no more.

    Args:
        problem: As for `split`. With ``checkpoint='auto'`` and the makespan, no partition
            recomputes every micro-batch unless nothing else fits.
        k: How many.
        objective: ``'makespan'`` or ``'bottleneck'``.

    Returns:
        Splits, best first. Each is ``'optimal'`` among those that are left: its lower bound is
        its value.

    Raises:
        BalanceError: a `k` that is not 1 or more; an objective, or a problem, whose solver cannot
            be asked for the next best.
        InfeasibleError: no split fits the devices and keeps the rules.

    Complexity:
        Up to K solves for each split and K partitions; see `gpipebal.solvers.ranked`.

    Example:
        >>> problem = Problem([1, 2, 3, 4], [2, 4, 6, 8], [1, 2, 3, 4], n_partitions=2, chunks=8)
        >>> [(best.balance, best.value) for best in best_splits(problem, 2)]
        [((3, 1), 198), ((2, 2), 226)]
    """
    splits = list(islice(iter_best_splits(problem, objective), check_count("k", k)))
    if not splits:
        raise explain_infeasible(problem)
    return splits


def iter_best_splits(problem: Problem, objective: Objective = "makespan") -> Iterator[Split]:
    """Produce splits from the best one on; see `best_splits`.

    Raises:
        BalanceError: as `best_splits`.
    """
    names = applicable(problem, objective, select_method(problem, objective))
    used = next((name for name in GENERAL if name in names), None)
    if used is None or (objective == "makespan" and _always(problem)):
        raise BalanceError(
            f"the next best splits cannot be found: objective={objective!r} with "
            f"checkpoint={problem.checkpoint!r} (expected an objective and a mode that one of "
            f"{', '.join(map(repr, GENERAL))} solves).\n"
            "Fix: objective='bottleneck', or checkpoint='except_last'."
        )
    if problem.checkpoint != "auto" or objective != "makespan":
        return _splits(problem, used, Levels(problem))
    without = Levels(problem)
    modes = [tuple(mode for mode in of if mode != "always") for of in without.modes]
    without = Levels(problem, known=without, modes=modes)
    first = next(found := _splits(problem, used, without), None)
    if first is not None:
        return chain([first], found)
    return _splits(problem, used, Levels(problem, known=without), exact=False)


def _always(problem: Problem) -> bool:
    checkpoint = problem.checkpoint
    return checkpoint != "auto" and "always" in modes_of(checkpoint, problem.n_partitions)


def _splits(problem: Problem, used: str, levels: Levels, exact: bool = True) -> Iterator[Split]:
    def solve(levels: Levels) -> tuple[int, Path] | None:
        found = search(problem, used, levels, lambda: False)
        return None if found is None else (found[0], found[2])

    for value, path in ranked(levels, solve):
        bound = problem.to_time(value)
        number = bound
        if not exact:
            # A recompute of the last micro-batch may show; see `gpipebal.solvers.any_mode`.
            modes = [option.mode for option in path.options]
            number = problem.makespan(path.bounds, modes, levels.devices_of(path.groups))
        yield split_of(problem, levels, path, number, bound, used)
