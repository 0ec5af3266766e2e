"""Schedules side by side: one table of what each would cost for the same work."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from gpipebal.argument_kinds import check_kind, check_list, check_mapping, row_of
from gpipebal.errors import BalanceError, KindError
from gpipebal.schedule import (
    ALL_SCHEDULES,
    KNOWN_SCHEDULES,
    CheckpointMode,
    KnownSchedule,
    check_checkpoint,
    check_count,
    check_known_schedule,
    order_of,
    shares_devices,
)
from gpipebal.simulator.durations import Durations
from gpipebal.simulator.held import HeldBytes
from gpipebal.simulator.place import place
from gpipebal.simulator.tracks import memory_over_time
from gpipebal.text import aligned
from gpipebal.timeline import Timeline
from gpipebal.units import count, format_bytes, format_percent, format_seconds

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["ScheduleRow", "ScheduleTable", "compare_durations", "refused"]


@dataclass(frozen=True)
class ScheduleRow:
    """One schedule, and what it would cost.

    Attributes:
        schedule: Its name.
        partitions_per_device: How many partitions every device has.
        makespan: Seconds from the first start to the last end; None: the schedule cannot be made.
        bubble_fraction: Idle share of all devices' time.
        imbalance: Largest busy time of a device over the mean one.
        peak_bytes: Most memory on any device; None: sizes were not given.
        run_by: The software that runs it.
        refusal: Why it cannot be made for these counts; empty if it can.
    """

    schedule: str
    partitions_per_device: int
    makespan: float | None
    bubble_fraction: float | None
    imbalance: float | None
    peak_bytes: int | None
    run_by: str
    refusal: str = ""


@dataclass(frozen=True)
class ScheduleTable:
    """Schedules side by side; printed, it is a table.

    Attributes:
        rows: The fastest first; those that cannot be made last.
        n_devices: Number of devices.
        chunks: Number of micro-batches.
        checkpoint: Which micro-batches are recomputed.
        notes: What a reader should know about the costs.
    """

    rows: tuple[ScheduleRow, ...]
    n_devices: int
    chunks: int
    checkpoint: CheckpointMode
    notes: tuple[str, ...] = ()

    @property
    def best(self) -> ScheduleRow:
        """The fastest."""
        return self.rows[0]

    def row(self, schedule: str, partitions_per_device: int | None = None) -> ScheduleRow:
        """Return the row of a schedule, the faster one if there are several.

        Raises:
            UsageError: there is none.
        """
        first = row_of(self.rows, "schedule", schedule)
        if partitions_per_device is None:
            return first
        rows = [row for row in self.rows if row.schedule == schedule]
        return row_of(rows, "partitions_per_device", partitions_per_device)

    def to_frame(self) -> pd.DataFrame:
        """Return one row per schedule: seconds, fractions, bytes."""
        import pandas as pd

        return pd.DataFrame([asdict(row) for row in self.rows])

    def __str__(self) -> str:
        lines = [("schedule", "parts/device", "makespan", "bubble", "imbalance", "peak", "run by")]
        notes = list(self.notes)
        for row in self.rows:
            name, each = row.schedule, str(row.partitions_per_device)
            if row.makespan is None or row.bubble_fraction is None or row.imbalance is None:
                lines.append((name, each, "-", "-", "-", "-", row.run_by))
                notes.append(f"{row.schedule}: {row.refusal}")
                continue
            lines.append(
                (
                    name,
                    each,
                    format_seconds(row.makespan),
                    format_percent(row.bubble_fraction),
                    f"{row.imbalance:.2f}",
                    "-" if row.peak_bytes is None else format_bytes(row.peak_bytes),
                    row.run_by,
                )
            )
        title = (
            f"{count(self.n_devices, 'device')}, {count(self.chunks, 'micro-batch')}, "
            f"checkpoint {self.checkpoint!r}"
        )
        return "\n".join([title, *aligned(lines, left=(0, len(lines[0]) - 1)), *notes])


def compare_durations(
    durations: Durations | Mapping[int, Durations],
    chunks: int,
    *,
    checkpoint: CheckpointMode = "never",
    schedules: Sequence[str] = ALL_SCHEDULES,
    held: Mapping[int, Sequence[HeldBytes]] | None = None,
    overlap: bool = True,
) -> ScheduleTable:
    """Simulate schedules for the same work, and set them side by side.

    Args:
        durations: Seconds of the partitions, by the number of partitions on every device: 1, and
            others for schedules whose devices run several. A single `Durations` is for one per
            device. Launches by the host count only for schedules that `GPipe` runs, in one process;
            torch has one process for every device.
        chunks: Number of micro-batches.
        checkpoint: Which micro-batches are recomputed, also under schedules that torch runs.
        schedules: Names of the schedules to compare.
        held: Bytes of the partitions, by the number of partitions on every device.
        overlap: Whether transfers overlap with the devices' work; see `place`.

    Returns:
        A table, the fastest first. A schedule that cannot be made for these counts is in it, with
        the reason.

    Raises:
        UnsupportedPlanError: an unknown schedule.
        BalanceError: partitions that cannot be dealt out evenly, or a count below 1.

    Example:
        >>> times = Durations((1.0,) * 4, (1.0,) * 4, (2.0,) * 4)
        >>> table = compare_durations(times, 8)
        >>> [(row.schedule, row.makespan) for row in table.rows]
        [('zb_h1', 27.0), ('gpipe', 33.0), ('1f1b', 33.0), ('gpipe_in_order', 33.0)]
    """
    if isinstance(durations, Durations):
        durations = {1: durations}
    check_mapping("durations", durations, "durations={1: durations}")
    for each, times in durations.items():
        check_count("partitions_per_device", each)
        check_kind("durations", times, Durations, "durations=durations_of(profile, bounds)")
    if not durations:
        raise KindError(
            "there are no durations: len(durations)=0 (expected Durations, or some by how many "
            "every device has).\nFix: durations={1: durations}."
        )
    if held is not None:
        check_mapping("held", held, "held={1: held_of(profile, plan)}")
    schedules = check_list("schedules", schedules, str)
    n_devices = max(1, min(times.n_partitions // each for each, times in durations.items()))
    for each, times in durations.items():
        if times.n_partitions != each * n_devices:
            raise BalanceError(
                f"partitions cannot be dealt out evenly: {count(times.n_partitions, 'partition')} "
                f"with {each} on every device (expected {each * n_devices} on "
                f"{count(n_devices, 'device')}).\n"
                "Fix: give the durations of as many partitions."
            )
    check_checkpoint(checkpoint)
    chunks = check_count("chunks", chunks)
    rows = []
    for name in map(check_known_schedule, schedules):
        known = KNOWN_SCHEDULES[name]
        for each, times in durations.items():
            if (each > 1) != shares_devices(name):
                continue
            sizes = None if held is None else held.get(each)
            try:
                order = order_of(name, n_devices, chunks, checkpoint, partitions_per_device=each)
            except BalanceError as error:
                rows.append(refused(name, each, str(error).replace("\n", " ")))
                continue
            times = times if known.is_ours else times.without_launches
            timeline = place(order, times, overlap=overlap)
            rows.append(_placed(known, each, timeline, sizes))
    rows.sort(key=lambda row: (row.makespan is None, row.makespan or 0.0))
    return ScheduleTable(tuple(rows), n_devices, chunks, checkpoint)


def _placed(
    known: KnownSchedule, each: int, timeline: Timeline, sizes: Sequence[HeldBytes] | None
) -> ScheduleRow:
    peak = None
    if sizes is not None:
        peak = max(track.peak for track in memory_over_time(timeline, sizes))
    return ScheduleRow(
        schedule=known.name,
        partitions_per_device=each,
        makespan=timeline.makespan,
        bubble_fraction=timeline.bubble_fraction,
        imbalance=timeline.imbalance,
        peak_bytes=peak,
        run_by=known.run_by,
    )


def refused(schedule: str, partitions_per_device: int, why: str) -> ScheduleRow:
    """Return the row of a schedule that cannot be made."""
    by = KNOWN_SCHEDULES[schedule].run_by
    return ScheduleRow(schedule, partitions_per_device, None, None, None, None, by, why)
