"""What benchmarks have in common.

`script` (options, and what becomes of a result), `machine` (where a result comes from), `text`
(tables), `bars` (what a figure must reach), `turns` (ways that are timed in turns), `devices` and
`layers` (of several benchmarks), `allocator` (what torch's reports), `shares` (one device divided
into several).
"""
