"""Find the best split of a chain, with its proof.

Every solver here is exact: it returns a split together with a lower bound that equals its value.
None falls back to a heuristic. Which one runs depends on objective, checkpoint mode and chunks
only, and `select_method` tells beforehand.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from gpipebal.errors import BalanceError
from gpipebal.problem import Problem, to_balance
from gpipebal.solvers.always import solve_makespan_always
from gpipebal.solvers.bottleneck import solve_bottleneck
from gpipebal.solvers.makespan import solve_makespan

__all__ = ["METHODS", "OBJECTIVES", "Objective", "Split", "select_method", "split"]

Objective = Literal["makespan", "bottleneck"]
OBJECTIVES: tuple[Objective, ...] = get_args(Objective)

#: Names of the algorithms; ``'auto'`` stands for the one that `select_method` names.
METHODS = ("auto", "bisection", "two-threshold sweep", "pareto program")


@dataclass(frozen=True)
class Split:
    """A way to cut a chain into partitions, and how good it is proven to be.

    Attributes:
        bounds: Where partitions begin and end: 0, the cuts, number of layers.
        value: What was minimised, in the unit of the problem's times.
        lower_bound: No split into as many partitions has a smaller value, in the same unit.
        status: ``'optimal'`` when `value` equals `lower_bound`, else ``'feasible'``.
        method: Name of the algorithm.
    """

    bounds: tuple[int, ...]
    value: float
    lower_bound: float
    status: Literal["optimal", "feasible"]
    method: str

    @property
    def balance(self) -> tuple[int, ...]:
        """Number of layers in each partition."""
        return to_balance(self.bounds)

    @property
    def gap(self) -> float:
        """How far `value` may be from the optimum, as a fraction of it; 0 for a value of 0."""
        return (self.value - self.lower_bound) / self.value if self.value else 0.0


def split(problem: Problem, objective: Objective = "makespan", method: str = "auto") -> Split:
    """Split a chain into partitions in the provably best way.

    Minimises `objective` over all splits into exactly ``problem.n_partitions`` non-empty runs of
    consecutive layers. Ties are broken by the smallest bottleneck, then by the least sum of
    squared partition times (forward + recompute + backward), then by the leftmost cuts
    (lexicographically smallest bounds): the same problem always gives the same split.

    Args:
        problem: Times of the layers, number of partitions, chunks and checkpoint mode.
        objective: ``'makespan'``, first start to last end of a mini-batch, or ``'bottleneck'``,
            the time of the slowest partition for one micro-batch.
        method: ``'auto'``, or the name of the algorithm that `select_method` tells.

    Returns:
        A Split with status ``'optimal'``; times are in the unit of the problem's.

    Raises:
        BalanceError: an objective or a method that does not exist or does not apply.

    Complexity:
        For N layers and K partitions: O(P K log N) with P about 1 to 15 for ``'bottleneck'``, a
        few to some dozens of times that for ``'makespan'``; and O(N log N) to O(N K log N) for
        the tie-break. See the modules of `gpipebal.solvers`.

    Example:
        >>> problem = Problem([1, 2, 3, 4], [2, 4, 6, 8], [1, 2, 3, 4], n_partitions=2, chunks=8)
        >>> best = split(problem)
        >>> best.balance, best.value, best.status, best.method
        ((3, 1), 198, 'optimal', 'two-threshold sweep')
    """
    selected = select_method(problem, objective)
    if method not in ("auto", selected):
        raise BalanceError(
            f"method does not solve this problem: method={method!r} (expected 'auto' or "
            f"{selected!r} for objective={objective!r}, checkpoint={problem.checkpoint!r}; "
            f"all methods: {', '.join(map(repr, METHODS))}).\n"
            "Fix: method='auto'."
        )
    if objective == "bottleneck":
        solve = solve_bottleneck
    else:
        solve = solve_makespan_always if problem.checkpoint == "always" else solve_makespan
    bounds, value, lower_bound = solve(problem)
    return Split(
        bounds=bounds,
        value=problem.to_time(value),
        lower_bound=problem.to_time(lower_bound),
        status="optimal" if value == lower_bound else "feasible",
        method=selected,
    )


def select_method(problem: Problem, objective: Objective = "makespan") -> str:
    """Name the algorithm that `split` runs for a problem.

    ``'bisection'`` of one threshold, for the bottleneck, and for the makespan with one chunk;
    ``'two-threshold sweep'`` for the makespan, unless every micro-batch is recomputed;
    ``'pareto program'`` then, which begins with a sweep that mostly suffices.

    Raises:
        BalanceError: an objective that does not exist.

    Example:
        >>> select_method(Problem.from_costs([1, 2, 3], 2), "bottleneck")
        'bisection'
    """
    if objective not in OBJECTIVES:
        raise BalanceError(
            f"objective does not exist: objective={objective!r} "
            f"(expected one of {', '.join(map(repr, OBJECTIVES))}).\n"
            f"Fix: objective={OBJECTIVES[0]!r}."
        )
    if objective == "bottleneck" or problem.chunks == 1:
        return "bisection"
    return "pareto program" if problem.checkpoint == "always" else "two-threshold sweep"
