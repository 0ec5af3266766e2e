"""Predicted peak memory of the partitions of a chain.

A cell (one micro-batch in one partition) holds its input, and from its forward or recompute until
its backward a graph: what its layers save, as a union of storages. How many cells are in flight
at once is up to the schedule, so each partition's row of it is walked, action by action::

    gpipe  never                  m graphs
           except_last, always    m - 1 inputs, and the graph of the one that is at work
    1f1b   partition j of n       min(m, n - j) graphs; or as many inputs, of which one has a graph

in addition to parameters, gradients, buffers and optimizer state. Inside an action the layers are
walked too. The peak is mostly in a backward: in the first one, where the gradients of the
parameters come into being one by one (``zero_grad`` frees them between steps), or in the next,
where all of them exist, and what a layer adds to them exists temporarily as well. Where gradients
exist before the step, they exist all through it.

Some things live longer than they are needed. The mini-batch's input and target belong to the
caller, and exist all the time. A backward keeps the gradient that it started from until it ends:
the engine was called with it. With ``loss(pipe(x))`` the last partition has the outputs of all
micro-batches, then a copy of them in one piece, then what the loss adds. Until the end it has that
copy (a training loop has given it a name), its gradient and the loss. With `GPipe.step` the loss is
one more layer of the last partition.

**Who is charged.** A tensor on its way is charged to its sender until the receiver begins the
action that takes it; after that, to the receiver. So what waits for a busy neighbour, an output for
the next partition or a gradient for the one before, is charged to the partition that made it, and
so is a skip connection on its way past the partitions in between. `GPipe` lets few wait
(`gpipebal.schedule.MOST_WAITING`). How many of these do depends on timing; a plan counts the most,
so that no partition that is late breaks a limit, and a timeline tells how many did. Where two
neighbours share one memory (partitions on one CPU) the tensor at their cut exists once. It is
charged to the receiver from its forward on, as long as the sender's graph or kept input still holds
it, even when the receiver no longer needs it; what a sender makes again in a recompute is charged
to the sender. The mini-batch stays with the first partition, also where it is handed through to
others.

**Values without a gradient** (integers, constants, what comes before the first layer that is
trained) make none, and are held until a backward only where a layer saves them or a recompute needs
them. A partition that receives no gradient keeps nothing.

**Copies of buffers.** A cell that is recomputed keeps copies of the buffers that its layers may
write to, from its forward to its recompute. What the recompute's graph saves of them (the
statistics of a batch normalisation) is kept until its backward. A run of layers that is recomputed
by itself keeps its copies until its backward is over.

**Tied parameters** belong to the first partition that has them. Each partition that uses them has
gradients of its own until the end of the step, when all are added up in the first.

**Gradients that share memory**, as those of a sum or a concatenation do, are passed on as they are
inside a partition, and copied at a cut: by its first layer, and by one that pops what an earlier
partition has stashed.

**Upper bounds.** A layer's peak is that of the layer alone, while its output and that output's
gradient are held too. In a chain both may be freed while its backward still runs. A gradient that
is a part of a larger one is taken to have gaps that its layer has to close. So a partition may need
less than predicted, by a few tensors of one layer.

**The optimizer's step** comes after all of this: parameters, gradients and state, and what the step
itself needs temporarily. It is the peak where layers have many parameters and small outputs.

Read in this order: `moment` (bytes at one time), `cell` (one micro-batch in one partition, with the
`layer_peaks` of its layers and the `gradients` on their way back), `ties` (shared parameters),
`loss` (what the caller adds), `waiting` (what is on its way), `partitions` (the walk through the
schedule), `recomputed_runs` (layers that are recomputed in runs inside a partition).
"""

from gpipebal.memory.partitions import partition_memory

__all__ = ["partition_memory"]
