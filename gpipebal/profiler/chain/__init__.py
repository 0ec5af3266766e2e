"""How a micro-batch passes through the layers.

Read in this order: `batch` and `data` (a mini-batch that knows where its rows are, and its target),
`value` and `numbers` (what goes from layer to layer, and its storages), `moving` (the same, copied
or brought to another device), `outputs` and `gradients` (what comes out, and what comes back),
`clock` (how long it takes), `chain` (the walk), `failures` (which layer failed).
"""
