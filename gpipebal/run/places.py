"""Where the partitions of a run go: the words of ``--device`` as one device per partition."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gpipebal.errors import DeviceError
from gpipebal.pipeline.layers.devices import parse_device, visible_cores
from gpipebal.units import count

__all__ = ["choose_places", "describe_places", "shares_places"]

#: Partitions on a machine without CUDA devices, by default.
CPU_PARTITIONS = 2


def choose_places(device: str, partitions: int | None = None) -> list[torch.device]:
    """Return one device per partition, round-robin when there are fewer devices.

    Args:
        device: ``'auto'`` (the CUDA devices, or the CPU where there are none), ``'cpu'``,
            ``'cuda'`` (all CUDA devices), or a list such as ``'cuda:0,cuda:1'``.
        partitions: Number of partitions; None: one for each device of the list; if only ``'cpu'``
            is named, 2.

    Raises:
        DeviceError: a device does not exist, or devices of different kinds are mixed.

    Example:
        >>> len(choose_places("cpu")), len(choose_places("cpu,cpu,cpu"))
        (2, 3)
    """
    n_cuda = torch.cuda.device_count()
    if device == "auto":
        device = "cuda" if n_cuda else "cpu"
    if device == "cuda" and n_cuda:
        found = [torch.device("cuda", index) for index in range(n_cuda)]
    else:
        found = [parse_device(name.strip()) for name in device.split(",")]
    if len({place.type for place in found}) > 1:
        raise DeviceError(
            f"devices are of different kinds: device={device!r} (expected all CPU or all CUDA).\n"
            "Fix: device='cpu', or CUDA devices only."
        )
    alone = found == [torch.device("cpu")]
    n_partitions = partitions or (CPU_PARTITIONS if alone else len(found))
    return [found[j % len(found)] for j in range(n_partitions)]


def shares_places(places: Sequence[torch.device]) -> bool:
    """Tell whether two partitions share a CUDA device; CPU partitions have cores of their own."""
    return places[0].type == "cuda" and len(set(places)) < len(places)


def describe_places(places: Sequence[torch.device], threads: int | None) -> str:
    """Say in one line where the partitions go."""
    n_partitions = len(places)
    head = f"{count(n_partitions, 'partition')} on "
    if threads is not None:
        each = " each" if n_partitions > 1 else ""
        cores = visible_cores()
        return f"{head}the CPU, {count(threads, 'thread')}{each} ({count(cores, 'core')})"
    if not shares_places(places):
        return head + ", ".join(map(str, places))
    n_devices = len(set(places))
    named = ", ".join(map(str, places))
    return f"{head}{count(n_devices, 'CUDA device')}, round-robin: {named}"
