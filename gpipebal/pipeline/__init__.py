"""The executor: a chain of layers as a pipeline of partitions.

Read in this order: `gpipe` (the module that users see), `layers` (what it is made of), `values`
(what travels), `workers` (what runs), `minibatch` (one mini-batch on its way), `process` and
`randomness` (what makes its numbers those of the plain model), `observers`, `trace` and `meter`
(watching it).
"""

from gpipebal.pipeline.gpipe import GPipe
from gpipebal.pipeline.layers.batchnorm import DeferredBatchNorm
from gpipebal.pipeline.layers.deferral import convert_deferred_batch_norm
from gpipebal.pipeline.layers.flat import flatten
from gpipebal.pipeline.layers.runs import with_recompute
from gpipebal.pipeline.meter import MemoryMeter, measure_memory
from gpipebal.pipeline.observers.recorder import Recorder
from gpipebal.pipeline.process.phase import is_checkpointing, is_recomputing
from gpipebal.pipeline.trace import trace
from gpipebal.pipeline.values.parting import gather, scatter

__all__ = [
    "DeferredBatchNorm",
    "GPipe",
    "MemoryMeter",
    "Recorder",
    "convert_deferred_batch_norm",
    "flatten",
    "gather",
    "is_checkpointing",
    "is_recomputing",
    "measure_memory",
    "scatter",
    "trace",
    "with_recompute",
]
