"""The clock: how long a span of work took, on the host and on its device."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch

__all__ = ["Clock", "Span", "host_seconds_of", "seconds_of", "synchronize"]

#: Begin and end of some work, as points of a clock.
Span = tuple[Any, Any]


class Clock:
    """Points in time: on a CPU, of the host's clock; on CUDA, an event and the host's time.

    A CUDA device lags behind the host: the event tells when the device reached this point, the
    host's time when the work was launched. A host that is far ahead has to wait until the device
    accepts more, so the time of launching alone is only seen while the device has nothing else to
    do.

    Attributes:
        from_idle: Whether work begins only when a CUDA device has done all before.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._is_cuda = device.type == "cuda"
        self.from_idle = False

    def begin(self) -> Any:
        """Return the point in time at which some work begins."""
        if not self._is_cuda:
            return time.perf_counter()
        if self.from_idle:
            torch.cuda.synchronize(self._device)
        event = self._event()
        return event, time.perf_counter()

    def end(self) -> Any:
        """Return the point in time at which some work ends, or has been launched."""
        if not self._is_cuda:
            return time.perf_counter()
        launched = time.perf_counter()
        return self._event(), launched

    def _event(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def seconds_of(spans: Sequence[Span | None]) -> list[float]:
    """Turn spans into seconds; waits for those of a device. None is not work: 0."""
    return [_seconds(*span) if span is not None else 0.0 for span in spans]


def host_seconds_of(spans: Sequence[Span | None]) -> list[float]:
    """Return the seconds that the host needed for spans on a device that works on its own."""
    return [span[1][1] - span[0][1] if span is not None else 0.0 for span in spans]


def _seconds(begin: Any, end: Any) -> float:
    if isinstance(begin, float):
        return float(end - begin)
    end[0].synchronize()
    return max(0.0, float(begin[0].elapsed_time(end[0])) / 1e3)


def synchronize(device: torch.device) -> None:
    """Wait for a device that works on its own."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
