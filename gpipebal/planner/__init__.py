"""From a profile to a plan: `solve` finds the balance, `evaluate` is given one.

Read in this order: `solve`, `question` (what can be asked, with `layer_rules` and `places`),
`posing` (the question as a problem for the solvers; `quantiles`, and `run_memory` with `moments`
and `storage_tables`), `solved` (the solver for it), `best` (which split it is; `all_ways`
where only a clock tells what fits), `plans` (a split as a plan; `assemble`, and `sensitivity`),
`advice` (why there is none); `evaluate`; `execution` (how a split is run), `times` (what partitions
and steps take, from the layers' times), `training_step` (a plan's step, as its profile predicts
it). Beside them: `schedules` (the search under schedules without a closed form, with its
`schedule_bounds`), `grid` (pipelines side by side; `replicated` for one number of them),
`rule_comparison` (a plan beside the rules of thumb), and `recompute` (single layers recomputed
inside the partitions of a plan: `recompute_choice` is its noun, with `recompute_posing`,
`recompute_network` and `recompute_ways`).
"""

from gpipebal.planner.assemble import equal_split
from gpipebal.planner.evaluate import evaluate
from gpipebal.planner.grid import solve_grid
from gpipebal.planner.quantiles import at_quantile
from gpipebal.planner.question import default_reserve
from gpipebal.planner.recompute import recompute_layers
from gpipebal.planner.recompute_choice import LayerRecompute
from gpipebal.planner.rule_comparison import compare_rules
from gpipebal.planner.solve import select_method, solve, top_plans
from gpipebal.planner.training_step import training_step

__all__ = [
    "LayerRecompute",
    "at_quantile",
    "compare_rules",
    "default_reserve",
    "equal_split",
    "evaluate",
    "recompute_layers",
    "select_method",
    "solve",
    "solve_grid",
    "top_plans",
    "training_step",
]
