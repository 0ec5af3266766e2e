"""How close the executor comes to the ideal, and how it compares with its peers.

Read in this order: `workloads` (what is trained), `ways` (how it is run in this process),
`processes` (how it is run in two), `cells` (the ideal makespan), `measure` (all of them in turns),
`result`, `floors` and `tables` (what the stored result says).
"""
