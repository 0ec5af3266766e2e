"""Solvers that fill partitions one after the other, as full as limits allow.

Read in this order: `bottleneck`; `thresholds` (the smallest sum of two maxima), `makespan`;
`pareto` and `paths` (any partition may decide), `always` (the makespan with recompute throughout).
"""
