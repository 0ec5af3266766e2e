"""Several pipelines that share the rows of a mini-batch.

Read in this order: `grid` (all ways to divide the devices), `options` (what can be asked of them),
`ways` (what is tried), `replicated` (one number of pipelines), `refusals` (why there is none).
"""

from gpipebal.planner.grid.grid import GridRow, GridTable, solve_grid

__all__ = ["GridRow", "GridTable", "solve_grid"]
