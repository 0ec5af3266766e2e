"""What all runs of layers need, start by start and end by end.

Read in this order: `moments` (the moments of a schedule at which memory is counted), `chain` and
`inputs` (where storages are, and what runs are given), `highest` (the highest of many layers, end
by end), `storage_tables`, `tie_tables` and `gradient_tables` (what runs hold), `peaks`,
`forward_peaks` and `ends` (what they need), `memory` (all of it for the solvers), `sizes` (the same
without a schedule, for balances by size).
"""
