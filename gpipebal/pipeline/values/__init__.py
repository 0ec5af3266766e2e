"""What travels between partitions, and how it gets to another device.

Read in this order: `tensors` (storages, copies, versions), `places` (which have memory in common),
`microbatch` (values as packets of leaves), `gradients` (how they come back), `dims` (where each
tensor has its rows), `parting` (dividing a mini-batch along any dimension, and joining outputs),
`lane` (the device and the stream of a partition).
"""
