"""All ways of running a workload in turns, round after round, in one run.

In turns, what else the machine does meets all of them. The cells from which the ideal makespan is
computed are run in the same rounds. Rounds come in pairs: a new order, the same for every run of
the benchmark, then that order backwards. So none always runs after the same one.
"""

from __future__ import annotations

import gc
import math
import random
import statistics
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from itertools import count, pairwise
from typing import Any, NamedTuple

from torch import Tensor

from executor_benchmark.cells import CellTimes, ideal, run_serially, run_side_by_side
from executor_benchmark.processes import SCHEDULES, Processes
from executor_benchmark.ways import CHECKPOINTS, WAYS, NotAvailableError, make_way
from executor_benchmark.workloads import N_PARTITIONS, Workload
from gpipebal.problem import to_bounds
from gpipebal.schedule import make_schedule

#: Largest distance of two gradients, relative to their size, that rounding explains.
TOLERANCE = 1e-3


class Length(NamedTuple):
    """How long ways take turns.

    Attributes:
        rounds: Rounds that count, at least; one more comes first, in which the gradients are
            compared with the plain model's.
        least_seconds: So long there are more of them, that short steps are known as well as long
            ones.
    """

    rounds: int
    least_seconds: float = 0.0


@dataclass
class _Turn:
    """What has its turn in every round: a way of running a step, or the cells of a schedule."""

    name: str
    checkpoint: str | None
    run: Callable[[], float] = lambda: math.nan
    gradients: Callable[[], list[Tensor | None]] | None = None
    clear: Callable[[], None] = lambda: None
    seconds: list[float] = field(default_factory=list)
    status: str = "ok"


class _Cells:
    """The cells of one schedule.

    `rounds` holds what they took one after the other, `beside` what they took with each partition
    in a bare thread of its own.
    """

    def __init__(
        self, workload: Workload, balance: Sequence[int], chunks: int, checkpoint: str, name: str
    ) -> None:
        self.checkpoint = checkpoint
        self.schedule = make_schedule(name, len(balance), chunks, checkpoint)
        self.model = workload.make_model()
        self.rounds: list[CellTimes] = []
        self.beside: list[CellTimes] = []
        self._batch = workload.make_batch()
        self._partitions = [self.model[a:b] for a, b in pairwise(to_bounds(balance))]

    def run(self) -> float:
        self.clear()
        self.rounds.append(run_serially(self._partitions, self.schedule, self._batch))
        return math.nan

    def run_beside(self) -> float:
        self.clear()
        self.beside.append(run_side_by_side(self._partitions, self.schedule, self._batch))
        return math.nan

    def clear(self) -> None:
        self.model.zero_grad(set_to_none=True)

    def gradients(self) -> list[Tensor | None]:
        return [parameter.grad for parameter in self.model.parameters()]

    def pause(self) -> float:
        return statistics.median(cells.pause for cells in self.rounds)

    def ideals(self, *, barrier: bool, beside: bool = False) -> list[float]:
        """Return the ideal makespan by the cells of each round, alone or side by side."""
        found = []
        for cells in self.beside if beside else self.rounds:
            # No partition works during the loss of the whole mini-batch.
            pause = self.pause() if beside else cells.pause
            durations = cells.durations(loss=not barrier)
            found.append(ideal(self.schedule, durations, pause if barrier else None))
        return found

    def record(self) -> dict[str, Any]:
        """Keep the medians over the rounds of the mean cells, for who wants to place them anew."""
        kinds: dict[str, list[float]] = {}
        for kind in ("forward", "recompute", "backward"):
            every = [getattr(cells.durations(loss=False), kind) for cells in self.rounds]
            kinds[kind] = [_round(statistics.median(row)) for row in zip(*every, strict=True)]
        return {
            "chunks": self.schedule.chunks,
            "checkpoint": self.checkpoint,
            "cells": self.schedule.name,
            **kinds,
            "pause": _round(self.pause()),
        }


#: Which cells, and whether with a barrier, give a way's ideal makespan.
_IDEAL_OF = {
    "gpipebal": ("gpipe", True),
    "torchgpipe": ("gpipe", True),
    "fairscale": ("gpipe", True),
    "gpipebal_gpipe": ("gpipe", False),
    "distributed_gpipe": ("gpipe", False),
    "gpipebal_1f1b": ("1f1b", False),
    "distributed_1f1b": ("1f1b", False),
}


