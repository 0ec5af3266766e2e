"""Single layers that are recomputed inside the partitions of a plan.

Read in this order: `recompute` (the verb, and what to allow where nothing fits), `choice` (the noun
that it returns), `posing` (the plan as a question), `run_choice` (the search), `network` (the ways
of a partition as a network), `ways` (some of them, in order).
"""
