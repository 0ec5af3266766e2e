"""The ideal makespan: serially measured cells, placed as if nothing else cost time.

The cells of a step are run in this process, on one thread, without any executor: plain calls of
the layers and of `torch.autograd.backward`. A schedule is gone through as a partition's worker
would: as many cells of one partition as can be run, then those of the other. So as many graphs are
alive at one time as in the pipeline, and the costs of their memory are the same.

The same cells are also run *side by side*: each partition in a bare thread of its own, with inputs
and gradients that lie ready, so that no thread waits for another. What they take then is more than
alone, because the threads share caches, memory bandwidth and the interpreter; no executor within
one process can take less.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from executor_benchmark.workloads import loss_fn
from gpipebal.schedule import Action, Schedule
from gpipebal.simulator import Durations, place

#: A mini-batch, and its target.
Batch = tuple[Tensor, Tensor]


@dataclass
class CellTimes:
    """Seconds of the cells of one step.

    Attributes:
        forward: For each partition, of each micro-batch.
        recompute: For each partition, of each recomputed micro-batch.
        backward: For each partition, of each micro-batch, without recompute.
        loss_forward: Of the loss of each micro-batch.
        loss_backward: Of the gradient of each of them with respect to the output.
        pause: Of what ``loss(pipe(x))`` does between forward and backward, over the mini-batch:
            join the outputs, loss, gradient of the outputs.
    """

    forward: list[list[float]]
    recompute: list[list[float]]
    backward: list[list[float]]
    loss_forward: list[float] = field(default_factory=list)
    loss_backward: list[float] = field(default_factory=list)
    pause: float = 0.0

    @classmethod
    def empty(cls, n_partitions: int) -> CellTimes:
        """Make the record of a step that has not been run."""
        return cls(*([[] for _ in range(n_partitions)] for _ in range(3)))

    def durations(self, *, loss: bool) -> Durations:
        """Return the mean cell of each partition; with `loss`, the last one's has it in it."""
        kinds = (self.forward, self.recompute, self.backward)
        forward, recompute, backward = ([_mean(times) for times in kind] for kind in kinds)
        if loss:
            forward[-1] += _mean(self.loss_forward)
            backward[-1] += _mean(self.loss_backward)
        return Durations(tuple(forward), tuple(recompute), tuple(backward))


def ideal(schedule: Schedule, durations: Durations, pause: float | None = None) -> float:
    """Return the ideal makespan of a step.

    Args:
        schedule: In which order each partition works.
        durations: Seconds of each partition for one micro-batch.
        pause: Of ``loss(pipe(x)).backward()``: seconds between the forwards and the backwards. The
            loss is one for the whole mini-batch, so all forwards end before the first backward
            begins. None: the loss is inside the last partition's cells.

    Example:
        >>> from gpipebal.schedule import gpipe_schedule
        >>> durations = Durations((1.0, 2.0), (1.0, 2.0), (3.0, 2.0))
        >>> ideal(gpipe_schedule(2, 4, "never"), durations, 0.5)  # 3 + 3 * 2, 0.5, 5 + 3 * 3
        23.5
        >>> ideal(gpipe_schedule(2, 4, "except_last"), durations, 0.5)  # the same, 5 + 3 * 4
        26.5
    """
    return place(schedule, durations, pause=pause).makespan


def run_serially(partitions: Sequence[nn.Module], schedule: Schedule, batch: Batch) -> CellTimes:
    """Run a step cell by cell in this thread, and clock each.

    Gradients are added to the parameters as by the plain model.

    Args:
        partitions: The layers of each partition.
        schedule: Which micro-batches are recomputed, and in which order each partition works.
        batch: What is trained with.
    """
    step = _SerialStep(partitions, schedule, batch)
    _run_through(step, schedule)
    step.clock_pause()
    return step.times


