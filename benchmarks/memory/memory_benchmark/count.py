"""What an experiment at a reduced size needs, counted while it runs, and estimated."""

from __future__ import annotations

from typing import Any

import torch

from gpipebal.memory import partition_memory
from gpipebal.pipeline import GPipe, measure_memory
from gpipebal.problem import to_bounds
from memory_benchmark.estimate import figures, profile_of, with_gradients
from memory_benchmark.experiments import Experiment

__all__ = ["count"]


def count(experiment: Experiment) -> dict[str, Any]:
    """Return the estimated and the counted peak of each partition on a CPU, in bytes.

    As published: two steps, the gradients kept between them; the second one is counted. ``least``
    and ``most`` are the estimates if nothing waited for a neighbour, or everything as long as the
    order of the actions lets it: between them the clock decides.
    """
    profile = with_gradients(profile_of(experiment, "CPU core"))
    estimated = figures(experiment, profile, experiment.balance)
    torch.manual_seed(0)
    pipe = GPipe(
        experiment.build(),
        list(experiment.balance),
        devices=["cpu"] * len(experiment.balance),
        chunks=experiment.chunks,
        checkpoint=experiment.checkpoint,
        threads_per_partition=1,
    )
    images, target = experiment.make_data()
    optimizer = experiment.make_optimizer(list(pipe.parameters()))

    def step() -> None:
        output = pipe(images)
        experiment.loss_fn(output, target).backward()
        optimizer.step()

    step()
    with measure_memory(pipe, optimizer) as meter:
        # The target lies in the last partition's memory, as the images do in the first's.
        meter.ledger.hold([target], len(experiment.balance) - 1)
        step()
    pipe.close()
    least, most = (
        partition_memory(
            profile,
            to_bounds(experiment.balance),
            chunks=experiment.chunks,
            checkpoint=experiment.checkpoint,
            shared_memory=True,
            latest=latest,
        )
        for latest in (False, True)
    )
    return {
        "size": list(experiment.size),
        "rows": experiment.rows,
        "chunks": experiment.chunks,
        "image_size": experiment.image_size,
        "balance": list(experiment.balance),
        "model": estimated["model"],
        "estimated": [
            a + b for a, b in zip(estimated["model"], estimated["activations"], strict=True)
        ],
        "least": [peak.total for peak in least],
        "most": [peak.total for peak in most],
        "counted": list(meter.peak_bytes),
    }
