"""Count the peak memory of every partition, and compare it with what the formula predicts.

    python benchmarks/peak_memory/make.py            measure, write results.json and the README
    python benchmarks/peak_memory/make.py --readme   write the README's tables from results.json

Every row is one training step that counts all live tensors, after one that does not. When its cells
started and ended is recorded, and the formula has the same clock.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import gpipebal as gb
from gpipebal.files import read_record, write_record
from gpipebal.memory import partition_memory
from gpipebal.pipeline import GPipe, measure_memory, trace
from gpipebal.plan import PeakMemory
from gpipebal.planner import evaluate
from gpipebal.problem import to_bounds
from gpipebal.profile import Profile
from gpipebal.schedule import Checkpoint
from gpipebal.timeline import EventTable, Timeline

# What all benchmarks have in common is next to their folders.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmark_tools.machine import Progress, provenance
from benchmark_tools.script import parser_of, publish
from peak_memory_models import MODELS, Model
from peak_memory_tables import FORMAT, VERSION, blocks

HERE = Path(__file__).parent
RESULTS = HERE / "results.json"

#: How a step is done, and the checkpoint modes to do it with.
WAYS = {
    "loss(pipe(x))": ("always", "except_last", "never", "mixed"),
    "step gpipe": ("always", "never"),
    "step 1f1b": ("always", "never", "mixed"),
}
#: One mode per partition.
MIXED = ("always", "never", "except_last", "never")
CHUNKS = (4, 8)


def main() -> None:
    """Measure, store, print, and write the README."""
    arguments = parser_of(__doc__, RESULTS).parse_args()
    if not arguments.readme:
        write_record(arguments.out, measure())
    publish(arguments.out, RESULTS, blocks(read_record(arguments.out, FORMAT, VERSION)))


def measure() -> dict[str, Any]:
    """Measure all models in all ways, and return the record to store."""
    progress = Progress()
    rows: list[dict[str, Any]] = []
    for name, model in MODELS.items():
        for chunks in CHUNKS:
            rows += measure_model(name, model, chunks)
            progress.told(f"{name}, {chunks} micro-batches")
    return {
        "format": FORMAT,
        "version": VERSION,
        "provenance": {**provenance(), "minutes": progress.minutes},
        "models": {name: model.about for name, model in MODELS.items()},
        "rows": rows,
    }


def measure_model(name: str, model: Model, chunks: int) -> Iterator[dict[str, Any]]:
    """Predict and count one model in all ways, for every number of partitions."""
    torch.manual_seed(0)
    layers = nn.Sequential(*model.layers())
    sample, target = model.data()
    profile = gb.profile_model(
        layers,
        sample,
        chunks=chunks,
        loss_fn=model.loss_fn,
        target=target,
        optimizer=model.optimizer,
        timeout=2.0,
        progress=False,
    )
    for n_partitions, balance in model.balances.items():
        for way, modes in WAYS.items():
            for mode in modes:
                checkpoint = MIXED[:n_partitions] if mode == "mixed" else mode
                pipe = GPipe(layers, balance, chunks=chunks, checkpoint=checkpoint)
                counted, at_once, clock = count(pipe, model, sample, target, way)
                pipe.close()
                layers.zero_grad()
                predicted = predict(profile, balance, way, checkpoint, clock)
                yield {
                    "model": name,
                    "way": way,
                    "mode": mode,
                    "chunks": chunks,
                    "balance": balance,
                    **predicted,
                    "counted": counted,
                    "counted_at_once": at_once,
                }


def predict(
    profile: Profile, balance: list[int], way: str, checkpoint: Checkpoint, clock: Timeline
) -> dict[str, Any]:
    """Return the parts of each partition's predicted peak, and what another clock would make of it.

    Returns:
        ``predicted``, the parts with what waits in the timing of the counted step; ``taken``, the
        totals if what neighbours take while an action runs were gone at its start; ``planned``,
        those of a plan, in which everything waits as long as order and `GPipe` let it.
    """
    schedule, inside = "1f1b" if way == "step 1f1b" else "gpipe", way != "loss(pipe(x))"
    plan = evaluate(profile, balance, checkpoint=checkpoint, schedule=schedule, loss_inside=inside)

    def peaks(**clocks: Any) -> tuple[PeakMemory, ...]:
        return partition_memory(
            profile,
            to_bounds(balance),
            chunks=profile.chunks,
            checkpoint=checkpoint,
            schedule=schedule,
            loss_inside=inside,
            shared_memory=True,
            **clocks,
        )

    return {
        "predicted": [{**asdict(peak), "total": peak.total} for peak in peaks(timeline=clock)],
        "taken": [peaks(timeline=_taken_earlier(clock, j))[j].total for j in range(len(balance))],
        "planned": [part.memory.total for part in plan.partitions],
    }


def _taken_earlier(clock: Timeline, j: int) -> Timeline:
    """Let others start and end just before the actions of partition j that run at that time.

    What they do while nothing runs there stays where it is.
    """
    table = clock.table
    own = table.partitions == j
    in_order = np.argsort(table.starts[own])
    begun, ended = table.starts[own][in_order], table.ends[own][in_order]
    shortest = (ended - begun).min()

    def earlier(times: np.ndarray) -> np.ndarray:
        place = np.searchsorted(begun, times, side="right") - 1
        is_beside = (place >= 0) & (times < ended[place]) & ~own
        return np.where(is_beside, begun[place] - shortest / 2, times)

    starts, ends = earlier(table.starts), earlier(table.ends)
    moved = EventTable(table.partitions, table.kinds, table.micro_batches, starts, ends)
    return Timeline(moved, clock.n_devices, "measured")


def count(
    pipe: GPipe, model: Model, sample: torch.Tensor, target: torch.Tensor, way: str
) -> tuple[list[int], int, Timeline]:
    """Return the most that each partition held, that all held at one time, and the step's clock."""
    optimizer = model.optimizer(list(pipe.parameters()))

    def step() -> None:
        optimizer.zero_grad()
        if way == "loss(pipe(x))":
            output = pipe(sample)
            model.loss_fn(output, target).backward()
        else:
            schedule = way.removeprefix("step ")
            pipe.step(sample, target=target, loss_fn=model.loss_fn, schedule=schedule)
        optimizer.step()

    step()
    optimizer.zero_grad()
    with trace(pipe) as recorder, measure_memory(pipe, optimizer) as meter:
        # The target lies in the last partition's memory, as the sample does in the first's.
        meter.ledger.hold([target], len(pipe.balance) - 1)
        step()
    return list(meter.peak_bytes), meter.total_peak_bytes, recorder.timeline


if __name__ == "__main__":
    main()