def run_side_by_side(
    partitions: Sequence[nn.Module], schedule: Schedule, batch: Batch
) -> CellTimes:
    """Run the cells of a step with every partition in a thread of its own, and clock each.

    A run through the step, not clocked, gives the threads copies of what they would wait for. Its
    gradients are added to the parameters, and then those of the threads. The pause is not clocked.

    Takes what `run_serially` takes.
    """
    first = _SerialStep(partitions, schedule, batch, keep=True)
    _run_through(first, schedule)
    steps = [_SerialStep(partitions, schedule, batch, ready=first.kept) for _ in partitions]
    del first
    all_here = threading.Barrier(len(steps))
    failures: list[BaseException] = []

    def work(j: int) -> None:
        try:
            torch.set_num_threads(1)
            all_here.wait()
            for action in schedule.rows[j]:
                steps[j].run(action)
        except BaseException as error:
            failures.append(error)
            all_here.abort()

    threads = [threading.Thread(target=work, args=(j,)) for j in range(len(steps))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    times = CellTimes.empty(schedule.n_partitions)
    for j, step in enumerate(steps):
        for kind in ("forward", "recompute", "backward"):
            getattr(times, kind)[j] = getattr(step.times, kind)[j]
    times.loss_forward = steps[-1].times.loss_forward
    times.loss_backward = steps[-1].times.loss_backward
    return times


def _run_through(step: _SerialStep, schedule: Schedule) -> None:
    """Run every action of a step, as many of a partition as can be run before the next one's."""
    rows = [deque(row) for row in schedule.rows]
    while any(rows):
        n_left = sum(map(len, rows))
        for row in rows:
            while row and step.can_run(row[0]):
                step.run(row.popleft())
        if sum(map(len, rows)) == n_left:
            raise ValueError(f"schedule can never finish: {[row[0] for row in rows if row]} wait")


@dataclass
class _Kept:
    """What the cells of a step are given, by (partition, micro-batch)."""

    inputs: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    gradients: dict[tuple[int, int], Tensor] = field(default_factory=dict)


class _SerialStep:
    """One step, cell by cell.

    With `keep` it keeps copies of what every cell is given; with those as `ready` no cell waits
    for another.
    """

    def __init__(
        self,
        partitions: Sequence[nn.Module],
        schedule: Schedule,
        batch: Batch,
        *,
        keep: bool = False,
        ready: _Kept | None = None,
    ) -> None:
        self._partitions = partitions
        self._chunks = schedule.chunks
        inputs, self._target = batch
        self._targets = self._target.chunk(self._chunks)
        self._outputs: dict[int, Tensor] = {}
        # By (partition, micro-batch): what a cell waits for, and what it keeps for its backward.
        self._arrived = {(0, i): part for i, part in enumerate(inputs.chunk(self._chunks))}
        self._gradients: dict[tuple[int, int], Tensor] = {}
        self.kept = _Kept() if keep else None
        self._is_ready = ready is not None
        if ready is not None:
            self._arrived = dict(ready.inputs)
            self._gradients = dict(ready.gradients)
        self._graphs: dict[tuple[int, int], tuple[Tensor, object]] = {}
        self._recomputed = {(a.partition, a.micro_batch) for a in _recomputes(schedule)}
        self.times = CellTimes.empty(schedule.n_partitions)

    def can_run(self, action: Action) -> bool:
        place = (action.partition, action.micro_batch)
        if action.kind == "F":
            return place in self._arrived
        return action.kind == "R" or place in self._gradients

    def run(self, action: Action) -> None:
        {"F": self._forward, "R": self._recompute, "B": self._backward}[action.kind](
            action.partition, action.micro_batch
        )

    def _forward(self, j: int, i: int) -> None:  # j: partition, i: micro-batch
        checkpointed = (j, i) in self._recomputed
        # A checkpointed cell keeps its input for the recompute.
        value = self._arrived[j, i] if checkpointed else self._arrived.pop((j, i))
        started = time.perf_counter()
        if checkpointed:
            with torch.no_grad():
                output = self._partitions[j](value)
        else:
            output = self._with_graph(j, i, value)
        self.times.forward[j].append(time.perf_counter() - started)
        if self.kept is not None:
            self.kept.inputs[j, i] = value.detach().clone()
        if j + 1 < len(self._partitions):
            self._arrived[j + 1, i] = output
        else:
            self._loss(j, i, output)

    def _with_graph(self, j: int, i: int, value: Tensor) -> Tensor:
        leaf = value.detach().requires_grad_(j > 0)
        output = self._partitions[j](leaf)
        self._graphs[j, i] = leaf, get_gradient_edge(output)
        return output.detach()

    def _recompute(self, j: int, i: int) -> None:
        value = self._arrived.pop((j, i))
        started = time.perf_counter()
        self._with_graph(j, i, value)
        self.times.recompute[j].append(time.perf_counter() - started)

    def _loss(self, j: int, i: int, output: Tensor) -> None:
        self._outputs[i] = output
        started = time.perf_counter()
        leaf = output.detach().requires_grad_()
        loss = loss_fn(leaf, self._targets[i]) / self._chunks
        self.times.loss_forward.append(time.perf_counter() - started)
        started = time.perf_counter()
        loss.backward()
        self.times.loss_backward.append(time.perf_counter() - started)
        assert leaf.grad is not None
        self._pass_gradient(j, i, leaf.grad)

    def _backward(self, j: int, i: int) -> None:
        leaf, edge = self._graphs.pop((j, i))
        gradient = self._gradients.pop((j, i))
        started = time.perf_counter()
        torch.autograd.backward((edge,), (gradient,))  # type: ignore[arg-type]
        # The graph is freed here, as a worker frees it.
        del edge
        self.times.backward[j].append(time.perf_counter() - started)
        if j > 0:
            assert leaf.grad is not None
            self._pass_gradient(j - 1, i, leaf.grad)

    def _pass_gradient(self, j: int, i: int, gradient: Tensor) -> None:
        if self.kept is not None:
            self.kept.gradients[j, i] = gradient.clone()
        if not self._is_ready or j == len(self._partitions) - 1:
            self._gradients[j, i] = gradient

    def clock_pause(self) -> None:
        parts = [self._outputs[i] for i in range(self._chunks)]
        started = time.perf_counter()
        # One micro-batch needs no joining.
        leaf = (torch.cat(parts) if len(parts) > 1 else parts[0]).requires_grad_()
        loss_fn(leaf, self._target).backward()
        self.times.pause = time.perf_counter() - started


def _recomputes(schedule: Schedule) -> list[Action]:
    return [action for row in schedule.phase("R") for action in row]


def _mean(times: Sequence[float]) -> float:
    return sum(times) / len(times) if times else 0.0