class _Group:
    """What takes turns: the ways of running a workload with one number of micro-batches."""

    def __init__(
        self, stack: ExitStack, workload: Workload, balance: Sequence[int], chunks: int
    ) -> None:
        self.turns: list[_Turn] = []
        self.cells: dict[tuple[str, str], _Cells] = {}
        self._stack, self._workload, self._balance, self._chunks = stack, workload, balance, chunks

    def add_way(self, name: str, checkpoint: str | None) -> None:
        """Add a way that runs in this process."""
        mode = checkpoint or "never"
        try:
            way = make_way(name, self._workload, self._balance, self._chunks, mode)
        except NotAvailableError as error:
            self.turns.append(_Turn(name, checkpoint, status=str(error)))
            return
        self._stack.callback(way.close)
        self.turns.append(_Turn(name, checkpoint, way.run, way.gradients, way.clear))

    def add_distributed(self, processes: Processes | None, names: Collection[str]) -> None:
        """Add the ways that run in other processes: `names` of them."""
        status = dict.fromkeys(SCHEDULES, "ok" if processes is not None else "left out")
        if processes is not None:
            if self._chunks < N_PARTITIONS:
                status["distributed_1f1b"] = "needs 2 micro-batches"
            try:
                processes.build(self._workload, self._balance, self._chunks)
            except RuntimeError as error:
                status = dict.fromkeys(SCHEDULES, _failed(error))
        for name in filter(names.__contains__, SCHEDULES):
            turn = _Turn(name, "never", status=status[name])
            if processes is not None:
                turn.run, turn.gradients = partial(processes.run, name), processes.gradients
            self.turns.append(turn)

    def add_cells(self, checkpoint: str) -> None:
        """Add the cells of each schedule, alone and side by side."""
        for name in ("gpipe", "1f1b"):
            made = _Cells(self._workload, self._balance, self._chunks, checkpoint, name)
            self.cells[name, checkpoint] = made
            self.turns.append(
                _Turn(f"cells_{name}", checkpoint, made.run, made.gradients, made.clear)
            )
            # With one micro-batch no two partitions ever work side by side.
            if self._chunks > 1:
                self.turns.append(_Turn(f"beside_{name}", checkpoint, made.run_beside))

    def go_round(self, length: Length) -> None:
        """Let all have their turns, after a first one that does not count."""
        _warm_up(self.turns, compare=not self._workload.random)
        for made in self.cells.values():
            made.rounds.clear()
            made.beside.clear()
        _go_round(self.turns, length)

    def records(self) -> list[dict[str, Any]]:
        """Return what is stored: a record of each way, and then of the cells."""
        steps = [turn for turn in self.turns if not turn.name.startswith(("cells", "beside"))]
        found = [*map(self._record, steps), *(made.record() for made in self.cells.values())]
        return [{"workload": self._workload.name, **record} for record in found]

    def _record(self, turn: _Turn) -> dict[str, Any]:
        record: dict[str, Any] = {
            "chunks": self._chunks,
            "checkpoint": turn.checkpoint,
            "way": turn.name,
            "status": turn.status,
        }
        if turn.status != "ok":
            return record
        record["seconds"] = spread(turn.seconds)
        schedule, barrier = _IDEAL_OF.get(turn.name, ("", False))
        made = self.cells.get((schedule, turn.checkpoint or ""))
        if made is not None:
            record["ideal"] = spread(made.ideals(barrier=barrier))
            if made.beside:
                record["side_by_side"] = spread(made.ideals(barrier=barrier, beside=True))
        return record


