"""What an experiment needs while it runs: at a reduced size, and at its full size on one device."""

from __future__ import annotations

import gc
import time
from typing import Any

import numpy as np
import torch
from benchmark_tools.machine import provenance
from benchmark_tools.shares import wait_for

from gpipebal.memory import partition_memory
from gpipebal.pipeline import GPipe, MemoryMeter, measure_memory
from gpipebal.problem import to_bounds
from gpipebal.profile import Profile
from gpipebal.schedule import order_of
from gpipebal.timeline import EventTable, Timeline
from memory_benchmark.estimate import figures, profile_of, with_gradients
from memory_benchmark.experiments import Experiment

#: Experiments in the order of being measured: those that take least time first.
ORDER = (
    "amoebanetd naive-1",
    "unet naive-1",
    "unet pipeline-1",
    "amoebanetd pipeline-1",
    "amoebanetd pipeline-2",
    "unet pipeline-2",
    "unet pipeline-4",
    "amoebanetd pipeline-4",
    "amoebanetd pipeline-8",
    "unet pipeline-8",
)

#: Rows of the step before: one micro-batch that is recomputed, and the last, which is not.
_FIRST_ROWS = 2


def count(experiment: Experiment) -> dict[str, Any]:
    """Return the estimated and the counted peak of each partition on a CPU, in bytes.

    As published: two steps, the gradients kept between them; the second one is counted. ``least``
    is the estimate if nothing waited for a neighbour: between it and the estimate the clock
    decides.
    """
    profile = with_gradients(profile_of(experiment, "CPU core"))
    estimated = figures(experiment, profile, experiment.balance)
    meter, _ = _metered(experiment, torch.device("cpu"), experiment.rows)
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
        "least": _least(experiment, profile),
        "counted": list(meter.peak_bytes),
    }


def _least(experiment: Experiment, profile: Profile) -> list[int]:
    """Return the peak of each partition if nothing waited: in a timeline with the others before."""
    n = len(experiment.balance)
    order = order_of("gpipe", n, experiment.chunks, experiment.checkpoint)
    found = []
    for j in range(n):
        starts = np.where(order.partitions == j, 1.0 + np.arange(order.n_actions), 0.0)
        columns = (order.partitions, order.kinds, order.micro_batches, starts, starts + 0.5)
        peaks = partition_memory(
            profile,
            to_bounds(experiment.balance),
            chunks=experiment.chunks,
            checkpoint=experiment.checkpoint,
            shared_memory=True,
            timeline=Timeline(EventTable(*columns), n, "simulated"),
        )
        found.append(peaks[j].total)
    return found


def measure(experiment: Experiment, device: torch.device) -> dict[str, Any]:
    """Run a step of torchgpipe's balance, all partitions on one device, and return what it needs.

    As published, gradients and optimizer state exist when the step begins. They are left by a step
    of two rows, which has the same peak behind it as one of all rows.

    Args:
        experiment: What runs.
        device: Where the model, the mini-batch and all partitions are.

    Returns:
        ``counted``: the peak of live bytes of each partition, ``counted_total``: of all of them at
        one time; ``allocated`` and ``reserved``: the peaks of the CUDA allocator, None on another
        device; ``seconds`` of the metered step; ``free``, the bytes that were free before, and
        ``provenance``.
    """
    about = {"provenance": _provenance(device), "free": free_bytes(device)}
    meter, seconds = _metered(experiment, device, _FIRST_ROWS)
    on_cuda = device.type == "cuda"
    return {
        **about,
        "balance": list(experiment.balance),
        "counted": list(meter.peak_bytes),
        "counted_total": meter.total_peak_bytes,
        # Since the meter began, which let them start again.
        "allocated": torch.cuda.max_memory_allocated(device) if on_cuda else None,
        "reserved": torch.cuda.max_memory_reserved(device) if on_cuda else None,
        "seconds": seconds,
    }


def free_bytes(device: torch.device) -> int | None:
    """Return how much memory is free on a CUDA device; None for another, where it is not known.

    What earlier experiments left is given back before.
    """
    gc.collect()
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    # cuBLAS keeps a workspace for each thread that used it, beyond the thread's end.
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)[0]


def _metered(
    experiment: Experiment, device: torch.device, first_rows: int
) -> tuple[MemoryMeter, float]:
    """Run a step of so many rows, and meter one of all rows; return the meter and its seconds."""
    torch.manual_seed(0)
    with torch.device(device):
        model = experiment.build()
        images, target = experiment.make_data()
    n_partitions = len(experiment.balance)
    pipe = GPipe(
        model,
        list(experiment.balance),
        devices=[device] * n_partitions,
        chunks=experiment.chunks,
        checkpoint=experiment.checkpoint,
        threads_per_partition=1,
    )
    optimizer = experiment.make_optimizer(list(pipe.parameters()))

    def step(rows: int) -> None:
        output = pipe(images[:rows])
        experiment.loss_fn(output, target[:rows]).backward()
        optimizer.step()

    try:
        step(first_rows)
        if device.type == "cuda":
            torch.cuda.empty_cache()
        started = time.perf_counter()
        with measure_memory(pipe, optimizer) as meter:
            # The target lies in the last partition's memory, as the images do in the first's.
            meter.ledger.hold([target], n_partitions - 1)
            step(experiment.rows)
            wait_for(device)
        return meter, time.perf_counter() - started
    finally:
        pipe.close()


def _provenance(device: torch.device) -> dict[str, Any]:
    about = {**provenance(), "device": str(device)}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        about |= {
            "device": properties.name,
            "device_bytes": properties.total_memory,
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
        }
    return about
