"""Find the best split of a chain, with its proof.

Every solver here is exact: it returns a split together with a lower bound that equals its value,
unless a time limit ends it before, or HiGHS works to its tolerance: then the gap says so. None
falls back to another. Which one runs depends only on the question, and `dispatch.select_method`
names it beforehand.

Read in this order: `dispatch` (which algorithm answers which question), then the algorithm:

===================  ========================  ====================================
method               entry                     built on
===================  ========================  ====================================
bisection            `filling.bottleneck`      `bisection`, `tiebreak`
two-threshold sweep  `filling.makespan`        `filling.thresholds`, `tiebreak`
pareto program       `filling.always`          `filling.paths`, `filling.pareto`
set bisection        `sets.staircase`          `sets.reachability`, `sets.evenness`
set sweep            `sets.staircase`          `sets.reachability`, `sets.evenness`
box search           `sets.boxes`              `sets.reachability`
peak bisection       `sets.peak`               `sets.reachability`
integer program      `integer_program`         HiGHS, `sets.reachability`
===================  ========================  ====================================

For the makespan with one chunk, ``'bisection'`` is run by the next two entries. Where modes are
open or some are ``'always'``, the set sweep and the box search are run by `sets.any_mode`, up to
three times.

The first three methods fill partitions one after the other: `chain` has their vocabulary, and
`tiebreak` chooses among splits that are equally good. The other methods keep sets of ends.

Without a method name: `next_best` (the k best splits), `infeasible` (why there is no split),
`dense` (any cost of a partition), and `knapsack` (the cheapest way through a chain under a limit of
bytes, for `gpipebal.planner.recompute_layers`). `deadline` is the clock of them all.
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
