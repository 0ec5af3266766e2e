"""Rules of thumb: how a chain is cut without a solver, to compare a plan with.

None of them knows an objective: they put layers, or parameters, or seconds into the partitions as
evenly as they can. `compare_rules` says what that costs.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from itertools import accumulate, pairwise

from gpipebal.errors import BalanceError
from gpipebal.problem import Problem
from gpipebal.problem.checks import check_times, largest_denominator, scaled
from gpipebal.problem.fits import check_enough_layers
from gpipebal.profile import Profile
from gpipebal.schedule import check_count
from gpipebal.solvers import split
from gpipebal.units import count

__all__ = ["block_split", "equal_parameters"]


def equal_parameters(profile: Profile, n_partitions: int) -> tuple[int, ...]:
    """Return the bounds of the split whose largest partition has the fewest bytes of parameters.

    Raises:
        BalanceError: no layer has parameters, or there are more partitions than layers.

    Example:
        >>> profile = Profile.from_costs([1.0] * 4, parameter_bytes=[8, 0, 0, 8])
        >>> equal_parameters(profile, 2)
        (0, 1, 4)
    """
    sizes = [layer.parameter_bytes for layer in profile.layers]
    if not any(sizes):
        raise BalanceError(
            "no layer has parameters: sum(parameter_bytes)=0 (expected more).\n"
            "Fix: profile the model itself, or give parameter_bytes to Profile.from_costs."
        )
    return split(Problem.from_costs(sizes, n_partitions), "bottleneck").bounds


def block_split(
    costs: Sequence[float], n_partitions: int, *, time_limit: float = math.inf
) -> tuple[int, ...]:
    """Return the bounds that torchgpipe's rule ends with.

    It begins with equally many layers in each partition; the last one takes the remainder. Then a
    smallest partition takes a layer from its neighbour on the side of a largest one, again and
    again, until largest and smallest differ by no more than one layer can. That bounds their
    difference, not the largest: the result may be far from the best. torchgpipe first subtracts the
    smallest layer's cost from every layer: the longer a partition is, the more of its cost is
    ignored.

    Args:
        costs: Cost of each layer, 0 or more.
        n_partitions: Number of partitions, 1 to number of layers.
        time_limit: Seconds after which to give up.

    Raises:
        BalanceError: no costs, or more partitions than layers; or the rule leaves a partition
            without layers, or does not end in time.

    Complexity:
        O(K) for each layer that is moved, of up to O(N^3) for N layers and K partitions.

    Source:
        Barany and Grinberg, "Block partitions of sequences", Israel Journal of Mathematics 206,
        2015. As in torchgpipe 0.0.7: scaled costs; of equally large partitions the last one counts
        as the largest and the first one as the smallest. Differs: in whole numbers, so that no
        rounding decides.

    Example:
        >>> block_split([1] * 15, 8)
        (0, 1, 2, 3, 4, 5, 6, 7, 15)
        >>> block_split([1, 2, 3, 4, 5, 6], 2)
        (0, 4, 6)
    """
    costs = check_times("costs", costs)
    n_layers, n_partitions = len(costs), check_count("partitions", n_partitions)
    check_enough_layers("n_partitions", n_partitions, n_layers)
    until = time.monotonic() + time_limit
    whole = list(scaled(costs, largest_denominator(costs)))
    least = min(whole)
    unit = max(whole) - least
    sums = list(accumulate((cost - least for cost in whole), initial=0))
    bounds = [j * (n_layers // n_partitions) for j in range(n_partitions)] + [n_layers]

    def size(j: int) -> int:
        # A bound may temporarily pass over an empty partition, which then ends before it begins.
        return sums[max(bounds[j], bounds[j + 1])] - sums[bounds[j]]

    sizes = [size(j) for j in range(n_partitions)]
    largest, p = _last_largest(sizes)
    while True:
        smallest = min(sizes)
        if largest <= smallest + unit:
            break
        if time.monotonic() > until:
            raise BalanceError(
                f"rule did not end: not within {time_limit:g} s (expected an end; "
                f"{count(n_layers, 'layer')}, {count(n_partitions, 'partition')}).\n"
                "Fix: a larger time_limit."
            )
        q = sizes.index(smallest)
        # The neighbour towards the largest partition hands over the layer at the border.
        if p < q:
            giver = q - 1
            bounds[q] -= 1
        else:
            giver = q + 1
            bounds[q + 1] += 1
        if not 0 <= bounds[max(q, giver)] <= n_layers:
            raise BalanceError(
                f"rule loses its way: a cut before layer {bounds[max(q, giver)]} (expected 0 to "
                f"{n_layers}).\nFix: fewer partitions, or solve."
            )
        sizes[q], sizes[giver] = size(q), size(giver)
        if giver == p:
            largest, p = _last_largest(sizes)
    for j, (start, end) in enumerate(pairwise(bounds)):
        if start >= end:
            raise BalanceError(
                f"rule leaves a partition without layers: partition {j} (expected 1 or more).\n"
                "Fix: fewer partitions, or solve."
            )
    return tuple(bounds)


def _last_largest(sizes: Sequence[int]) -> tuple[int, int]:
    """Return the largest size, and the last partition that has it."""
    return max((size, j) for j, size in enumerate(sizes))
