"""A study: a chain examined and measured at several sizes of micro-batches, as one profile."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from gpipebal.errors import GpipebalError, ProfileError
from gpipebal.pipeline.process.caller import CallerState
from gpipebal.profile import Profile, StepTerms
from gpipebal.profile.moments import keep_largest
from gpipebal.profiler.alone import SizeWalk, join_times, walk_alone
from gpipebal.profiler.chain.chain import Chain
from gpipebal.profiler.chain.failures import first_line_of, is_out_of_memory, left_out
from gpipebal.profiler.chain.value import Value
from gpipebal.profiler.describe import describe_profile, describe_times, times_of_layers
from gpipebal.profiler.doubts import (
    doubts_about,
    doubts_about_loss,
    doubts_about_parameters,
    doubts_about_peaks,
)
from gpipebal.profiler.replicas.replica import replicate
from gpipebal.profiler.step.by_layer import OptimizerCosts, optimizer_costs
from gpipebal.profiler.step.gathered import (
    GatheredTerms,
    measure_gathered,
    most_bytes,
    scaled_gathered,
    try_gathered,
)
from gpipebal.profiler.step.loss import (
    LossSurvey,
    describe_loss,
    loss_chain,
    survey_loss,
    times_of_loss,
)
from gpipebal.profiler.step.step import measure_optimizer
from gpipebal.profiler.survey import Scout, Survey, known_for_others, survey
from gpipebal.profiler.times.rounds import Pace, Subject, Times, run_side_by_side
from gpipebal.profiler.together import measure_together
from gpipebal.profiler.training import Training
from gpipebal.profiler.trial.correct import try_out
from gpipebal.profiler.trial.trial import Setting
from gpipebal.units import count

__all__ = ["Study"]

_HOST = torch.device("cpu")
#: Rounds of the loss where no rounds of the chain include it.
LOSS_ROUNDS = 5


@dataclass
class _Size:
    """One size of micro-batch, and what is known about it."""

    rows: int
    found: Survey
    start: Value = field(default_factory=lambda: Value([], None))
    loss: LossSurvey | None = None
    times: Times = field(default_factory=Times)


class Study:
    """A chain, and what is found out about it.

    Args:
        training: The chain, and how it is trained.
        device: Where to measure.
        all_sizes: Whether a layer may not fail at sizes other than the micro-batch's own.
        alone: Whether one layer is on the device at a time.
    """

    def __init__(
        self, training: Training, device: torch.device, *, all_sizes: bool, alone: bool
    ) -> None:
        self._training = training = training.with_target_on(device)
        self._names, self._modules, self._device = training.names, training.modules, device
        self._data, self._loss_fn = training.data, training.loss_fn
        self._all_sizes, self._is_alone = all_sizes, alone
        self._maker = training.maker()
        self._notes = list(doubts_about(self._names, self._modules, keep_modes=training.keep_modes))
        self._notes += doubts_about_loss(self._loss_fn, self._modules)
        self._sizes: list[_Size] = []
        self._replicas: list[nn.Module] = []
        self._written: list[frozenset[int]] = [frozenset()] * len(self._names)
        self._private: set[int] = set()

    def survey_sizes(self, others: Sequence[int]) -> None:
        """Find out all that needs no repeats: at the micro-batch's own size, then at others.

        Args:
            others: Rows of the other sizes.

        Raises:
            ProfileError: a layer failed.
        """
        data = self._data
        start = data.start_of(data.sizes[0], self._device)
        chain = self._chain(start, self._modules)
        scout = Scout(chain, keep_modes=self._training.keep_modes)
        main = _Size(data.sizes[0], survey(chain, self._training.routes, scout), start)
        self._notes += doubts_about_parameters(self._names, self._modules)
        self._sizes.append(main)
        self._survey_loss(main)
        if self._loss_fn is not None and main.loss is None:
            outputs = data.outputs(main.found.outputs, data.sizes)
            target = data.target_of(data.sizes)
            try_gathered(outputs, main.found.numbers, self._device, self._loss_fn, target)
        self._private = scout.writers
        self._replicas = self._replicate()
        for rows in others:
            try:
                self._sizes.append(self._survey_size(rows))
            except GpipebalError as error:
                if self._all_sizes:
                    raise
                self._notes.append(left_out(rows, error))

    def measure(
        self,
        side_by_side: int,
        n_threads: int | None,
        pace: Pace,
        state: CallerState,
    ) -> int:
        """Measure the times of all sizes; return in how many threads; see `measure_together`."""
        before = [_versions(module) for module in self._modules]
        run = partial(run_side_by_side, n_threads=n_threads, state=state, all_sizes=self._all_sizes)
        found = measure_together(self._subjects, side_by_side, self._names, run, pace)
        self._notes += found.notes
        for name, module, versions in zip(self._names, self._modules, before, strict=True):
            if _versions(module) != versions:
                self._notes.append(
                    f"layer {name!r} wrote to its parameters in the middle: the model has changed"
                )
        measured = []
        for size, times in zip(self._sizes, found.times, strict=True):
            if times is None:
                self._notes.append(f"not measured at {count(size.rows, 'row')}: not enough memory")
            else:
                size.times = times
                measured.append(size)
        self._sizes = measured
        return found.side_by_side

    def _subjects(self, k: int) -> list[Subject]:
        """Make what thread `k` sends each size of micro-batch through."""
        replicas = self._replicas if not k else self._replicate()
        return [self._subject(size, replicas, copies=k > 0) for size in self._sizes]

    def measure_alone(self, others: Sequence[int], pace: Pace, *, share: bool) -> None:
        """Examine and measure with one layer on the device at a time; see `walk_alone`."""
        walks: list[SizeWalk] = []
        for rows in (self._data.sizes[0], *others):
            start = self._data.start_of(rows, _HOST)
            walks.append(SizeWalk.start(rows, start, self._device, *walks[:1]))
        self._notes += walk_alone(
            self._training, walks, self._device, pace, share=share, all_sizes=self._all_sizes
        )
        self._notes += doubts_about_parameters(self._names, self._modules)
        self._notes.append("one layer at a time: what neighbours do to each other is not measured")
        for walk in walks:
            try:
                self._sizes.append(self._finish_alone(walk))
            except GpipebalError as error:
                if self._all_sizes or not self._sizes or not is_out_of_memory(error):
                    raise
                self._notes.append(left_out(walk.rows, error))

    def _finish_alone(self, walk: SizeWalk) -> _Size:
        """Measure the loss after layers that were measured alone."""
        size = _Size(walk.rows, walk.survey(self._training.routes, self._device))
        size.times = join_times(walk.times)
        self._survey_loss(size)
        if size.loss is not None:
            for _ in range(LOSS_ROUNDS):
                size.times.run_loss(size.loss.chain, size.found.outputs.value)
        return size

    def profile(self, provenance: Mapping[str, Any]) -> Profile:
        """Put together what was found; measure the terms of the step besides the layers.

        Args:
            provenance: Where and with what it was measured.
        """
        optimizer = optimizer_costs(
            self._maker,
            self._modules,
            self._device.type,
            self._sizes[0].found.memory,
            len(self._data.sizes),
        )
        self._notes += optimizer.doubts
        can_step = None not in (optimizer.state or ())
        optimizer = optimizer._replace(seconds=self._optimizer_time(can_step=can_step))
        others = [self._profile_of(size, optimizer, provenance) for size in self._sizes[1:]]
        others.sort(key=lambda profile: profile.rows)
        main = self._profile_of(self._sizes[0], optimizer, provenance)
        return keep_largest(replace(main, other_sizes=tuple(others)))

    def _optimizer_time(self, *, can_step: bool) -> float | None:
        """Measure the optimizer's step; one layer at a time, only the layer with most to step.

        Args:
            can_step: Whether it could step stand-ins. If it could not, a failure here is expected.
        """
        maker = self._maker
        if maker is None or maker.needs_closure:
            return None
        one_of = [list(module.parameters()) for module in self._modules] if self._is_alone else None
        try:
            return measure_optimizer(maker, self._device, one_of=one_of)
        except ProfileError as error:
            if is_out_of_memory(error):
                self._notes.append("the optimizer's time is not known: no memory for its step")
            elif can_step:
                raise
            return None

    def try_out(
        self, profile: Profile, n_partitions: int, n_threads: int, seconds: float
    ) -> Profile:
        """Run the layers as a pipeline for a while, and correct the profile by the result.

        Args:
            profile: What `profile` returned.
            n_partitions: Partitions that work side by side.
            n_threads: Intra-operation threads of each.
            seconds: About how long.
        """

        def setting(chunks: int) -> Setting:
            sizes = [self._data.sizes[0]] * chunks
            loss_fn = self._loss_fn
            if isinstance(loss_fn, nn.Module):
                loss_fn = replicate(["loss"], [loss_fn], self._device)[0]
            return Setting(
                OrderedDict(zip(self._names, self._replicas, strict=True)),
                self._data.of_sizes(sizes, self._device),
                loss_fn,
                n_partitions,
                n_threads,
            )

        return try_out(profile, setting, n_partitions, len(self._data.sizes), seconds)

    def _replicate(self) -> list[nn.Module]:
        given = (self._names, self._modules, self._device)
        return replicate(*given, private=self._private, keep_modes=self._training.keep_modes)

    def _chain(self, start: Value, layers: Sequence[nn.Module]) -> Chain:
        """Make a chain of layers; all have in common what is known of inputs that are written."""
        given = (self._names, layers, self._device, start)
        routes = self._training.routes
        chain = Chain(*given, routes=routes, out_dims=self._data.joined_dims)
        chain.written = self._written
        return chain

    def _survey_size(self, rows: int) -> _Size:
        start = self._data.start_of(rows, self._device)
        chain = self._chain(start, self._replicas)
        main = self._sizes[0]
        known = known_for_others(main.found.memory, main.rows)
        found = survey(chain, self._training.routes, at_other_rows=known)
        size = _Size(rows, found, start)
        self._survey_loss(size)
        return size

    def _survey_loss(self, size: _Size) -> None:
        if self._loss_fn is None:
            return
        sizes = [size.rows] * len(self._data.sizes)
        try:
            target = self._data.first_target(sizes)
            outputs, numbers = size.found.outputs, size.found.numbers
            chain = loss_chain(self._loss_fn, target, outputs.value, self._device)
            size.loss = survey_loss(chain, outputs, numbers)
        except GpipebalError as error:
            why = first_line_of(error)
            self._notes.append(f"the loss is not measured at {count(size.rows, 'row')}: {why}")

    def _subject(self, size: _Size, replicas: list[nn.Module], *, copies: bool) -> Subject:
        loss = None
        if size.loss is not None and self._loss_fn is not None:
            loss = size.loss.chain
            if copies:
                loss = loss_chain(self._loss_fn, loss.loss.target, loss.start, self._device)
                loss.written = size.loss.chain.written
        return Subject(self._chain(size.start, replicas), loss)

    def _profile_of(
        self, size: _Size, optimizer: OptimizerCosts, provenance: Mapping[str, Any]
    ) -> Profile:
        times, settled = times_of_layers(size.times)
        step = self._step_of(size)
        described = describe_times(size.rows, settled, size.times.waited)
        described["flags"] += doubts_about_peaks(self._names, size.found)
        if size is self._sizes[0]:
            described["flags"] += self._notes
        sizes, device_type = self._sizes_of(size), self._device.type
        profile = describe_profile(
            self._training, size.found, sizes, times, step, optimizer, device_type
        )
        return replace(profile, provenance={**provenance, "rows": size.rows, **described})

    def _sizes_of(self, size: _Size) -> Sequence[int]:
        """Return the rows of the micro-batches of a mini-batch of this size."""
        sizes = self._data.sizes
        return sizes if size is self._sizes[0] else [size.rows] * len(sizes)

    def _step_of(self, size: _Size) -> StepTerms:
        """Measure what a step costs besides the layers and the optimizer.

        At sizes larger than the micro-batch's own nothing is gathered: the mini-batch for them
        might not fit.
        """
        loss = None
        if size.loss is not None:
            loss = describe_loss(size.loss, times_of_loss(size.times))
        if size.rows > self._data.sizes[0]:
            return StepTerms(loss=loss)
        sizes = self._sizes_of(size)
        terms: GatheredTerms | None = None
        outputs = self._data.outputs(size.found.outputs, sizes)
        given = (outputs, size.found.numbers, self._device)
        try:
            target = self._data.target_of(sizes)
            if self._is_alone:
                free = most_bytes(self._modules, size.found.memory)
                terms = scaled_gathered(*given, loss, target, free)
            if terms is None:
                terms = measure_gathered(*given, self._loss_fn, target)
            else:
                self._notes.append(
                    f"the gathered output at {count(size.rows, 'row')} is scaled, not measured"
                )
        except GpipebalError as error:
            # Inside the pipeline the loss needs no gathered output: such a step may still fit.
            is_memory = is_out_of_memory(error)
            if not is_memory and (size is self._sizes[0] or self._all_sizes):
                raise
            why = "did not fit the device" if is_memory else first_line_of(error)
            self._notes.append(
                f"not measured at {count(size.rows, 'row')}: the gathered output and its loss: "
                f"{why}"
            )
        gather_time, whole_loss, gathered = terms or (None, None, ())
        return StepTerms(gather_time, loss, whole_loss, gathered)


def _versions(module: nn.Module) -> list[int]:
    return [parameter._version for parameter in module.parameters()]
