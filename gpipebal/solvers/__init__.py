"""Find the best split of a chain, with its proof.

Every solver here is exact: it returns a split together with a lower bound that equals its value,
unless a time limit ends it before, or HiGHS works to its tolerance: then the gap says so. None
falls back to another. Which one runs depends only on the question, and `dispatch.select_method`
names it beforehand.

Read in this order: `dispatch` (which algorithm answers which question), then the algorithm:

===================  =========================================  ================================
method               entry                                      built on
===================  =========================================  ================================
bisection            `bottleneck.solve_bottleneck`              `bisection`, `tiebreak`
two-threshold sweep  `makespan.solve_makespan`                  `thresholds`, `tiebreak`
pareto program       `always.solve_makespan_always`             `thresholds`, `paths`, `pareto`
set bisection        `staircase.least_bottleneck`               `reachability`, `evenness`
set sweep            `staircase.least_sum`                      `reachability`, `evenness`
box search           `boxes.least_makespan`                     `reachability`
peak bisection       `peak.least_peak`                          `reachability`, `staircase`
integer program      `integer_program.solve_integer_program`    HiGHS, `reachability`
===================  =========================================  ================================

For the makespan with one chunk, ``'bisection'`` is run by the next two entries. Where modes are
open or some are ``'always'``, the set sweep and the box search are run by
`any_mode.solve_any_mode`, up to three times.

The first three methods fill partitions one after the other: `chain` has their vocabulary.
`tiebreak` chooses among splits that are equally good: by a table over windows (`narrow`; many
places at once: `by_rows`), which `near_even` makes smaller, or by prices (`parametric`); `envelope`
finds the cheapest ends for `narrow` and `parametric`. The other methods keep sets of ends: `runs`
(costs of runs, and which are allowed), `levels` (which device may run which partition),
`reachability` (the search).

Without a method name: `next_best` (the k best splits, with `ranked`), `infeasible` (why there is no
split), `dense` (any cost of a partition), and `knapsack` with `knapsack_network` (the cheapest way
through a chain under a limit of bytes, for `gpipebal.planner.recompute_layers`).
"""

from __future__ import annotations

from gpipebal.objectives import OBJECTIVES, Objective
from gpipebal.solvers.dense import split_any_cost
from gpipebal.solvers.dispatch import (
    METHODS,
    Split,
    find,
    select_method,
    split,
)
from gpipebal.solvers.infeasible import explain_infeasible
from gpipebal.solvers.next_best import iter_best_splits

__all__ = [
    "METHODS",
    "OBJECTIVES",
    "Objective",
    "Split",
    "explain_infeasible",
    "find",
    "iter_best_splits",
    "select_method",
    "split",
    "split_any_cost",
]
