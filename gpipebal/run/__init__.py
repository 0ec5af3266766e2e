"""The whole job in one call: profile, solve, train, compare with the prediction.

Read in this order: `workload` (what to train) and `function` (the user's own, which returns it),
`places` (on which devices), `training` (what a training step does), `attempts` (which of the best
plans is fastest), `comparison` (how steps are timed), `folder` (what is written), `job` (all
together).
"""

from gpipebal.run.folder import FILES
from gpipebal.run.job import run
from gpipebal.run.workload import Workload, load_workload

__all__ = ["FILES", "Workload", "load_workload", "run"]
