"""The published runs, and runs of equal and of largest batch, simulated from an estimate."""

from __future__ import annotations

from bisect import bisect_left
from typing import Any

import torch
from benchmark_tools.devices import P40

import gpipebal as gb
from gpipebal.errors import InfeasibleError
from gpipebal.problem import Link
from gpipebal.profile import Profile
from gpipebal.rates import DeviceRates
from speed_benchmark.devices import FAST_LINK, LINK, MEMORY_LIMIT
from speed_benchmark.predict import Step, fastest_balance, fits, host_seconds, step_seconds
from speed_benchmark.published import SpeedModel

#: Numbers of devices.
DEVICES = (1, 2, 4, 8)
#: More micro-batches than these change nothing any more.
MOST_CHUNKS = 1024
#: Most images of a mini-batch that the plain model is tried with.
_MOST_PLAIN = 1024


def estimate(model: SpeedModel, rates: DeviceRates = P40) -> Profile:
    """Estimate a model for a device, at the sizes of all its micro-batches."""
    divisors = [r for r in range(1, model.equal_batch + 1) if model.equal_batch % r == 0]
    rows = {*divisors, *(run.rows for run in model.runs)}
    most = max(rows)
    with torch.device("meta"):
        net = model.build(False)
        images, target = model.make_data(most)
    return gb.profile_model(
        net,
        images,
        rows=sorted(rows - {most}),
        loss_fn=model.loss_fn,
        target=target,
        optimizer=model.make_optimizer,
        method="estimate",
        rates=rates,
        progress=False,
    )


def simulate(model: SpeedModel, profile: Profile, fast: Profile) -> dict[str, Any]:
    """Return what is stored of a model: seconds of steps, with and without a host to wait for.

    Args:
        model: Which.
        profile: Its profile for the published device.
        fast: Its profile for a fast one.
    """
    return {
        "about": model.about,
        "sizes": sorted([profile.rows, *(size.rows for size in profile.other_sizes)]),
        "published": [_published(profile, run) for run in model.runs],
        "plain": {
            "equal": _plain(profile, model.equal_batch),
            "largest": _plain(profile, _largest_plain(profile)),
        },
        "equal": [_equal(model, profile, n) for n in DEVICES],
        "largest": [_largest(model, profile, n) for n in DEVICES],
        "fast": [_fast(model, fast, n) for n in DEVICES],
    }


def _found(profile: Profile, step: Step) -> dict[str, Any]:
    return {**_about(profile, step), "fits": fits(profile, step, MEMORY_LIMIT)}


def _about(profile: Profile, step: Step, link: Link = LINK) -> dict[str, Any]:
    """Tell what a step is, and its seconds: if launching cost nothing, and if one host launches."""
    return {
        "batch": step.batch,
        "rows": step.rows,
        "chunks": step.chunks,
        "balance": list(step.balance),
        "seconds": {
            "devices": step_seconds(profile, step, link, host=False),
            "host": step_seconds(profile, step, link, host=True),
            "launching": host_seconds(profile, step),
        },
    }


def _published(profile: Profile, run: Any) -> dict[str, Any]:
    theirs = Step(run.rows, run.chunks, run.balance, run.checkpoint)
    # A balance that fits, if there is one.
    limits: tuple[int | None, ...] = (MEMORY_LIMIT, None)
    for limit in limits:
        try:
            ours = fastest_balance(
                profile,
                run.n_partitions,
                run.rows,
                run.chunks,
                link=LINK,
                checkpoint=run.checkpoint,
                memory_limit=limit,
            )
            break
        except InfeasibleError:
            continue
    return {
        "name": run.name,
        "theirs": _found(profile, theirs),
        "planner": _found(profile, Step(run.rows, run.chunks, ours, run.checkpoint)),
    }


def _plain(profile: Profile, rows: int) -> dict[str, Any]:
    return _found(profile, Step(rows, 1, (profile.n_layers,), "never"))


def _largest_plain(profile: Profile) -> int:
    """Return the most images with which the plain model fits."""

    def is_too_large(rows: int) -> bool:
        return not fits(profile, Step(rows, 1, (profile.n_layers,), "never"), MEMORY_LIMIT)

    return bisect_left(range(1, _MOST_PLAIN), True, key=is_too_large)


def _equal(model: SpeedModel, profile: Profile, n_devices: int) -> dict[str, Any]:
    """Part the equal batch into as many micro-batches as make the shortest step, host and all."""
    found = None
    for rows in range(1, model.equal_batch // 2 + 1):
        chunks, rest = divmod(model.equal_batch, rows)
        if rest:
            continue
        balance = fastest_balance(profile, n_devices, rows, chunks, link=LINK)
        step = Step(rows, chunks, balance)
        seconds = step_seconds(profile, step, LINK, host=True)
        if found is None or seconds < found[0]:
            found = seconds, step
    assert found is not None
    return {"n": n_devices, **_found(profile, found[1])}


def _largest(model: SpeedModel, profile: Profile, n_devices: int) -> dict[str, Any]:
    """Take as many micro-batches of torchgpipe's size as fit in the fastest balance."""
    rows = _published_rows(model, n_devices)

    def fastest(chunks: int) -> Step:
        return Step(rows, chunks, fastest_balance(profile, n_devices, rows, chunks, link=LINK))

    def is_too_large(chunks: int) -> bool:
        return not fits(profile, fastest(chunks), MEMORY_LIMIT)

    chunks = bisect_left(range(1, MOST_CHUNKS + 1), True, key=is_too_large)
    if not chunks:
        return {"n": n_devices, "rows": rows, "chunks": 0}
    return {"n": n_devices, **_found(profile, fastest(chunks))}


def _fast(model: SpeedModel, profile: Profile, n_devices: int) -> dict[str, Any]:
    """Do on fast devices what is published for so many of most micro-batches."""
    rows = _published_rows(model, n_devices)
    chunks = 32
    balance = fastest_balance(profile, n_devices, rows, chunks, link=FAST_LINK)
    return {"n": n_devices, **_about(profile, Step(rows, chunks, balance), FAST_LINK)}


def _published_rows(model: SpeedModel, n_devices: int) -> int:
    known = {run.n_partitions for run in model.runs}
    return model.rows_of_published(n_devices if n_devices in known else min(known))
