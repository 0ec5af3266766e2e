"""What an experiment needs, estimated from shapes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from benchmark_tools.devices import P40

import gpipebal as gb
from gpipebal.plan import PeakMemory
from gpipebal.planner import evaluate
from gpipebal.problem import to_bounds
from gpipebal.profile import LayerProfile, Profile
from gpipebal.rates import DeviceRates
from memory_benchmark.balances import find_balances
from memory_benchmark.experiments import Experiment

#: What a partition may need on torchgpipe's device, in the fastest balance: all but half a GB.
#: torchgpipe's own need leaves no more of it.
MEMORY_LIMIT = 23_500_000_000


def profile_of(experiment: Experiment, rates: str | DeviceRates) -> Profile:
    """Estimate the layers of an experiment, at the size of its micro-batches."""
    with torch.device("meta"):
        model = experiment.build()
        images, target = experiment.make_data()
    return gb.profile_model(
        model,
        images,
        chunks=experiment.chunks,
        rows=(),
        loss_fn=experiment.loss_fn,
        target=target,
        optimizer=experiment.make_optimizer,
        method="estimate",
        rates=rates,
        progress=False,
    )


def with_gradients(profile: Profile) -> Profile:
    """Return the same chain in a step that begins with gradients of the step before.

    torchgpipe's memory is that of two steps without `zero_grad`. So gradients count like buffers
    here, and a backward adds to them. A single byte stays, which says that there is one.
    """
    return replace(
        profile,
        layers=tuple(
            replace(
                layer,
                buffer_bytes=layer.buffer_bytes + layer.gradient_bytes,
                gradient_bytes=min(1, layer.gradient_bytes),
                backward_peak_bytes=(
                    layer.backward_peak_bytes
                    if layer.accumulating_peak_bytes is None
                    else layer.accumulating_peak_bytes
                ),
                chained_peak_bytes=(
                    layer.chained_peak_bytes
                    if layer.chained_accumulating_peak_bytes is None
                    else layer.chained_accumulating_peak_bytes
                ),
            )
            for layer in profile.layers
        ),
    )


def figures(
    experiment: Experiment,
    profile: Profile,
    balance: Sequence[int],
    *,
    shared_memory: bool | None = None,
) -> dict[str, Any]:
    """Return what each partition needs under a balance, in bytes, and the predicted seconds.

    Args:
        experiment: Tells how much belongs to the model.
        profile: Its layers, as `with_gradients` returns them.
        balance: Layers of each partition.
        shared_memory: Whether all partitions live in one memory; None: as on the profile's device.

    Returns:
        ``model``: parameters, gradients and optimizer state; ``activations``: the rest of the peak,
        and its parts: what micro-batches in flight keep, what one needs for a moment, outputs with
        loss and target, what waits for a neighbour, buffers, and copies of them.
    """
    plan = evaluate(profile, balance, checkpoint=experiment.checkpoint, shared_memory=shared_memory)
    needs = [
        _needs(experiment, profile.layers[a:b], partition.memory)
        for (a, b), partition in zip(pairwise(to_bounds(balance)), plan.partitions, strict=True)
    ]
    return {
        "balance": list(balance),
        "model": [model for model, _ in needs],
        "activations": [sum(parts.values()) for _, parts in needs],
        "parts": {name: [parts[name] for _, parts in needs] for name in needs[0][1]},
        "makespan": plan.makespan,
    }


def _needs(
    experiment: Experiment, layers: Sequence[LayerProfile], peak: PeakMemory
) -> tuple[int, dict[str, int]]:
    """Return what belongs to the model in a partition, and the parts of the rest of its peak."""
    model = experiment.per_parameter * sum(layer.parameter_bytes for layer in layers)
    # A checkpointed cell of GPipe copies its partition's buffers for its recompute.
    copies = (experiment.chunks - 1) * sum(layer.kept_buffer_bytes for layer in layers)
    parts = {
        "in flight": peak.activations - copies,
        "transient": peak.transient,
        "outputs": peak.outputs,
        "waiting": peak.waiting,
    }
    # With the optimizer's counters, which are no model memory as it was published. The single bytes
    # that stand for gradients are none at all.
    buffers = peak.total - peak.gradients - model - copies - sum(parts.values())
    return model, {**parts, "buffers": buffers, "copies": copies}


def estimate(experiment: Experiment) -> dict[str, Any]:
    """Return what is stored of an experiment at its full size."""
    plain = profile_of(experiment, P40)
    profile = with_gradients(plain)
    balances = find_balances(profile, experiment.balance, experiment.checkpoint, MEMORY_LIMIT)
    # torch 1.3 stepped one parameter after the other; today's torch steps all of them at once.
    today = replace(experiment, foreach=None)
    on_one_device = figures(experiment, profile, experiment.balance, shared_memory=True)
    of_today = figures(today, with_gradients(profile_of(today, P40)), today.balance)
    return {
        "parameters": sum(layer.parameter_bytes for layer in plain.layers) // 4,
        "n_layers": plain.n_layers,
        "approximate": len(plain.provenance["approximate"]),
        "balances": {
            name: figures(experiment, profile, balance) for name, balance in balances.items()
        },
        "today": of_today["activations"],
        "on_one_device": on_one_device["activations"],
    }
