"""Splits written as bounds and as balances."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise

__all__ = ["to_balance", "to_bounds"]


def to_balance(bounds: Sequence[int]) -> tuple[int, ...]:
    """Count the layers of every partition.

    Example:
        >>> to_balance((0, 2, 5))
        (2, 3)
    """
    return tuple(end - start for start, end in pairwise(bounds))


def to_bounds(balance: Iterable[int]) -> tuple[int, ...]:
    """Place the cuts of a balance.

    Example:
        >>> to_bounds([2, 3])
        (0, 2, 5)
    """
    return tuple(accumulate(balance, initial=0))
