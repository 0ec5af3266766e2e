"""The job of ``gpipebal run``: measure, plan, write, train, compare, write."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn
from tqdm import tqdm

from gpipebal.errors import BalanceError, UsageError
from gpipebal.pipeline import GPipe, measure_memory, trace
from gpipebal.pipeline.devices import share_of_cores, visible_cores
from gpipebal.plan import Plan
from gpipebal.planner import solve
from gpipebal.plots import plot_run, save_figure
from gpipebal.profiler import profile_model
from gpipebal.report import PlainTimes, RunReport
from gpipebal.run.places import choose_places, describe_places, shares_places
from gpipebal.run.training import PipelineTrainer, PlainTrainer, cpu_threads, timed
from gpipebal.run.workload import Workload, default_optimizer, load_workload
from gpipebal.schedule import CheckpointMode, check_checkpoint, check_count
from gpipebal.simulator import simulate
from gpipebal.timeline import Timeline

__all__ = ["FILES", "run"]

#: Files of a run, in the order in which they are written.
FILES = ("profile.json", "plan.json", "timeline.json", "report.json", "plan.png")


def run(
    model: str,
    *,
    partitions: int | None = None,
    chunks: int = 8,
    rows: int | None = None,
    image_size: int | None = None,
    checkpoint: CheckpointMode = "except_last",
    steps: int = 4,
    threads_per_partition: int | None = None,
    seed: int = 0,
    device: str = "auto",
    output: str | os.PathLike[str] = "gpipebal-run",
    progress: bool | None = None,
    echo: Callable[[str], None] = print,
) -> RunReport:
    """Profile a model, solve its balance, train a few steps, and compare with the prediction.

    The files ``profile.json``, ``plan.json``, ``timeline.json``, ``report.json`` and
    ``plan.png`` go to `output`, each one as soon as it is known.

    Args:
        model: A built-in model, or ``package.module:function``; see `load_workload`.
        partitions: Number of partitions; None: as many as CUDA devices, else 2.
        chunks: Micro-batches per mini-batch.
        rows: Rows of the mini-batch of a built-in model; None: 32.
        image_size: Pixels of the side of its images; None: the model's own default.
        checkpoint: Which micro-batches are recomputed.
        steps: Training steps that are timed, after one that is not.
        threads_per_partition: Intra-operation threads of each CPU partition, also while its
            layers are profiled; None: its share of the cores.
        seed: Seed of parameters and data.
        device: ``'auto'``, ``'cpu'``, ``'cuda'`` or a list such as ``'cuda:0,cuda:1'``.
        output: Folder of the files; made if it does not exist.
        progress: Whether to show progress bars; None: on a terminal only.
        echo: Takes each line of text that a reader should see on the way.

    Returns:
        What was predicted and measured.

    Raises:
        GpipebalError: something asked for does not exist or cannot be.
        KeyboardInterrupt: with a note of the files that were written before it.
    """
    for name, count in (("chunks", chunks), ("steps", steps)):
        check_count(name, count)
    optional = {"partitions": partitions, "rows": rows, "image_size": image_size}
    for name, value in {**optional, "threads_per_partition": threads_per_partition}.items():
        if value is not None:
            check_count(name, value)
    check_checkpoint(checkpoint)
    # Built-in models take the seed after this one for their targets.
    if not 0 <= seed < 2**63 - 1:
        raise UsageError(
            f"seed is out of range: seed={seed} (expected 0 <= seed < 2**63 - 1).\nFix: seed=0."
        )
    places = choose_places(device, partitions)
    workload = load_workload(model, rows=rows, image_size=image_size, seed=seed, chunks=chunks)
    if len(places) > len(workload.model):
        raise BalanceError(
            f"model has fewer layers than partitions: partitions={len(places)} "
            f"(expected 1..{len(workload.model)}, the number of its layers).\n"
            f"Fix: partitions={len(workload.model)}, or fewer."
        )
    on_cpu = places[0].type == "cpu"
    threads = (threads_per_partition or share_of_cores(len(places))) if on_cpu else None
    folder = _Folder(Path(output))
    job = _Job(workload, places, threads, chunks, checkpoint, steps, seed, folder, progress, echo)
    try:
        return job.do()
    except KeyboardInterrupt as interrupt:
        interrupt.add_note(folder.summary())
        raise


@dataclass
class _Job:
    """Settings of a run that are known to be good."""

    workload: Workload
    places: list[torch.device]
    threads: int | None
    chunks: int
    checkpoint: CheckpointMode
    steps: int
    seed: int
    folder: _Folder
    progress: bool | None
    echo: Callable[[str], None]

    def do(self) -> RunReport:
        workload, n_partitions = self.workload, len(self.places)
        n_parameters = sum(parameter.numel() for parameter in workload.model.parameters())
        self.echo(f"{workload.name}: {len(workload.model)} layers, {n_parameters:,} parameters")
        self.echo(describe_places(self.places, self.threads))
        # Both trainings start from the same values; the pipeline trains the model itself.
        plain_model = copy.deepcopy(workload.model)
        self.echo(f"Profiling {len(workload.model)} layers")
        profile = profile_model(
            workload.model,
            workload.sample,
            device=self.places[0],
            chunks=self.chunks,
            threads=self.threads,
            loss_fn=workload.loss_fn,
            target=workload.target,
            optimizer=workload.make_optimizer,
            progress=self.progress,
        )
        plan = solve(
            profile,
            n_partitions,
            checkpoint=self.checkpoint,
            shared_memory=len(set(self.places)) == 1,
        )
        self.echo(f"\n{plan}\n")
        self.folder.write("profile.json", profile.save)
        self.folder.write("plan.json", plan.save)

        measured = self._train(plan, plain_model)
        predicted = simulate(plan, pause=plan.pause_time)
        timeline = measured.timeline
        self.folder.write("timeline.json", lambda path: timeline.save(path, beside=[predicted]))
        report = RunReport(
            model=workload.name,
            n_parameters=n_parameters,
            devices=tuple(map(str, self.places)),
            cores=visible_cores(),
            threads_per_partition=self.threads,
            balance=plan.balance,
            chunks=plan.chunks,
            mini_batch_rows=profile.mini_batch_rows,
            image_size=workload.image_size,
            checkpoint=self.checkpoint,
            seed=self.seed,
            loss=workload.loss_name,
            optimizer=measured.optimizer,
            predicted_step_time=plan.step_time,
            step_times=tuple(measured.step_times),
            predicted_peak_bytes=tuple(part.memory.total for part in plan.partitions),
            peak_bytes=measured.peak_bytes,
            total_peak_bytes=measured.total_peak_bytes,
            plain=tuple(measured.plain),
            notes=tuple(self._notes(plan) + measured.notes),
            output=str(self.folder.path),
            provenance=dict(plan.provenance),
        )
        self.folder.write("report.json", report.save)
        figure = plot_run(profile, plan, predicted, timeline)
        self.folder.write("plan.png", lambda path: save_figure(figure, path))
        return report

    def _train(self, plan: Plan, plain_model: nn.Module) -> _Measured:
        """Take steps of the pipeline and of the plain model in turns, so that both see the same.

        What else the machine does, its clock and its temperature change over a run; in turns,
        they change for all.
        """
        pipe = GPipe.from_plan(
            self.workload.model,
            plan,
            devices=self.places,
            threads_per_partition=self.threads,
        )
        try:
            trainer = PipelineTrainer(pipe, self.workload)
            optimizer = describe_optimizer(trainer.optimizer)
            if self.workload.make_optimizer is default_optimizer:
                optimizer += " (default)"
            self.echo(
                f"Training, loss {self.workload.loss_name}, optimizer {optimizer}: 1 step to warm "
                f"up and {self.steps} to time, in turns with the plain model"
            )
            measured = _Measured(optimizer)
            ways = self._plain_ways()
            times: dict[str, list[float]] = {where: [] for where, _ in ways}
            n_steps = (self.steps + 1) * (1 + len(ways))
            hidden = None if self.progress is None else not self.progress
            with (
                trace(pipe) as recorder,
                tqdm(total=n_steps, desc="training", leave=False, disable=hidden) as bar,
            ):
                plain: PlainTrainer | None = None
                for _ in range(self.steps + 1):
                    measured.step_times.append(timed(trainer.step, self.places))
                    bar.update()
                    try:
                        for where, threads in ways:
                            plain = plain or PlainTrainer(
                                plain_model, self.workload, plan.chunks, self.places[0]
                            )
                            with cpu_threads(threads):
                                times[where].append(timed(plain.step, self.places[:1]))
                            bar.update()
                    except torch.OutOfMemoryError:
                        plain, ways, times = None, [], {}
                        measured.notes.append(
                            f"The plain model does not fit on {self.places[0]}: no comparison."
                        )
            # The first step of each is the warm-up.
            measured.step_times = measured.step_times[1:]
            measured.timeline = _typical(recorder.timelines[1:], measured.step_times)
            measured.plain = [
                PlainTimes(where, threads, tuple(times[where][1:])) for where, threads in ways
            ]
            del plain
            self.echo("Measuring peak memory in one more step")
            with measure_memory(pipe, trainer.optimizer) as meter:
                trainer.step()
            measured.peak_bytes = meter.peak_bytes
            measured.total_peak_bytes = meter.total_peak_bytes
            return measured
        finally:
            pipe.close()

    def _plain_ways(self) -> list[tuple[str, int | None]]:
        """Return how the plain model is run: name, and threads or None for a device's own."""
        if self.places[0].type != "cpu":
            return [(str(self.places[0]), None)]
        cores = visible_cores()
        ways: list[tuple[str, int | None]] = [("1 thread", 1)]
        return [*ways, (f"{cores} threads", cores)] if cores > 1 else ways

    def _notes(self, plan: Plan) -> list[str]:
        notes = []
        if plan.chunks < self.chunks:
            notes.append(
                f"{self.chunks} micro-batches were asked for, but the mini-batch has only "
                f"{plan.chunks} rows."
            )
        cores = visible_cores()
        if self.threads is not None and self.threads * len(self.places) > cores:
            notes.append(
                f"{len(self.places)} partitions with {self.threads} threads each share {cores} "
                "cores: the prediction takes each partition's cores as its own."
            )
        if shares_places(self.places):
            notes.append("Partitions share devices: the prediction takes each device as its own.")
        return notes


