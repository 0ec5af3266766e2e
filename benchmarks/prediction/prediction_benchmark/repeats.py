"""Repeats: the same models profiled again and again, beside work that is always the same.

Profiles of one model differ from each other because the profiler measures for a short while, and
because the machine is not always equally fast. So in each turn every model is profiled, and right
before it two pieces of work are clocked that have nothing to do with profiles: a matrix product,
which computes, and an addition of long vectors, which waits for memory. They run in as many threads
as the partitions will, as the profiler's rounds do. By as much as they differ from turn to turn,
profiles must.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from statistics import median
from typing import Any

import torch

import gpipebal as gb
from gpipebal.problem import to_bounds
from gpipebal.profile import Profile
from prediction_benchmark.measure import MIDDLE, Subject, take_profiles
from prediction_benchmark.settings import N_PARTITIONS

#: Times of a partition that are compared.
KINDS = ("forward", "backward", "recompute")
#: Seconds for which each piece of work is repeated in a turn.
WORK_SECONDS = 0.4


def measure_repeats(
    subjects: Sequence[Subject],
    turns: int,
    timeout: float | None,
    *,
    work_seconds: float = WORK_SECONDS,
    told: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Profile models in turns, and clock work that is always the same in the same turns.

    Args:
        subjects: The models.
        turns: How often each is profiled.
        timeout: Seconds for the repeats of a profile; None: the profiler's default.
        work_seconds: Seconds for each piece of work in a turn.
        told: Gets a line now and then.

    Returns:
        By model: the balance, the seconds of each partition by kind of work and turn, and the
        seconds of each piece of work by turn.
    """
    found: dict[str, Any] = {}
    for turn in range(turns):
        for subject in subjects:
            work = {name: seconds_of_work(make, work_seconds) for name, make in WORK.items()}
            profile = take_profiles(subject, (MIDDLE,), timeout)[MIDDLE]
            of_model = found.setdefault(
                subject.model.name,
                {
                    "balance": _balance(profile),
                    "partitions": [{kind: [] for kind in KINDS} for _ in range(N_PARTITIONS)],
                    "work": {name: [] for name in WORK},
                },
            )
            for partition, times in zip(
                of_model["partitions"], _times(profile, of_model["balance"]), strict=True
            ):
                for kind in KINDS:
                    partition[kind].append(times[kind])
            for name, seconds in work.items():
                of_model["work"][name].append(round(seconds, 8))
        told(f"repeats: turn {turn + 1} of {turns}")
    return found


def _balance(profile: Profile) -> list[int]:
    return gb.solve(profile, N_PARTITIONS, chunks=MIDDLE).balance


def _times(profile: Profile, balance: Sequence[int]) -> list[dict[str, float]]:
    """Add up the seconds of each partition by kind."""
    return [
        {
            kind: round(sum(getattr(la, f"{kind}_time") for la in profile.layers[a:b]), 7)
            for kind in KINDS
        }
        for a, b in pairwise(to_bounds(balance))
    ]


def _matrix_product() -> Callable[[], object]:
    left, right, out = (torch.ones(256, 256) for _ in range(3))
    return lambda: torch.mm(left, right, out=out)


def _long_vectors() -> Callable[[], object]:
    # Larger than most caches.
    vector, out = torch.ones(2**22), torch.ones(2**22)
    return lambda: torch.add(vector, 1.0, out=out)


#: Pieces of work: each makes a function with memory of its own.
WORK: dict[str, Callable[[], Callable[[], object]]] = {
    "matrix product": _matrix_product,
    "long vectors": _long_vectors,
}


def seconds_of_work(make: Callable[[], Callable[[], object]], seconds: float) -> float:
    """Repeat a piece of work in as many threads as there will be partitions.

    Args:
        make: Makes the work of one thread.
        seconds: How long, about.

    Returns:
        Median seconds of one repeat, of all threads together.
    """
    times: list[float] = []
    deadline = time.perf_counter() + seconds

    def repeat() -> None:
        torch.set_num_threads(1)
        work = make()
        work()
        own = []
        while not own or time.perf_counter() < deadline:
            started = time.perf_counter()
            work()
            own.append(time.perf_counter() - started)
        times.extend(own)

    threads = [threading.Thread(target=repeat) for _ in range(N_PARTITIONS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return median(times)
