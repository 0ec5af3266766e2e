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
from typing import Any

import numpy as np
import torch
from benchmark_tools.shares import about_shares, shares_of_device
from torch import Tensor

import gpipebal as gb
from gpipebal.pipeline import GPipe
from gpipebal.planner import evaluate
from gpipebal.profile import Profile
from speed_benchmark.predict import Step, fastest_balance
from speed_benchmark.published import Run, SpeedModel

__all__ = ["N_SHARES", "about_shares", "measure_shares"]

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
    timeout: float | None,
    small: bool = False,
    measured: dict[str, Any] | None = None,
    keep: Callable[[dict[str, Any]], None] = lambda found: None,
    told: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Profile a model on one share, simulate the published runs, and measure them in turns.

    Args:
        model: Which.
        rounds: How often each way does a timed step.
        timeout: Seconds for the repeats of the profile.
        small: Whether to take the model that a CPU can run, to try the program.
        measured: What this returned on such a device: its balances and seconds are kept, and only
            profile and predictions made anew. None: nothing.
        keep: Called after each timed turn with what would be returned if it were the last, so that
            a run that is ended early has not measured in vain.
        told: Called with lines about how far it is.

    Returns:
        The runs, and how many turns were made and asked for: fewer if it was ended early.
    """
    places = _places()
    runs = [_shorter(model, run, small) for run in model.runs if run.name in CHUNKS[model.name]]
    with _in_float32(), _current(places[0]):
        torch.manual_seed(0)
        with torch.device(_device_of(places[0])):
            net = model.build(small)
        profile = _profile(model, net, runs, timeout, small)
        told("profiled")
        if measured is None:
            ways = {
                f"{run.name}, {whose}": (run, balance)
                for run in runs
                for whose, balance in _balances(profile, run).items()
            }
            turns = {"turns": 0, "rounds": rounds}
            for times in _measured(model, net, ways, places, rounds, small, told):
                turns["turns"] += 1
                keep(_record(model, profile, ways, times, turns, small))
        else:
            run_of = {run.name: run for run in runs}
            known = {f"{old['name']}, {old['whose']}": old for old in measured["runs"]}
            ways = {name: (run_of[old["name"]], old["balance"]) for name, old in known.items()}
            times = {name: old["seconds"] for name, old in known.items()}
            turns = {name: measured[name] for name in ("turns", "rounds")}
    return _record(model, profile, ways, times, turns, small)


def _record(
    model: SpeedModel,
    profile: Profile,
    ways: dict[str, tuple[Run, tuple[int, ...]]],
    times: dict[str, list[float]],
    turns: dict[str, int],
    small: bool,
) -> dict[str, Any]:
    return {
        "about": model.small_about if small else model.about,
        **turns,
        "flags": list(profile.provenance.get("flags", [])),
        "runs": [
            {
                "name": run.name,
                "whose": name.rpartition(", ")[2],
                "batch": run.batch,
                "chunks": run.chunks,
                "checkpoint": run.checkpoint,
                "balance": list(balance),
                "predicted": _predicted(profile, run, balance),
                "seconds": times[name],
            }
            for name, (run, balance) in ways.items()
        ],
    }


def _places() -> list[torch.device | torch.cuda.Stream]:
    if torch.cuda.is_available():
        return list(shares_of_device(N_SHARES))
    return [torch.device("cpu")] * N_SHARES


def _device_of(place: torch.device | torch.cuda.Stream) -> torch.device:
    return place.device if isinstance(place, torch.cuda.Stream) else place


@contextmanager
def _current(place: torch.device | torch.cuda.Stream) -> Iterator[None]:
    """Let the caller compute on a share."""
    if isinstance(place, torch.cuda.Stream):
        with torch.cuda.stream(place):
            yield
    else:
        yield


@contextmanager
def _in_float32() -> Iterator[None]:
    """Have no products in a shorter format."""
    before = torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32 = before


def _shorter(model: SpeedModel, run: Run, small: bool) -> Run:
    """Return a run with its micro-batches as large and as many as they are measured."""
    chunks = min(run.chunks, CHUNKS[model.name][run.name])
    rows = model.small_rows if small else run.rows // ROWS_DIVISOR.get(model.name, 1)
    return replace(run, chunks=chunks, batch=rows * chunks)


def _profile(
    model: SpeedModel, net: torch.nn.Sequential, runs: list[Run], timeout: float | None, small: bool
) -> Profile:
    """Measure the layers on the current stream, at micro-batches of several partitions.

    Those are the smallest, the largest, and those of the largest mini-batch.
    """
    longest = max(runs, key=lambda run: run.batch)
    sizes = {run.rows for run in runs if run.n_partitions > 1}
    images, target = model.make_data(longest.batch, small=small)
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


def _predicted(profile: Profile, run: Run, balance: tuple[int, ...]) -> dict[str, float | None]:
    """Predict a step: if launching cost nothing, and if one host launches for all partitions."""
    step = Step(run.rows, run.chunks, balance, run.checkpoint)
    sized = profile.at_rows(step.rows, mini_batch_rows=step.batch)
    free = replace(
        sized,
        layers=tuple(
            replace(layer, forward_host_time=None, backward_host_time=None)
            for layer in sized.layers
        ),
    )
    return {
        name: evaluate(costs, balance, chunks=step.chunks, checkpoint=step.checkpoint).step_time
        for name, costs in (("devices", free), ("host", sized))
    }


def _measured(
    model: SpeedModel,
    net: torch.nn.Sequential,
    ways: dict[str, tuple[Run, tuple[int, ...]]],
    places: list[torch.device | torch.cuda.Stream],
    rounds: int,
    small: bool,
    told: Callable[[str], None],
) -> Iterator[dict[str, list[float]]]:
    """Yield quartiles of the seconds of a step in each way after each turn of all ways."""
    optimizer = model.make_optimizer(list(net.parameters()))
    device = _device_of(places[0])
    times: dict[str, list[float]] = {name: [] for name in ways}
    shuffler = random.Random(0)
    for turn in range(rounds + 1):
        names = list(ways)
        shuffler.shuffle(names)
        for name in names:
            run, balance = ways[name]
            images, target = (data.to(device) for data in model.make_data(run.batch, small=small))
            forward: Callable[[Tensor], Tensor] = net
            pipe = None
            if run.checkpoint != "never":
                pipe = forward = GPipe(
                    net,
                    list(balance),
                    devices=places[: len(balance)],
                    chunks=run.chunks,
                    checkpoint=run.checkpoint,
                )
            gc.collect()
            optimizer.zero_grad()
            _wait(device)
            started = time.perf_counter()
            model.loss_fn(forward(images), target).backward()
            optimizer.step()
            _wait(device)
            seconds = time.perf_counter() - started
            told(f"turn {turn}: {seconds:6.2f} s  {name}")
            if turn:  # the first finds libraries that are not loaded, and memory not allocated
                times[name].append(seconds)
            if pipe is not None:
                pipe.close()
        if turn:
            yield {
                name: [float(q) for q in np.percentile(found, [25, 50, 75])]
                for name, found in times.items()
            }


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
