"""A lane: the device and the streams of one partition, and how tensors reach it.

On CUDA each partition computes on a stream of its own and copies on others, and events order
them: nothing here waits on the host for what a device computes. Only a copy out of the host's own
memory blocks, until the copy itself is done, because the caller may refill that memory; so it has
a stream on which no other work comes before it. And what a layer has copied to pinned memory is
waited for before the caller joins it. A tensor that is read on another stream than it was
made on is recorded there, so that the allocator does not give its memory away too early. On a CPU
none of this is needed.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any

import torch
from torch import Tensor

from gpipebal.pipeline.values.tensors import plain_parts

__all__ = [
    "CudaLane",
    "Events",
    "Lane",
    "Span",
    "current_events",
    "record_stream",
]

#: CUDA events to wait for; none on a CPU, whose work is done when it is handed over.
Events = Sequence[Any]

#: Two points in time of a lane's `clock`.
Span = tuple[Any, Any]

#: Not in every version of torch.
_WARN_OF_STREAMS: Callable[[bool], None] | None = getattr(
    torch.autograd.graph, "set_warn_on_accumulate_grad_stream_mismatch", None
)


class Lane:
    """A CPU partition's lane: tensors are handed over as they are."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def enter_thread(self) -> None:
        """Prepare the thread of this partition's worker."""

    def follow_caller(self) -> Events:
        """Return what the lane must wait for, called in the caller's thread."""
        return ()

    def wait_for(self, ready: Events) -> None:
        """Let the lane's coming work start after `ready`: a CPU can only wait on the host."""
        for event in ready:
            event.synchronize()

    def receive(
        self,
        leaves: Sequence[Any],
        ready: Events,
        spans: list[Span] | None = None,
        *,
        of_caller: bool = False,
    ) -> list[Any]:
        """Bring the tensors of another partition, or of the caller, to this device.

        Args:
            leaves: The tensors, among other things.
            ready: What to wait for before reading them.
            spans: Receives the start and end of the copying, if any tensor was copied; None: no
                clock is read.
            of_caller: Whether they are the caller's, who may write to them again once the pipeline
                has returned.
        """
        self.wait_for(ready)
        strange = [isinstance(leaf, Tensor) and leaf.device != self.device for leaf in leaves]
        if not any(strange):
            return list(leaves)
        started = self.clock() if spans is not None else None
        received = [
            leaf.to(self.device) if moves else leaf
            for leaf, moves in zip(leaves, strange, strict=True)
        ]
        if spans is not None:
            spans.append((started, self.clock()))
        return received

    def computing(self) -> AbstractContextManager[Any]:
        """Return a context in which any thread computes where this lane does."""
        return nullcontext()

    def mark(self, leaves: Sequence[Any] = ()) -> Events:
        """Return what others wait for before they use what this lane has computed so far.

        Args:
            leaves: What they use: a layer of a CPU partition may have put some of it on a GPU.
        """
        return current_events(leaves)

    def give_to_caller(self, leaves: Sequence[Any], ready: Events) -> None:
        """Let the caller use tensors of this lane; called in the caller's thread."""
        for event in ready:  # of tensors that a layer has put on a GPU
            torch.cuda.current_stream(event.device).wait_event(event)
        for leaf in leaves:
            if isinstance(leaf, Tensor) and leaf.is_cuda:
                record_stream(leaf, torch.cuda.current_stream(leaf.device))

    def clock(self) -> Any:
        """Return a point in time for a recorder: seconds of `time.perf_counter`."""
        return time.perf_counter()


