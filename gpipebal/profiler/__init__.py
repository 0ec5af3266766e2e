"""The profiler: measure what every layer of a chain costs, at the sizes that micro-batches have.

Read in this order: `replicas` (what is measured instead of the caller's model), `chain` (how a
micro-batch passes through the layers), `times` (the clocked rounds), `memory` (bytes and
operations), `step` (what a step costs besides the layers), `training` (the chain with its target,
loss and optimizer), `survey` (a walk without repeats), `alone` (one layer on the device at a time),
`together` (rounds in as many threads as the layers bear), `study` (all of this at several sizes),
`trial` (the layers run as a pipeline for a few steps), `describe` and `doubts` (the profile and its
flags), `setting` and `conduct` (where, and for how long), `measure` (the verb). `estimate` needs no
device.
"""

from gpipebal.profiler.measure import profile_model

__all__ = ["profile_model"]
