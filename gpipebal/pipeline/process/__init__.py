"""What torch has once for the process or the thread, and how workers take it from the caller.

Read in this order: `phase` (whether a layer runs under a checkpoint, or again), `caller` (the
settings of the thread that called, and what it sees of a call), `process_wide` (settings that torch
has once for all threads), `engine_state` (autograd's own), `forks` (what a forked child does with
its parent's locks, and a thread with its own), `blocks` (what is installed while any thread needs
it), `modes` (dispatch modes in several threads at once), `eager` (running as written, whatever was
compiled).
"""