@dataclass
class _Measured:
    """What the training showed."""

    optimizer: str
    step_times: list[float] = field(default_factory=list)
    timeline: Timeline = field(default_factory=lambda: Timeline((), 1, "measured"))
    plain: list[PlainTimes] = field(default_factory=list)
    peak_bytes: tuple[int, ...] = ()
    total_peak_bytes: int = 0
    notes: list[str] = field(default_factory=list)


class _Folder:
    """The output folder, and which of its files this run has written."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.written: list[str] = []
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise _bad_folder(path, error.strerror or str(error)) from error
        if not os.access(path, os.W_OK | os.X_OK):
            raise _bad_folder(path, "no permission to write into it")

    def write(self, name: str, save: Callable[[Path], None]) -> None:
        save(self.path / name)
        self.written.append(name)

    def summary(self) -> str:
        """Say what this run has left, and what is older."""
        kept = f"{', '.join(self.written)} written" if self.written else "nothing written"
        older = [n for n in FILES if n not in self.written and (self.path / n).exists()]
        return f"{self.path}: {kept}" + (f"; {', '.join(older)} from before" if older else "")


def describe_optimizer(optimizer: torch.optim.Optimizer) -> str:
    """Name an optimizer with its learning rate, such as ``SGD(lr=0.01)``."""
    rate = optimizer.defaults.get("lr")
    return type(optimizer).__name__ + (f"(lr={float(rate):g})" if rate is not None else "")


def _typical(timelines: list[Timeline], step_times: list[float]) -> Timeline:
    """Return the timeline of the step whose time is the median, or the nearest to it."""
    order = sorted(range(len(step_times)), key=step_times.__getitem__)
    return timelines[order[(len(order) - 1) // 2]]


def _bad_folder(path: Path, reason: str) -> UsageError:
    return UsageError(
        f"output folder cannot be used: output={str(path)!r} ({reason}).\n"
        "Fix: name a folder that you may write to with --output."
    )
