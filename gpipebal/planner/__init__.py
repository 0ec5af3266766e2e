"""From a profile to a plan: `solve` finds the balance, `evaluate` is given one.

Read in this order: `solve`, `question` (what can be asked, with `layer_rules` and `devices`),
`own_cost` (a cost that the caller gives); `posing` (the question as a problem for the solvers, with
`quantiles`); `runs` (the memory of all runs of layers); `search` (which split is best); `plans` (a
split as a plan; `assemble`, and `sensitivity`), `shortage` and `advice` (why there is none, and
what would help); `evaluate`; `execution` (how a chain is cut and run), `times` (how long partitions
and steps take, from the layers' times), `training_step` (a plan's step, as its profile predicts
it).

Besides these: `schedules` (local search under schedules without a closed form), `grid` (several
pipelines that share the rows), `thumb_comparison` (a plan next to `rules_of_thumb`), and
`recompute` (single layers recomputed inside the partitions of a plan).
"""

from gpipebal.planner.assemble import equal_split
from gpipebal.planner.evaluate import evaluate
from gpipebal.planner.grid import solve_grid
from gpipebal.planner.quantiles import at_quantile
from gpipebal.planner.question import default_reserve
from gpipebal.planner.recompute.choice import LayerRecompute
from gpipebal.planner.recompute.recompute import recompute_layers
from gpipebal.planner.solve import select_method, solve, top_plans
from gpipebal.planner.thumb_comparison import compare_rules
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
