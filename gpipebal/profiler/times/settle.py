"""Reconcile what the layers cost by themselves with what the whole chain costs in one piece."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["Settled", "settle", "settle_launches", "settle_rounds", "spread_of", "whole_again"]

#: A layer keeps at least this share of its measured time.
LEAST_SHARE = 0.1


@dataclass(frozen=True)
class Settled:
    """Times of layers that add up to the whole, and how that was reached.

    Attributes:
        times: Seconds of each layer, reconciled with the whole.
        spread: Interquartile range of each layer's measured times.
        measured: Median of the measured sums over the layers.
        whole: Median of the measured times of the chain in one piece.
        whole_spread: Interquartile range of these.
        rounds: How often each layer was measured, at least.
        has_whole: Whether the chain was measured in one piece; else `whole` is the sum.
    """

    times: NDArray[np.float64]
    spread: NDArray[np.float64]
    measured: float
    whole: float
    whole_spread: float
    rounds: int
    has_whole: bool = True

    @property
    def misses(self) -> bool:
        """Whether the layers miss the whole by more than its spread."""
        return abs(self.measured - self.whole) > self.whole_spread

    def to_record(self) -> dict[str, Any]:
        """Say what was corrected, for the provenance."""
        return {
            "sum_of_layers": self.measured,
            "whole": self.whole if self.has_whole else None,
            "whole_spread": self.whole_spread if self.has_whole else None,
            "misses_by_more_than_the_spread": self.misses,
        }


def settle_rounds(layers: Sequence[Sequence[float]], whole: Sequence[float]) -> Settled:
    """Take medians over rounds, and reconcile them with the whole.

    Args:
        layers: For each round, the seconds of every layer; NaN: it was not in this round.
        whole: For each round, the seconds of the chain in one piece; empty: it never ran in one
            piece, and there is nothing to compare with.
    """
    table, times = np.asarray(layers, dtype=np.float64), _medians(layers)
    spread = np.subtract(*np.nanpercentile(table, [75, 25], axis=0))
    rounds = int((~np.isnan(table)).sum(axis=0).min())
    if not len(whole):
        return Settled(times, spread, float(times.sum()), float(times.sum()), 0.0, rounds, False)
    in_one_piece = float(np.median(whole))
    return Settled(
        times=settle(times, in_one_piece),
        spread=spread,
        measured=float(np.median(table.sum(axis=1))),
        whole=in_one_piece,
        whole_spread=spread_of(whole),
        rounds=rounds,
    )


def settle_launches(
    layers: Sequence[Sequence[float]], whole: Sequence[float]
) -> NDArray[np.float64] | None:
    """Reconcile the host's launch time of each layer with that of the chain in one piece.

    Between layers that are clocked there are further calls, so they may add up to more than the
    whole. The whole can take longer than the layers only because the host waited for room in the
    device's queue, which is not work: then the layers' times stay as they are.

    Args:
        layers: For each round, the host's seconds for every layer.
        whole: For each round, those for the chain in one piece; empty: it never ran in one piece.

    Returns:
        Seconds of each layer; None if there are no rounds, because the host does the work itself.

    Example:
        >>> settle_launches([[4.0, 2.0, 1.0]], [4.1]).round(6).tolist()
        [3.0, 1.0, 0.1]
        >>> settle_launches([[4.0, 2.0, 1.0]], [9.0]).tolist()
        [4.0, 2.0, 1.0]
    """
    if not len(layers):
        return None
    times = _medians(layers)
    if not len(whole):
        return times
    return settle(times, min(float(times.sum()), float(np.median(whole))))


def whole_again(
    again: Sequence[Sequence[float]], layers: Sequence[Sequence[float]], whole: Sequence[float]
) -> list[float]:
    """Tell what the chain would take the second time in one piece, which it never runs in.

    The cost of cutting is the same both times, so the whole differs as the sums over the layers do.

    Args:
        again: For each round, the seconds of every layer the second time.
        layers: The same the first time.
        whole: For each round, the seconds of the chain in one piece the first time.

    Example:
        >>> whole_again([[2.0, 4.0]], [[2.0, 3.0]], [4.0])
        [5.0]
    """
    if not len(whole) or not len(again) or not len(layers):
        return list(whole)
    longer = _medians(again).sum() - _medians(layers).sum()
    return [max(0.0, float(seconds + longer)) for seconds in whole]


def spread_of(seconds: Sequence[float]) -> float:
    """Return the interquartile range of some times."""
    return float(np.subtract(*np.percentile(seconds, [75, 25])))


def _medians(rounds: Sequence[Sequence[float]]) -> NDArray[np.float64]:
    """Return the median of each layer's seconds."""
    medians: NDArray[np.float64] = np.nanmedian(np.asarray(rounds, dtype=np.float64), axis=0)
    return medians


def settle(times: NDArray[np.float64], whole: float) -> NDArray[np.float64]:
    """Make the times of the layers add up to the time of the whole chain.

    Clocking a layer by itself costs something for every layer, however small it is: a call into
    autograd, and work that neighbours would share. So if the layers add up to more than the whole,
    the same overhead is subtracted from each, but no layer loses more than nine tenths. If they add
    up to less, all are scaled.

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
