"""What benchmarks have in common: `machine` (where a result comes from) and `text` (tables)."""
