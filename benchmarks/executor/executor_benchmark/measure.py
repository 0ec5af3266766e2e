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
from itertools import count
from typing import Any

from torch import Tensor, nn

from executor_benchmark.cells import (
    CellTimes,
    ideal_with_barrier,
    ideal_without_barrier,
    run_serially,
    run_side_by_side,
)
from executor_benchmark.processes import SCHEDULES, Processes
from executor_benchmark.ways import CHECKPOINTS, WAYS, NotAvailableError, make_way
from executor_benchmark.workloads import N_PARTITIONS, Workload, loss_fn
from gpipebal.schedule import make_schedule

__all__ = ["measure_group", "measure_one_partition", "spread"]

#: Largest distance of two gradients, relative to their size, that rounding explains.
TOLERANCE = 1e-3


@dataclass
class _Turn:
    """What has its turn in every round: a way of running a step, or the cells of a schedule."""

    name: str
    checkpoint: str | None
    run: Callable[[], float]
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
        ends = [sum(balance[: j + 1]) for j in range(len(balance))]
        self._partitions: list[nn.Module] = [
            self.model[end - size : end] for size, end in zip(balance, ends, strict=True)
        ]

    def run(self) -> float:
        self.clear()
        inputs, target = self._batch
        self.rounds.append(run_serially(self._partitions, self.schedule, inputs, target, loss_fn))
        return math.nan

    def run_beside(self) -> float:
        self.clear()
        inputs, target = self._batch
        self.beside.append(
            run_side_by_side(self._partitions, self.schedule, inputs, target, loss_fn)
        )
        return math.nan

    def clear(self) -> None:
        self.model.zero_grad(set_to_none=True)

    def gradients(self) -> list[Tensor | None]:
        return [parameter.grad for parameter in self.model.parameters()]

    def ideals(self, *, barrier: bool, beside: bool = False) -> list[float]:
        """Return the ideal makespan by the cells of each round, alone or side by side."""
        rounds = self.beside if beside else self.rounds
        if not barrier:
            return [
                ideal_without_barrier(self.schedule, cells.durations(loss=True)) for cells in rounds
            ]
        # No partition works during the loss of the whole mini-batch.
        pause = statistics.median(cells.pause for cells in self.rounds)
        chunks = self.schedule.chunks
        return [
            ideal_with_barrier(
                cells.durations(loss=False),
                chunks,
                self.checkpoint,
                pause if beside else cells.pause,
            )
            for cells in rounds
        ]


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


