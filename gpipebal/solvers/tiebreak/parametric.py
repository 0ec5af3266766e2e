"""Least squares by pricing partitions, for chains where cuts could be almost anywhere.

When one layer dominates, the best bottleneck says nothing about the rest of the chain, and every
cut may be almost anywhere: a table over cuts and places then has nearly N times K entries. The
way out is to drop the number of partitions from the table. Let a partition cost its square plus a
price, and minimise over splits into any number of partitions: one row suffices. The higher the
price, the fewer partitions are used, and since the least sum of squares is convex in their
number, some integer price makes exactly `n_partitions` of them optimal.

At that price other numbers may be optimal too. From every place, the numbers of partitions that
optimal continuations use form an interval, so the leftmost optimal split with exactly
`n_partitions` is found by walking from the left and never leaving the interval.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import pairwise
from math import isqrt

from gpipebal.solvers.chain import Limit
from gpipebal.solvers.tiebreak.envelope import cheapest_ends

__all__ = ["priced_least_squares"]

#: Prices that are guessed before secants take over.
_MOST_GUESSES = 8


def priced_least_squares(
    sums: Sequence[int], limits: Sequence[Limit], n_partitions: int
) -> list[int]:
    """Find the leftmost split with the least sum of squared partition weights.

    Minimises over all splits into exactly `n_partitions` non-empty partitions that keep `limits`;
    among the minimisers, returns the lexicographically smallest bounds.

    Args:
        sums: Prefix sums of the layers' weights.
        limits: The limits. Some split must keep them.
        n_partitions: Number of partitions.

    Complexity:
        O(S N log N) for N layers and S prices that are tried; S is about 4 to 12.

    Source:
        Aggarwal, Schieber and Tokuyama, "Finding a minimum-weight k-link path in graphs with the
        concave Monge property", Discrete and Computational Geometry 12, 1994. Differs: prices are
        chosen by guesses and secants, not by bisection; the leftmost path among all optimal ones.

    Example:
        >>> priced_least_squares([0, 1, 2, 3, 4], [], 2)
        [0, 2, 4]
    """
    n_layers = len(sums) - 1
    # The first start of a partition with each end.
    entry = [0] * (n_layers + 1)
    for ends, starts, limit in limits:
        entry = list(map(max, entry, [bisect_left(starts, end - limit) for end in ends]))
    # Prices are stretched by a square larger than the number of layers, so that one more unit of
    # price decides between equal costs by the number of partitions, and changes nothing else.
    stretch = isqrt(n_layers) + 1
    unit = stretch * stretch
    stretched = [stretch * total for total in sums]

    def costs_at(price: int, nudge: int) -> list[int]:
        cost = [0] * (n_layers + 1)
        row = (0, n_layers - 1), (1, n_layers)
        cheapest_ends(stretched, entry, cost, cost, *row, unit * price + nudge)
        return cost

    # Two points of the convex function from number of partitions to least sum of squares, with
    # too few partitions and with too many; nothing is known yet of what is too few.
    few: tuple[int, int] | None = None
    many = n_layers, sum([(end - start) ** 2 for start, end in pairwise(sums)])
    # As a rule the number goes down with the root of the price; from even partitions that is two
    # or three guesses. Then secants: they do end.
    price, power, guesses, was_too_many = (sums[-1] // n_partitions) ** 2, 2, 0, False
    while True:
        secant = guesses == _MOST_GUESSES or not price
        least = costs_at(price, 1)
        cost, number = divmod(least[0], unit)
        too_many = number > n_partitions
        if too_many:
            many = min(many, (number, cost - number * price))
        else:
            if secant or number == n_partitions:
                most = costs_at(price, -1)
                cost, number = -(-most[0] // unit), -most[0] % unit
                if number >= n_partitions:
                    break
            few = max(few or (0, 0), (number, cost - number * price))
        if few is not None and 8 * (many[0] - few[0]) <= n_partitions + 16:
            guesses = _MOST_GUESSES
        if few is not None and guesses == _MOST_GUESSES:
            # At the slope between the points, one of them is replaced, unless it is the price.
            price = (few[1] - many[1]) // (many[0] - few[0])
            continue
        guesses = min(guesses + 1, _MOST_GUESSES)
        # Further if the last guess was wrong in the same direction.
        power = power * 2 if guesses > 1 and too_many == was_too_many else 2
        was_too_many = too_many
        price = price * number**power // n_partitions**power + too_many

    bounds = [0]
    for left in range(n_partitions - 1, -1, -1):  # left: partitions after this one
        start = bounds[-1]
        remaining = least[start] // unit - price
        for end in range(start + 1, n_layers + 1):
            weight = sums[end] - sums[start]
            if (
                weight * weight + least[end] // unit == remaining
                and least[end] % unit <= left <= -most[end] % unit
            ):
                bounds.append(end)
                break
    return bounds
