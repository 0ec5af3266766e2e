"""The objective `makespan`: end the mini-batch as early as possible.

Where no micro-batch is recomputed, or all but the last are, the makespan is a sum that no split
can change, plus (chunks - 1) times the sum of the largest forward and the largest backward (with
recompute) of a partition. So it is least where the sum of those two maxima is: a sweep over two
thresholds. With one chunk, every split has the same makespan, and the tie-break decides alone.
With recompute of every micro-batch the makespan has more terms: see
`gpipebal.solvers.filling.always`.
"""

from __future__ import annotations

from gpipebal.problem import Problem
from gpipebal.solvers.chain import Limit, Solution
from gpipebal.solvers.filling.thresholds import smallest_sum
from gpipebal.solvers.tiebreak.choose import tie_break

__all__ = ["solve_makespan"]


def solve_makespan(problem: Problem) -> Solution:
    """Split a chain so that its mini-batch ends as early as possible.

    Minimises the makespan of checkpoint mode ``'never'`` or ``'except_last'`` over all splits
    into exactly `n_partitions` non-empty partitions. Among the minimisers: smallest bottleneck,
    then least sum of squared partition times, then leftmost cuts.

    Complexity:
        That of `smallest_sum`; and the tie-break, once per pair of maxima that is optimal.

    Source:
        Tarnawski et al., "Efficient Algorithms for Device Placement of DNN Graph Operators",
        NeurIPS 2020, appendix C, states the objective for 'never'. Differs: recompute; a
        polynomial algorithm for chains in place of an integer program.

    Example:
        >>> solve_makespan(Problem([3, 1, 1], [1, 3, 5], [0, 0, 0], 2, chunks=3))
        Solution(bounds=(0, 2, 3), value=32, lower_bound=32)
    """
    forward, backward_phase, n_partitions = (
        problem.forward_sums,
        problem.backward_phase_sums,
        problem.n_partitions,
    )
    repeats = problem.chunks - 1
    once = forward[-1] + problem.backward_sums[-1]
    if not repeats:
        bounds = tie_break(problem.load_sums, [[]], n_partitions)
        return Solution(bounds, once, once)
    least = smallest_sum(forward, backward_phase, n_partitions, both=problem.load_sums)
    candidates = [
        [Limit(forward, forward, one), Limit(backward_phase, backward_phase, two)]
        for one, two in least.pairs
    ]
    bounds = tie_break(problem.load_sums, candidates, n_partitions)
    return Solution(bounds, once + repeats * least.total, once + repeats * least.lower_bound)
