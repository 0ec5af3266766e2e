"""The best few plans, each run for a few steps: the fastest one is taken.

Predictions for plans that differ by a cut or two are closer to each other than to the measured
times: a run decides between them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import torch
from torch import nn

from gpipebal.copies import deep_copy
from gpipebal.pipeline import GPipe
from gpipebal.plan import Plan
from gpipebal.profiler.chain.failures import is_out_of_memory
from gpipebal.profiler.times.progress import progress_bar
from gpipebal.run.training import PipelineTrainer, timed
from gpipebal.run.workload import Workload
from gpipebal.text import aligned
from gpipebal.units import format_seconds

__all__ = ["Attempt", "fastest", "try_plans"]

#: How many turns every plan has, and the steps of a turn, after one to warm up.
TURNS = 2
STEPS = 2


@dataclass(frozen=True)
class Attempt:
    """A plan, and how long its steps took.

    Attributes:
        plan: The plan.
        step_times: Seconds of each step; none if it ran out of memory.
    """

    plan: Plan
    step_times: tuple[float, ...]

    @property
    def step_time(self) -> float:
        """Median seconds of a step; infinite if it ran out of memory."""
        return median(self.step_times) if self.step_times else math.inf


def try_plans(
    plans: Sequence[Plan],
    workload: Workload,
    *,
    devices: Sequence[torch.device],
    threads: int | None,
    progress: bool | None = None,
    echo: Callable[[str], None] = print,
) -> list[Attempt]:
    """Train a copy of the model under every plan for a few steps, the plans taking turns.

    Args:
        plans: Plans of the workload's model.
        workload: What to train; it is left as it is.
        devices: Device of each partition.
        threads: Intra-operation threads of a CPU partition.
        progress: Whether to show a progress bar; None: on a terminal only.
        echo: Called with the table of results.

    Returns:
        One attempt per plan, in the order of the plans.

    Raises:
        torch.OutOfMemoryError: every plan ran out of memory.
    """
    times: list[list[float]] = [[] for _ in plans]
    failures: dict[int, str] = {}
    model = deep_copy(workload.model, {})
    with progress_bar("trying", TURNS * len(plans), progress) as advance:
        for turn in range(TURNS):
            # Forwards and then in reverse, so that a drift of the machine affects all alike.
            order = range(len(plans)) if turn % 2 == 0 else reversed(range(len(plans)))
            for k in order:
                advance()
                if k in failures:
                    continue
                try:
                    times[k] += _some_steps(model, plans[k], workload, devices, threads)
                except (RuntimeError, MemoryError) as error:
                    if not is_out_of_memory(error):
                        raise
                    times[k].clear()
                    # Only the text: the error's frames hold memory that the others need.
                    failures[k] = str(error)
    if len(failures) == len(plans):
        raise torch.OutOfMemoryError(failures[0])
    attempts = [Attempt(plan, tuple(found)) for plan, found in zip(plans, times, strict=True)]
    echo(_table(attempts))
    return attempts


def _table(attempts: Sequence[Attempt]) -> str:
    best = fastest(attempts)
    rows = [["balance", "predicted step", "measured step", ""]]
    for attempt in attempts:
        predicted = attempt.plan.step_time
        rows.append(
            [
                ",".join(map(str, attempt.plan.balance)),
                "unknown" if predicted is None else format_seconds(predicted),
                format_seconds(attempt.step_time) if attempt.step_times else "out of memory",
                "taken" if attempt is best else "",
            ]
        )
    return "\n".join(aligned(rows, left=(0, 3)))


def fastest(attempts: Sequence[Attempt]) -> Attempt:
    """Return the attempt with the shortest step; of equally fast ones the first."""
    return min(attempts, key=lambda attempt: attempt.step_time)


def _some_steps(
    model: nn.Sequential,
    plan: Plan,
    workload: Workload,
    devices: Sequence[torch.device],
    threads: int | None,
) -> list[float]:
    pipe = GPipe.from_plan(
        model, plan, devices=list(devices), threads_per_partition=threads, **workload.dims
    )
    try:
        trainer = PipelineTrainer(pipe, workload)
        trainer.step()
        return [timed(trainer.step, pipe.devices) for _ in range(STEPS)]
    finally:
        pipe.close()
