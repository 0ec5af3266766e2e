"""The layers of a pipeline: what can be a chain, and what becomes of layers before they run.

Read in this order: `container` (the module that has the layers under their own names), `chain`
(what can be a chain and a balance), `planned` (whether a plan fits it), `devices`, `flat` (nested
chains opened), `own` (what a model has besides its layers), `old_keys` (torchgpipe's files),
`collectives` (layers that talk to other processes), `modules`, `attributes`, `written`,
`cached_weights`, `buffers` and `returned` (what layers hold and change), `recomputed`, `proxy` and
`runs` (runs of layers that are recomputed by themselves), `batchnorm` and `deferral` (deferred
batch normalisation).
"""
