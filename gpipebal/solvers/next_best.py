"""The best splits of a problem, one after the other."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import chain, count

from gpipebal.errors import BalanceError
from gpipebal.objectives import Objective
from gpipebal.problem import Problem
from gpipebal.solvers.dispatch import (
    GENERAL,
    Split,
    applicable,
    solve_levels,
    split_of,
)
from gpipebal.solvers.sets.levels import MOST_STATES, Levels, count_states
from gpipebal.solvers.sets.ranked import ranked

__all__ = ["iter_best_splits"]


def iter_best_splits(problem: Problem, objective: Objective = "makespan") -> Iterator[Split]:
    """Yield splits from the best one on, no two with the same bounds; none if none fits.

    Args:
        problem: As for `split`.
        objective: ``'makespan'`` or ``'bottleneck'``.

    Returns:
        Splits, best first. Each is ``'optimal'`` among those that are left: its lower bound is its
        value. Only the makespan with ``checkpoint='auto'`` and devices in any order may leave a
        gap, where a partition has to recompute every micro-batch.

    Raises:
        BalanceError: an objective, or a problem, whose solver cannot be asked for the next best.

    Complexity:
        Up to K solves for each split and K partitions; see `gpipebal.solvers.sets.ranked`.

    Example:
        >>> from itertools import islice
        >>> problem = Problem([1, 2, 3, 4], [2, 4, 6, 8], [1, 2, 3, 4], n_partitions=2, chunks=8)
        >>> [(best.balance, best.value) for best in islice(iter_best_splits(problem), 2)]
        [([3, 1], 198), ([2, 2], 226)]
    """
    names = applicable(problem, objective)
    used = next((name for name in GENERAL if name in names), None)
    if used is None or (objective == "makespan" and "always" in (problem.modes or ())):
        if count_states(problem) > MOST_STATES:
            raise BalanceError(
                "the next best splits cannot be found: the devices are of too many kinds to be "
                f"put into any order (expected at most {MOST_STATES} ways to use some of them).\n"
                "Fix: any_order=False, with the devices in the order of the chain."
            )
        other_mode = "" if objective == "peak_memory" else ", or checkpoint='except_last'"
        raise BalanceError(
            f"the next best splits cannot be found: objective={objective!r} with "
            f"checkpoint={problem.checkpoint!r} (expected an objective and a mode that one of "
            f"{', '.join(map(repr, GENERAL))} solves).\n"
            f"Fix: objective='bottleneck'{other_mode}."
        )
    found = _splits(problem, used, Levels(problem))
    if problem.checkpoint != "auto" or objective != "makespan":
        return found
    return _in_order(problem, found)


def _splits(problem: Problem, used: str, levels: Levels) -> Iterator[Split]:
    for value, path in ranked(levels, partial(solve_levels, used)):
        bound = problem.to_time(value)
        yield split_of(path, bound, bound, used)


def _in_order(problem: Problem, found: Iterator[Split]) -> Iterator[Split]:
    """Put splits in the order of their true makespans.

    They come in the order of the makespans that they have if no recompute of a last micro-batch
    lengthens them (see `gpipebal.solvers.sets.any_mode`), which are bounds: a split is held back
    until no other can come before it.
    """
    tickets = count()
    waiting: list[tuple[float, int, Split]] = []
    for one in chain(found, [None]):
        while waiting and (one is None or waiting[0][0] <= one.value):
            value, _, best = heapq.heappop(waiting)
            # With other devices the same cuts might take less, down to their bound.
            least = [best, *(split for _, _, split in waiting)] if problem.any_order else []
            bound = min([value, *(split.lower_bound for split in least)])
            yield replace(best, value=value).with_bound(bound)
        if one is not None:
            value = problem.makespan(one.bounds, one.modes, one.order)
            heapq.heappush(waiting, (value, next(tickets), one))
