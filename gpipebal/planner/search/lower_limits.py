"""Searches under lower limits, until a plan keeps the true ones with what may wait in it.

Solvers know the least that may wait in a partition, whatever the others are. When a plan that they
found exceeds a limit because more may wait in it, they are asked for the best split without it: for
one in which each partition that exceeds its limit needs less. This is repeated. The next split is a
little worse or equally good, and often as much may wait in it as in the last one, or nothing at
all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from gpipebal.plan import Plan
from gpipebal.planner.plans import keeps_limit, plan_of_split
from gpipebal.planner.posing import Posed
from gpipebal.problem import Memory, Problem
from gpipebal.schedule import CheckpointMode
from gpipebal.solvers import Split

__all__ = ["under_lower_limits"]

#: How often partitions have to need one byte less; after that, less by all that they lack.
_MOST_STEPS, _MOST_LEAPS = 16, 8
#: The same where one search takes long.
_FEW_STEPS, _FEW_LEAPS = 1, 3


def under_lower_limits(
    posed: Posed, found: Split, plan: Plan, solve: Callable[[Problem], Split | None]
) -> Iterator[Plan]:
    """Yield the plans of the best splits under lower and lower limits.

    Args:
        posed: The question, with limits.
        found: The split that a solver found for it.
        plan: The plan of it, which exceeds a limit.
        solve: Finds the best split of a problem.

    Yields:
        Plans with the bound of `found`, which holds for all. Each exceeds a limit, but for the
        last one.
    """
    question = posed.question
    is_slow = question.is_searched or question.cost is not None
    steps, leaps = (_FEW_STEPS, _FEW_LEAPS) if is_slow else (_MOST_STEPS, _MOST_LEAPS)
    kept, bound = [0] * posed.problem.n_partitions, found.lower_bound
    for step in range(steps + leaps):
        lacking = [j for j, part in enumerate(plan.partitions) if not keeps_limit(part)]
        if not lacking:
            return
        for j in lacking:
            part = plan.partitions[j]
            assert part.memory_limit is not None
            room = part.memory_limit - _peak(posed, found, j)
            lacks = 1 if step < steps else part.memory.total - part.memory_limit
            kept[j] = max(kept[j], room + lacks)
        memory = _keeping_free(posed.problem.memory, kept)
        other = solve(replace(posed.problem, memory=memory))
        if other is None:
            return
        # Where the least peak is asked for, the bytes that are kept free count in its own bound.
        found = replace(other, lower_bound=min(bound, other.lower_bound))
        plan = plan_of_split(posed, found)
        yield plan


def _peak(posed: Posed, found: Split, j: int) -> int:
    """Return the least that a partition needs."""
    memory, (start, end) = posed.problem.memory, found.bounds[j : j + 2]
    assert memory is not None
    return int(memory.rows(start, j, found.modes[j])[end - start - 1])


def _keeping_free(memory: Memory | None, kept: list[int]) -> Memory:
    """Return the memory of all runs, and in each partition some more bytes."""
    assert memory is not None
    labels = memory.labels(len(kept))
    kinds = list(dict.fromkeys(zip(labels, kept, strict=True)))
    more = tuple(kept)

    def rows(first: int, partition: int, mode: CheckpointMode) -> Any:
        return np.asarray(memory.rows(first, partition, mode)) + more[partition]

    return Memory(rows, tuple(map(kinds.index, zip(labels, kept, strict=True))))
