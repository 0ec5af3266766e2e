"""From a profile to a plan: `solve` finds the balance, `evaluate` is given one.

Read in this order: `solve`, `question` (what can be asked), `posing` (the question as a problem for
the solvers; `chunking`, `quantiles`, and `run_memory` with `moments` and `storage_tables`), `best`
(which plan it is), `advice` (why there is none), `sensitivity`; `evaluate`; `assemble` (what both
put into a plan), `times` (what partitions and steps take, from the layers' times). Beside them:
`schedules` (the search under schedules without a closed form, with its `schedule_bounds`), `grid`
(pipelines side by side), and `rule_comparison` (a plan beside the rules of thumb).
"""

from gpipebal.planner.assemble import equal_split
from gpipebal.planner.evaluate import evaluate
from gpipebal.planner.grid import solve_grid
from gpipebal.planner.question import default_reserve
from gpipebal.planner.rule_comparison import compare_rules
from gpipebal.planner.solve import make_plan, select_method, solve, top_plans

__all__ = [
    "compare_rules",
    "default_reserve",
    "equal_split",
    "evaluate",
    "make_plan",
    "select_method",
    "solve",
    "solve_grid",
    "top_plans",
]
