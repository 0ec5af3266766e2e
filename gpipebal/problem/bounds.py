"""Splits written as bounds and as balances."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise

from gpipebal.argument_kinds import check_list, check_whole, whole_number
from gpipebal.errors import BalanceError

__all__ = ["check_bounds", "partition_of_layers", "to_balance", "to_bounds"]


def check_bounds(name: str, bounds: object, n_layers: int | None = None) -> tuple[int, ...]:
    """Return bounds of runs as a tuple: whole numbers that grow, from 0 to the number of layers.

    Raises:
        KindError: it is not a list.
        BalanceError: it has other numbers.

    Example:
        >>> check_bounds("bounds", [0, 2, 5], 5)
        (0, 2, 5)
    """
    found = tuple(map(whole_number, check_list(name, bounds, fix=f"{name}=(0, 2, 5), say")))
    known = tuple(number for number in found if number is not None)
    good = len(known) == len(found) > 1 and known[0] == 0
    grows = good and all(start < end for start, end in pairwise(known))
    if not grows or n_layers not in (None, known[-1]):
        last = "the number of layers" if n_layers is None else n_layers
        raise BalanceError(
            f"bounds of partitions are not valid: {name}={bounds!r:.60} (expected whole numbers "
            f"that grow, from 0 to {last}).\nFix: {name}=to_bounds(balance)."
        )
    return known


def to_balance(bounds: Sequence[int]) -> list[int]:
    """Count the layers of every partition.

    Example:
        >>> to_balance((0, 2, 5))
        [2, 3]
    """
    ends = [check_whole("bounds", end) for end in check_list("bounds", bounds)]
    return [end - start for start, end in pairwise(ends)]


def to_bounds(balance: Iterable[int]) -> tuple[int, ...]:
    """Place the cuts of a balance.

    Example:
        >>> to_bounds([2, 3])
        (0, 2, 5)
    """
    balance = check_list("balance", balance)
    return tuple(accumulate((check_whole("balance", layers) for layers in balance), initial=0))


def partition_of_layers(balance: Iterable[int]) -> list[int]:
    """Return the partition of each layer.

    Example:
        >>> partition_of_layers([2, 3])
        [0, 0, 1, 1, 1]
    """
    return [j for j, n_layers in enumerate(balance) for _ in range(n_layers)]
