"""The executor: a chain of layers as a pipeline of partitions.

Read in this order: `microbatch` (what travels), `cell` (one micro-batch in one partition),
`minibatch` (the schedule, run by all workers), `worker` (their threads), `bridge` (how it becomes
one differentiable call), `gpipe` (the module that users see), `trace` and `meter` (watching it).
"""

from gpipebal.pipeline.batchnorm import DeferredBatchNorm
from gpipebal.pipeline.checkpoint import is_checkpointing, is_recomputing
from gpipebal.pipeline.deferral import convert_deferred_batch_norm
from gpipebal.pipeline.flat import flatten
from gpipebal.pipeline.gpipe import GPipe
from gpipebal.pipeline.meter import MemoryMeter, measure_memory
from gpipebal.pipeline.parting import gather, scatter
from gpipebal.pipeline.recomputed import with_recompute
from gpipebal.pipeline.recorder import Recorder
from gpipebal.pipeline.trace import trace

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