def measure_group(
    workload: Workload,
    balance: Sequence[int],
    chunks: int,
    *,
    rounds: int,
    least_seconds: float = 0.0,
    processes: Processes | None,
    quick: bool = False,
    only: Collection[str] | None = None,
) -> list[dict[str, Any]]:
    """Run a workload in all ways, with one number of micro-batches.

    With one micro-batch both checkpoint modes are the same work, and it is done once.

    Args:
        workload: What to train.
        balance: Layers of each partition, for all ways.
        chunks: Micro-batches.
        rounds: Rounds that count, at least; one more comes first, in which the gradients are
            compared with the plain model's.
        least_seconds: So long there are more of them, that short steps are known as well as long
            ones.
        processes: Those of torch.distributed; None: leave it out.
        quick: Whether `workload` is a tiny one.
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
        absent = {}
        if processes is None:
            absent = dict.fromkeys(SCHEDULES, "left out")
        else:
            if chunks < N_PARTITIONS:
                absent["distributed_1f1b"] = "needs 2 micro-batches"
            try:
                processes.build(workload, balance, chunks, quick=quick)
            except RuntimeError as error:
                absent = dict.fromkeys(SCHEDULES, _failed(error))
        turns: list[_Turn] = []
        cells: dict[tuple[str, str], _Cells] = {}
        for name in chosen:
            if name.startswith("plain"):
                turns.append(_make_turn(stack, name, None, workload, balance, chunks))
        for checkpoint in checkpoints:
            for name in chosen:
                if name in SCHEDULES and checkpoint == "never":  # it has no checkpointing
                    turns.append(_distributed_turn(name, processes, absent.get(name, "ok")))
                elif name not in SCHEDULES and not name.startswith("plain"):
                    turns.append(_make_turn(stack, name, checkpoint, workload, balance, chunks))
            for name in ("gpipe", "1f1b") if only is None else ():
                made = _Cells(workload, balance, chunks, checkpoint, name)
                cells[name, checkpoint] = made
                turns.append(
                    _Turn(f"cells_{name}", checkpoint, made.run, made.gradients, made.clear)
                )
                # With one micro-batch no two partitions ever work side by side.
                if chunks > 1:
                    beside = _Turn(f"beside_{name}", checkpoint, made.run_beside)
                    turns.append(beside)
        _warm_up(turns, compare=not workload.random)
        for made in cells.values():
            made.rounds.clear()
            made.beside.clear()
        _go_round(turns, rounds, least_seconds)
    steps = [turn for turn in turns if not turn.name.startswith(("cells", "beside"))]
    return [_record(turn, workload, chunks, cells) for turn in steps] + [
        _cells_record(made, workload, chunks) for made in cells.values()
    ]


def _make_turn(
    stack: ExitStack,
    name: str,
    checkpoint: str | None,
    workload: Workload,
    balance: Sequence[int],
    chunks: int,
) -> _Turn:
    try:
        way = make_way(name, workload, balance, chunks, checkpoint or "never")
    except NotAvailableError as error:
        return _Turn(name, checkpoint, lambda: math.nan, status=str(error))
    stack.callback(way.close)
    return _Turn(name, checkpoint, way.run, way.gradients, way.clear)


def _distributed_turn(name: str, processes: Processes | None, status: str) -> _Turn:
    if processes is None:
        return _Turn(name, "never", lambda: math.nan, status=status)
    return _Turn(name, "never", lambda: processes.run(name), processes.gradients, status=status)


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


def _go_round(turns: Sequence[_Turn], rounds: int, least_seconds: float) -> None:
    running = [turn for turn in turns if turn.status == "ok"]
    gc.collect()
    # What exists by now stays: a collection looks only at what the steps made.
    gc.freeze()
    gc.disable()
    started = time.monotonic()
    try:
        for k in count():
            if k >= rounds and time.monotonic() - started >= least_seconds:
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


def _record(
    turn: _Turn, workload: Workload, chunks: int, cells: dict[tuple[str, str], _Cells]
) -> dict[str, Any]:
    record: dict[str, Any] = {
        "workload": workload.name,
        "chunks": chunks,
        "checkpoint": turn.checkpoint,
        "way": turn.name,
        "status": turn.status,
    }
    if turn.status != "ok":
        return record
    record["seconds"] = spread(turn.seconds)
    schedule, barrier = _IDEAL_OF.get(turn.name, ("", False))
    made = cells.get((schedule, turn.checkpoint or ""))
    if made is not None:
        record["ideal"] = spread(made.ideals(barrier=barrier))
        if made.beside:
            record["side_by_side"] = spread(made.ideals(barrier=barrier, beside=True))
    return record


def _cells_record(made: _Cells, workload: Workload, chunks: int) -> dict[str, Any]:
    """Keep the medians over the rounds of the mean cells, for who wants to place them anew."""

    def over_rounds(kind: str) -> list[float]:
        every = [getattr(cells.durations(loss=False), kind) for cells in made.rounds]
        return [_round(statistics.median(column)) for column in zip(*every, strict=True)]

    return {
        "workload": workload.name,
        "chunks": chunks,
        "checkpoint": made.checkpoint,
        "cells": made.schedule.name,
        **{kind: over_rounds(kind) for kind in ("forward", "recompute", "backward")},
        "pause": _round(statistics.median(cells.pause for cells in made.rounds)),
    }


def measure_one_partition(
    workload: Workload, *, rounds: int, least_seconds: float = 0.0
) -> dict[str, Any]:
    """Run one partition with one micro-batch, ``never``, in turns with the plain model."""
    n_layers = len(workload.make_model())
    with ExitStack() as stack:
        turns = [
            _make_turn(stack, name, "never", workload, [n_layers], 1)
            for name in ("plain_1", "gpipebal")
        ]
        _warm_up(turns, compare=not workload.random)
        _go_round(turns, rounds, least_seconds)
    return {
        "workload": workload.name,
        **{turn.name: spread(turn.seconds) for turn in turns},
    }


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
