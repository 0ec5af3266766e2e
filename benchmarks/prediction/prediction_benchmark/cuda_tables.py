"""Tables of the README about a CUDA device, made from a stored result and from nothing else.

Here a prediction of memory has in it what libraries take for the time of an operation, and the
count of live tensors has not. So nothing is said of the counted peaks of partitions: the peaks are
compared with the allocator's, of the whole model as one partition.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, median
from typing import Any

from benchmark_tools.bars import Bar
from benchmark_tools.text import block, percent, percent_or_unknown, table

from gpipebal.units import count
from prediction_benchmark import figures
from prediction_benchmark.figures import Row
from prediction_benchmark.models import MODELS

__all__ = ["blocks", "by_allocator"]

#: Figures of the times, as `figures.bars` names them, that one round can tell.
_TIMES = (
    "step time, mean absolute error",
    "step time, farthest off",
    "  mean, by a profile of some minutes before",
    "rank correlation, lowest of a model",
    "chosen plan over best measured, worst model",
    "  planner's balance over best measured, mean",
    "  planner's balance over best measured, worst",
)
_CALL = "loss(pipe(x))"


def blocks(record: dict[str, Any]) -> dict[str, str]:
    """Return what the record says as blocks of a README, by their marks."""
    rows = record["allocator"]["rows"]
    parts = [
        block(_bars(record)),
        "### Step time by model, with CUDA",
        block(_times_by_model(record)),
        "### Peak memory of the allocator",
        f"{block(by_allocator(rows))}\n\n{_about_outputs(rows)}".rstrip(),
    ]
    return {"cuda": "\n\n".join(parts), "cuda-environment": block(_environment(record))}


def by_allocator(rows: Sequence[Row]) -> str:
    """Write predicted and counted over allocated peaks, by model and by who computes the loss."""
    lines = []
    for call in (False, True):
        for name in dict.fromkeys(row["model"] for row in rows):
            of_model = [row for row in _of(rows, call=call) if row["model"] == name]
            if not of_model:
                continue
            found, counted = (_over_allocated(of_model, what) for what in ("predicted", "counted"))
            allocated = [row["allocated"] / 2**20 for row in of_model]
            over = max(row["predicted"] - row["allocated"] for row in of_model) / 2**20
            lines.append(
                [
                    _CALL if call else "step",
                    name,
                    str(len(of_model)),
                    f"{min(allocated):.0f}-{max(allocated):.0f}",
                    percent(figures.mean_absolute(found)),
                    percent(max(found), sign=True),
                    percent(min(found), sign=True),
                    f"{round(over, 1) + 0.0:.1f}",  # no sign for what rounds to nothing
                    f"{percent(min(counted), sign=True)} to {percent(max(counted), sign=True)}",
                ]
            )
    header = ["step", "model", "settings", "MiB", "mean abs", "most over", "most under"]
    return table([*header, "most over, MiB", "counted"], lines, left=(0, 1))


def _bars(record: dict[str, Any]) -> str:
    """Write the figures that have a bar, and beside them those of one micro-batch and of `step`."""
    times = {bar.name: bar for bar in figures.bars(record)}
    alone = [row for row in record["rows"] if row["chunks"] == 1]
    found = figures.errors(alone)
    worst = max(range(len(alone)), key=lambda k: abs(found[k]))
    everywhere = f"over {len(alone)} plans"
    peaks = record["allocator"]["rows"]
    bars = []
    for name in _TIMES:
        bars.append(times[name])
        if name == "step time, mean absolute error":
            bars.append(
                Bar("  mean, one micro-batch", None, figures.mean_absolute(found), True, everywhere)
            )
        elif name == "step time, farthest off":
            where = figures.describe(alone[worst])
            bars.append(Bar("  farthest, one micro-batch", None, abs(found[worst]), True, where))
            far = max(record["rows"], key=_apart)
            where = figures.describe(far)
            bars.append(Bar("  steps of one plan, farthest apart", None, _apart(far), True, where))
    for of_step, rows in ((False, peaks), (True, _of(peaks, call=False))):
        errors = _over_allocated(rows, "predicted")
        under = rows[min(range(len(rows)), key=errors.__getitem__)]
        where = f"{under['model']}, {under['way']}, chunks={under['chunks']}, {under['checkpoint']}"
        over = f"over {len(rows)} settings"
        limits = (None, None) if of_step else (0.02, -0.01)
        names = ("  mean, step", "  farthest under, step")
        if not of_step:
            names = ("allocator's peak, mean absolute error", "allocator's peak, farthest under")
        bars += [
            Bar(names[0], limits[0], figures.mean_absolute(errors), True, over),
            Bar(names[1], limits[1], min(errors), False, where),
        ]
    words = {True: "reached", False: "NOT REACHED", None: ""}
    lines = []
    for bar in bars:
        is_rank = "rank" in bar.name
        limit, value = (_write(number, is_rank) for number in (bar.limit, bar.value))
        sign = "<=" if bar.at_most else ">="
        limit = "" if bar.limit is None else f"{sign} {limit}"
        lines.append([bar.name, limit, value, words[bar.reached], bar.where])
    return table(["figure", "bar", "value", "", "where"], lines, left=(0, 3, 4))


def _times_by_model(record: dict[str, Any]) -> str:
    lines = []
    for name in record["models"]:
        rows = [row for row in record["rows"] if row["model"] == name]
        times = [1e3 * row["seconds"]["median"] for row in rows]
        line = [name, str(len(rows)), f"{min(times):.0f}-{max(times):.0f}"]
        for several in (False, True):
            some = [row for row in rows if (row["chunks"] > 1) == several]
            found = figures.errors(some)
            line += [
                percent(fmean(found), sign=True),
                percent(figures.mean_absolute(found)),
                percent(max(found, key=abs), sign=True),
                percent(median(map(_apart, some))),
            ]
        rank = figures.rank(rows)
        before = percent(figures.mean_absolute(figures.errors(rows, "start")))
        lines.append([*line, _write(rank, True), percent(figures.regret(rows)), before])
    header = ["model", "plans", "ms", "1: off by", "mean abs", "worst", "apart"]
    header += ["4, 8: off by", "mean abs", "worst", "apart", "rank", "regret", "before"]
    return table(header, lines, left=(0,))


def _about_outputs(rows: Sequence[Row]) -> str:
    """Say in which settings the caller did not keep the output, as a prediction counts it."""
    calls = _of(rows, call=True)
    dropped = [row for row in calls if not row["keeps_output"]]
    if not dropped:
        return ""
    return (
        f"In {len(dropped)} of {len(calls)} settings of `{_CALL}` the caller dropped the output "
        "before the backward (`keeps_output` is false). The\nprediction counts it as kept."
    )


def _environment(record: dict[str, Any]) -> str:
    about, asked = record["provenance"], record["allocator"]["provenance"]
    missing = [model.name for model in MODELS if model.name not in record["models"]]
    lines = [
        f"{about['device_name']}, CUDA {about['cuda']}, {about['cores']} cores, {about['system']}, "
        f"{about['date']}",
        f"Python {about['python']}, torch {about['torch']}, gpipebal {about['gpipebal']}",
    ]
    if shares := about.get("shares"):
        alone, beside = (shares["product"][key] for key in ("one share", "all shares"))
        lines.append(
            f"{shares['shares']} partitions on one device, "
            f"{shares['multiprocessors_of_a_share']} of its {shares['multiprocessors']} "
            f"multiprocessors each; a matrix product next to another takes {beside / alone:.3f} "
            "times as long"
        )
    else:
        lines.append(f"partitions on {', '.join(about['devices'])}")
    lines += [
        f"times: {count(about['rounds'], 'round')}; {about['minutes']:.0f} minutes in "
        f"{count(about['runs'], 'run')}; without {', '.join(missing) or 'none of the models'}",
        f"allocator: {asked['device_name']}, torch {asked['torch']}, {asked['date']}, "
        f"{count(asked['runs'], 'run')}",
        "other programs' share of the cores meanwhile: " + percent_or_unknown(about["other_load"]),
    ]
    return "\n".join(lines)


def _of(rows: Sequence[Row], *, call: bool) -> list[Row]:
    return [row for row in rows if (row["way"] == _CALL) == call]


def _over_allocated(rows: Sequence[Row], what: str) -> list[float]:
    return [row[what] / row["allocated"] - 1 for row in rows]


def _apart(row: Row) -> float:
    """Return the slowest over the fastest of the steps of a plan's turns, less one."""
    times = [seconds for turn in row["turns"] for seconds in turn]
    return float(max(times) / min(times) - 1)


def _write(value: float | None, is_rank: bool) -> str:
    if not is_rank:
        return percent(value)
    return "-" if value is None else f"{value:.3f}"
