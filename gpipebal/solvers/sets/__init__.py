"""Solvers that keep sets of ends: a longer run may be allowed where a shorter one is not.

Read in this order: `runs` (what they cost, and which are allowed), `levels` (which device may run
which partition), `reachability` (the search), `evenness` (the most even split); then what is
searched for: `staircase` (bottleneck, and a makespan that is a sum of two maxima), `boxes` (any
makespan), `any_mode` (with modes that are open), `peak` (memory), `ranked` (the k best splits).
"""
