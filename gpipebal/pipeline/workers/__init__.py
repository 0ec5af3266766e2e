"""What runs: partitions with their layers, and a thread for each.

Read in this order: `partition` (layers that run together, with the `passes` through them and facts
about these), `input_writes` (what layers write to although the facts do not say so),
`worker` (a thread for each partition), `inbox` (where a worker waits), `tasks` (what all run, to
the end or until it is stopped), `tied` (parameters that several partitions have), `runtime` (all of
it for one pipeline), `activity`, `blame` and `failures` (what each worker is doing, and what went
wrong).
"""
