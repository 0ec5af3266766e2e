"""What an experiment needs at its full size on one device: counted, and as the allocator tells."""

from __future__ import annotations

import gc
import time
from typing import Any

import torch
from benchmark_tools.machine import provenance

from gpipebal.pipeline import GPipe, measure_memory
from memory_benchmark.experiments import Experiment

__all__ = ["ORDER", "free_bytes", "measure"]

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


def free_bytes(device: torch.device) -> int | None:
    """Return how much memory is free on a CUDA device; None for another, where it is not known.

    What earlier experiments left is given back before.
    """
    _release(device)
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else None


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
        device; ``seconds`` of the metered step. If the device has not enough memory,
        ``did_not_fit`` alone. In both cases ``free``, the bytes that were free before, and
        ``provenance``.
    """
    about: dict[str, Any] = {"provenance": _provenance(device), "free": free_bytes(device)}
    try:
        found = _measured(experiment, device)
    except RuntimeError as error:
        # Libraries report it by errors of their own, which are no torch.OutOfMemoryError.
        if "out of memory" not in str(error).lower():
            raise
        found = {"did_not_fit": True}
    # Behind the except clause: the error's traceback holds the tensors.
    _release(device)
    return {**about, **found}


def _measured(experiment: Experiment, device: torch.device) -> dict[str, Any]:
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
    )
    optimizer = experiment.make_optimizer(list(pipe.parameters()))

    def step(rows: int) -> None:
        output = pipe(images[:rows])
        experiment.loss_fn(output, target[:rows]).backward()
        optimizer.step()

    try:
        step(_FIRST_ROWS)
        if device.type == "cuda":
            torch.cuda.empty_cache()
        started = time.perf_counter()
        with measure_memory(pipe, optimizer) as meter:
            # The target lies in the last partition's memory, as the images do in the first's.
            meter.ledger.hold([target], n_partitions - 1)
            step(experiment.rows)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
        return {
            "balance": list(experiment.balance),
            "counted": list(meter.peak_bytes),
            "counted_total": meter.total_peak_bytes,
            **_allocator_peaks(device),
            "seconds": time.perf_counter() - started,
        }
    finally:
        pipe.close()


def _allocator_peaks(device: torch.device) -> dict[str, int | None]:
    """Return the allocator's peaks since the meter began, which let them start again."""
    if device.type != "cuda":
        return {"allocated": None, "reserved": None}
    return {
        "allocated": torch.cuda.max_memory_allocated(device),
        "reserved": torch.cuda.max_memory_reserved(device),
    }


def _release(device: torch.device) -> None:
    """Give back what earlier experiments left."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        # cuBLAS keeps a workspace for each thread that used it, beyond the thread's end.
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()


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
