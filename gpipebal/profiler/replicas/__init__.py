"""Replicas: what is measured instead of the caller's layers, so that these stay as they are.

Read in this order: `copying` (a copy of one layer), `replica` (copies that share the parameters'
memory), `owned` (bytes that layers have all the time), `compiled` (layers that torch compiles),
`spoken` (what code speaks of), `foreign`, `caches`, `harmless` and `torch_state` (what is put back
afterwards), `moved` (what no two threads may use at once), `reads` and `identity` (which layers are
alike).
"""
