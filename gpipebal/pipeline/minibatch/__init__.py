"""One mini-batch on its way through the pipeline.

Read in this order: `inputs` (divided into micro-batches), `cell` (one micro-batch in one
partition), `routes` (how values get from cell to cell), `minibatch` (the schedule, run by all
workers), `target` and `loss` (the loss in the last partition), `new_gradients` (what becomes of
parameters' gradients), `bridge` (the place of all of it in the caller's graph).
"""
