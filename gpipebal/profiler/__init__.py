"""The profiler: measure what every layer of a chain costs, for one micro-batch.

Read in this order: `replica` (what is measured instead of the caller's model), `rounds` (the
clocked work), `storages` (the memory), `step` (loss, gather, optimizer), `measure` (all together).
"""

from gpipebal.profiler.measure import profile_model

__all__ = ["profile_model"]