class CudaLane(Lane):
    """A CUDA partition's lane: streams to compute on and to copy on, and events between them.

    Args:
        device: The device.
        compute: The stream to compute on; None: a new one.
    """

    def __init__(self, device: torch.device, compute: torch.cuda.Stream | None = None) -> None:
        super().__init__(device)
        if _WARN_OF_STREAMS is not None:
            # A parameter's gradient is accumulated on the stream on which its node was made. With
            # workers and the caller that cannot be the stream of every thread that finds a part of
            # it, and autograd lets the streams wait for each other.
            _WARN_OF_STREAMS(False)
        _settle_attention(device)
        self.compute = torch.cuda.Stream(device) if compute is None else compute
        #: For what comes from other devices.
        self.copy = torch.cuda.Stream(device)
        #: For what comes from the host's memory. It waits for no event, so a copy that blocks the
        #: host blocks it for its own time only.
        self.upload = torch.cuda.Stream(device)
        # torch copies between devices on the source's current stream too, which would be its
        # default stream, the caller's. So there is one stream for each source instead.
        self._sources: dict[torch.device, torch.cuda.Stream] = {}
        self._of_caller: set[torch.device] = set()

    def enter_thread(self) -> None:
        """Make the compute stream current in the worker's thread, for good."""
        torch.cuda.set_device(self.device)
        torch.cuda.set_stream(self.compute)

    def follow_caller(self) -> Events:
        """Mark the caller's work on this device: the optimizer may still write parameters."""
        return [torch.cuda.current_stream(self.device).record_event()]

    def wait_for(self, ready: Events) -> None:
        """Let the compute stream wait for events."""
        for event in ready:
            self.compute.wait_event(event)

    def receive(
        self,
        leaves: Sequence[Any],
        ready: Events,
        spans: list[Span] | None = None,
        *,
        of_caller: bool = False,
    ) -> list[Any]:
        """Copy tensors from elsewhere on the copy streams; read those on this device in place."""
        received = list(leaves)
        from_host: list[int] = []
        from_devices: list[int] = []
        for k, leaf in enumerate(received):
            if isinstance(leaf, Tensor) and leaf.device != self.device:
                (from_devices if leaf.is_cuda else from_host).append(k)
                if of_caller and leaf.is_cuda:
                    self._of_caller.add(leaf.device)
        if from_devices:
            for event in ready:
                self.copy.wait_event(event)
            with self._timed(self.copy, spans):
                for k in from_devices:
                    received[k] = self._from_device(received[k], ready)
            self.compute.wait_event(self.copy.record_event())
        else:
            self.wait_for(ready)
        if from_host:
            if not of_caller and any(_is_pinned(received[k]) for k in from_host):
                # A layer's copy to the host may still be filling it.
                for event in ready:
                    self.upload.wait_event(event)
            with self._timed(self.upload, spans), torch.cuda.stream(self.upload):
                for k in from_host:
                    # From pinned memory a copy that does not block would go on while the caller
                    # refills it.
                    received[k] = received[k].to(self.device)
            self.compute.wait_event(self.upload.record_event())
        for leaf in received:
            if isinstance(leaf, Tensor):
                record_stream(leaf, self.compute)
        return received

    def _from_device(self, tensor: Tensor, ready: Events) -> Tensor:
        source = self._sources.get(tensor.device)
        if source is None:
            source = self._sources[tensor.device] = torch.cuda.Stream(tensor.device)
        # torch lets each of the two streams wait for the other before it copies, and after; but a
        # tensor with gaps may be made contiguous first, which only the source's stream does.
        for event in ready:
            source.wait_event(event)
        with torch.cuda.stream(source), torch.cuda.stream(self.copy):
            received = tensor.to(self.device, non_blocking=True)
        record_stream(tensor, source)
        return received

    @contextmanager
    def _timed(self, stream: torch.cuda.Stream, spans: list[Span] | None) -> Iterator[None]:
        started = self._clock(stream) if spans is not None else None
        yield
        if spans is not None:
            spans.append((started, self._clock(stream)))

    def computing(self) -> AbstractContextManager[Any]:
        """Make the compute stream current in this thread and block."""
        return torch.cuda.stream(self.compute)

    def mark(self, leaves: Sequence[Any] = ()) -> Events:
        """Record an event after the work that the compute stream has so far."""
        return [self.compute.record_event()]

    def give_to_caller(self, leaves: Sequence[Any], ready: Events) -> None:
        """Let the caller's streams wait, and keep the memory until they have read it.

        These are its streams on this device, on the tensors' devices, and on the devices of the
        caller's tensors that were copied: a copy reads on a stream that the caller does not know.
        """
        found = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_cuda]
        for device in {self.device, *self._of_caller, *(leaf.device for leaf in found)}:
            current = torch.cuda.current_stream(device)
            for event in ready:
                current.wait_event(event)
        for leaf in found:
            record_stream(leaf, torch.cuda.current_stream(leaf.device))
        host = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.device.type == "cpu"]
        if any(map(_is_pinned, host)):
            # A layer's copy may still be filling it, and the caller joins it on the host.
            for event in ready:
                event.synchronize()

    def clock(self) -> torch.cuda.Event:
        """Record a timing event on the compute stream."""
        return self._clock(self.compute)

    def _clock(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(stream)
        return event


@functools.cache
def _settle_attention(device: torch.device) -> None:
    """Let torch choose the order in which it tries its attention kernels, before it is read.

    It does so when it is first asked for attention on such a device, for the whole process: in a
    worker, in the middle of a mini-batch, it would change what its backward has to do as well.
    """
    query = torch.empty(1, 1, 8, 8, dtype=torch.half, device=device)
    # Asked without running a kernel. Not every version of torch has the function.
    with suppress(AttributeError, RuntimeError):
        torch._fused_sdp_choice(query, query, query)


def record_stream(tensor: Tensor, stream: torch.cuda.Stream) -> None:
    """Keep a tensor's memory until a stream has read it, whatever the tensor is made of.

    A class that wraps others need not know how, and may have some of them on the host.
    """
    for part in plain_parts(tensor):
        if part.is_cuda:
            part.record_stream(stream)


def _is_pinned(tensor: Tensor) -> bool:
    """Tell whether any memory of a tensor is pinned, whatever the tensor is made of."""
    return any(part.is_pinned() for part in plain_parts(tensor))


def current_events(leaves: Sequence[Any]) -> list[torch.cuda.Event]:
    """Mark this thread's work on the devices of these tensors, on its current stream of each."""
    devices = {leaf.device for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_cuda}
    return [torch.cuda.current_stream(device).record_event() for device in devices]
