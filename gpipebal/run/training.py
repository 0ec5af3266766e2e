"""A training step, of the pipeline and of the plain model, and how long it takes.

A step is: clear the gradients, forward, loss, backward, optimizer. The pipeline does it with the
loss over the whole mini-batch, or, under 1F1B, with that of each micro-batch inside. The plain
model does what its users do when a mini-batch does not fit: the same micro-batches one after the
other, forward, loss and backward of each, with the gradients adding up and the loss weighted by
rows, then the optimizer. So both normalise batches alike, and neither pays for memory that the
other avoids. The plain model recomputes nothing: what checkpointing costs is part of the
comparison.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from gpipebal.errors import ModelError
from gpipebal.pipeline import GPipe, gather
from gpipebal.pipeline.values.parting import chunk_sizes
from gpipebal.profiler.chain.batch import Batch
from gpipebal.profiler.chain.clock import synchronize
from gpipebal.profiler.step.optimizer import as_one
from gpipebal.run.workload import Workload

__all__ = ["PipelineTrainer", "PlainTrainer", "timed"]


class PipelineTrainer:
    """Trains a pipeline on one mini-batch, again and again, under the pipeline's schedule."""

    def __init__(self, pipe: GPipe, workload: Workload) -> None:
        self.pipe = pipe
        self.loss_fn, self.target_dims = workload.loss_fn, workload.parting.get("target_dims", 0)
        self.loss = workload.loss
        self.sample, self.keywords = workload.batch().to(pipe.devices[0]).call()
        self.target = workload.target_on(pipe.devices[-1])
        self.optimizer = as_one(workload.make_optimizer(list(pipe.parameters())))

    def step(self) -> None:
        """Do one training step."""
        self.optimizer.zero_grad()
        if self.pipe.schedule == "gpipe":
            output = self.pipe(self.sample, **self.keywords)
            self.loss(output, self.target).backward()
        else:
            self.pipe.step(
                self.sample,
                target=self.target,
                loss_fn=self.loss_fn,
                target_dims=self.target_dims,
                keywords=self.keywords,
            )
        self.optimizer.step()


class PlainTrainer:
    """Trains the plain model on the same micro-batches, on one device."""

    def __init__(
        self, model: nn.Module, workload: Workload, chunks: int, device: torch.device
    ) -> None:
        self.model, self.device = model.to(device), device
        self.loss = workload.loss
        batch = workload.batch().to(device)
        self.rows = chunk_sizes(batch.count_rows(), chunks)
        self.micro_batches = batch.parts(self.rows)
        self.out_dims = workload.parting.get("out_dims", 0)
        target = workload.target_batch()
        target = None if target is None else target.to(device)
        self.target = None if target is None else target.value
        self.targets = _part_target(target, self.rows)
        self.optimizer = as_one(workload.make_optimizer(list(self.model.parameters())))

    def step(self) -> None:
        """Do one training step."""
        self.optimizer.zero_grad()
        if self.targets is None:
            outputs = [self._run(micro_batch) for micro_batch in self.micro_batches]
            self.loss(gather(outputs, self.out_dims), self.target).backward()
        else:
            total = sum(self.rows) or 1
            for rows, micro_batch, target in zip(
                self.rows, self.micro_batches, self.targets, strict=True
            ):
                (self.loss(self._run(micro_batch), target) * (rows / total)).backward()
        self.optimizer.step()

    def _run(self, micro_batch: Batch) -> Any:
        """Run a micro-batch; keyword arguments are the first layer's, as in a pipeline."""
        # A copy, as a layer that writes to its input would change the data of later steps, and
        # those of the pipeline, which looks after its own.
        value, keywords = micro_batch.copied_to(self.device).call()
        if not keywords:
            return self.model(value)
        assert isinstance(self.model, nn.Sequential)
        first, *others = self.model  # a layer may be in several places
        value = first(value, **keywords)
        for layer in others:
            value = layer(value)
        return value


def timed(step: Callable[[], None], devices: Sequence[torch.device]) -> float:
    """Run a step and return its seconds, until all its work on the devices has ended."""
    _wait_for(devices)
    start = time.perf_counter()
    step()
    _wait_for(devices)
    return time.perf_counter() - start


def _wait_for(devices: Sequence[torch.device]) -> None:
    for device in set(devices):
        synchronize(device)


def _part_target(target: Batch | None, rows: Sequence[int]) -> list[Any] | None:
    """Divide the target as the sample is; None: it has no such rows, so there is one loss."""
    if target is None:
        return [None] * len(rows)
    try:
        if target.count_rows() != sum(rows):
            return None
    except ModelError:
        return None
    return [part.value for part in target.parts(rows)]
