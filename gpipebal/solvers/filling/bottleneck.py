"""The objective `bottleneck`: make the slowest partition as fast as possible."""

from __future__ import annotations

from gpipebal.problem import Problem
from gpipebal.solvers.bisection import floor, smallest_limit
from gpipebal.solvers.chain import Limit, Solution
from gpipebal.solvers.tiebreak.choose import fewest_squares

__all__ = ["solve_bottleneck"]


def solve_bottleneck(problem: Problem) -> Solution:
    """Split a chain so that its slowest partition is as fast as possible.

    Minimises forward + recompute + backward of the slowest partition, for one micro-batch, over
    all splits into exactly `n_partitions` non-empty partitions. Among the minimisers: least sum
    of squared partition times, then leftmost cuts.

    Complexity:
        O(P K log N) for N layers, K partitions and P probes, about 2 to 18; and the tie-break,
        see `gpipebal.solvers.tiebreak.choose`.

    Example:
        >>> solve_bottleneck(Problem.from_costs([5, 32, 17, 20, 50, 27, 25, 25], 4))
        Solution(bounds=(0, 3, 5, 6, 8), value=70, lower_bound=70)
    """
    loads, n_partitions = problem.load_sums, problem.n_partitions
    found = smallest_limit(loads, loads, n_partitions, at_least=floor(loads, n_partitions))
    bounds = fewest_squares(loads, [Limit(loads, loads, found.value)], n_partitions)
    return Solution(bounds, found.value, found.lower_bound)
