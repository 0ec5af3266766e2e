"""The job of ``gpipebal run``: measure, plan, write, train, compare, write."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from gpipebal.argument_kinds import check_path
from gpipebal.copies import deep_copy
from gpipebal.errors import BalanceError, UsageError
from gpipebal.pipeline import GPipe
from gpipebal.pipeline.layers.devices import check_threads, share_of_cores, visible_cores
from gpipebal.plan import Plan
from gpipebal.planner import solve, top_plans, training_step
from gpipebal.planner.question import Options, Size, check_memory_limit
from gpipebal.plots import plot_run, save_figure
from gpipebal.profile import Profile
from gpipebal.profiler import profile_model
from gpipebal.profiler.setting import check_values, layers_of
from gpipebal.profiler.step.optimizer import Maker
from gpipebal.report import RunReport, notes_on_scatter, notes_on_threads, notes_on_waiting
from gpipebal.run.attempts import fastest, try_plans
from gpipebal.run.comparison import Measured, train_in_turns
from gpipebal.run.folder import Folder
from gpipebal.run.places import choose_places, describe_places, shares_places
from gpipebal.run.workload import Workload, load_workload
from gpipebal.schedule import CheckpointMode, check_checkpoint, check_count, check_schedule
from gpipebal.simulator import held_of, memory_over_time
from gpipebal.timeline import Timeline
from gpipebal.units import count

__all__ = ["run"]


#: More than this is a typing error; refused before a list of as many devices is made.
MOST_PARTITIONS = 4096


def run(
    model: str,
    *,
    partitions: int | None = None,
    chunks: int = 8,
    rows: int | None = None,
    image_size: int | None = None,
    arguments: Mapping[str, Any] | None = None,
    checkpoint: CheckpointMode | Literal["auto"] = "except_last",
    schedule: str = "gpipe",
    memory_limit: Size | Sequence[Size | None] | None = None,
    steps: int = 4,
    attempts: int = 1,
    threads_per_partition: int | None = None,
    seed: int = 0,
    device: str = "auto",
    output: str | os.PathLike[str] = "gpipebal-run",
    progress: bool | None = None,
    echo: Callable[[str], None] = print,
) -> RunReport:
    """Profile a model, solve its balance, train a few steps, and compare with the prediction.

    The files ``profile.json``, ``plan.json``, ``timeline.json``, ``report.json`` and
    ``plan.png`` go to `output`, each one as soon as its content is known.

    Args:
        model: A built-in model, or ``package.module:function``; see `load_workload`. If it is in
            evaluation mode as a whole, it is put into training mode.
        partitions: Number of partitions; None: one for each device, and 2 on ``'cpu'`` alone.
        chunks: Micro-batches per mini-batch.
        rows: Rows of the mini-batch of a built-in model; None: 32.
        image_size: Pixels of the side of its images; None: the model's own default.
        arguments: What a built-in model is built from, by name (see `gpipebal.models.CATALOGUE`),
            or keyword arguments of a function of your own.
        checkpoint: Which micro-batches are recomputed; ``'auto'``: in each partition as few as fit.
        schedule: ``'gpipe'``, with the loss of the mini-batch after the pipeline; or ``'1f1b'``,
            with that of each micro-batch inside it.
        memory_limit: Memory of a device, as `solve` takes it; None: no limit.
        steps: Training steps that are timed, after one that is not.
        attempts: How many of the best plans to run for a few steps; the fastest is taken.
        threads_per_partition: Intra-operation threads of each CPU partition, also while its
            layers are profiled; None: its share of the cores.
        seed: Seed of parameters and data.
        device: ``'auto'``, ``'cpu'``, ``'cuda'`` or a list such as ``'cuda:0,cuda:1'``.
        output: Folder of the files; made if it does not exist.
        progress: Whether to show progress bars; None: on a terminal only.
        echo: Called with each line of text that a reader should see on the way.

    Returns:
        What was predicted and measured.

    Raises:
        GpipebalError: something asked for does not exist or is impossible; or the model has
            nothing to train. An error has a note if the folder then holds files of two runs.
        KeyboardInterrupt: with a note of the files that were written before it.
    """
    chunks, steps = check_count("chunks", chunks), check_count("steps", steps)
    attempts = check_count("attempts", attempts)
    if partitions is not None:
        partitions = check_count("partitions", partitions)
    if partitions is not None and partitions > MOST_PARTITIONS:
        raise UsageError(
            f"there are too many partitions: partitions={partitions} (expected at most "
            f"{MOST_PARTITIONS}).\nFix: partitions=2, or at most the number of layers."
        )
    if threads_per_partition is not None:
        check_threads("threads_per_partition", threads_per_partition)
    if checkpoint != "auto":
        check_checkpoint(checkpoint, or_auto=True)
    schedule = check_schedule(schedule)
    places = choose_places(device, partitions)
    workload = load_workload(
        model, rows=rows, image_size=image_size, seed=seed, chunks=chunks, arguments=arguments
    )
    _check_model(workload, len(places))
    if schedule != "gpipe":
        _check_target(workload, schedule)
    limit = check_memory_limit(memory_limit, len(places))
    _check_optimizer(workload)
    on_cpu = places[0].type == "cpu"
    threads = (threads_per_partition or share_of_cores(len(places))) if on_cpu else None
    if output == "":
        raise UsageError(
            "output folder has no name: output='' (expected a path).\n"
            "Fix: output='gpipebal-run', or output='.' for the current folder."
        )
    folder = Folder(check_path(output))
    job = _Job(
        workload=workload,
        places=places,
        threads=threads,
        chunks=chunks,
        options={"checkpoint": checkpoint, "schedule": schedule, "memory_limit": limit},
        steps=steps,
        seed=seed,
        folder=folder,
        progress=progress,
        echo=echo,
        attempts=attempts,
    )
    try:
        return job.do()
    except BaseException as error:
        if folder.is_mixed or isinstance(error, KeyboardInterrupt):
            error.add_note(folder.summary())
        raise
    finally:
        folder.drop_if_empty()


def _check_model(workload: Workload, n_partitions: int) -> None:
    """Refuse a model that cannot be trained, or not in so many partitions."""
    model = workload.model
    if not len(model):
        raise BalanceError(
            "model has no layers: there is nothing to run (expected one layer or more).\n"
            "Fix: let the function return an nn.Sequential with layers."
        )
    keywords = workload.parting.get("keywords")
    check_values(layers_of(model), workload.sample, keywords, workload.target)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        n_parameters = len(list(model.parameters()))
        raise BalanceError(
            f"model has nothing to train: trainable=0 of {count(n_parameters, 'parameter')} "
            "(expected one or more that require a gradient).\n"
            "Fix: let a parameter require a gradient (requires_grad_(True))."
        )
    if n_partitions > len(model):
        raise BalanceError(
            f"model has fewer layers than partitions: partitions={n_partitions} "
            f"(expected 1..{len(model)}, the number of its layers).\n"
            f"Fix: partitions={len(model)}, or fewer."
        )


def _check_target(workload: Workload, schedule: str) -> None:
    """Refuse a target of other rows than the sample's, if each micro-batch has a loss."""
    target, n_rows = workload.target_batch(), workload.batch().count_rows()
    if target is not None and not target.is_whole and target.count_rows() != n_rows:
        raise UsageError(
            f"target cannot be divided into micro-batches, which schedule={schedule!r} needs: it "
            f"has {count(target.count_rows(), 'row')} (expected {n_rows}, as the sample).\n"
            "Fix: schedule='gpipe', which takes the loss of the whole mini-batch."
        )


