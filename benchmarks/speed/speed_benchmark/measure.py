"""Small models on two CPU partitions, measured, and simulated from a profile of one core."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from benchmark_tools.turns import seconds_in_turns

import gpipebal as gb
from gpipebal.pipeline import GPipe
from gpipebal.planner import evaluate
from gpipebal.profile import Profile
from speed_benchmark.predict import fastest_balance
from speed_benchmark.published import SpeedModel
from speed_benchmark.simulate import DEVICES

#: Micro-batches of a mini-batch.
CHUNKS = 8


def measure(model: SpeedModel, *, rounds: int, timeout: float | None = None) -> dict[str, Any]:
    """Profile a small model with one thread, simulate it, and compare it with the plain one.

    Args:
        model: Which.
        rounds: How often each way does a timed step; the ways take turns.
        timeout: Seconds for the repeats of the profile; None: the profiler's default.
    """
    torch.manual_seed(0)
    torch.set_num_threads(1)
    net = model.build(True)
    n_rows = model.small_rows * CHUNKS
    images, target = model.make_data(n_rows, small=True)
    profile = gb.profile_model(
        net,
        images,
        chunks=CHUNKS,
        rows=(n_rows, 2 * model.small_rows),
        threads=1,
        partitions=2,
        loss_fn=model.loss_fn,
        target=target,
        optimizer=model.make_optimizer,
        timeout=timeout,
        progress=False,
    )
    balances = {n: fastest_balance(profile, n, model.small_rows, CHUNKS) for n in DEVICES}
    plain = profile.at_rows(n_rows, mini_batch_rows=n_rows)
    return {
        "about": model.small_about,
        "batch": n_rows,
        "chunks": CHUNKS,
        "predicted": {
            "plain": _seconds(plain, (profile.n_layers,), "never"),
            **{str(n): _seconds(profile, balances[n], "except_last") for n in DEVICES},
        },
        "balances": {str(n): list(balance) for n, balance in balances.items()},
        "flags": list(profile.provenance.get("flags", [])),
        "measured": _measured(model, net, (images, target), balances, rounds),
    }


def _seconds(profile: Profile, balance: tuple[int, ...], checkpoint: Any) -> float:
    seconds = evaluate(profile, balance, checkpoint=checkpoint).step_time
    assert seconds is not None
    return seconds


def _measured(
    model: SpeedModel,
    net: torch.nn.Sequential,
    batch: tuple[torch.Tensor, torch.Tensor],
    balances: dict[int, tuple[int, ...]],
    rounds: int,
) -> dict[str, list[float]]:
    """Return quartiles of the seconds of a step: plain, with one partition, and with two."""
    images, target = batch
    pipes = {
        str(n): GPipe(
            net,
            list(balances[n]),
            devices=["cpu"] * n,
            chunks=CHUNKS,
            checkpoint="except_last",
            threads_per_partition=1,
        )
        for n in (1, 2)
    }
    optimizer = model.make_optimizer(list(net.parameters()))
    ways: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {"plain": net, **pipes}

    def step(forward: Callable[[torch.Tensor], torch.Tensor]) -> float:
        optimizer.zero_grad()
        started = time.perf_counter()
        model.loss_fn(forward(images), target).backward()
        optimizer.step()
        return time.perf_counter() - started

    times = seconds_in_turns({name: partial(step, way) for name, way in ways.items()}, rounds)
    for pipe in pipes.values():
        pipe.close()
    return {
        name: [float(q) for q in np.percentile(found, [25, 50, 75])]
        for name, found in times.items()
    }
