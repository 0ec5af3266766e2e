"""Measure: in each round a profile, then all plans of a model in an order that changes."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import Any

import numpy as np
from torch import nn

import gpipebal as gb
from gpipebal.plan import Plan
from gpipebal.planner import evaluate
from gpipebal.profile import Profile
from gpipebal.schedule import make_schedule
from gpipebal.timeline import Timeline
from prediction_benchmark.models import Model
from prediction_benchmark.parts import PARTS, cell_times, explain, predicted_timeline
from prediction_benchmark.settings import CHUNKS, SETTINGS, Setting, choose_balances
from prediction_benchmark.steps import Steps, devices, on_first_device

#: The number of micro-batches whose first profile has the other sizes too.
MIDDLE = 4
#: In so many rounds a step of each plan is traced.
TRACED_ROUNDS = 2


@dataclass
class Subject:
    """A model under measurement.

    Attributes:
        model: The model.
        layers: Its layers.
        start: Costs by number of micro-batches, before any step was measured.
        rounds: The same at the beginning of each round.
        end: Those of `MIDDLE` micro-batches, when all models have been measured.
    """

    model: Model
    layers: nn.Sequential
    start: dict[int, Profile] = field(default_factory=dict)
    rounds: list[dict[int, Profile]] = field(default_factory=list)
    end: dict[int, Profile] = field(default_factory=dict)


@dataclass
class _Trial:
    """One plan under measurement."""

    setting: Setting
    balance: tuple[int, ...]
    source: str
    turns: list[list[float]] = field(default_factory=list)
    traced: list[tuple[int, float, Timeline]] = field(default_factory=list)
    peaks: list[int] = field(default_factory=list)


def take_profiles(
    subject: Subject,
    chunks: Sequence[int],
    timeout: float | None,
    *,
    other_rows: bool = False,
) -> dict[int, Profile]:
    """Profile a model at some numbers of micro-batches.

    Args:
        subject: The model.
        chunks: The numbers of micro-batches.
        timeout: Seconds for the repeats of each; None: the profiler's default.
        other_rows: Whether the profile of `MIDDLE` micro-batches is measured at the rows of all
            the others too.
    """
    model = subject.model
    inputs, target = model.make_batch()
    found = {}
    for m in chunks:
        rows = sorted({model.rows // other for other in CHUNKS if other != m})
        with on_first_device():
            found[m] = gb.profile_model(
                subject.layers,
                inputs,
                device=devices()[0],
                chunks=m,
                rows=rows if m == MIDDLE and other_rows else (),
                threads=1,
                partitions=len(devices()),
                loss_fn=model.loss_fn,
                target=target,
                optimizer=model.optimizer,
                timeout=timeout,
                progress=False,
            )
    return found


def predict(profile: Profile, balance: Sequence[int], setting: Setting) -> Plan:
    """Predict a plan from a profile at any number of rows."""
    rows = profile.mini_batch_rows // setting.chunks
    if rows != profile.rows:
        profile = profile.at_rows(rows)
    first, *_, last = devices()
    return evaluate(
        profile,
        balance,
        chunks=setting.chunks,
        checkpoint=setting.checkpoint,
        schedule=setting.schedule,
        loss_inside=setting.loss_inside,
        shared_memory=first == last,
    )


def measure_model(
    subject: Subject,
    *,
    rounds: int,
    steps: int,
    timeout: float | None,
    settings: Sequence[Setting] = SETTINGS,
    told: Callable[[str], None] = print,
) -> list[dict[str, Any]]:
    """Measure all plans of a model, and compare them with what was predicted.

    Args:
        subject: The model, with its profiles of the start; gets those of the rounds.
        rounds: How often each plan has its turn.
        steps: Timed steps in each turn.
        timeout: Seconds for the repeats of a round's profiles; None: the profiler's default.
        settings: How to run.
        told: Gets a line now and then.

    Returns:
        A record for each plan.
    """
    trials = [
        _Trial(setting, balance, source)
        for setting in settings
        for balance, source in choose_balances(subject.start[setting.chunks], setting).items()
    ]
    batch = subject.model.make_batch()
    shuffled = random.Random(0)
    order = list(range(len(trials)))
    chunks = sorted({setting.chunks for setting in settings})
    for number in range(rounds):
        subject.rounds.append(take_profiles(subject, chunks, timeout))
        shuffled.shuffle(order)
        for k in order:
            _have_a_turn(subject, trials[k], batch, steps, number)
        told(f"{subject.model.name}: round {number + 1} of {rounds}, {len(trials)} plans")
    return [_record(subject, trial) for trial in trials]


def _have_a_turn(
    subject: Subject, trial: _Trial, batch: tuple[Any, Any], steps: int, number: int
) -> None:
    """Run a plan for a while; its memory is counted in its first turn only."""
    run = Steps(subject.model, subject.layers, batch, trial.balance, trial.setting)
    try:
        trial.turns.append([run.seconds() for _ in range(steps)])
        if number < TRACED_ROUNDS:
            trial.traced.append((number, *run.traced()))
        if not number:
            trial.peaks = run.peaks()
    finally:
        run.close()


def _record(subject: Subject, trial: _Trial) -> dict[str, Any]:
    """Return what is stored of a plan; times in seconds, to a tenth of a microsecond."""
    setting, chunks = trial.setting, trial.setting.chunks
    plan = predict(subject.start[chunks], trial.balance, setting)
    from_one = predict(subject.start[MIDDLE], trial.balance, setting)
    again = [predict(of_round[chunks], trial.balance, setting) for of_round in subject.rounds]
    q1, middle, q3 = np.percentile([time for turn in trial.turns for time in turn], [25, 50, 75])
    parts = [
        explain(subject.rounds[number][chunks], again[number], setting, seconds, timeline)
        for number, seconds, timeline in trial.traced
    ]
    return {
        "model": subject.model.name,
        "way": setting.way,
        "chunks": chunks,
        "checkpoint": setting.checkpoint,
        "balance": list(trial.balance),
        "source": trial.source,
        "predicted": {
            "start": _rounded(plan.step_time),
            "same minutes": _rounded(median(_rounded(each.step_time) for each in again)),
            "one profile": _rounded(from_one.step_time),
        },
        "seconds": {"median": _rounded(middle), "q1": _rounded(q1), "q3": _rounded(q3)},
        "turns": [[_rounded(time) for time in turn] for turn in trial.turns],
        "parts": {name: _rounded(fmean(part[name] for part in parts)) for name in PARTS},
        "traced": _rounded(fmean(seconds for _, seconds, _ in trial.traced)),
        "cells": _cells(subject, trial, again),
        "memory": _memory(plan, trial.peaks),
    }


def measure_memory_of(
    subject: Subject, rows: Sequence[dict[str, Any]], timeout: float | None
) -> list[dict[str, Any]]:
    """Predict and count the memory of plans anew, and no times.

    Args:
        subject: Their model.
        rows: What is stored of them; only what they say of memory is replaced.
        timeout: Seconds for the repeats of a profile; None: the profiler's default.

    Returns:
        The rows with the new figures.
    """
    profiles = take_profiles(subject, CHUNKS, timeout)
    batch = subject.model.make_batch()
    found = []
    for row in rows:
        setting = Setting(row["way"], row["chunks"], row["checkpoint"])
        plan = predict(profiles[setting.chunks], row["balance"], setting)
        run = Steps(subject.model, subject.layers, batch, row["balance"], setting)
        try:
            found.append({**row, "memory": _memory(plan, run.peaks())})
        finally:
            run.close()
    return found


def _memory(plan: Plan, counted: Sequence[int]) -> dict[str, list[int]]:
    predicted = [part.memory.total for part in plan.partitions]
    return {"predicted": predicted, "counted": list(counted)}


def _cells(
    subject: Subject, trial: _Trial, plans: Sequence[Plan]
) -> dict[str, list[list[float] | None]]:
    """Return predicted and measured seconds of a cell of each kind, by partition.

    Args:
        subject: The model.
        trial: A plan of it.
        plans: What was predicted of the plan in each round.
    """
    setting = trial.setting
    order = make_schedule(setting.schedule, len(trial.balance), setting.chunks, setting.checkpoint)
    predicted: dict[tuple[str, int], list[float]] = defaultdict(list)
    measured: dict[tuple[str, int], list[float]] = defaultdict(list)
    for number, _, timeline in trial.traced:
        placed = predicted_timeline(subject.rounds[number][setting.chunks], plans[number])
        for found_in, one in ((predicted, placed), (measured, timeline)):
            for key, times in cell_times(one, order).items():
                found_in[key] += times
    found: dict[str, list[list[float] | None]] = {}
    for name in ("forward", "no_grad_forward", "recompute", "backward"):
        pairs = [
            [_rounded(median(predicted[name, j])), _rounded(median(measured[name, j]))]
            if (name, j) in measured
            else None
            for j in range(len(trial.balance))
        ]
        if any(pairs):
            found[name] = pairs
    return found


def about(subject: Subject) -> dict[str, Any]:
    """Return what is stored of a model: what it is, and what its profiles say in all."""
    return {
        "about": subject.model.about,
        "n_layers": len(subject.layers),
        "rows": subject.model.rows,
        "parameters": sum(parameter.numel() for parameter in subject.layers.parameters()),
        "profiles": {
            "start": _by_chunks(subject.start),
            "rounds": [_by_chunks(of_round) for of_round in subject.rounds],
            "end": _by_chunks(subject.end),
        },
    }


def _by_chunks(profiles: dict[int, Profile]) -> dict[str, Any]:
    return {str(chunks): _totals(profile) for chunks, profile in profiles.items()}


def _totals(profile: Profile) -> dict[str, Any]:
    step = profile.step
    return {
        "forward": _rounded(sum(layer.forward_time for layer in profile.layers)),
        "backward": _rounded(sum(layer.backward_time for layer in profile.layers)),
        "recompute": _rounded(sum(layer.recompute_time for layer in profile.layers)),
        "gather": _rounded(step.gather_time),
        "loss": None if step.loss is None else _rounded(step.loss.time),
        "whole_loss": _rounded(step.loss_time),
        "optimizer": _rounded(step.optimizer_time),
        "flags": list(profile.provenance.get("flags", [])),
    }


def _rounded(seconds: float | None) -> float:
    if seconds is None:
        raise ValueError("a term of the step was not measured (expected loss and optimizer)")
    return round(float(seconds), 7)
