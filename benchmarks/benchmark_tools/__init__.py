"""What benchmarks have in common.

`machine` (where a result comes from), `text` (tables), `layers` (of several benchmarks' models),
`allocator` (what torch's reports), `shares` (one device divided into several).
"""
