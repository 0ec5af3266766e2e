"""Least squares by pricing partitions, for chains where cuts could stand almost anywhere.

When one layer dominates, the best bottleneck says nothing about the rest of the chain, and every
cut may stand almost anywhere: a table over cuts and places is then nearly N times K large. The
way out is to drop the number of partitions from the table. Let a partition cost its square plus a
price, and minimise over splits into any number of partitions: one row suffices. The higher the
price, the fewer partitions are used, and since the least sum of squares is convex in their
number, some integer price makes exactly `n_partitions` of them optimal.

At that price other numbers may be optimal too. From every place, the numbers of partitions that
optimal continuations use form an interval, so the leftmost optimal split with exactly
`n_partitions` is found by walking from the left and never leaving the interval.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import isqrt

from gpipebal.solvers.envelope import cheapest_ends

__all__ = ["priced_least_squares"]


def priced_least_squares(
    sums: Sequence[int], reach: Sequence[int], entry: Sequence[int], n_partitions: int
) -> list[int]:
    """Find the leftmost split with the least sum of squared partition weights.

    Minimises over all splits into exactly `n_partitions` non-empty partitions that keep `reach`;
    among the minimisers, returns the lexicographically smallest bounds.

    Args:
        sums: Prefix sums of the layers' weights.
        reach: The limits; see `gpipebal.solvers.chain`. Some split must keep them.
        entry: `reach` inverted.
        n_partitions: Number of partitions.

    Complexity:
        O(S N log N) for N layers and S prices that are tried; S is about 10 to 30.

    Source:
        Aggarwal, Schieber and Tokuyama, "Finding a minimum-weight k-link path in graphs with the
        concave Monge property", Discrete and Computational Geometry 12, 1994. Differs: prices are
        chosen by secants, not by bisection; the leftmost path among all optimal ones.

    Example:
        >>> priced_least_squares([0, 1, 2, 3, 4], [4, 4, 4, 4], [0, 0, 0, 0, 0], 2)
        [0, 2, 4]
    """
    n_layers = len(reach)
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

    # Two points of the convex function from number of partitions to least sum of squares.
    price = sums[-1] * sums[-1] + 1
    cost, few = divmod(costs_at(price, 1)[0], unit)
    few_squares = cost - few * price
    many = n_layers
    many_squares = sum((sums[layer + 1] - sums[layer]) ** 2 for layer in range(n_layers))
    if few == many:
        return list(range(n_layers + 1))
    while True:
        # The slope between the points leaves at least one of them behind, unless it is the price.
        price = (few_squares - many_squares) // (many - few)
        least = costs_at(price, 1)
        cost, number = divmod(least[0], unit)
        if number > n_partitions:
            many, many_squares = number, cost - number * price
            continue
        most = costs_at(price, -1)
        cost, number = -(-most[0] // unit), -most[0] % unit
        if number >= n_partitions:
            break
        few, few_squares = number, cost - number * price

    bounds = [0]
    for left in range(n_partitions - 1, -1, -1):  # left: partitions after this one
        start = bounds[-1]
        remaining = least[start] // unit - price
        for end in range(start + 1, reach[start] + 1):
            weight = sums[end] - sums[start]
            if (
                weight * weight + least[end] // unit == remaining
                and least[end] % unit <= left <= -most[end] % unit
            ):
                bounds.append(end)
                break
    return bounds
