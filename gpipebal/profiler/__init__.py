"""The profiler: measure what every layer of a chain costs, at the sizes that micro-batches have.

Read in this order: `replica` (what is measured instead of the caller's model), `batch` and `data`
(a mini-batch and its target), `value` and `chain` (how a micro-batch goes through the layers),
`clock` and `rounds` (the clocked work), `settle` (layers compared with the whole chain), `storages`
and `flops` (memory and operations), `outputs`, `loss` and `step` (what a step costs besides the
layers), `survey` (a walk without repeats), `alone` (one layer on the device at a time), `sizes`
(all of this at several sizes), `describe`, `setting` and `measure` (the verb). `estimate` needs no
device.
"""

from gpipebal.profiler.measure import profile_model

__all__ = ["profile_model"]
