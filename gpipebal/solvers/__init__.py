"""Find the best split of a chain, with its proof.

Every solver here is exact: it returns a split together with a lower bound that equals its value,
unless a time limit ends it before, or HiGHS works to its tolerance: then the gap says so. None
falls back to another. Which one runs depends on the question only, and `select_method` tells
beforehand.
"""

from __future__ import annotations

from gpipebal.solvers.dense import split_any_cost
from gpipebal.solvers.dispatch import (
    METHODS,
    OBJECTIVES,
    Objective,
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
