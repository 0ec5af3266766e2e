"""RunReport: what a run predicted, what it measured, and how that compares with the plain model."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

from gpipebal.files import write_record
from gpipebal.plan import PeakMemory
from gpipebal.text import aligned
from gpipebal.units import count, format_bytes, format_change, format_percent, format_seconds

__all__ = ["PlainTimes", "RunReport", "notes_on_scatter", "notes_on_threads", "notes_on_waiting"]

FORMAT = "gpipebal-report"
VERSION = 1

#: From here on steps scatter so widely that a comparison with them may mislead: by
#: `PlainTimes.scatter`, a fraction of their median.
WIDE_SCATTER = 0.1

#: From here on more threads have slowed the plain model down so much that it is not their work: by
#: the factor that a step takes longer than with fewer.
SLOWED = 2.0

#: From here on a predicted peak memory is so far above the measured one that it needs a word: by
#: the factor that it is larger.
FAR_OVER = 1.02


@dataclass(frozen=True)
class PlainTimes:
    """Training steps of the plain model over the same micro-batches.

    Attributes:
        where: What it ran with, such as ``'1 thread'`` or ``'cuda:0'``.
        threads: Intra-operation threads on a CPU; None on another device.
        step_times: Seconds of each step.
    """

    where: str
    threads: int | None
    step_times: tuple[float, ...]

    @property
    def step_time(self) -> float:
        """Median seconds of a step."""
        return median(self.step_times)

    @property
    def scatter(self) -> float:
        """Median distance of the steps from their median, as a fraction of it.

        A single slow step, which hardly moves the median, hardly changes it.

        Example:
            >>> PlainTimes("1 thread", 1, (1.0, 1.0, 9.0)).scatter
            0.0
        """
        middle = self.step_time
        return median(abs(time - middle) for time in self.step_times) / middle if middle else 0.0


def notes_on_scatter(plain: Sequence[PlainTimes]) -> list[str]:
    """Warn in one line of all plain runs whose steps scatter by `WIDE_SCATTER` or more."""
    wide = [f"{format_percent(r.scatter)} ({r.where})" for r in plain if r.scatter >= WIDE_SCATTER]
    if not wide:
        return []
    return [
        f"Steps of the plain model scatter: half of them are off their median by {', '.join(wide)} "
        f"or more (expected less than {format_percent(WIDE_SCATTER)}), so the comparison may "
        "mislead; run again while nothing else does, or with more steps."
    ]


def notes_on_threads(plain: Sequence[PlainTimes]) -> list[str]:
    """Warn if the plain model takes `SLOWED` times as long or more with more threads as with fewer.

    Example:
        >>> runs = [PlainTimes("1 thread", 1, (1.0,)), PlainTimes("2 threads", 2, (9.0,))]
        >>> (note,) = notes_on_threads(runs)
        >>> note.partition(",")[0]
        'The plain model takes 9.0 times as long with 2 threads as with 1 thread'
    """
    runs = [run for run in plain if run.threads and run.step_time]
    for more in runs:
        others = [run for run in runs if (run.threads or 0) < (more.threads or 0)]
        fewer = min(others, key=lambda run: run.step_time, default=more)
        if more.step_time / fewer.step_time >= SLOWED:
            return [
                f"The plain model takes {more.step_time / fewer.step_time:.1f} times as long with "
                f"{more.where} as with {fewer.where}, as where other programs use the cores and "
                "threads of one operation wait for each other, so that comparison may mislead; run "
                "again while nothing else does, or with OMP_WAIT_POLICY=passive in the environment."
            ]
    return []


def notes_on_waiting(memories: Sequence[PeakMemory], peak_bytes: Sequence[int]) -> list[str]:
    """Say of which partitions less memory was measured because less waited than may have to.

    Args:
        memories: The predicted peak memory of each partition.
        peak_bytes: The measured one.

    Example:
        >>> (note,) = notes_on_waiting([PeakMemory(activations=900, waiting=100)], [950])
        >>> note.partition("(")[2].partition(")")[0]
        '100 B of partition 0'
    """
    over = [
        f"{format_bytes(memory.waiting)} of partition {j}"
        for j, (memory, found) in enumerate(zip(memories, peak_bytes, strict=True))
        if memory.total - memory.waiting <= found and memory.total >= FAR_OVER * found
    ]
    if not over:
        return []
    return [
        "Predicted peak memory counts all values that may have to wait for busy neighbours "
        f"({', '.join(over)}); in the measured step fewer waited."
    ]


@dataclass(frozen=True)
class RunReport:
    """Result of `gpipebal.run.run`. Times in seconds of one training step, sizes in bytes.

    Attributes:
        model: What was trained.
        n_parameters: Number of its parameters.
        devices: Device of each partition.
        cores: Cores that the process may use.
        threads_per_partition: Intra-operation threads of a CPU partition; None on CUDA.
        balance: Layers in each partition.
        chunks: Micro-batches per mini-batch.
        mini_batch_rows: Rows of the mini-batch.
        image_size: Pixels of the images' side; None: no images, or a user's model.
        checkpoint: Which micro-batches were recomputed.
        seed: Seed of parameters and data.
        loss: Name of the loss.
        optimizer: The optimizer, with its learning rate.
        predicted_step_time: None when a part of the step could not be measured beforehand.
        step_times: Measured, one per step after the warm-up.
        predicted_peak_bytes: Of each partition.
        peak_bytes: Measured in a step of its own, of each partition.
        total_peak_bytes: The most that all partitions held at one time.
        plain: The plain model, once for each way in which it was run.
        notes: What the reader should know before trusting the figures.
        output: Folder of the files.
        provenance: Provenance of the profile: versions, date, device names.
        schedule: Schedule of the pipeline: ``'gpipe'``, with the loss after it, or ``'1f1b'``, with
            the loss inside.
    """

    model: str
    n_parameters: int
    devices: tuple[str, ...]
    cores: int
    threads_per_partition: int | None
    balance: list[int]
    chunks: int
    mini_batch_rows: int
    image_size: int | None
    checkpoint: str
    seed: int
    loss: str
    optimizer: str
    predicted_step_time: float | None
    step_times: tuple[float, ...]
    predicted_peak_bytes: tuple[int, ...]
    peak_bytes: tuple[int, ...]
    total_peak_bytes: int
    plain: tuple[PlainTimes, ...]
    notes: tuple[str, ...] = ()
    output: str = ""
    provenance: dict[str, Any] = field(default_factory=dict)
    schedule: str = "gpipe"

    @property
    def step_time(self) -> float:
        """Median of the measured steps."""
        return median(self.step_times)

    @property
    def step_time_error(self) -> float | None:
        """Predicted over measured step time, less one; None without a prediction."""
        return _error(self.predicted_step_time, self.step_time)

    @property
    def speedups(self) -> dict[str, float]:
        """How many times as fast as each plain run the pipeline is; below 1 it is slower."""
        return {run.where: run.step_time / self.step_time for run in self.plain}

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON values, with medians and ratios besides the raw times."""
        return {
            "format": FORMAT,
            "version": VERSION,
            **asdict(self),
            "step_time": self.step_time,
            "step_time_error": self.step_time_error,
            "speedups": self.speedups,
        }

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the report to a JSON file, whole or not at all."""
        write_record(path, self.to_dict())

    def __str__(self) -> str:
        lines = [
            _title(self),
            "",
            *_predictions(self),
            "",
            *_comparison(self),
            "",
            *_verdicts(self),
        ]
        lines += [f"Note: {note}" for note in self.notes]
        return "\n".join(lines)


def _title(report: RunReport) -> str:
    devices = list(dict.fromkeys(report.devices))
    threads = report.threads_per_partition
    each = f", {count(threads, 'thread')} each" if threads is not None else ""
    partitions = count(len(report.devices), "partition")
    rows = count(report.mini_batch_rows, "row")
    modes = f"checkpoint={report.checkpoint!r}"
    if report.schedule != "gpipe":
        modes = f"schedule={report.schedule!r}, {modes}"
    return (
        f"{report.model} on {partitions} ({', '.join(devices)}{each}), "
        f"a mini-batch of {rows} in {count(report.chunks, 'micro-batch')}, "
        f"{modes}, loss {report.loss}, optimizer {report.optimizer}"
    )


def _predictions(report: RunReport) -> list[str]:
    rows = [["", "predicted", "measured", "predicted is off by"]]
    predicted = report.predicted_step_time
    rows.append(
        [
            "training step",
            "unknown" if predicted is None else format_seconds(predicted),
            format_seconds(report.step_time),
            _signed(report.step_time_error),
        ]
    )
    pairs = [*zip(report.predicted_peak_bytes, report.peak_bytes, strict=True)]
    named = [(f"peak memory, partition {j}", *pair) for j, pair in enumerate(pairs)]
    total = sum(report.predicted_peak_bytes), sum(report.peak_bytes)
    for name, expected, found in [*named, ("peak memory, sum", *total)]:
        rows.append([name, format_bytes(expected), format_bytes(found)])
        rows[-1].append(_signed(_error(expected, found)))
    # Partitions have their peaks at different moments: the sum is not a prediction of this one.
    rows.append(["memory, most at one time", "", format_bytes(report.total_peak_bytes), ""])
    return aligned(rows, gap="   ")


def _comparison(report: RunReport) -> list[str]:
    runs = [("pipeline", report.step_times)]
    runs += [(f"plain model, {run.where}", run.step_times) for run in report.plain]
    rows = [["training step of the", "median", "fastest", "slowest", "pipeline is"]]
    for name, times in runs:
        ratio = "" if name == "pipeline" else f"{median(times) / report.step_time:.2f}x as fast"
        figures = [format_seconds(value) for value in (median(times), min(times), max(times))]
        rows.append([name, *figures, ratio])
    return aligned(rows, gap="   ")


def _verdicts(report: RunReport) -> list[str]:
    lines = []
    for run in report.plain:
        longer = report.step_time / run.step_time - 1
        faster, less = ("faster", "less") if longer < 0 else ("slower", "more")
        plain = f"plain model {'on' if run.threads is None else 'with'} {run.where}"
        lines.append(
            f"The pipeline is {faster} than the {plain}: "
            f"it takes {format_percent(abs(longer))} {less} time per step"
            f"{_in_turns(faster, report.step_times, run.step_times)}."
        )
    lines.append(
        f"Times are of {count(len(report.step_times), 'step')}, taken alternately after one "
        "warm-up; the plain model does the same micro-batches one by one, without recompute."
    )
    return lines


def _in_turns(faster: str, pipeline: Sequence[float], plain: Sequence[float]) -> str:
    """Say in how many turns the pipeline was what it is on the whole: other load mixes them."""
    slower = [one > other for one, other in zip(pipeline, plain, strict=False)]
    alike = slower.count(faster == "slower")
    return f" ({faster} in {alike} of {count(len(slower), 'turn')})" if len(slower) > 1 else ""


def _error(predicted: float | None, measured: float) -> float | None:
    return None if predicted is None or not measured else predicted / measured - 1


def _signed(fraction: float | None) -> str:
    return "" if fraction is None else format_change(fraction)
