"""Predicted peak memory of the partitions of a chain.

A cell (one micro-batch in one partition) holds its input, and from its forward or recompute until
its backward a graph: what its layers save, as a union of storages. How many cells are in flight
at once is up to the schedule, so each partition's row of it is walked, action by action::

    gpipe  never                  m graphs
           except_last, always    m - 1 inputs, and the graph of the one that is at work
    1f1b   partition j of n       min(m, n - j) graphs; or as many inputs, of which one has a graph

with parameters, gradients, buffers and optimizer state beside them. Inside an action the layers
are walked too. The peak is mostly in a backward: in the first, where the gradients of the
parameters come into being one by one (``zero_grad`` frees them between steps), or in the next,
where all of them exist, and what a layer adds to them lives beside them for a moment. Where
gradients exist before the step, they do in all of it.

Some things live longer than they are needed. The mini-batch's input and target are the caller's,
and there all the time. A backward keeps the gradient that it started from until it ends: the engine
was called with it. With ``loss(pipe(x))`` the last partition has the outputs of all micro-batches,
then a copy of them in one piece, then what the loss adds, and until the end that copy (a training
loop has given it a name), its gradient and the loss. With `GPipe.step` the loss is one more layer
of the last partition.

**Who is charged.** A tensor on its way is its sender's until the receiver begins the action that
takes it; then it is the receiver's. So what waits for a busy neighbour, outputs on the way up and
gradients on the way down, is charged to who made it, and so is a skip connection on its way past
the partitions in between; how many wait at once a timeline tells, simulated or measured. A plan
counts with a margin: with each neighbour as if it were slower by itself than predicted, so that one
that is behind for once does not break a limit. Where two neighbours share one memory (partitions on
one CPU) the tensor at their cut exists once. It is charged to the receiver from its forward on, and
as long as the sender's graph or kept input still holds it, also when the receiver is through with
it; what a sender makes anew in a recompute is its own. The mini-batch stays with the first
partition, also where it is handed through to others.

**What has no gradient** (integers, constants, what comes before the first layer that is trained)
makes none, and is held until a backward only where a layer saves it or a recompute needs it. A
partition to which no gradient comes keeps nothing.

**Copies of buffers.** A cell that is recomputed keeps copies of the buffers that its layers may
write to, from its forward to its recompute; and what the recompute's graph saves of them (the
statistics of a batch normalisation) until its backward.

**Tied parameters** belong to the first partition that has them. Each partition that uses them has
gradients of its own until the end of the step, when all are added up for the first.

**Upper bounds.** A layer's peak is that of the layer alone, with its output and that output's
gradient held beside it. In a chain both may be freed while its backward still runs, and gradients
that share memory, as those of a concatenation do, go on as they are where a cut would copy them. So
a partition may need less than predicted, by at most these two tensors and the gradients of one
layer's inputs.

**The optimizer's step** comes behind it all: parameters, gradients and state, and what the step
itself needs for a moment. It is the peak where layers have many parameters and small outputs.

Read in this order: `cell` (one micro-batch in one partition), `fixed` (what is there all the time),
`ties` (shared parameters), `loss` (what the caller adds), `waiting` (what is on its way),
`partitions` (the walk through the schedule).
"""

from gpipebal.memory.partitions import partition_memory

__all__ = ["partition_memory"]
