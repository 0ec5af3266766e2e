"""Which split is best: the solver's answer, and what only timelines or further tries can tell.

Read in this order: `solved` (the solver for a question, and its answer); `lower_bounds` (what no
plan of a question can undercut, found quickly); `all_ways` and `best_way` (every split, where only
a timeline tells what fits); `lower_limits` (the search under lower limits until a plan fits);
`row_peaks` (the memory of one partition at a time) and `descent` (a way made better by small
changes); `left_runs` and `remaining` (all that could still be better, gone through); `best` (the
best of all questions: every number of micro-batches, every order of devices); `best_plans` (the
next best ones, too).
"""
