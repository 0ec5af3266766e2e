"""Tracing: a measured timeline of every mini-batch that runs through a pipeline."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from gpipebal.argument_kinds import check_kind
from gpipebal.pipeline.gpipe import GPipe
from gpipebal.pipeline.observers.recorder import Recorder

__all__ = ["trace"]


@contextmanager
def trace(pipe: GPipe) -> Iterator[Recorder]:
    """Record when each cell of a pipeline runs.

    A mini-batch belongs to the trace if its forward starts inside the block; its backward is
    recorded even when it comes later. Without a trace the pipeline reads no clock.

    Args:
        pipe: The pipeline to watch.

    Yields:
        A recorder: ``recorder.timelines`` has one `Timeline` per mini-batch, with forward,
        recompute and backward of every cell in seconds since its first action.

    Raises:
        KindError: it is not a pipeline.
        PipelineError: the pipeline is traced already.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> pipe = GPipe(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), [1, 1], chunks=2)
        >>> with trace(pipe) as recorder:
        ...     pipe(torch.ones(4, 2)).sum().backward()
        >>> len(recorder.timeline.events)
        10
    """
    check_kind("pipe", pipe, GPipe, "pipe = GPipe(model, balance)")
    recorder = Recorder()
    try:
        pipe.start_recording(recorder)
        yield recorder
    finally:
        try:
            pipe.stop_recording(recorder)
        except BaseException:  # an interrupt came in between
            pipe.stop_recording(recorder)
            raise
