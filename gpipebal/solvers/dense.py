"""Any cost of a partition at all: a table over cuts and places, with nothing left out.

The other solvers are fast because they know how costs come about. This one does not: it asks for
the cost of every run in every partition. It serves costs that come from a function or from a
measurement, and it gives answers to check the other solvers against.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from gpipebal.errors import BalanceError, InfeasibleError
from gpipebal.problem import Rules
from gpipebal.problem.fits import check_enough_layers
from gpipebal.schedule import check_count

__all__ = ["AnyCost", "split_any_cost"]

#: Cost of the layers `first` to `end` - 1 in a partition; `math.inf` or None if it is impossible.
AnyCost = Callable[[int, int, int], "float | None"]


def split_any_cost(
    cost: AnyCost, n_layers: int, n_partitions: int, *, rules: Rules | None = None
) -> tuple[float, tuple[int, ...]]:
    """Split a chain in the best way under any cost of a partition.

    Minimises the largest cost of a partition over all splits into exactly `n_partitions` non-empty
    partitions. After each cut, what is left is split in the best way too; of equal ends the first.

    Args:
        cost: Called as ``cost(first, end, partition)``, once for each run and partition, where
            `end` is one past the last layer. Ints and Fractions are compared exactly. None or
            infinity: not allowed.
        n_layers: Number of layers.
        n_partitions: Number of partitions, 1 to number of layers.
        rules: Where cuts may not be, and which layers belong where; `cost` is not asked about runs
            that they forbid. None: no rules.

    Returns:
        The least value, and bounds that attain it.

    Raises:
        BalanceError: counts or rules that make no sense, a cost of NaN.
        InfeasibleError: every split has a partition that is not allowed.

    Complexity:
        O(N^2 K) calls of `cost`, for N layers and K partitions; O(N L K) where rules allow L
        lengths.

    Source:
        Bokhari, "Partitioning problems in parallel, pipeline, and distributed computing", IEEE
        Transactions on Computers 37(1), 1988. Differs: any cost; a table by places.

    Example:
        >>> split_any_cost(lambda first, end, partition: (end - first) ** 2, 5, 2)
        (9, (0, 2, 5))
    """
    n_layers = check_count("n_layers", n_layers)
    n_partitions = check_count("n_partitions", n_partitions)
    check_enough_layers("n_partitions", n_partitions, n_layers)
    if rules is not None:
        rules.check(n_layers, n_partitions)
    lengths = (rules or Rules()).lengths(n_layers)
    # From the right: the value from each place on.
    after: dict[int, float] = {n_layers: -math.inf}
    choices: list[dict[int, int]] = []
    for j in range(n_partitions - 1, -1, -1):  # j: partition
        here: dict[int, float] = {}
        chosen: dict[int, int] = {}
        for start in range(j, n_layers - (n_partitions - j) + 1) if j else (0,):
            for end in range(start + lengths.start, min(start + lengths.stop, n_layers + 1)):
                if end not in after or not (rules is None or rules.allows(start, end, j)):
                    continue
                own = cost(start, end, j)
                if own is None or own == math.inf:
                    continue
                if own != own:
                    raise BalanceError(
                        f"cost of a run is not a number: cost({start}, {end}, {j})={own!r} "
                        "(expected a number, or None).\nFix: return None for what is not allowed."
                    )
                total = max(own, after[end])
                if start not in here or total < here[start]:
                    here[start], chosen[start] = total, end
        after = here
        choices.append(chosen)
    if 0 not in after:
        breaks = "" if rules is None else "breaks a rule, or "
        raise InfeasibleError(
            f"no split is allowed: every one {breaks}has a partition whose cost is None or "
            f"infinite (expected {n_partitions} runs that are allowed).\n"
            "Fix: another number of partitions, or allow longer runs."
        )
    bounds = [0]
    for chosen in reversed(choices):
        bounds.append(chosen[bounds[-1]])
    return after[0], tuple(bounds)
