"""Steps: a training step in one setting and balance, to time, to trace and to meter."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from benchmark_tools.machine import place
from torch import Tensor, nn

from gpipebal.pipeline import GPipe, measure_memory, trace
from gpipebal.timeline import Timeline
from prediction_benchmark.models import Model
from prediction_benchmark.settings import N_PARTITIONS, Setting

__all__ = ["Steps", "about_devices", "devices", "wait"]


def devices() -> list[torch.device]:
    """Return a device for each partition: CUDA's, in turns if there are too few; else the CPU."""
    n = torch.cuda.device_count()
    if not n:
        return [torch.device("cpu")] * N_PARTITIONS
    return [torch.device("cuda", j % n) for j in range(N_PARTITIONS)]


def about_devices() -> dict[str, Any]:
    """Tell what the partitions run on."""
    places = devices()
    on_cuda = places[0].type == "cuda"
    return {
        "devices": [str(device) for device in places],
        "device_name": torch.cuda.get_device_name(places[0]) if on_cuda else place()["cpu"],
    }


def wait() -> None:
    """Wait until all devices are done."""
    for device in {device for device in devices() if device.type == "cuda"}:
        torch.cuda.synchronize(device)


class Steps:
    """A pipeline and its training step: zero_grad, forwards, loss, backwards, optimizer.

    It is ready when made: threads and gradients exist, and what is found out in a first step is
    known. Close it before the next one is made, whose layers may be elsewhere.

    Args:
        model: Tells loss and optimizer.
        layers: The model's layers.
        batch: Inputs and target.
        balance: How to cut.
        setting: How to run.
    """

    def __init__(
        self,
        model: Model,
        layers: nn.Sequential,
        batch: tuple[Tensor, Tensor],
        balance: Sequence[int],
        setting: Setting,
    ) -> None:
        places = devices()
        self.pipe = GPipe(
            layers,
            list(balance),
            devices=places,
            chunks=setting.chunks,
            checkpoint=setting.checkpoint,
            threads_per_partition=1,
        )
        self._inputs, self._target = batch[0].to(places[0]), batch[1].to(places[-1])
        self._loss_fn, self._setting = model.loss_fn, setting
        self._optimizer = model.optimizer(list(self.pipe.parameters()))
        self.run()

    def run(self) -> None:
        """Run a step."""
        self._optimizer.zero_grad()
        if self._setting.loss_inside:
            self.pipe.step(
                self._inputs,
                target=self._target,
                loss_fn=self._loss_fn,
                schedule=self._setting.schedule,
            )
        else:
            output = self.pipe(self._inputs)
            self._loss_fn(output, self._target).backward()
        self._optimizer.step()

    def seconds(self) -> float:
        """Run a step by the clock."""
        wait()
        started = time.perf_counter()
        self.run()
        wait()
        return time.perf_counter() - started

    def traced(self) -> tuple[float, Timeline]:
        """Run a step by the clock, and return its timeline too."""
        with trace(self.pipe) as recorder:
            seconds = self.seconds()
        return seconds, recorder.timeline

    def peaks(self) -> list[int]:
        """Run a step, and count the most bytes that each partition held."""
        self._optimizer.zero_grad()
        with measure_memory(self.pipe, self._optimizer) as meter:
            # It lies in the last partition's memory, as the inputs do in the first's.
            meter.ledger.hold([self._target], N_PARTITIONS - 1)
            self.run()
        return list(meter.peak_bytes)

    def close(self) -> None:
        """End the threads, and free the gradients."""
        self.pipe.close()
        self._optimizer.zero_grad()
