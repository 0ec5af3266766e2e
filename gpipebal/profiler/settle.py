"""Settle what the layers cost on their own with what the whole chain costs in one piece."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["settle"]

#: A layer keeps at least this share of its measured time.
LEAST_SHARE = 0.1


def settle(times: NDArray[np.float64], whole: float) -> NDArray[np.float64]:
    """Make the times of the layers add up to the time of the whole chain.

    Clocking a layer on its own costs something for every layer, however small it is: a call into
    autograd, and work that neighbours would share. So if the layers add up to more than the
    whole, the same overhead is taken off each, but no layer loses more than nine tenths. If they
    add up to less, all are scaled.

    Args:
        times: Seconds of each layer.
        whole: Seconds of the chain in one piece.

    Returns:
        Seconds of each layer; their sum is `whole` where that is possible.

    Complexity:
        O(n) for n layers, times 60 halvings.

    Example:
        >>> settle(np.array([4.0, 2.0, 1.0]), 4.1).round(6).tolist()
        [3.0, 1.0, 0.1]
    """
    total = float(times.sum())
    if total <= 0 or whole <= 0:
        return times
    if total <= whole:
        return times * (whole / total)
    floor = LEAST_SHARE * times
    if whole <= floor.sum():
        return floor * (whole / floor.sum())
    low, high = 0.0, float(times.max())
    for _ in range(60):
        overhead = (low + high) / 2
        if np.maximum(times - overhead, floor).sum() > whole:
            low = overhead
        else:
            high = overhead
    return np.maximum(times - high, floor)
