"""torch.distributed.pipelining: two processes that stay alive, each with one partition, over gloo.

The processes do nothing, and burn no core, until they are told to run a step: they wait on a pipe.
Then they meet at a barrier, each clocks its own step, and the slower one's time counts.
"""

from __future__ import annotations

import gc
import multiprocessing
import multiprocessing.connection
import os
import tempfile
import time
from collections.abc import Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from executor_benchmark.workloads import SMALL, WORKLOADS, Workload, loss_fn, tiny

SCHEDULES = {"distributed_gpipe": "ScheduleGPipe", "distributed_1f1b": "Schedule1F1B"}

#: Seconds after which a process that does not answer counts as lost.
PATIENCE = 120.0


class Processes:
    """The worker processes, one per partition; a context manager that ends them.

    Args:
        n_partitions: How many.
    """

    def __init__(self, n_partitions: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._folder = tempfile.TemporaryDirectory()
        meeting_point = (Path(self._folder.name) / "store").as_uri()
        self._connections: list[Connection] = []
        self._processes = []
        self._failure: str | None = None
        # gloo asks which interface the host's name stands for, which need not have an answer.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        for rank in range(n_partitions):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_work, args=(theirs, rank, n_partitions, meeting_point), daemon=True
            )
            process.start()
            theirs.close()
            self._connections.append(ours)
            self._processes.append(process)

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *_: object) -> None:
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            # After a failure one may wait for another that is gone.
            process.join(10 if self._failure is None else 0.1)
            if process.is_alive():
                process.terminate()
                process.join()
        self._folder.cleanup()

    def build(self, workload: Workload, balance: Sequence[int], chunks: int) -> None:
        """Let every process make its partition of a workload, and the schedules."""
        self._ask("build", workload.name, workload.is_tiny, list(balance), chunks)

    def run(self, way: str) -> float:
        """Run a step by the schedule of this name; return its seconds."""
        return max(self._ask("run", way))

    def gradients(self) -> list[Tensor | None]:
        """Return the gradients of the last step, in the order of the chain."""
        # As numpy arrays: tensors would be sent as handles to shared memory.
        return [
            None if array is None else torch.from_numpy(array)
            for arrays in self._ask("gradients")
            for array in arrays
        ]

    def _ask(self, *question: Any) -> list[Any]:
        """Put a question to all processes; return their answers, by rank.

        Raises:
            RuntimeError: one failed, now or before. The others may be waiting for it, so none is
                asked again.
        """
        if self._failure is None:
            try:
                return self._ask_all(question)
            except (RuntimeError, OSError, EOFError) as error:
                self._failure = f"{question[0]}: {error or type(error).__name__}"
        raise RuntimeError(self._failure)

    def _ask_all(self, question: tuple[Any, ...]) -> list[Any]:
        for connection in self._connections:
            connection.send(question)
        answers: dict[Connection, Any] = {}
        while len(answers) < len(self._connections):
            waiting = [each for each in self._connections if each not in answers]
            ready = multiprocessing.connection.wait(waiting, PATIENCE)
            if not ready:
                raise RuntimeError(f"no answer within {PATIENCE:.0f} s")
            for connection in waiting:
                if connection in ready:
                    ok, answers[connection] = connection.recv()
                    if not ok:
                        raise RuntimeError(answers[connection])
        return [answers[connection] for connection in self._connections]


def _work(connection: Connection, rank: int, size: int, meeting_point: str) -> None:
    import torch.distributed as dist

    torch.set_num_threads(1)
    gc.disable()
    dist.init_process_group(
        "gloo",
        init_method=meeting_point,
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=PATIENCE / 2),
    )
    partition = _Partition(rank, size)
    try:
        while True:
            try:
                verb, *args = connection.recv()
            except EOFError:
                return  # nobody asks any more
            try:
                connection.send((True, getattr(partition, verb)(*args)))
            except Exception as error:
                connection.send((False, f"{type(error).__name__}: {error}"))
                return
    finally:
        dist.destroy_process_group()


class _Partition:
    """One partition in one process; its methods are what the parent can ask for."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank = rank
        self._size = size
        self._model: nn.Module = nn.Module()
        self._schedules: dict[str, Any] = {}
        self._inputs: tuple[Tensor, ...] = ()
        self._target: Tensor | None = None

    def build(self, name: str, is_tiny: bool, balance: list[int], chunks: int) -> None:
        from torch.distributed import pipelining

        workload = next(each for each in (*WORKLOADS, *SMALL) if each.name == name)
        if is_tiny:
            workload = tiny(workload)
        first = sum(balance[: self._rank])
        self._model = workload.make_model()[first : first + balance[self._rank]]
        inputs, target = workload.make_batch()
        self._inputs = (inputs,) if self._rank == 0 else ()
        self._target = target if self._rank == self._size - 1 else None

        def part_of_loss(output: Tensor, part_target: Tensor) -> Tensor:
            # A factor for one number, instead of scale_grads' factor for every gradient.
            return loss_fn(output, part_target) / chunks

        self._schedules = {}
        for way, class_name in SCHEDULES.items():
            if way == "distributed_1f1b" and chunks < self._size:
                continue
            stage = pipelining.PipelineStage(
                self._model, self._rank, self._size, torch.device("cpu")
            )
            self._schedules[way] = getattr(pipelining, class_name)(
                stage, chunks, loss_fn=part_of_loss, scale_grads=False
            )
        # The model before this one goes, and collections look no more at what is here now.
        gc.unfreeze()
        gc.collect()
        gc.freeze()

    def run(self, way: str) -> float:
        import torch.distributed as dist

        schedule = self._schedules[way]
        self._model.zero_grad(set_to_none=True)
        gc.collect()
        losses: list[Tensor] | None = [] if self._target is not None else None
        dist.barrier()
        started = time.perf_counter()
        # The outputs are not joined: they are not needed, and gpipebal's step does not either.
        schedule.step(*self._inputs, target=self._target, losses=losses, return_outputs=False)
        return time.perf_counter() - started

    def gradients(self) -> list[Any]:
        return [
            None if parameter.grad is None else parameter.grad.numpy()
            for parameter in self._model.parameters()
        ]
