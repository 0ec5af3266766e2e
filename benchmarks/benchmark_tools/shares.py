"""Shares: one large CUDA device divided into several small ones, each with its multiprocessors.

A green context of the CUDA driver runs on some of a device's multiprocessors and on no others. A
stream of such a context is a place for a partition (`GPipe` takes streams): what is launched on it
shares memory, caches and copy engines with its neighbours, but no multiprocessor.

`torch.cuda.GreenContext` makes one context at a time and takes the first multiprocessors each time,
so two of them run on the same ones. Here the driver parts the device once, into shares that have
none in common; torch then uses their streams. It needs the package ``cuda-bindings``.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch

__all__ = [
    "Place",
    "about_shares",
    "computing_on",
    "device_of",
    "seconds_of_product",
    "shares_of_device",
    "wait_for",
]

#: Where a partition runs: a device, or a share of one.
Place = torch.device | torch.cuda.Stream


def device_of(place: Place) -> torch.device:
    """Return the device that a place is on."""
    return place.device if isinstance(place, torch.cuda.Stream) else place


def computing_on(place: Place) -> AbstractContextManager[Any]:
    """Let the caller compute on a share; on a device it does so anyhow."""
    return torch.cuda.stream(place) if isinstance(place, torch.cuda.Stream) else nullcontext()


def wait_for(device: torch.device) -> None:
    """Wait until a device is done; a CPU always is."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@cache
def shares_of_device(n_shares: int, index: int = 0) -> tuple[torch.cuda.Stream, ...]:
    """Part a CUDA device's multiprocessors into equal shares, and return a stream on each.

    The shares stay for the life of the process. What does not divide evenly is left idle.

    Args:
        n_shares: How many.
        index: Which CUDA device.

    Raises:
        RuntimeError: the driver cannot part it so, or the package ``cuda-bindings`` is missing.
    """
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise RuntimeError(
            "the device cannot be divided without the package cuda-bindings.\n"
            "Fix: python -m pip install cuda-bindings"
        ) from error

    def call(function: Any, *arguments: Any) -> Any:
        status, *results = function(*arguments)
        if status != driver.CUresult.CUDA_SUCCESS:
            raise RuntimeError(f"{function.__name__} failed: {status.name}")
        return results[0] if len(results) == 1 else results

    torch.zeros(1, device=torch.device("cuda", index))  # makes the context that the shares are of
    device = call(driver.cuDeviceGet, index)
    kind = driver.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM
    whole = call(driver.cuDeviceGetDevResource, device, kind)
    size = _size(whole.sm.smCount, n_shares)
    groups, count, _rest = call(driver.cuDevSmResourceSplitByCount, n_shares, whole, 0, size)
    if size == 0 or count < n_shares:
        raise RuntimeError(
            f"the device has too few multiprocessors: {whole.sm.smCount} (expected "
            f"{max(size, 8)} for each of {n_shares} shares)."
        )
    streams = []
    for group in groups[:n_shares]:
        described = call(driver.cuDevResourceGenerateDesc, [group], 1)
        flags = driver.CUgreenCtxCreate_flags.CU_GREEN_CTX_DEFAULT_STREAM
        context = call(driver.cuGreenCtxCreate, described, device, flags)
        beside = driver.CUstream_flags.CU_STREAM_NON_BLOCKING
        stream = call(driver.cuGreenCtxStreamCreate, context, beside, 0)
        streams.append(torch.cuda.get_stream_from_external(int(stream), index))
    return tuple(streams)


def _size(n_multiprocessors: int, n_shares: int) -> int:
    """Return the multiprocessors of a share: the driver hands them out by eight."""
    return n_multiprocessors // n_shares // 8 * 8


def about_shares(n_shares: int, index: int = 0) -> dict[str, Any]:
    """Tell what shares a device is divided into, and how far they slow each other down.

    Returns:
        Names and counts; and the seconds of a large product of matrices on the whole device, on
        one share, and on a share while all the others do the same.
    """
    properties = torch.cuda.get_device_properties(index)
    streams = shares_of_device(n_shares, index)
    return {
        "device_name": properties.name,
        "device_bytes": properties.total_memory,
        "multiprocessors": properties.multi_processor_count,
        "shares": n_shares,
        "multiprocessors_of_a_share": _size(properties.multi_processor_count, n_shares),
        "cuda": torch.version.cuda,
        "product": {
            "whole device": seconds_of_product([torch.cuda.Stream(index)]),
            "one share": seconds_of_product(streams[:1]),
            "all shares": seconds_of_product(streams),
        },
    }


def seconds_of_product(
    streams: Sequence[torch.cuda.Stream], size: int = 4096, times: int = 10
) -> float:
    """Return the seconds of a product of two matrices on each stream, all at once."""
    matrix = torch.randn(size, size, device=streams[0].device)
    torch.cuda.synchronize(streams[0].device)
    for count in (1, times):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record(streams[0])
        for stream in streams:
            stream.wait_event(begin)
        for _ in range(count):
            for stream in streams:
                with torch.cuda.stream(stream):
                    torch.mm(matrix, matrix)
        for stream in streams:
            streams[0].wait_event(stream.record_event())
        end.record(streams[0])
        torch.cuda.synchronize(streams[0].device)
    return begin.elapsed_time(end) / 1e3 / times