def measure_group(
    workload: Workload,
    balance: Sequence[int],
    chunks: int,
    length: Length,
    processes: Processes | None,
    only: Collection[str] | None = None,
) -> list[dict[str, Any]]:
    """Run a workload in all ways, with one number of micro-batches.

    With one micro-batch both checkpoint modes are the same work, and it is done once.

    Args:
        workload: What to train.
        balance: Layers of each partition, for all ways.
        chunks: Micro-batches.
        length: How long.
        processes: Those of torch.distributed; None: leave it out.
        only: Names of some ways, which then run by themselves: without checkpoints, and without the
            cells that tell the ideal makespan; gradients are compared with those of the first.
            None: all ways.

    Returns:
        One record per way and checkpoint mode.

    Raises:
        AssertionError: gpipebal, or the cells, gave other gradients than the plain model.
    """
    checkpoints = CHECKPOINTS if chunks > 1 and only is None else CHECKPOINTS[:1]
    chosen = [name for name in WAYS if only is None or name in only]
    with ExitStack() as stack:
        group = _Group(stack, workload, balance, chunks)
        for name in chosen:
            if name.startswith("plain"):
                group.add_way(name, None)
        for checkpoint in checkpoints:
            for name in chosen:
                if name not in SCHEDULES and not name.startswith("plain"):
                    group.add_way(name, checkpoint)
            if checkpoint == "never":  # torch.distributed has no checkpointing
                group.add_distributed(processes, chosen)
            if only is None:
                group.add_cells(checkpoint)
        group.go_round(length)
    return group.records()


def _failed(error: Exception) -> str:
    return f"failed: {str(error) or type(error).__name__}".splitlines()[0]


def _warm_up(turns: Sequence[_Turn], *, compare: bool) -> None:
    """Give everybody a first turn, and compare gradients with the plain model's, which is first."""
    wanted: list[Tensor] | None = None
    for turn in turns:
        if turn.status != "ok":
            continue
        ours = turn.name.startswith(("plain", "gpipebal", "cells", "beside"))
        try:
            turn.run()
            found = [] if turn.gradients is None else turn.gradients()
            missing = [index for index, gradient in enumerate(found) if gradient is None]
            assert not missing, f"no gradient for parameters {missing}"
            gradients = [gradient for gradient in found if gradient is not None]
            if turn.gradients is None:
                continue  # cleared in its next run
            if wanted is None:
                wanted = [gradient.clone() for gradient in gradients]
            apart = _distance(gradients, wanted) if compare else 0.0
            assert apart < TOLERANCE, f"gradients are {apart:.1e} off the plain model's"
        except Exception as error:
            if ours:
                error.add_note(f"in {turn.name}, checkpoint={turn.checkpoint}")
                raise
            turn.status = _failed(error)
        turn.clear()


def _distance(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> float:
    """Return the norm of the difference, relative to that of what is wanted."""
    apart = sum(float((a - b).square().sum()) for a, b in zip(found, wanted, strict=True))
    size = sum(float(b.square().sum()) for b in wanted)
    return math.sqrt(apart / size) if size else math.sqrt(apart)


def _go_round(turns: Sequence[_Turn], length: Length) -> None:
    running = [turn for turn in turns if turn.status == "ok"]
    gc.collect()
    # What exists by now stays: a collection looks only at what the steps made.
    gc.freeze()
    gc.disable()
    started = time.monotonic()
    try:
        for k in count():
            if k >= length.rounds and time.monotonic() - started >= length.least_seconds:
                break
            for turn in _order(running, k):
                turn.seconds.append(turn.run())
                turn.clear()
                gc.collect()
    finally:
        gc.enable()
        gc.unfreeze()


def _order(turns: Sequence[_Turn], k: int) -> list[_Turn]:
    """Shuffle for an even round `k`, and take the shuffle of the round before from its end."""
    order = list(turns)
    random.Random(k // 2).shuffle(order)
    return order[::-1] if k % 2 else order


def measure_one_partition(workload: Workload, length: Length) -> dict[str, Any]:
    """Run one partition with one micro-batch, ``never``, in turns with the plain model."""
    with ExitStack() as stack:
        group = _Group(stack, workload, [len(workload.make_model())], 1)
        for name in ("plain_1", "gpipebal"):
            group.add_way(name, "never")
        group.go_round(length)
    times = {turn.name: spread(turn.seconds) for turn in group.turns}
    return {"workload": workload.name, **times}


def spread(seconds: Sequence[float]) -> dict[str, Any]:
    """Describe times by their median and quartiles, and keep them all."""
    quartiles = (
        statistics.quantiles(seconds, n=4, method="inclusive")
        if len(seconds) > 1
        else [seconds[0]] * 3
    )
    low, middle, high = map(_round, quartiles)
    return {"median": middle, "q1": low, "q3": high, "all": [_round(value) for value in seconds]}


def _round(seconds: float) -> float:
    """Keep the microseconds' tenths."""
    return round(seconds, 7)
