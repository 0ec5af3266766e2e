"""Times of partitions and steps, from the times of the layers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise

from gpipebal.problem import Problem
from gpipebal.profile import LayerProfile, Profile
from gpipebal.schedule import Checkpoint, CheckpointMode, check_count, make_schedule
from gpipebal.simulator import Durations, place
from gpipebal.timeline import Timeline

__all__ = ["durations", "loss_of_micro_batch", "pause_time", "problem_of", "step_timeline"]


def pause_time(profile: Profile, chunks: int) -> float | None:
    """Predict the seconds of gather and loss between the phases; None if one was not measured.

    Both were measured for the mini-batch of the profile, and grow with the rows.
    """
    step = profile.step
    if step.gather_time is None:
        return None
    if step.whole_loss is not None:
        return (step.whole_loss.time + step.gather_time) * chunks / profile.chunks
    if step.loss is not None:
        return step.loss.time * chunks + step.gather_time * chunks / profile.chunks
    return None


def loss_of_micro_batch(profile: Profile) -> LayerProfile | None:
    """Return the times of the loss over one micro-batch; None if no loss was measured."""
    step = profile.step
    if step.loss is not None or step.whole_loss is None:
        return step.loss
    whole, m = step.whole_loss, profile.chunks
    return replace(
        whole,
        forward_time=whole.forward_time / m,
        backward_time=whole.backward_time / m,
        recompute_time=whole.recompute_time / m or whole.forward_time / m,
        no_grad_forward_time=None,
    )


def step_timeline(
    profile: Profile,
    bounds: Sequence[int],
    chunks: int,
    checkpoint: Checkpoint,
    schedule: str,
    loss_inside: bool,
    pause: float | None,
) -> Timeline:
    """Simulate a training step without its optimizer, as well as the profile tells."""
    loss = loss_of_micro_batch(profile) if loss_inside else None
    times = durations(profile, bounds, loss, without_graph=True)
    order = make_schedule(schedule, len(bounds) - 1, chunks, checkpoint)
    return place(order, times, pause=None if loss_inside else pause or 0.0)


def durations(
    profile: Profile,
    bounds: Sequence[int],
    loss: LayerProfile | None = None,
    *,
    without_graph: bool = False,
) -> Durations:
    """Add up the times of every partition.

    Args:
        profile: Costs of the layers.
        bounds: First layer of each partition, then the number of layers.
        loss: A loss that the last partition computes behind its layers.
        without_graph: Whether forwards of micro-batches that are recomputed later take the time
            that such a forward takes, as far as it is known.
    """
    parts = [list(profile.layers[start:end]) for start, end in pairwise(bounds)]
    if loss is not None:
        parts[-1].append(loss)

    def add(time_of: Callable[[LayerProfile], float]) -> tuple[float, ...]:
        return tuple(math.fsum(map(time_of, part)) for part in parts)

    return Durations(
        forward=add(lambda layer: layer.forward_time),
        recompute=add(lambda layer: layer.recompute_time),
        backward=add(lambda layer: layer.backward_time),
        no_grad_forward=add(_time_without_graph) if without_graph else None,
    )


def _time_without_graph(layer: LayerProfile) -> float:
    known = layer.no_grad_forward_time
    return layer.forward_time if known is None else known


def problem_of(
    profile: Profile, partitions: int, chunks: int | None, checkpoint: CheckpointMode
) -> Problem:
    """Pose the question of the best balance to the solvers."""
    return Problem(
        forward=[layer.forward_time for layer in profile.layers],
        backward=[layer.backward_time for layer in profile.layers],
        recompute=[layer.recompute_time for layer in profile.layers],
        n_partitions=partitions,
        chunks=profile.chunks if chunks is None else check_count("chunks", chunks),
        checkpoint=checkpoint,
    )
