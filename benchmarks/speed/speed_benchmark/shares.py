"""The models at full size on shares of one CUDA device, measured and simulated.

Each partition gets a share of the device's multiprocessors, an eighth; the plain model gets one
share too. So there are as many small devices as partitions, which share memory and its bandwidth,
and one process that launches for all of them. Convolutions and products are in float32 throughout,
as on the published device. Where a step would take long, mini-batches have fewer micro-batches than
published, and those fewer images; the simulation has as many as are measured.
"""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from benchmark_tools.shares import (
    Place,
    computing_on,
    device_of,
    shares_of_device,
    wait_for,
)
from torch import Tensor

import gpipebal as gb
from gpipebal.pipeline import GPipe
from gpipebal.planner import evaluate
from gpipebal.profile import Profile
from speed_benchmark.predict import fastest_balance
from speed_benchmark.published import Run, SpeedModel

#: Shares of the device; the published runs have so many partitions at most.
N_SHARES = 8
#: Most micro-batches that are measured, by model and published run; others are left out.
CHUNKS = {
    "resnet101": {
        "naive-1": 1,
        "pipeline-1": 2,
        "pipeline-2": 32,
        "pipeline-4": 24,
        "pipeline-8": 16,
    },
    "amoebanetd": {"n=2, m=1": 1, "n=2, m=4": 4, "n=4, m=4": 4, "n=8, m=4": 4},
    "unet": {
        "naive-1": 1,
        "pipeline-1": 2,
        "pipeline-2": 12,
        "pipeline-4": 8,
        "pipeline-8": 20,
    },
}
#: Micro-batches have the published images divided by this, by model.
ROWS_DIVISOR = {"amoebanetd": 4}


def measure_shares(
    model: SpeedModel,
    *,
    rounds: int,
    timeout: float | None = None,
    told: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Profile a model on one share, simulate the published runs, and measure them in turns.

    Args:
        model: Which.
        rounds: How often each way does a timed step.
        timeout: Seconds for the repeats of the profile; None: the profiler's default.
        told: Called with lines about how far it is.
    """
    places = _places()
    runs = [_shorter(model, run) for run in model.runs if run.name in CHUNKS[model.name]]
    with _in_float32(), computing_on(places[0]):
        torch.manual_seed(0)
        with torch.device(device_of(places[0])):
            net = model.build(False)
        profile = _profile(model, net, runs, timeout)
        told("profiled")
        ways = [
            _Way(run, whose, balance)
            for run in runs
            for whose, balance in _balances(profile, run).items()
        ]
        times = _measured(model, net, ways, places, rounds, told)
    return {
        "about": model.about,
        # Both, because there were runs that ended early.
        "turns": rounds,
        "rounds": rounds,
        "flags": list(profile.provenance.get("flags", [])),
        "runs": [
            {
                "name": way.run.name,
                "whose": way.whose,
                "batch": way.run.batch,
                "chunks": way.run.chunks,
                "checkpoint": way.run.checkpoint,
                "balance": list(way.balance),
                "predicted": _predicted(profile, way),
                "seconds": [float(q) for q in np.percentile(seconds, [25, 50, 75])],
            }
            for way, seconds in times.items()
        ],
    }


class _Way(NamedTuple):
    """A published run, and the balance that it is done with: torchgpipe's, or the planner's."""

    run: Run
    whose: str
    balance: tuple[int, ...]


def _places() -> list[Place]:
    if torch.cuda.is_available():
        return list(shares_of_device(N_SHARES))
    return [torch.device("cpu")] * N_SHARES


@contextmanager
def _in_float32() -> Iterator[None]:
    """Have no products in a shorter format."""
    before = torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32 = before


def _shorter(model: SpeedModel, run: Run) -> Run:
    """Return a run with its micro-batches as large and as many as they are measured."""
    chunks = min(run.chunks, CHUNKS[model.name][run.name])
    rows = run.rows // ROWS_DIVISOR.get(model.name, 1)
    return replace(run, chunks=chunks, batch=rows * chunks)


def _profile(
    model: SpeedModel, net: torch.nn.Sequential, runs: list[Run], timeout: float | None
) -> Profile:
    """Measure the layers on the current stream, at micro-batches of several partitions.

    Those are the smallest, the largest, and those of the largest mini-batch.
    """
    longest = max(runs, key=lambda run: run.batch)
    sizes = {run.rows for run in runs if run.n_partitions > 1}
    images, target = model.make_data(longest.batch)
    return gb.profile_model(
        net,
        images,
        chunks=longest.chunks,
        # Other sizes are on the line through these, also the larger ones of one partition.
        rows=sorted({min(sizes), max(sizes)} - {longest.rows}),
        loss_fn=model.loss_fn,
        target=target,
        optimizer=model.make_optimizer,
        timeout=timeout,
        progress=False,
    )


def _balances(profile: Profile, run: Run) -> dict[str, tuple[int, ...]]:
    """Return torchgpipe's balance of a run, and the planner's if it is another."""
    found = {"torchgpipe's": run.balance}
    if run.n_partitions > 1:
        ours = fastest_balance(
            profile, run.n_partitions, run.rows, run.chunks, checkpoint=run.checkpoint
        )
        if ours != run.balance:
            found["planner's"] = ours
    return found


def _predicted(profile: Profile, way: _Way) -> dict[str, float | None]:
    """Predict a step: if launching cost nothing, and if one host launches for all partitions."""
    run = way.run
    sized = profile.at_rows(run.rows, mini_batch_rows=run.batch)
    free = replace(
        sized,
        layers=tuple(
            replace(layer, forward_host_time=None, backward_host_time=None)
            for layer in sized.layers
        ),
    )
    return {
        name: evaluate(costs, way.balance, chunks=run.chunks, checkpoint=run.checkpoint).step_time
        for name, costs in (("devices", free), ("host", sized))
    }


def _measured(
    model: SpeedModel,
    net: torch.nn.Sequential,
    ways: list[_Way],
    places: list[Place],
    rounds: int,
    told: Callable[[str], None],
) -> dict[_Way, list[float]]:
    """Return the seconds of a step in each way in each turn of all ways."""
    times: dict[_Way, list[float]] = {way: [] for way in ways}
    shuffler = random.Random(0)
    for turn in range(rounds + 1):
        order = list(ways)
        shuffler.shuffle(order)
        for way in order:
            seconds = _step_seconds(model, net, way, places)
            told(f"turn {turn}: {seconds:6.2f} s  {way.run.name}, {way.whose}")
            if turn:  # the first finds libraries that are not loaded, and memory not allocated
                times[way].append(seconds)
    return times


def _step_seconds(
    model: SpeedModel,
    net: torch.nn.Sequential,
    way: _Way,
    places: list[Place],
) -> float:
    """Do one step of a pipeline that is made for it, or of the plain model."""
    device = device_of(places[0])
    images, target = (data.to(device) for data in model.make_data(way.run.batch))
    optimizer = model.make_optimizer(list(net.parameters()))
    forward: Callable[[Tensor], Tensor] = net
    pipe = None
    if way.run.checkpoint != "never":
        pipe = forward = GPipe(
            net,
            list(way.balance),
            devices=places[: len(way.balance)],
            chunks=way.run.chunks,
            checkpoint=way.run.checkpoint,
        )
    gc.collect()
    optimizer.zero_grad()
    wait_for(device)
    started = time.perf_counter()
    model.loss_fn(forward(images), target).backward()
    optimizer.step()
    wait_for(device)
    seconds = time.perf_counter() - started
    if pipe is not None:
        pipe.close()
    return seconds
