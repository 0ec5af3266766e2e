"""The measured half of a run: the pipeline and the plain model, taking turns step by step.

The other load of the machine, its clock and its temperature change over a run; as the steps take
turns, they change for all, so that the ratios are fair even where the times are not steady.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from gpipebal.pipeline import GPipe, measure_memory, trace
from gpipebal.pipeline.layers.devices import visible_cores
from gpipebal.profiler.chain.failures import is_out_of_memory
from gpipebal.profiler.setting import threads_set
from gpipebal.profiler.step.optimizer import Optimizers
from gpipebal.profiler.times.progress import progress_bar
from gpipebal.report import PlainTimes
from gpipebal.run.training import PipelineTrainer, PlainTrainer, timed
from gpipebal.run.workload import Workload, default_optimizer
from gpipebal.timeline import Timeline
from gpipebal.units import count

__all__ = ["Measured", "train_in_turns"]


@dataclass
class Measured:
    """What the training showed.

    Attributes:
        optimizer: The optimizer, with its learning rate.
        step_times: Seconds of each step of the pipeline, without the warm-up.
        timeline: Timeline of the step whose time is the median, or the next below it.
        peak_bytes: Peak memory of each partition.
        total_peak_bytes: The most that all partitions held at one time.
        plain: The plain model, once for each way in which it was run.
        notes: What did not go as planned.
    """

    optimizer: str
    step_times: list[float]
    timeline: Timeline
    peak_bytes: tuple[int, ...]
    total_peak_bytes: int
    plain: list[PlainTimes]
    notes: list[str] = field(default_factory=list)


def train_in_turns(
    pipe: GPipe,
    plain_model: nn.Module,
    workload: Workload,
    *,
    steps: int,
    progress: bool | None = None,
    echo: Callable[[str], None] = print,
) -> Measured:
    """Train both, time every step but the first of each, then measure peak memory in one more.

    Args:
        pipe: The pipeline.
        plain_model: A copy of its model, to train on the first device of the pipeline.
        workload: What to train on.
        steps: Steps to time.
        progress: Whether to show a progress bar; None: on a terminal only.
        echo: Called with each line of text that a reader should see on the way.
    """
    trainer = PipelineTrainer(pipe, workload)
    optimizer = _describe(trainer.optimizer)
    if workload.make_optimizer is default_optimizer:
        optimizer += " (default)"
    echo(
        f"Training, loss {workload.loss_name}, optimizer {optimizer}: 1 step to warm up and "
        f"{steps} to time, alternately with the plain model"
    )
    place = pipe.devices[0]
    ways = _plain_ways(place)
    times: dict[str, list[float]] = {where: [] for where, _ in ways}
    step_times: list[float] = []
    timelines: list[Timeline] = []
    notes: list[str] = []
    plain: PlainTrainer | None = None
    n_steps = (steps + 1) * (1 + len(ways))
    with trace(pipe) as recorder, progress_bar("training", n_steps, progress) as advance:
        while len(step_times) <= steps:
            is_plains_turn = False
            try:
                step_times.append(timed(trainer.step, pipe.devices))
                timelines.append(recorder.timeline)
                advance()
                is_plains_turn = True
                for where, threads in ways:
                    plain = plain or PlainTrainer(plain_model, workload, pipe.chunks, place)
                    with threads_set(threads):
                        times[where].append(timed(plain.step, [place]))
                    advance()
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error) or not (plain or is_plains_turn):
                    raise
                beside = "" if is_plains_turn else " beside the pipeline"
                notes.append(f"The plain model does not fit on {place}{beside}: no comparison.")
                plain, ways = None, []
                _make_room(plain_model)
    del plain
    echo("Measuring peak memory in one more step")
    with measure_memory(pipe, trainer.optimizer) as meter:
        trainer.step()
    return Measured(
        optimizer=optimizer,
        step_times=step_times[1:],
        timeline=_typical(timelines[1:], step_times[1:]),
        peak_bytes=meter.peak_bytes,
        total_peak_bytes=meter.total_peak_bytes,
        plain=[PlainTimes(where, threads, tuple(times[where][1:])) for where, threads in ways],
        notes=notes,
    )


def _make_room(plain_model: nn.Module) -> None:
    """Take the model off the device: the pipeline's next steps need the memory."""
    plain_model.zero_grad()
    plain_model.to("cpu")


def _plain_ways(place: torch.device) -> list[tuple[str, int | None]]:
    """Return how the plain model is run: a name, and its threads or None off the CPU."""
    if place.type != "cpu":
        return [(str(place), None)]
    cores = visible_cores()
    ways: list[tuple[str, int | None]] = [("1 thread", 1)]
    return [*ways, (count(cores, "thread"), cores)] if cores > 1 else ways


def _describe(optimizer: torch.optim.Optimizer | Optimizers) -> str:
    """Name an optimizer with its learning rate, such as ``SGD(lr=0.01)``."""
    if isinstance(optimizer, Optimizers):
        return " and ".join(map(_describe, optimizer))
    rate = optimizer.defaults.get("lr")
    return type(optimizer).__name__ + (f"(lr={float(rate):g})" if rate is not None else "")


def _typical(timelines: Sequence[Timeline], step_times: Sequence[float]) -> Timeline:
    """Return the timeline of the step whose time is the median, or the next below it."""
    order = sorted(range(len(step_times)), key=step_times.__getitem__)
    return timelines[order[(len(order) - 1) // 2]]
