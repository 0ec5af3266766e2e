"""Random numbers that depend on mini-batch, layer and micro-batch alone.

Read in this order: `random_ops` (how operations that draw are caught), `randomness` (what they draw
from), `seeds` (where the seed of a mini-batch comes from), `lent` (states of the caller's generator
that an operation has borrowed).
"""
