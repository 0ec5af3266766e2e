"""Moments: what the peaks of a layer are the largest of, and so the peaks at any number of rows.

A layer's backward has its peak at one of several moments: with few rows mostly at its end, when all
gradients of parameters are there and what was saved is freed, with many rows at its beginning. The
bytes of each moment are a line in the rows. Two measured sizes tell all these lines, and so where
another moment becomes the largest, also beyond the sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from gpipebal.profile.fit import STRAIGHT, points_around
from gpipebal.profile.layer import MOMENTS, LayerProfile

if TYPE_CHECKING:
    from gpipebal.profile.profile import Profile

__all__ = ["keep_largest", "largest_moment"]

#: Rows, and the bytes of each moment.
_Size = tuple[int, Sequence[int]]


def keep_largest(profile: Profile) -> Profile:
    """Leave out the moments that are the peak at no number of rows; all where they are no lines.

    Args:
        profile: A chain at several sizes, with all moments of each; of those that are not the same
            moments as at the largest size nothing is known.
    """
    sizes = sorted((profile, *profile.other_sizes), key=lambda size: size.rows)
    rows = [size.rows for size in sizes]
    places = lru_cache(_places)  # layers that are alike have the same moments
    layers = [
        _kept(rows, each, places) for each in zip(*(size.layers for size in sizes), strict=True)
    ]
    found = {
        size.rows: replace(size, layers=of_size, other_sizes=())
        for size, of_size in zip(sizes, zip(*layers, strict=True), strict=True)
    }
    others = tuple(found[other.rows] for other in profile.other_sizes)
    return replace(found[profile.rows], other_sizes=others)


def _kept(
    rows: Sequence[int], layers: Sequence[LayerProfile], find: Callable[..., list[int]]
) -> list[LayerProfile]:
    """Do that for one layer at all sizes, with `_places` or what remembers what that found."""
    kept: list[dict[str, Any]] = [{} for _ in layers]
    for name in MOMENTS.values():
        found: list[Sequence[int]] = [getattr(layer, name) for layer in layers]
        alike = [k for k, each in enumerate(found) if len(each) == len(found[-1])]
        places = find(tuple((rows[k], found[k]) for k in alike))
        for k, of_size in enumerate(kept):
            of_size[name] = tuple(found[k][place] for place in places if k in alike)
    return [replace(layer, **of_size) for layer, of_size in zip(layers, kept, strict=True)]


def _places(points: Sequence[_Size]) -> list[int]:
    """Return the places of moments that are the largest at some number of rows.

    There are none where there are fewer than two sizes, or where the line of one of these moments
    through the outermost sizes misses another size.
    """
    if len(points) < 2 or not points[0][1]:
        return []
    # Other sizes may be left out later, because the layer does something else there.
    pairs = {(0, len(points) - 1), *pairwise(range(len(points)))}
    places = {place for one, other in pairs for place in _hull(points[one], points[other])}
    places.update(max(range(len(of)), key=of.__getitem__) for _, of in points)
    (first, low), (last, high) = points[0], points[-1]
    length = last - first
    for rows, middle in points[1:-1]:
        most = STRAIGHT * max(middle) * length
        for k in places:
            on_line = low[k] * length + (high[k] - low[k]) * (rows - first)
            if abs(on_line - middle[k] * length) > most:
                return []
    return sorted(places)


def _hull(one: _Size, other: _Size) -> list[int]:
    """Return the places of moments whose lines through two sizes are the highest somewhere.

    Args:
        one: The size with fewer rows.
        other: The one with more.

    Source:
        The upper envelope of lines, by a stack in the order of their slopes (the "convex hull
        trick"): one is left out where its neighbours cross above it.

    Example:
        >>> _hull((1, [10, 4, 2, 1]), (2, [10, 8, 5, 11]))
        [0, 3]
    """
    (first, low), (last, high) = one, other
    best: dict[int, int] = {}
    for k, (before, behind) in enumerate(zip(low, high, strict=True)):
        rise = behind - before
        if rise not in best or low[best[rise]] < before:
            best[rise] = k
    found: list[tuple[int, int, int]] = []
    for rise, k in sorted(best.items()):
        while len(found) > 1:
            (rise1, low1, _), (rise2, low2, _) = found[-2:]
            if (low[k] - low1) * (rise2 - rise1) < (low2 - low1) * (rise - rise1):
                break
            found.pop()
        found.append((rise, low[k], k))
    # Leave out lines that are the highest only below zero rows.
    at_zero = [value * (last - first) - rise * first for rise, value, _ in found]
    while len(found) > 1 and at_zero[1] >= at_zero[0]:
        del found[0], at_zero[0]
    return [k for *_, k in found]


# Layers that are alike have the same moments.
@lru_cache(maxsize=1 << 15)
def largest_moment(points: tuple[tuple[int, tuple[int, ...]], ...], rows: int) -> int:
    """Return the largest of some moments at these rows, rounded up; never below 0.

    Args:
        points: Two sizes or more, in ascending order of rows.
        rows: Rows to find it at.

    Example:
        >>> largest_moment(((2, (60, 20)), (4, (50, 40))), 8)
        80
    """
    (first, low), (last, high) = points_around(points, rows)
    length = last - first
    each = (
        -(-(one * length + (other - one) * (rows - first)) // length)
        for one, other in zip(low, high, strict=True)
    )
    return max(0, *each)
