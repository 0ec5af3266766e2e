"""What benchmarks have in common.

`machine` (where a result comes from), `text` (tables), `bars` (what a figure must reach), `devices`
and `layers` (of several benchmarks), `allocator` (what torch's reports), `shares` (one device
divided into several).
"""
