"""One cost at a number of rows that was not measured: lines through the measured sizes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache
from typing import Any

__all__ = [
    "SURE",
    "TOLERANCE",
    "Counts",
    "count_at",
    "fit_line",
    "interpolate",
    "is_rising_line",
    "peak_at",
    "points_around",
    "time_at",
]

#: No measured time is taken to be more certain than this, as a fraction of it.
SURE = 0.01
#: A fit is bad where it misses a time by more than its spread and more than this fraction of it.
TOLERANCE = 0.03
#: A peak is a line in the rows if it is off by no more than this fraction between the outermost.
STRAIGHT = 0.01

#: Rows and bytes, or operations, of the measured sizes, in ascending order of rows.
Counts = tuple[tuple[int, int], ...]


def time_at(points: Sequence[tuple[int, float, float]], rows: int) -> tuple[float, bool]:
    """Return a time at these rows, and whether the fit was good.

    Args:
        points: Rows, seconds and spread of the measured sizes, in ascending order of rows.
        rows: Rows to find the time at.

    Example:
        >>> time_at([(2, 3.0, 0.0), (4, 5.0, 0.0)], 6)
        (7.0, True)
        >>> time_at([(2, 1.0, 0.0), (4, 1.0, 0.0), (8, 9.0, 0.0)], 6)
        (5.0, False)
    """
    for r, time, _ in points:
        if r == rows:
            return float(time), True
    line = _line_through(tuple(points))
    if line is not None:
        overhead, slope, unit = line
        return (overhead + slope * rows) * unit, True
    found = interpolate([(r, t) for r, t, _ in points], rows)
    return float(found), len(points) == 1 or not any(time for _, time, _ in points)


# A search over several numbers of rows asks for the same lines each time.
@lru_cache(maxsize=1 << 15)
def _line_through(
    points: tuple[tuple[int, float, float], ...],
) -> tuple[float, float, float] | None:
    """Return overhead and slope in a unit, and the unit; None where the times are no line."""
    largest = max(time for _, time, _ in points)
    if len(points) < 2 or largest <= 0:
        return None
    # In a unit near the largest time, so that no square is too large or too small for a float;
    # a power of two, so that nothing is rounded.
    unit = math.ldexp(1.0, math.frexp(largest)[1])
    scaled = [(r, t / unit, spread / unit) for r, t, spread in points]
    overhead, slope = fit_line(
        [(r, t, min(max(spread, SURE * t, 1e-3), 1e3) ** -2) for r, t, spread in scaled]
    )
    if all(abs(overhead + slope * r - t) <= max(spread, TOLERANCE * t) for r, t, spread in scaled):
        return overhead, slope, unit
    return None


# Most layers have the same few numbers of bytes, such as 0.
@lru_cache(maxsize=1 << 15)
def count_at(points: Counts, rows: int) -> int:
    """Return bytes or operations at these rows: exact where they are a line, else rounded up."""
    value, parts = _on_line(points_around(points, rows), rows)
    return -(-value // parts)


def peak_at(points: Counts, rows: int, fixed: int = 0, *, turns: bool = False) -> int:
    """Return the largest of several sums of bytes at these rows, of each of which is a line.

    Between the points it is interpolated, which is no less than such a largest. Beyond them a line
    goes on as it is if it rises and all points are on it. If not, another sum may be the largest
    there. With more rows it is at most in proportion to the last point, as no sum is negative at
    zero rows; with fewer it is at most between the first point and what there is at zero rows.

    Args:
        points: The measured sizes.
        rows: Rows to find the peak at.
        fixed: The most that there is at zero rows, as far as it is known: gradients of parameters.
        turns: Whether another sum will be the largest with more rows, wherever the points are.

    Example:
        >>> peak_at(((2, 20), (4, 40), (8, 80)), 16), peak_at(((2, 60), (4, 50), (8, 40)), 16)
        (160, 80)
        >>> peak_at(((2, 60), (4, 50), (8, 40)), 1, fixed=80)
        70
    """
    found = count_at(points, rows)
    (first, at_first), (last, at_last) = points[0], points[-1]
    goes_on = not turns and is_rising_line(points)
    if first <= rows <= last or goes_on:
        return found
    if rows > last:
        return max(found, -(-at_last * rows // last))
    (second, at_second) = points[1]
    fall = at_first - at_second
    if fall <= 0:
        return found
    at_zero = max(fixed, at_first + -(-fall * first // (second - first)))
    return max(found, at_first + -(-(at_zero - at_first) * (first - rows) // first))


# Sizes are found for many numbers of rows in turn, from the same points.
@lru_cache(maxsize=1 << 15)
def is_rising_line(points: Counts) -> bool:
    """Tell whether points are on one line that does not fall.

    Example:
        >>> is_rising_line(((2, 20), (4, 20), (8, 20))), is_rising_line(((2, 9), (4, 5), (8, 7)))
        (True, False)
    """
    ends = [points[0], points[-1]]
    off = (abs(value - interpolate(ends, r)) - Fraction(STRAIGHT) * value for r, value in points)
    return points[0][1] <= points[-1][1] and all(each <= 0 for each in off)


def fit_line(points: Sequence[tuple[int, float, float]]) -> tuple[float, float]:
    """Fit an overhead and a slope, neither negative, by weighted least squares.

    Args:
        points: Rows, seconds and weight of each size; two or more different numbers of rows.

    Returns:
        Overhead in seconds, and seconds per row.

    Source:
        Least squares with bounds in two unknowns: the optimum is the free one if that keeps the
        bounds, else it is on the bound that the free one breaks (the sum of squares is convex).

    Example:
        >>> fit_line([(1, 3.0, 1.0), (2, 5.0, 1.0), (4, 9.0, 1.0)])
        (1.0, 2.0)
    """
    total = math.fsum(w for _, _, w in points)
    mean_rows = math.fsum(w * r for r, _, w in points) / total
    mean_time = math.fsum(w * t for _, t, w in points) / total
    around = math.fsum(w * (r - mean_rows) ** 2 for r, _, w in points)
    slope = math.fsum(w * (r - mean_rows) * (t - mean_time) for r, t, w in points) / around
    overhead = mean_time - slope * mean_rows
    if slope < 0:
        return mean_time, 0.0
    if overhead < 0:
        squares = math.fsum(w * r * r for r, _, w in points)
        return 0.0, math.fsum(w * r * t for r, t, w in points) / squares
    return overhead, slope


def interpolate(points: Sequence[tuple[int, Any]], rows: int) -> Fraction:
    """Interpolate linearly between points of ascending rows, exactly.

    Beyond the points, the line through the two outermost goes on. But it never falls as the rows
    grow, and goes to zero at zero rows where it would be negative there. With only one point, the
    result is in proportion to the rows.

    Example:
        >>> [int(interpolate([(2, 20), (4, 60)], rows)) for rows in (1, 2, 3, 4, 6)]
        [10, 20, 40, 60, 100]
    """
    nearest = [(r, Fraction(value)) for r, value in points_around(points, rows)]
    value, parts = _on_line(nearest, rows)
    return value / parts


def points_around(points: Sequence[tuple[int, Any]], rows: int) -> Sequence[tuple[int, Any]]:
    """Return the two points whose line goes through these rows, or the only one."""
    k = next((k for k in range(1, len(points)) if rows <= points[k][0]), len(points) - 1)
    return points[max(k - 1, 0) : k + 1]


def _on_line(points: Sequence[tuple[int, Any]], rows: int) -> tuple[Any, int]:
    """Return the value of a line at these rows, as a fraction: of whole numbers if points are."""
    if len(points) == 1:
        r, value = points[0]
        return (value * rows, r) if r else (value, 1)
    (first, low), (last, high) = points
    length, rise = last - first, high - low
    if first <= rows <= last:
        return low * length + rise * (rows - first), length
    rise = max(rise, 0)
    if rows > last:
        return high * length + rise * (rows - last), length
    if low * length < rise * first:
        return low * rows, first
    return low * length - rise * (first - rows), length
