"""Estimates: a profile without a device, from shapes alone.

The layers run on meta tensors, which have shapes and storages but no memory; identical layers run
only once. What they would allocate is counted as the measuring profiler counts it
(`gpipebal.profiler.memory.storages`): with ``rates="CPU core"`` bytes equal those of a measurement
on a CPU. The exceptions, above all layers that run a recurrent network, and on CUDA those with
convolutions, batch normalisation or attention, are named with the reason in
``provenance["approximate"]``. Times are floating-point operations and bytes over a device's peak
rates: a lower bound, which tells how layers compare, not how long they take.

Read in this order: `stand_ins` (layers without memory), `constants` (tensors that functions use),
`acting`, `backends`, `results` and `group_norm` (what a device does differently from the meta
device), `known_results` (what need not be worked out again), `approximate` (where that is not
certain, with all reasons), `costs` (operations and bytes), `refused` (what runs only with values),
`walk` (layer after layer), `terms` (loss, gather, optimizer), `profile` (all of it together).

Example:
    >>> import torch
    >>> from gpipebal import profile_model
    >>> with torch.device("meta"):
    ...     model = torch.nn.Sequential(torch.nn.Linear(2**14, 2**16), torch.nn.ReLU())
    ...     sample = torch.empty(4096, 2**14)
    >>> profile = profile_model(model, sample, chunks=4, method="estimate", rates="A100")
    >>> profile.layers[0].parameter_bytes, profile.layers[0].flops
    (4295229440, 2199023255552)
    >>> f"{profile.layers[0].forward_time:.3f} s"
    '0.113 s'
"""

from gpipebal.profiler.estimate.profile import estimate_training

__all__ = ["estimate_training"]
