"""Estimates: a profile without a device, from shapes alone.

The layers run on meta tensors, which have shapes and storages but no memory. What they would
allocate is counted as the measuring profiler counts it (`gpipebal.profiler.memory.storages`), so
bytes are those of a measurement; times are floating-point operations and bytes over a device's peak
rates.

Read in this order: `stand_ins` (layers and values without memory), `constants` (tensors that
functions use), `backends`, `results`, `group_norm` and `autocast` (what a device does differently
from the meta device), `approximate` (where that is not certain), `costs` (operations and bytes),
`refused` (what runs only with values), `walk` (layer after layer), `terms` (loss, gather,
optimizer), `profile` (all of it together).
"""

from gpipebal.profiler.estimate.profile import estimate_profile

__all__ = ["estimate_profile"]
