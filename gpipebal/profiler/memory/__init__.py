"""Bytes and operations of a layer.

Read in this order: `device_ledger` (the largest memory of a device from a moment on), `layer_run`
(one forward and backward of the layer), `own_hooks` (what its own hooks on saved tensors keep),
`backward_peaks` (backwards in all places that it can have), `storages` (what it saves, hands on and
needs, by several of these), `layer_memory` (what is known of it then, alone and in its chain),
`buffers` (which buffers a recompute has copies of), `sparse_gradients` (which parameters have such
gradients), `flops` (its operations).
"""
