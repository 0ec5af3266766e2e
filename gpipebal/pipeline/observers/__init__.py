"""Who looks on while a pipeline runs: memory and traces.

Read in this order: `shares` (whose a storage is that tensors of several lie in), `ledger` (which
storages live, and whose they are), `in_place` (what takes no new memory unless someone looks on),
`recorder` (when each action ran).
"""
