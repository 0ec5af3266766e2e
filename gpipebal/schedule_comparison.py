"""`compare_schedules`: what a profiled chain would cost under each known schedule."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from gpipebal.argument_kinds import check_kind, check_list, is_list, plain_number
from gpipebal.errors import BalanceError
from gpipebal.plan.checks import check_chunks
from gpipebal.planner.times import with_turns
from gpipebal.problem import Link, Problem, links_of
from gpipebal.problem.checks import check_flag
from gpipebal.problem.chunking import at_chunks
from gpipebal.profile import Profile
from gpipebal.schedule import (
    ALL_SCHEDULES,
    CheckpointMode,
    check_count,
    check_known_schedule,
    shares_devices,
)
from gpipebal.simulator import (
    Durations,
    HeldBytes,
    ScheduleRow,
    ScheduleTable,
    compare_durations,
    durations_of,
    held_of,
)
from gpipebal.simulator.comparison import refused
from gpipebal.solvers import split
from gpipebal.units import count

__all__ = ["compare_schedules"]


def compare_schedules(
    profile: Profile,
    n_devices: int,
    *,
    chunks: int | None = None,
    checkpoint: CheckpointMode = "never",
    schedules: Sequence[str] = ALL_SCHEDULES,
    partitions_per_device: int | Sequence[int] = 2,
    bandwidth: float | None = None,
    latency: float = 0.0,
    overlap: bool = True,
) -> ScheduleTable:
    """Simulate a profiled chain under every known schedule, and set them side by side.

    For each number of partitions the chain is cut so that the largest time of a partition is
    smallest: the same cut for all schedules with that number. Times that the profile does not
    have are estimated, as `gpipebal.simulator.durations_of` describes.

    Args:
        profile: Costs of the layers for one micro-batch.
        n_devices: Number of devices, 1 to the number of layers.
        chunks: Micro-batches per mini-batch; None: the profile's. As in `solve`, if the profile was
            taken at several numbers of rows the mini-batch stays the same whatever `chunks` is; if
            at one, every micro-batch has that many rows, and a note says so.
        checkpoint: Which micro-batches are recomputed.
        schedules: Names of the schedules; see `gpipebal.schedule.ALL_SCHEDULES`.
        partitions_per_device: Number, or numbers, to try with schedules that go round the devices
            several times.
        bandwidth: Bytes per second between devices; None: transfers take no time.
        latency: Seconds of every transfer, in addition.
        overlap: Whether transfers overlap with the devices' work; see `gpipebal.simulator.place`.

    Returns:
        A table, the fastest first. Its makespans count three things that `Plan.makespan` does not,
        where the profile knows them. A forward that is recomputed later may take less than one that
        records a graph. Devices may have to wait for the one process that launches for all of them,
        as `GPipe` does. And on a CPU an action takes longer after one of the other kind, which
        happens all the time under 1F1B; this is counted for all schedules, except for backwards in
        two parts, and not at all with a bandwidth or latency, which mean other devices. Its peaks
        count all that a plan counts except the optimizer's step, with the loss inside the last
        partition, micro-batch by micro-batch: the one way that all schedules have.

    Raises:
        BalanceError: a count below 1, more devices than layers, more micro-batches than rows or
            than a plan can have, or no schedule.
        KindError: `profile` is not a Profile.
        UnsupportedPlanError: an unknown schedule.

    Example:
        >>> profile = Profile.from_costs([1.0] * 8, chunks=8)
        >>> table = compare_schedules(profile, 4)
        >>> [table.row(name).makespan for name in ("zb_h1", "interleaved_1f1b", "gpipe")]
        [54.0, 57.0, 66.0]
    """
    check_kind("profile", profile, Profile)
    n_devices = check_count("n_devices", n_devices)
    chunks = profile.chunks if chunks is None else check_chunks(chunks)
    profile, notes = at_chunks(profile, chunks)
    if n_devices > profile.n_layers:
        raise BalanceError(
            f"devices are more than layers: n_devices={n_devices} (expected at most "
            f"{profile.n_layers}).\nFix: n_devices={profile.n_layers}."
        )
    if not isinstance(checkpoint, str):
        raise BalanceError(
            f"several checkpoint modes are given: checkpoint={checkpoint!r:.60} (expected one, as "
            "schedules are compared with other numbers of partitions).\n"
            "Fix: checkpoint='except_last'."
        )
    overlap = check_flag("overlap", overlap)
    schedules = (schedules,) if isinstance(schedules, str) else check_list("schedules", schedules)
    schedules = tuple(map(check_known_schedule, schedules))
    if not schedules:
        raise BalanceError(
            "schedules leave nothing to compare: schedules=[] (expected one or more names).\n"
            f"Fix: schedules={ALL_SCHEDULES!r}, or leave it out."
        )
    links = None
    if bandwidth is not None or plain_number(latency) != 0:
        link = Link(math.inf if bandwidth is None else bandwidth, latency, overlap)
        links = links_of(profile, link)
    durations: dict[int, Durations] = {}
    held: dict[int, list[HeldBytes]] = {}
    impossible: list[ScheduleRow] = []
    given = partitions_per_device
    several = given if is_list(given) else (given,)
    asked = [check_count("partitions_per_device", one) for one in several]
    if max(asked, default=1) < 2 and all(map(shares_devices, schedules)):
        raise BalanceError(
            "partitions leave nothing to interleave: "
            f"partitions_per_device={asked} (expected 2 or more, for schedule "
            f"{', '.join(map(repr, schedules))}).\n"
            "Fix: partitions_per_device=2, or other schedules."
        )
    for each in dict.fromkeys((1, *asked)):
        if each * n_devices > profile.n_layers:
            layers = count(profile.n_layers, "layer")
            why = f"the chain has {layers} for {count(each * n_devices, 'partition')}."
            names = filter(shares_devices, dict.fromkeys(schedules))
            impossible += [refused(name, each, why) for name in names]
            continue
        bounds = _bounds(profile, each * n_devices, chunks, checkpoint)
        times = durations_of(profile, bounds, links=links)
        durations[each] = with_turns(profile, times) if links is None else times
        # Every schedule can have the loss inside the pipeline, and most can have it only there.
        held[each] = held_of(
            profile,
            bounds,
            chunks=chunks,
            checkpoint=checkpoint,
            loss_inside=True,
            shared_memory=profile.shares_memory,
        )
    table = compare_durations(
        durations,
        chunks,
        checkpoint=checkpoint,
        schedules=schedules,
        held=held,
        overlap=overlap,
    )
    return replace(table, rows=(*table.rows, *impossible), notes=notes)


def _bounds(
    profile: Profile, n_partitions: int, chunks: int, checkpoint: CheckpointMode
) -> tuple[int, ...]:
    """Cut the chain so that the largest time of a partition is smallest."""
    problem = Problem(
        **profile.layer_times,
        n_partitions=n_partitions,
        chunks=chunks,
        checkpoint=checkpoint,
        n_frozen=profile.n_frozen,
    )
    return tuple(split(problem, "bottleneck").bounds)
