"""Devices of the partitions, and the share of the cores that a CPU partition gets."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence

import torch
from torch import nn

from gpipebal.argument_kinds import check_list
from gpipebal.errors import BalanceError, DeviceError
from gpipebal.pipeline.layers.container import Container
from gpipebal.schedule import check_count
from gpipebal.units import count

__all__ = [
    "DeviceLike",
    "check_threads",
    "choose_devices",
    "in_order",
    "move_layer",
    "parse_device",
    "share_of_cores",
    "visible_cores",
]

#: Where a partition can be told to run.
DeviceLike = torch.device | str | int | torch.cuda.Stream

#: A partition may have this many threads even on a machine with fewer cores.
MOST_THREADS = 64


def visible_cores() -> int:
    """Count the cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def share_of_cores(n_partitions: int) -> int:
    """Return the threads of each CPU partition when all work side by side; at least 1."""
    return max(1, visible_cores() // max(1, n_partitions))


def check_threads(name: str, threads: object) -> int:
    """Return a number of threads that a partition can be given.

    Raises:
        BalanceError: it is not a whole number of 1 or more, or so large that starting so many
            threads could bring the machine down.
    """
    number = check_count(name, threads)
    most = max(MOST_THREADS, visible_cores())
    if number > most:
        raise BalanceError(
            f"{name} is too large: {name}={number} (expected at most {most}).\n"
            f"Fix: {name}={visible_cores()}, the number of cores, or fewer."
        )
    return number


def parse_device(device: torch.device | str | int) -> torch.device:
    """Read a device, and make sure that it exists.

    Raises:
        DeviceError: it is not a device, of a kind that is not supported, or does not exist.
    """
    try:
        # A bare number is read by torch as a device of a kind that the machine may not have.
        parsed = torch.device("cuda", device) if type(device) is int else torch.device(device)
    except (RuntimeError, TypeError, ValueError) as error:  # torch's own, of huge numbers too
        raise DeviceError(
            f"device is not readable: device={device!r:.60} (expected 'cpu', 'cuda' or 'cuda:0').\n"
            "Fix: device='cpu'."
        ) from error
    if parsed.type not in ("cpu", "cuda"):
        raise DeviceError(
            f"device is of a kind that is not supported: device={device!r} (expected a CPU or "
            "CUDA device).\nFix: device='cpu'."
        )
    if parsed.type == "cuda":
        n_cuda = torch.cuda.device_count()
        if (parsed.index or 0) >= n_cuda:
            raise DeviceError(
                f"device does not exist: device={device!r} (this machine has {n_cuda} CUDA "
                f"devices).\nFix: device={f'cuda:{n_cuda - 1}' if n_cuda else 'cpu'!r}."
            )
        if parsed.index is None:
            parsed = torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu") if parsed.type == "cpu" else parsed


def choose_devices(
    devices: Iterable[DeviceLike] | None, n_partitions: int
) -> tuple[list[torch.device], list[torch.cuda.Stream | None]]:
    """Return one device per partition, and the stream of each that was given one.

    Args:
        devices: Devices in order, or CUDA streams on them, at least as many as partitions; None:
            the CUDA devices, or on a machine with none, the CPU for every partition.
        n_partitions: Number of partitions.

    Raises:
        DeviceError: a device does not exist, or there are too few.
    """
    if devices is None:
        n_cuda = torch.cuda.device_count()
        devices = [f"cuda:{k}" for k in range(n_cuda)] if n_cuda else ["cpu"] * n_partitions
    elif isinstance(devices, (str, int, torch.device, torch.cuda.Stream)):
        device = devices.device if isinstance(devices, torch.cuda.Stream) else devices
        raise DeviceError(
            f"devices is not a list: devices={devices!r:.60} (expected one device per partition).\n"
            f"Fix: devices=[{str(parse_device(device))!r}] * {n_partitions}."
        )
    given = list(check_list("devices", devices, fix=f"devices=['cpu'] * {n_partitions}, say"))
    if len(given) >= n_partitions:
        given = given[:n_partitions]  # devices that are not used need not exist
    streams = [place if isinstance(place, torch.cuda.Stream) else None for place in given]
    parsed = [
        parse_device(place.device if isinstance(place, torch.cuda.Stream) else place)
        for place in given
    ]
    if len(parsed) < n_partitions:
        raise DeviceError(
            f"there are too few devices: {len(parsed)} for {count(n_partitions, 'partition')}.\n"
            "Fix: give one device per partition (one device may be named several times), or a "
            "balance with fewer partitions."
        )
    return parsed, streams


def in_order(
    devices: Iterable[DeviceLike] | None, order: Sequence[int]
) -> Iterable[DeviceLike] | None:
    """Put devices into the order in which a plan uses them; None: those of `choose_devices`.

    Args:
        devices: The devices that the plan was made for; None: the CUDA devices, or the CPU.
        order: For each partition, the index of its device.

    Raises:
        DeviceError: the plan uses more devices than there are.
    """
    if list(order) == list(range(len(order))):
        return devices
    places, streams = choose_devices(devices, max(order) + 1)
    return [streams[k] or places[k] for k in order]


def move_layer(name: str, layer: nn.Module, device: torch.device) -> None:
    """Move a layer to a device, in place.

    Raises:
        DeviceError: the layer's parameters hold no memory yet (they are on the meta device).
    """
    for parameter in layer.parameters():
        if parameter.device.type == "meta":
            raise DeviceError(
                f"layer {name!r} has no values: its parameters are on the meta device.\n"
                "Fix: make the model on a real device before you run it."
            )
    if not isinstance(layer, Container):  # a pipeline inside a pipeline stays on its devices
        layer.to(device)