def _check_optimizer(workload: Workload) -> None:
    """Refuse an optimizer that calls the model itself: in a pipeline a step is one forward.

    Raises:
        ProfileError: it cannot be made.
        UsageError: its step needs a closure.
    """
    maker = Maker(workload.make_optimizer, list(workload.model.parameters()))
    if maker.needs_closure:
        raise UsageError(
            f"optimizer needs a closure: {maker.name}.step() calls the model itself (expected an "
            "optimizer that is stepped after the backward).\n"
            "Fix: let the function return another 'optimizer', such as torch.optim.SGD."
        )


@dataclass
class _Job:
    """Settings of a run that are known to be good."""

    workload: Workload
    places: list[torch.device]
    threads: int | None
    chunks: int
    options: Options
    steps: int
    seed: int
    folder: Folder
    progress: bool | None
    echo: Callable[[str], None]
    attempts: int = 1

    @property
    def n_parameters(self) -> int:
        """Number of the model's parameters, all their elements counted."""
        return sum(parameter.numel() for parameter in self.workload.model.parameters())

    def do(self) -> RunReport:
        model = self.workload.model
        layers = count(len(model), "layer")
        self.echo(f"{self.workload.name}: {layers}, {self.n_parameters:,} parameters")
        self.echo(describe_places(self.places, self.threads))
        if not model.training:
            model.train()  # such a model is profiled as if it were trained
        # Both trainings start from the same values; the pipeline trains the model itself.
        plain_model = deep_copy(model, {})
        self.echo(f"Profiling {layers}")
        profile = self._profile()
        self.folder.write("profile.json", profile.save)
        plan = self._plan(profile)
        self.echo(f"\n{plan}\n")
        self.folder.write("plan.json", plan.save)
        measured = self._train(plan, plain_model)
        report = self._report(profile, plan, measured)
        self._write_comparison(profile, plan, measured.timeline, report)
        return report

    def _profile(self) -> Profile:
        """Measure the layers on the first of the devices."""
        workload = self.workload
        return profile_model(
            workload.model,
            workload.sample,
            device=self.places[0],
            chunks=self.chunks,
            threads=self.threads,
            partitions=len(self.places),
            loss_fn=workload.loss_fn,
            target=workload.target,
            optimizer=workload.make_optimizer,
            progress=self.progress,
            **workload.parting,
        )

    def _train(self, plan: Plan, plain_model: nn.Module) -> Measured:
        """Train the model as a pipeline, and its copy without one."""
        pipe = GPipe.from_plan(
            self.workload.model,
            plan,
            devices=self.places,
            threads_per_partition=self.threads,
            **self.workload.dims,
        )
        try:
            return train_in_turns(
                pipe,
                plain_model,
                self.workload,
                steps=self.steps,
                progress=self.progress,
                echo=self.echo,
            )
        finally:
            pipe.close()

    def _write_comparison(
        self, profile: Profile, plan: Plan, measured: Timeline, report: RunReport
    ) -> None:
        """Write the measured step next to the predicted one."""
        # The predicted training step counts more than the plan's makespan.
        predicted, held = training_step(profile, plan), held_of(profile, plan)
        memory = [memory_over_time(each, held) for each in (measured, predicted)]
        self.folder.write(
            "timeline.json", lambda path: measured.save(path, beside=[predicted], memory=memory)
        )
        self.folder.write("report.json", report.save)
        figure = plot_run(profile, plan, predicted, measured)
        self.folder.write("plan.png", lambda path: save_figure(figure, path))

    def _report(self, profile: Profile, plan: Plan, measured: Measured) -> RunReport:
        """Put together what was predicted and measured."""
        return RunReport(
            model=self.workload.name,
            n_parameters=self.n_parameters,
            devices=tuple(map(str, self.places)),
            cores=visible_cores(),
            threads_per_partition=self.threads,
            balance=plan.balance,
            chunks=plan.chunks,
            mini_batch_rows=profile.mini_batch_rows,
            image_size=self.workload.image_size,
            checkpoint=plan.checkpoint
            if isinstance(plan.checkpoint, str)
            else ",".join(plan.modes),
            schedule=plan.schedule,
            seed=self.seed,
            loss=self.workload.loss_name,
            optimizer=measured.optimizer,
            predicted_step_time=plan.step_time,
            step_times=tuple(measured.step_times),
            predicted_peak_bytes=tuple(part.memory.total for part in plan.partitions),
            peak_bytes=measured.peak_bytes,
            total_peak_bytes=measured.total_peak_bytes,
            plain=tuple(measured.plain),
            notes=(
                *self._notes(plan),
                *notes_on_waiting([part.memory for part in plan.partitions], measured.peak_bytes),
                *measured.notes,
                *notes_on_scatter(measured.plain),
                *notes_on_threads(measured.plain),
            ),
            output=str(self.folder.path),
            provenance=dict(plan.provenance),
        )

    def _plan(self, profile: Profile) -> Plan:
        """Find the best plan; if several are tried, the one that runs fastest."""
        n = len(self.places)
        options: Options = {**self.options, "shared_memory": len(set(self.places)) == 1}
        if self.attempts == 1:
            return solve(profile, n, **options)
        plans = top_plans(profile, self.attempts, n, **options)
        self.echo(f"Trying the best {count(len(plans), 'plan')}")
        tried = try_plans(
            plans,
            self.workload,
            devices=self.places,
            threads=self.threads,
            progress=self.progress,
            echo=self.echo,
        )
        return fastest(tried).plan

    def _notes(self, plan: Plan) -> list[str]:
        busy = "busy: "
        flags = [flag for flag in plan.provenance["flags"] if flag.startswith(busy)]
        notes = [f"The machine was busy: {flag.removeprefix(busy)}." for flag in flags]
        if plan.chunks < self.chunks:
            notes.append(
                f"{count(self.chunks, 'micro-batch')} were asked for, but the mini-batch has only "
                f"{count(plan.chunks, 'row')}."
            )
        cores = visible_cores()
        if self.threads is not None and self.threads * len(self.places) > cores:
            notes.append(
                f"{count(len(self.places), 'partition')} with {count(self.threads, 'thread')} "
                f"each share {cores} cores: the prediction takes each partition's cores as its own."
            )
        if shares_places(self.places):
            notes.append("Partitions share devices: the prediction takes each device as its own.")
        is_limited = self.options.get("memory_limit") is not None
        if is_limited and len(set(self.places)) < len(self.places):
            notes.append("Partitions share devices: each was given the whole memory limit.")
        return notes
