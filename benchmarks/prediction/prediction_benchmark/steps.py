"""Steps: a training step in one setting and balance, to time, to trace and to meter."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from benchmark_tools.machine import place
from benchmark_tools.shares import (
    Place,
    about_shares,
    computing_on,
    device_of,
    shares_of_device,
    wait_for,
)
from torch import Tensor, nn

from gpipebal.pipeline import GPipe, measure_memory, trace
from gpipebal.timeline import Timeline
from prediction_benchmark.models import Model
from prediction_benchmark.settings import N_PARTITIONS, Setting


def places() -> list[Place]:
    """Return where each partition runs.

    On the CPU if there is no CUDA device; on a device of its own where there are enough; else on
    a share of the multiprocessors of the one there is.
    """
    n = torch.cuda.device_count()
    if not n:
        return [torch.device("cpu")] * N_PARTITIONS
    if n >= N_PARTITIONS:
        return [torch.device("cuda", j) for j in range(N_PARTITIONS)]
    return list(shares_of_device(N_PARTITIONS))


def devices() -> list[torch.device]:
    """Return the device that each partition is on; several may share one."""
    return [device_of(one) for one in places()]


def on_first_device() -> AbstractContextManager[Any]:
    """Let the caller compute where the first partition does."""
    return computing_on(places()[0])


def about_devices() -> dict[str, Any]:
    """Tell what the partitions run on."""
    first, *_ = found = devices()
    if first.type != "cuda":
        return {"devices": [str(device) for device in found], "device_name": place()["cpu"]}
    on_shares = isinstance(places()[0], torch.cuda.Stream)
    return {
        "devices": [f"{device}, a share" if on_shares else str(device) for device in found],
        "device_name": torch.cuda.get_device_name(first),
        "cuda": torch.version.cuda,
        **({"shares": about_shares(N_PARTITIONS)} if on_shares else {}),
    }


def wait() -> None:
    """Wait until all devices are done."""
    for device in set(devices()):
        wait_for(device)


def run_step(
    pipe: GPipe,
    model: Model,
    optimizer: torch.optim.Optimizer,
    batch: tuple[Tensor, Tensor],
    setting: Setting,
) -> None:
    """Run a training step whose caller keeps the output through the backward."""
    inputs, target = batch
    optimizer.zero_grad()
    if setting.loss_inside:
        pipe.step(inputs, target=target, loss_fn=model.loss_fn, schedule=setting.schedule)
    else:
        output = pipe(inputs)
        model.loss_fn(output, target).backward()
    optimizer.step()


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
        self.pipe = GPipe(
            layers,
            list(balance),
            devices=places(),
            chunks=setting.chunks,
            checkpoint=setting.checkpoint,
            threads_per_partition=1,
        )
        first, *_, last = devices()
        with on_first_device():
            self._inputs, self._target = batch[0].to(first), batch[1].to(last)
        self._model, self._setting = model, setting
        self._optimizer = model.optimizer(list(self.pipe.parameters()))
        self.run()

    def run(self) -> None:
        """Run a step; what is between the partitions and after them runs where the first does."""
        batch = self._inputs, self._target
        with on_first_device():
            run_step(self.pipe, self._model, self._optimizer, batch, self._setting)

    def seconds(self) -> float:
        """Time a step."""
        wait()
        started = time.perf_counter()
        self.run()
        wait()
        return time.perf_counter() - started

    def traced(self) -> tuple[float, Timeline]:
        """Time a step, and return its timeline too."""
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
        """Wait for what is under way, end the threads, and free the gradients."""
        wait()
        self.pipe.close()
        self._optimizer.zero_grad()
