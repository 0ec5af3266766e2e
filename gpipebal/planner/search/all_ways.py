"""All ways to run a short chain, one by one: where no formula says what fits.

How much may wait for other partitions can depend on all cuts, so whether a split keeps its limits
is known only when it is complete. Where there are few ways to cut and run a chain, all are looked
at.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import combinations, product
from math import comb, factorial, prod
from typing import Literal

from gpipebal.planner.execution import Way
from gpipebal.planner.posing import Posed
from gpipebal.problem import Problem, Rules
from gpipebal.schedule import CHECKPOINT_MODES, Checkpoint, CheckpointMode, modes_of

__all__ = ["MOST_ORDERS", "all_ways", "device_orders"]

#: Up to this many orders of the devices are searched one by one.
MOST_ORDERS = 24


def all_ways(posed: Posed, most: int) -> list[Way] | None:
    """List all splits that keep the rules, in all modes and orders of devices that are open.

    Args:
        posed: The question.
        most: Largest number of ways.

    Returns:
        Ways, leftmost cuts first, and of each split those that recompute least; None if there may
        be more than `most`.
    """
    problem, question = posed.problem, posed.question
    n, n_layers = problem.n_partitions, problem.n_layers
    is_auto = question.checkpoint == "auto"
    count = comb(n_layers - 1, n - 1) * (len(CHECKPOINT_MODES) ** n if is_auto else 1)
    orders = device_orders(posed, most // count)
    if orders is None or count * len(orders) > most:
        return None
    return [
        Way(bounds, modes, order)
        for bounds in _bounds(problem)
        for modes in _modes(question.checkpoint, n, posed.chunks)
        for order in orders
    ]


def _modes(
    checkpoint: Checkpoint | Literal["auto"], n: int, chunks: int
) -> Iterable[tuple[CheckpointMode, ...]]:
    if checkpoint == "auto":
        n_recomputed = {"always": chunks, "except_last": chunks - 1, "never": 0}
        ways = product(reversed(CHECKPOINT_MODES), repeat=n)
        return sorted(ways, key=lambda modes: sum(n_recomputed[mode] for mode in modes))
    return [modes_of(checkpoint, n)]


def _bounds(problem: Problem) -> Iterator[tuple[int, ...]]:
    """Yield all splits that keep the rules, leftmost cuts first."""
    rules = problem.rules or Rules()
    for cuts in combinations(range(1, problem.n_layers), problem.n_partitions - 1):
        bounds = (0, *cuts, problem.n_layers)
        if rules.keeps(bounds):
            yield bounds


def device_orders(posed: Posed, most: int) -> list[tuple[int, ...]] | None:
    """List all orders of the devices that are open; orders that swap equal devices count once.

    The order that was given comes first.

    Args:
        posed: The question.
        most: Largest number of orders.

    Returns:
        Orders; None if there are more than `most`.
    """
    n, devices = posed.problem.n_partitions, posed.problem.devices
    if not posed.question.any_order or devices is None:
        return [tuple(range(n))]
    kinds = [devices.index(device) for device in devices]
    if factorial(n) // prod(factorial(kinds.count(kind)) for kind in set(kinds)) > most:
        return None
    # By kinds; of each kind the first device that is left is taken.
    orders: list[tuple[int, ...]] = [()]
    for _ in range(n):
        orders = [
            (*order, k)
            for order in orders
            for k in range(n)
            if k not in order and kinds[k] not in {kinds[i] for i in range(k) if i not in order}
        ]
    return orders
