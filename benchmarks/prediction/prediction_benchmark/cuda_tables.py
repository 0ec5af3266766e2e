"""Tables of the README about a CUDA device, made from a stored result and from nothing else.

Here a prediction of memory has in it what libraries take for the time of an operation, and the
count of live tensors has not. So nothing is said of the counted peaks of partitions: the peaks are
compared with the allocator's, of the whole model as one partition.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import fmean, median
from typing import Any

from benchmark_tools.bars import Bar, bars_table
from benchmark_tools.machine import software
from benchmark_tools.text import (
    Column,
    block,
    columns,
    other_load,
    percent,
    section,
    signed,
)

from gpipebal.units import count
from prediction_benchmark import figures
from prediction_benchmark.figures import Row
from prediction_benchmark.models import MODELS
from prediction_benchmark.tables import number, of_models, show_bar, times_in_ms

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
    bars = [*_bars_of_times(record), *_bars_of_allocator(record["allocator"]["rows"])]
    parts = [
        block(bars_table(bars, show_bar)),
        section("Step time by model, with CUDA", _times_by_model(record)),
        section("Peak memory of the allocator", _by_allocator(record["allocator"]["rows"])),
    ]
    return {"cuda": "\n\n".join(parts), "cuda-environment": block(_environment(record))}


def _by_allocator(rows: Sequence[Row]) -> str:
    """Write predicted and counted over allocated peaks, by model and by who computes the loss."""

    def allocated(rows: list[Row]) -> list[float]:
        return [row["allocated"] / 2**20 for row in rows]

    def most_over(rows: list[Row]) -> str:
        over = max(row["predicted"] - row["allocated"] for row in rows) / 2**20
        return f"{round(over, 1) + 0.0:.1f}"  # no sign for what rounds to nothing

    def predicted(rows: list[Row]) -> list[float]:
        return _over_allocated(rows, "predicted")

    def counted(rows: list[Row]) -> str:
        found = _over_allocated(rows, "counted")
        return f"{signed(min(found))} to {signed(max(found))}"

    described: list[Column[list[Row]]] = [
        ("step", lambda rows: _CALL if rows[0]["way"] == _CALL else "step"),
        ("model", lambda rows: rows[0]["model"]),
        ("settings", lambda rows: str(len(rows))),
        ("MiB", lambda rows: f"{min(allocated(rows)):.0f}-{max(allocated(rows)):.0f}"),
        ("mean abs", lambda rows: percent(figures.mean_absolute(predicted(rows)))),
        ("most over", lambda rows: signed(max(predicted(rows)))),
        ("most under", lambda rows: signed(min(predicted(rows)))),
        ("most over, MiB", most_over),
        ("counted", counted),
    ]
    names = dict.fromkeys(row["model"] for row in rows)
    groups = [
        [row for row in rows if row["model"] == name and (row["way"] == _CALL) == call]
        for call in (False, True)
        for name in names
    ]
    return columns(filter(None, groups), described, left=(0, 1))


def _bars_of_times(record: dict[str, Any]) -> Iterator[Bar]:
    """Yield the figures that have a bar, and beside them those of one micro-batch."""
    alone = [row for row in record["rows"] if row["chunks"] == 1]
    mean = figures.mean_absolute(figures.errors(alone))
    beside = {
        "step time, mean absolute error": [
            Bar("  mean, one micro-batch", None, mean, True, f"over {len(alone)} plans")
        ],
        "step time, farthest off": [
            _farthest("  farthest, one micro-batch", alone, _off_by),
            _farthest("  steps of one plan, farthest apart", record["rows"], _apart),
        ],
    }
    times = {bar.name: bar for bar in figures.bars(record)}
    for name in _TIMES:
        yield times[name]
        yield from beside.get(name, ())


def _farthest(name: str, rows: Sequence[Row], figure: Any) -> Bar:
    row = max(rows, key=figure)
    return Bar(name, None, figure(row), True, figures.describe(row))


def _bars_of_allocator(rows: Sequence[Row]) -> Iterator[Bar]:
    """Yield how far predictions are from the allocator's peaks, and those of `step` by itself."""
    of_step = [row for row in rows if row["way"] != _CALL]
    for some, names, limits in (
        (
            rows,
            ("allocator's peak, mean absolute error", "allocator's peak, farthest under"),
            (0.02, -0.01),
        ),
        (of_step, ("  mean, step", "  farthest under, step"), (None, None)),
    ):
        errors = _over_allocated(some, "predicted")
        least, under = min(zip(errors, some, strict=True), key=lambda pair: pair[0])
        where = f"{under['model']}, {under['way']}, chunks={under['chunks']}, {under['checkpoint']}"
        mean = figures.mean_absolute(errors)
        yield Bar(names[0], limits[0], mean, True, f"over {len(some)} settings")
        yield Bar(names[1], limits[1], least, False, where)


def _times_by_model(record: dict[str, Any]) -> str:
    def of_some(several: bool) -> list[Column[list[Row]]]:
        def some(rows: list[Row]) -> list[Row]:
            return [row for row in rows if (row["chunks"] > 1) == several]

        def errors(rows: list[Row]) -> list[float]:
            return figures.errors(some(rows))

        return [
            ("4, 8: off by" if several else "1: off by", lambda rows: signed(fmean(errors(rows)))),
            ("mean abs", lambda rows: percent(figures.mean_absolute(errors(rows)))),
            ("worst", lambda rows: signed(max(errors(rows), key=abs))),
            ("apart", lambda rows: percent(median(map(_apart, some(rows))))),
        ]

    described: list[Column[list[Row]]] = [
        ("model", lambda rows: rows[0]["model"]),
        ("plans", lambda rows: str(len(rows))),
        ("ms", times_in_ms),
        *of_some(False),
        *of_some(True),
        ("rank", lambda rows: number(figures.rank(rows))),
        ("regret", lambda rows: percent(figures.regret(rows))),
        ("before", lambda rows: percent(figures.mean_absolute(figures.errors(rows, "start")))),
    ]
    return columns(of_models(record), described, left=(0,))


def _environment(record: dict[str, Any]) -> str:
    about, asked = record["provenance"], record["allocator"]["provenance"]
    missing = [model.name for model in MODELS if model.name not in record["models"]]
    lines = [
        f"{about['device_name']}, CUDA {about['cuda']}, {about['cores']} cores, {about['system']}, "
        f"{about['date']}",
        software(about)[0],
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
        other_load(about["other_load"]),
    ]
    return "\n".join(lines)


def _over_allocated(rows: Sequence[Row], what: str) -> list[float]:
    return [row[what] / row["allocated"] - 1 for row in rows]


def _off_by(row: Row) -> float:
    return abs(figures.errors([row])[0])


def _apart(row: Row) -> float:
    """Return the slowest over the fastest of the steps of a plan's turns, less one."""
    times = [seconds for turn in row["turns"] for seconds in turn]
    return float(max(times) / min(times) - 1)
