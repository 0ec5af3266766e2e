"""Recorders: raw times of actions from the workers, turned into timelines when asked."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from gpipebal.errors import PipelineError
from gpipebal.schedule import Checkpoint, Schedule
from gpipebal.timeline import Event, Timeline

__all__ = ["MiniBatchRecord", "Recorder"]


class MiniBatchRecord:
    """Raw times of the actions of one mini-batch, as the workers' lanes gave them.

    Args:
        n_partitions: Number of partitions.
        provenance: What ran, for the timeline's provenance; JSON values.
    """

    def __init__(self, n_partitions: int, provenance: Mapping[str, Any]) -> None:
        self._n_partitions = n_partitions
        self._provenance = provenance
        self._actions: list[tuple[int, str, int, Any, Any]] = []
        self._adding = threading.Lock()
        self._timeline: Timeline | None = None

    def add(self, partition: int, kind: str, micro_batch: int, started: Any, ended: Any) -> None:
        """Keep the times of one action or copy; called by the worker that ran it."""
        with self._adding:
            self._actions.append((partition, kind, micro_batch, started, ended))
            self._timeline = None

    def timeline(self) -> Timeline:
        """Return the actions so far as a timeline that starts with the first one.

        On CUDA this waits for the recorded events.
        """
        with self._adding:
            if self._timeline is None:
                self._timeline = self._resolve()
            return self._timeline

    def _resolve(self) -> Timeline:
        seconds = _common_clock([t for *_, start, end in self._actions for t in (start, end)])
        events = []
        for k, (partition, kind, micro_batch, _, _) in enumerate(self._actions):
            start, end = seconds[2 * k], seconds[2 * k + 1]
            events.append(Event(partition, kind, micro_batch, start, max(start, end)))
        events.sort(key=lambda event: (event.start, event.partition))
        return Timeline(tuple(events), self._n_partitions, "measured", self._provenance)


def _common_clock(points: list[Any]) -> list[float]:
    """Turn points in time of all lanes into seconds since the first of them."""
    host = [point for point in points if isinstance(point, float)]
    if len(host) == len(points):
        first = min(host, default=0.0)
        return [point - first for point in points]
    if host:
        raise PipelineError(
            "a pipeline over CPU and CUDA partitions together has no common clock to trace by.\n"
            "Fix: trace a pipeline whose partitions are all on CUDA devices, or all on the CPU."
        )
    # Events of one device can be compared on the device; of several, only through the host.
    by_device: dict[Any, Any] = {}
    for point in points:
        by_device.setdefault(point.device, point)
    offsets = {device: _host_time(first, device) for device, first in by_device.items()}
    start = min(offsets.values(), default=0.0)
    times = []
    for point in points:
        point.synchronize()
        elapsed = by_device[point.device].elapsed_time(point) / 1e3
        times.append(offsets[point.device] - start + elapsed)
    earliest = min(times, default=0.0)
    return [moment - earliest for moment in times]


def _host_time(event: Any, device: Any) -> float:
    """Find the host's time of a past event, by counting back from an event recorded now."""
    event.synchronize()
    with torch.cuda.device(device):
        now = torch.cuda.Event(enable_timing=True)
        now.record()
        now.synchronize()
        host = time.perf_counter()
    return host - float(event.elapsed_time(now)) / 1e3


class Recorder:
    """Timelines of the mini-batches that ran while the trace was on."""

    def __init__(self) -> None:
        self._records: list[MiniBatchRecord] = []

    def begin(
        self, order: Schedule, balance: Sequence[int], checkpoint: Checkpoint, loss_inside: bool
    ) -> MiniBatchRecord:
        """Start the record of another mini-batch."""
        # Under the names that a simulated timeline has for them.
        provenance = {
            "schedule": order.name,
            "balance": list(balance),
            "chunks": order.chunks,
            "checkpoint": checkpoint if isinstance(checkpoint, str) else list(checkpoint),
            "loss_inside": loss_inside,
        }
        record = MiniBatchRecord(order.n_partitions, provenance)
        self._records.append(record)
        return record

    @property
    def timelines(self) -> list[Timeline]:
        """One measured timeline per mini-batch, in the order in which they went in."""
        return [record.timeline() for record in self._records]

    @property
    def timeline(self) -> Timeline:
        """The last mini-batch's timeline.

        Raises:
            PipelineError: no mini-batch ran under the trace.
        """
        if not self._records:
            raise PipelineError(
                "nothing was traced: no mini-batch ran inside the block.\n"
                "Fix: run the pipeline inside `with gpipebal.trace(pipe) as recorder:`."
            )
        return self._records[-1].timeline()
