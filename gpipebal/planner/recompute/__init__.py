"""Single layers that are recomputed inside the partitions of a plan.

Read in this order: `recompute` (the verb), `choice` (the noun that it returns), `posing` (the plan
as a question), `network` (the ways of a partition as a network), `ways` (what a way needs).
"""
