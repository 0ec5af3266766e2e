"""Which layers to recompute: the cheapest way through a chain under a limit of bytes.

Read in this order: `network` (the ways, and which cannot be chosen), `knapsack` (the search).
"""
