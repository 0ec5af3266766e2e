"""Seconds of a training step, predicted from a profile of one device."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from gpipebal.planner import evaluate
from gpipebal.planner.runs.memory import RunMemory
from gpipebal.planner.times import pause_time
from gpipebal.problem import Device, Link, Memory, Problem, links_of, to_bounds
from gpipebal.profile import Profile
from gpipebal.schedule import CheckpointMode, order_of
from gpipebal.simulator import durations_of, place
from gpipebal.solvers import split


@dataclass(frozen=True)
class Step:
    """How a training step is done.

    Attributes:
        rows: Images of a micro-batch.
        chunks: Micro-batches.
        balance: Layers of each partition.
        checkpoint: Which micro-batches are recomputed.
    """

    rows: int
    chunks: int
    balance: Sequence[int]
    checkpoint: CheckpointMode = "except_last"

    @property
    def batch(self) -> int:
        """Images of a mini-batch."""
        return self.rows * self.chunks


def step_seconds(profile: Profile, step: Step, link: Link, *, host: bool) -> float:
    """Predict the seconds of a training step, every partition on a device of its own.

    Forwards; gather and loss on the last device; backwards; each device's optimizer step.

    Args:
        profile: Costs of the layers, with the step's rows among its sizes, or about them.
        step: How it is done.
        link: Between neighbours; copies run during the computation.
        host: Whether one process launches for all devices, one operation after the other. If not,
            launching costs nothing.
    """
    sized = profile.at_rows(step.rows, mini_batch_rows=step.batch)
    bounds = to_bounds(step.balance)
    times = durations_of(sized, bounds, links=links_of(sized, link))
    if not host:
        times = times.without_launches
    optimizer = sized.step.optimizer_time
    if optimizer:
        layers = sized.layers
        sizes = [sum(layer.parameter_bytes for layer in layers[a:b]) for a, b in pairwise(bounds)]
        times = replace(
            times, optimizer=tuple(optimizer * size / max(1, sum(sizes)) for size in sizes)
        )
    order = order_of("gpipe", len(step.balance), step.chunks, step.checkpoint)
    return place(order, times, pause=pause_time(sized, step.chunks) or 0.0).makespan


def host_seconds(profile: Profile, step: Step) -> float:
    """Predict for how many seconds of a step one host launches layers, for all devices."""
    sized = profile.at_rows(step.rows, mini_batch_rows=step.batch)
    order = order_of("gpipe", len(step.balance), step.chunks, step.checkpoint)
    times = durations_of(sized, to_bounds(step.balance))
    launches = {"F": times.forward_launch, "R": times.forward_launch, "B": times.backward_launch}
    return math.fsum(
        seconds[action.partition]
        for row in order.schedule().rows
        for action in row
        if (seconds := launches[action.kind]) is not None
    )


def fastest_balance(
    profile: Profile,
    n_partitions: int,
    rows: int,
    chunks: int,
    *,
    link: Link | None = None,
    checkpoint: CheckpointMode = "except_last",
    memory_limit: int | None = None,
) -> tuple[int, ...]:
    """Return the planner's balance: the shortest makespan in which every partition fits.

    Args:
        profile: Costs of the layers.
        n_partitions: Number of partitions, each on a device.
        rows: Images of a micro-batch.
        chunks: Micro-batches.
        link: Between neighbours; None: nothing is copied.
        checkpoint: Which micro-batches are recomputed.
        memory_limit: Bytes that a partition may need; None: as many as it likes.

    Raises:
        InfeasibleError: there is none.
    """
    sized = profile.at_rows(rows, mini_batch_rows=rows * chunks)
    limited = memory_limit is not None
    problem = Problem(
        **sized.layer_times,
        n_partitions=n_partitions,
        chunks=chunks,
        checkpoint=checkpoint,
        links=None if link is None else links_of(sized, link),
        devices=[Device(memory_limit=memory_limit)] * n_partitions if limited else None,
        memory=_least_memory(sized, chunks) if limited else None,
    )
    return tuple(split(problem, "makespan").balance)


def _least_memory(profile: Profile, chunks: int) -> Memory:
    """Return what runs of layers need with the least that may wait for other partitions."""
    runs = RunMemory(profile, chunks=chunks, loss_inside=False, shared_memory=False, most=False)
    return runs.memory


def fits(profile: Profile, step: Step, memory_limit: int) -> bool:
    """Tell whether no partition needs more, with the most that may wait."""
    sized = profile.at_rows(step.rows, mini_batch_rows=step.batch)
    plan = evaluate(
        sized,
        step.balance,
        chunks=step.chunks,
        checkpoint=step.checkpoint,
        shared_memory=False,
    )
    return max(part.memory.total for part in plan.partitions) <= memory_limit
