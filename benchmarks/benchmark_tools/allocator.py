"""What torch's allocator reports of a block of code: peaks between marks."""

from __future__ import annotations

from typing import Any

from torch.profiler import record_function

__all__ = ["mark", "peaks_between_marks"]

_MARK = "a phase begins or ends"


def mark() -> None:
    """Put a mark among the profiler's events."""
    with record_function(_MARK):
        pass


def peaks_between_marks(report: Any) -> list[int]:
    """Return the peak of each phase that ends with a mark, in bytes beyond what was there before.

    Args:
        report: A `torch.profiler.profile` with ``profile_memory=True``, after its block. It reports
            no end of what began before the block.
    """
    events = sorted(report.profiler.kineto_results.events(), key=lambda event: event.start_ns())
    live = before = peak = 0
    peaks: list[int] = []
    for event in events:
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
        elif event.name() == _MARK:
            peaks.append(peak - before)
            before = peak = live
    return peaks
