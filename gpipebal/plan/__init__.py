"""Plan: how a chain of layers is cut for devices, what that will cost, and how sure that is.

A plan embeds everything that it was made from (times and memory of each partition, layer names,
fingerprints), so that it can be simulated, drawn and run without the profile.
"""

from gpipebal.plan.parts import PartitionPlan, PeakMemory
from gpipebal.plan.plan import Plan

__all__ = ["PartitionPlan", "PeakMemory", "Plan"]
