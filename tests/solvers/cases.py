"""Named chains that catch the known faults of balancers, shared by all tests of solvers."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["CHAINS", "KNOWN_BOTTLENECKS", "Chain"]


class Chain(NamedTuple):
    """Layer times for one micro-batch, and into how many partitions to cut them."""

    forward: list[float]
    backward: list[float]
    recompute: list[float]
    n_partitions: int


def _plain(times: list[float], n_partitions: int) -> Chain:
    """Make a chain whose backward takes twice its forward."""
    return Chain(times, [2 * time for time in times], times, n_partitions)


#: Small enough for brute force.
CHAINS: dict[str, Chain] = {
    "one layer": _plain([3], 1),
    "one partition": _plain([3, 1, 2], 1),
    "all equal": _plain([1] * 8, 3),
    "all zero": _plain([0] * 6, 3),
    "zero forward": Chain([0] * 6, [1, 2, 3, 3, 2, 1], [0] * 6, 3),
    "zero layers between": _plain([2, 0, 0, 2, 0, 1, 0], 3),
    "zeros at both ends": _plain([0, 0, 4, 1, 3, 0, 0], 4),
    "heavy start": _plain([50, 1, 2, 1, 2, 1, 1], 4),
    "heavy middle": _plain([1, 2, 1, 50, 2, 1, 1], 4),
    "heavy end": _plain([1, 2, 1, 2, 1, 1, 50], 4),
    "ramp up": _plain([1, 2, 3, 4, 5, 6, 7], 3),
    "ramp down": _plain([7, 6, 5, 4, 3, 2, 1], 3),
    "ties": _plain([2, 1, 1, 2, 1, 1, 2, 2], 4),
    "as many partitions as layers": _plain([3, 1, 4, 1, 5], 5),
    "one layer more than partitions": _plain([3, 1, 4, 1, 5, 1], 5),
    "ratio of a thousand million": _plain([1e-9, 1.0, 2e-9, 1e-9, 0.5, 3e-9], 3),
    "float noise": _plain([0.1, 0.2, 0.3, 0.1 + 0.2, 0.3, 0.6, 0.1, 0.5], 4),
    "forward against backward": Chain([6, 1, 1, 1, 1, 1], [1, 1, 1, 1, 4, 6], [1] * 6, 3),
    "recompute elsewhere": Chain([1] * 7, [2, 3, 1, 2, 3, 1, 2], [9, 0, 0, 1, 0, 0, 1], 3),
    "long recompute, short tail": Chain([9, 9, 1, 1], [1, 9, 1, 1], [30, 20, 0, 1], 3),
    "middle path decides": Chain([1, 3, 1, 0, 0, 0], [0, 2, 1, 1, 0, 1], [2, 9, 8, 0, 0, 0], 4),
    "one chunk leaves it to the loads": Chain(
        [1, 0, 2, 0, 30, 2, 2], [50, 1, 0, 0, 0, 0, 0], [0] * 7, 2
    ),
    "optimal pairs with unequal squares": Chain([1, 5, 3, 4], [1, 2, 1, 1], [0] * 4, 3),
    "optimal limits with unequal loads": Chain([1, 1, 16, 0, 2], [2, 5, 1, 1, 4], [0] * 5, 3),
    "last cut in the middle of the staircase": _plain([24, 19, 29, 30, 12], 2),
    "torchgpipe returns an empty partition": _plain([21, 38, 21, 28, 37, 50], 5),
    "DeepSpeed misses by a tenth": _plain([5, 32, 17, 20, 50, 27, 25, 25], 4),
    "DeepSpeed, integers": _plain([0, 1, 2, 3, 3, 3], 4),
    "DeepSpeed, floats": _plain([0.0, 1.1, 1.9, 3.0, 3.0, 3.0], 4),
    "DeepSpeed, one heavy": _plain([0.0, 1.1, 30, 3.0], 3),
    "DeepSpeed back-loads": _plain([1] * 5, 4),
}

#: Costs, number of partitions, smallest bottleneck: instances that other balancers get wrong, or
#: that were reported to them.
KNOWN_BOTTLENECKS: dict[str, tuple[list[float], int, float]] = {
    "torchgpipe: 80": ([10] * 15, 8, 20),
    "torchgpipe: an empty partition": ([21, 38, 21, 28, 37, 50], 5, 50),
    "torchgpipe: 35": ([1] * 98, 64, 2),
    "torchgpipe: 16": ([1] * 31, 16, 2),
    "torchgpipe: K / 2 times too large": ([1] * (2 * 50 - 1), 50, 2),
    "DeepSpeed: 77": ([5, 32, 17, 20, 50, 27, 25, 25], 4, 70),
    "DeepSpeed: last one empty": ([1] * 5, 4, 2),
    "DeepSpeed: some empty": ([1] * 42, 16, 3),
    "DeepSpeed: too large": ([1] * 38, 8, 5),
    "DeepSpeed: all 3": ([0, 1, 2, 3, 3, 3], 4, 3),
    "DeepSpeed: one heavy": ([0.0, 1.1, 30, 3.0], 3, 30),
}
