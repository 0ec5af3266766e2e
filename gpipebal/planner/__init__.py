"""From a profile to a plan: `solve` finds the balance, `evaluate` is given one.

Read in this order: `solve`, `evaluate`, `assemble` (what both put into a plan), `times` (what
partitions and steps take, from the layers' times).
"""

from gpipebal.planner.assemble import equal_split
from gpipebal.planner.evaluate import evaluate
from gpipebal.planner.solve import make_plan, solve

__all__ = ["equal_split", "evaluate", "make_plan", "solve"]
