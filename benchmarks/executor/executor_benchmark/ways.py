"""Ways to run a training step in this process: the plain model, gpipebal, torchgpipe, fairscale.

Every way has a model of its own, equal to the others', and clears its gradients before the clock
starts. A step is forward, loss and backward, without an optimizer. Each partition works with one
thread, and so does the thread that calls.
"""

from __future__ import annotations

import importlib
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from benchmark_tools.machine import package_version
from torch import Tensor, nn

from executor_benchmark.workloads import Workload, loss_fn
from gpipebal import GPipe

CHECKPOINTS = ("never", "except_last")

#: Every way of running a step.
WAYS = (
    *("plain_1", "plain_2", "gpipebal", "gpipebal_gpipe", "gpipebal_1f1b"),
    *("torchgpipe", "fairscale", "distributed_gpipe", "distributed_1f1b"),
)


class NotAvailableError(Exception):
    """A way cannot be run here; the message is what its row says."""


@dataclass
class Way:
    """A step that can be run again and again.

    Attributes:
        name: One of `WAYS`.
        model: Its own chain, whose parameters take the gradients.
        step: Runs forward, loss and backward.
        threads: Threads of the calling thread while the step runs.
        close: Ends its workers.
    """

    name: str
    model: nn.Module
    step: Callable[[], Any]
    threads: int = 1
    close: Callable[[], None] = lambda: None

    def run(self) -> float:
        """Run a step; return its seconds."""
        self.clear()
        with _threads(self.threads):
            started = time.perf_counter()
            self.step()
            return time.perf_counter() - started

    def clear(self) -> None:
        """Drop the gradients of the step before."""
        self.model.zero_grad(set_to_none=True)

    def gradients(self) -> list[Tensor | None]:
        """Return the gradients of the last step, in the order of the chain."""
        return [parameter.grad for parameter in self.model.parameters()]


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    if count != before:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        if count != before:
            torch.set_num_threads(before)


def make_way(
    name: str, workload: Workload, balance: Sequence[int], chunks: int, checkpoint: str
) -> Way:
    """Make a way of running a workload.

    Args:
        name: One of `WAYS`; the ones of torch.distributed are made by `processes`.
        workload: What to train.
        balance: Layers of each partition.
        chunks: Micro-batches.
        checkpoint: Checkpoint mode; the plain model has none.

    Raises:
        NotAvailableError: it is not installed.
    """
    model, (inputs, target) = workload.make_model(), workload.make_batch()
    if name.startswith("plain"):
        return _plain(name, model, inputs, target, chunks)
    pipe = _make_pipe(name, model, list(balance), chunks, checkpoint)
    if name in ("gpipebal_gpipe", "gpipebal_1f1b"):
        schedule = name.removeprefix("gpipebal_")

        def step() -> Any:
            return pipe.step(inputs, target=target, loss_fn=loss_fn, schedule=schedule)
    else:

        def step() -> Any:
            loss_fn(pipe(inputs), target).backward()

    return Way(name, model, step, close=getattr(pipe, "close", lambda: None))


def _plain(name: str, model: nn.Module, inputs: Tensor, target: Tensor, chunks: int) -> Way:
    """Take one micro-batch after the other through forward, loss and backward.

    With these micro-batches that is the plain model at its best: no two graphs are alive at once,
    and nothing is joined.
    """
    parts = list(zip(inputs.chunk(chunks), target.chunk(chunks), strict=True))

    def step() -> None:
        for part, part_target in parts:
            (loss_fn(model(part), part_target) / chunks).backward()

    return Way(name, model, step, threads=int(name.removeprefix("plain_")))


def _make_pipe(
    name: str, model: nn.Sequential, balance: list[int], chunks: int, checkpoint: str
) -> Any:
    options: dict[str, Any] = {"chunks": chunks, "checkpoint": checkpoint}
    options["devices"] = ["cpu"] * len(balance)
    if name.startswith("gpipebal"):
        return GPipe(model, balance, threads_per_partition=1, **options)
    with warnings.catch_warnings():
        # They were written for a torch that had not deprecated what they use; and fairscale says on
        # every use that it is deprecated itself.
        warnings.simplefilter("ignore")
        if name == "torchgpipe":
            return _import("torchgpipe").GPipe(model, balance, **options)
        return _import("fairscale.nn").Pipe(model, balance, **options)


def _import(name: str) -> Any:
    package = name.partition(".")[0]
    if package_version(package) is None:
        raise NotAvailableError("not installed")
    return importlib.import_module(name)
