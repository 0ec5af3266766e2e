"""The floor: what no prediction can do better, because the measured times differ from each other.

A plan's measured time is a median over the steps of several turns. Those of the even and of the
odd turns are two measurements of the same, minutes apart. They differ by more than the median of
all differs from the truth: each has half of the steps, and both err. So half of their difference
is what a perfect prediction would be off by, about.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import sqrt
from statistics import fmean, median
from typing import Any

from scipy.stats import spearmanr

Row = dict[str, Any]


def halves(row: Row) -> tuple[float, float] | None:
    """Return the median step time in the even turns, and in the odd ones; None: there is one."""
    turns = row["turns"]
    if len(turns) < 2:
        return None
    even, odd = ([time for turn in turns[k::2] for time in turn] for k in (0, 1))
    return median(even), median(odd)


def unavoidable(row: Row) -> float | None:
    """Return what a perfect prediction of a plan would be off by, about; None: it is not known."""
    both = halves(row)
    return None if both is None else abs(both[0] - both[1]) / sum(both)


def all_unavoidable(rows: Iterable[Row]) -> list[float]:
    """Return the same of all plans for which it is known."""
    return [value for row in rows if (value := unavoidable(row)) is not None]


def mean_unavoidable(rows: Iterable[Row]) -> float | None:
    """Return the mean over plans of what a perfect prediction would be off by; None: not known."""
    known = all_unavoidable(rows)
    return fmean(known) if known else None


def best_rank(rows: Sequence[Row]) -> float | None:
    """Return the rank correlation of a perfect prediction with the measured times, about.

    If two halves of a measurement correlate by r, the whole does with the truth by the root of
    2 r / (1 + r) (Spearman and Brown).
    """
    pairs = [both for row in rows if (both := halves(row)) is not None]
    if len(set(pairs)) < 2:
        return None
    r = float(spearmanr(*zip(*pairs, strict=True)).statistic)
    return sqrt(2 * r / (1 + r)) if r > 0 else 0.0


def regret_between_halves(rows: Sequence[Row]) -> float | None:
    """Return the regret of a plan that one half of the steps chose, measured by the other half.

    The mean of both ways; the best of the measured plans is a lucky one here too.
    """
    pairs = [both for row in rows if (both := halves(row)) is not None]
    if not pairs:
        return None
    found = []
    for first, second in ((0, 1), (1, 0)):
        chosen = min(pairs, key=lambda both: both[first])
        found.append(chosen[second] / min(both[second] for both in pairs) - 1)
    return fmean(found)


def regret_in_halves(chosen: Row, rows: Sequence[Row]) -> float | None:
    """Return the measured time of a plan over that of the best, less one, without its luck.

    The best is found in one half of the steps, and both are compared in the other; the mean of
    both ways. It may be below zero.
    """
    pairs = {id(row): both for row in rows if (both := halves(row)) is not None}
    if id(chosen) not in pairs:
        return None
    found = []
    for first, second in ((0, 1), (1, 0)):
        best = min(pairs.values(), key=lambda both: both[first])
        found.append(pairs[id(chosen)][second] / best[second] - 1)
    return fmean(found)


def far_from_median(values: Sequence[float]) -> float:
    """Return how far one of several values is at most from their median, as a share of it.

    Example:
        >>> far_from_median([9.0, 10.0, 13.0])
        0.3
    """
    middle = median(values)
    return max(abs(value / middle - 1) for value in values)


def partition_times(of_partition: dict[str, list[float]]) -> list[float]:
    """Add up forward and backward of a partition in each turn of the repeats."""
    pairs = zip(of_partition["forward"], of_partition["backward"], strict=True)
    return [forward + backward for forward, backward in pairs]
