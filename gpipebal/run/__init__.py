"""The whole job in one call: profile, solve, train, compare with the prediction.

Read in this order: `workload` (what to train), `places` (on which devices), `training` (what a
step is, and how it is timed), `job` (one part of the job after the other).
"""

from gpipebal.run.job import FILES, run
from gpipebal.run.workload import Workload, load_workload

__all__ = ["FILES", "Workload", "load_workload", "run"]
