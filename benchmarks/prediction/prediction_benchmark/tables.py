"""Tables of the README, made from a stored result and from nothing else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
    table,
)

from prediction_benchmark import figures, floor, merging
from prediction_benchmark.figures import Row
from prediction_benchmark.parts import PARTS
from prediction_benchmark.settings import SETTINGS

#: How many of the plans that are farthest off have a line.
FARTHEST = 12
_KINDS = {
    "forward": "forward",
    "no_grad_forward": "without graph",
    "recompute": "recompute",
    "backward": "backward",
}


def blocks(record: dict[str, Any]) -> dict[str, str]:
    """Return everything that the record says as blocks of a README, by their marks."""
    models = [f"* **{name}**: {about['about']}." for name, about in record["models"].items()]
    parts = [
        block(bars_table(figures.bars(record), show_bar)),
        "### The models\n\n" + "\n".join(models),
        section("Step time by model", _times_by_model(record)),
        section("Step time by setting", _times_by_setting(record)),
        section("Where the step time is off", _parts(record)),
        section("Cells", _cells(record)),
        section("Peak memory by model", _memory_by_model(record)),
        section("Farthest off", _farthest(record["rows"])),
    ]
    if repeats := record.get("repeats"):
        parts.append(_repeats(repeats))
    return {"result": "\n\n".join(parts), "environment": block(_environment(record))}


def show_bar(bar: Bar, value: float) -> str:
    """Write the figure of a bar: a rank, or an error in percent."""
    return number(value) if "rank" in bar.name else percent(value)


def of_models(record: dict[str, Any]) -> list[list[Row]]:
    """Return the plans of each model, in the order of the record."""
    return [_of(record["rows"], model=name) for name in record["models"]]


def times_in_ms(rows: Sequence[Row]) -> str:
    """Write the shortest and the longest measured time of some plans."""
    times = [1e3 * row["seconds"]["median"] for row in rows]
    return f"{min(times):.0f}-{max(times):.0f}"


def _times_by_model(record: dict[str, Any]) -> str:
    def about(rows: list[Row]) -> dict[str, Any]:
        found: dict[str, Any] = record["models"][rows[0]["model"]]
        return found

    def mean_absolute(rows: list[Row], by: str) -> str:
        return percent(figures.mean_absolute(figures.errors(rows, by)))

    def rank_within(rows: list[Row]) -> str:
        ranks = figures.ranks_within(rows)
        return number(fmean(ranks) if ranks else None)

    described: list[Column[list[Row]]] = [
        ("model", _model),
        ("plans", lambda rows: str(len(rows))),
        ("ms", times_in_ms),
        ("spread", lambda rows: percent(figures.spread(rows))),
        ("off by", lambda rows: signed(fmean(figures.errors(rows)))),
        ("mean abs", lambda rows: mean_absolute(rows, "same minutes")),
        ("floor", lambda rows: percent(floor.mean_unavoidable(rows))),
        ("worst", lambda rows: signed(max(figures.errors(rows), key=abs))),
        ("rank", lambda rows: number(figures.rank(rows))),
        ("at best", lambda rows: number(floor.best_rank(rows))),
        ("within", rank_within),
        ("regret", lambda rows: percent(figures.regret(rows))),
        ("before", lambda rows: mean_absolute(rows, "start")),
        ("one prof", lambda rows: mean_absolute(rows, "one profile")),
        ("drift", lambda rows: signed(figures.drift(about(rows)))),
        ("repeat", lambda rows: percent(figures.disagreement(about(rows)))),
    ]
    return columns(of_models(record), described, left=(0,))


def _times_by_setting(record: dict[str, Any]) -> str:
    def of_model(name: str) -> Column[list[Row]]:
        def mean(rows: list[Row]) -> str:
            found = figures.errors(_of(rows, model=name))
            return signed(fmean(found) if found else None)

        return name, mean

    described: list[Column[list[Row]]] = [
        *_SETTING,
        ("off by", lambda rows: signed(fmean(figures.errors(rows)))),
        ("mean abs", lambda rows: percent(figures.mean_absolute(figures.errors(rows)))),
        ("worst", lambda rows: signed(max(figures.errors(rows), key=abs))),
        *map(of_model, record["models"]),
    ]
    return columns(_of_settings(record), described, left=(0, 2))


def _parts(record: dict[str, Any]) -> str:
    lines = []
    for of_model in of_models(record):
        for several in (False, True):
            rows = [row for row in of_model if (row["chunks"] > 1) == several]
            if rows:
                parts, seconds = figures.mean_parts(rows), figures.median_parts(rows)
                lines.append(
                    [
                        *(_model(rows), "4, 8" if several else "1"),
                        *(signed(parts[part]) for part in PARTS),
                        signed(sum(parts.values())),
                        *(f"{1e3 * seconds[part]:+.2f}" for part in PARTS),
                    ]
                )
    header = ["model", "chunks", *PARTS, "sum", *(f"{part}, ms" for part in PARTS)]
    return table(header, lines, left=(0,))


def _cells(record: dict[str, Any]) -> str:
    def of_kind(kind: str) -> Column[list[Row]]:
        return _KINDS[kind], lambda rows: number(figures.cell_ratios(rows).get(kind))

    kinds = [of_kind(kind) for kind in _KINDS]
    by_model = columns(of_models(record), [("model", _model), *kinds], left=(0,))
    by_setting = columns(_of_settings(record), [*_SETTING, *kinds], left=(0, 2))
    return f"{by_model}\n\n{by_setting}"


def _memory_by_model(record: dict[str, Any]) -> str:
    def in_mib(rows: list[Row]) -> str:
        counted = [n_bytes / 2**20 for row in rows for n_bytes in row["memory"]["counted"]]
        return f"{min(counted):.1f}-{max(counted):.1f}"

    def within(found: list[float]) -> float:
        return sum(abs(error) <= 0.02 for error in found) / len(found)

    errors = figures.memory_errors
    described: list[Column[list[Row]]] = [
        ("model", _model),
        ("partitions", lambda rows: str(len(errors(rows)))),
        ("MiB", in_mib),
        ("mean abs", lambda rows: percent(figures.mean_absolute(errors(rows)))),
        ("most over", lambda rows: signed(max(errors(rows)))),
        ("most under", lambda rows: signed(min(errors(rows)))),
        ("within 2%", lambda rows: percent(within(errors(rows)))),
        ("under by > 1%", lambda rows: percent(figures.share_under(errors(rows)))),
    ]
    return columns(of_models(record), described, left=(0,))


def _farthest(rows: Sequence[Row]) -> str:
    def off_by(row: Row, by: str) -> float:
        return figures.errors([row], by)[0]

    found = sorted(rows, key=lambda row: -abs(off_by(row, "same minutes")))[:FARTHEST]
    described: list[Column[Row]] = [
        ("plan", figures.describe),
        ("off by", lambda row: signed(off_by(row, "same minutes"))),
        ("before", lambda row: signed(off_by(row, "start"))),
        ("predicted", lambda row: f"{1e3 * row['predicted']['same minutes']:.1f}"),
        ("measured ms", lambda row: f"{1e3 * row['seconds']['median']:.1f}"),
        (
            "quartiles",
            lambda row: f"{1e3 * row['seconds']['q1']:.1f}-{1e3 * row['seconds']['q3']:.1f}",
        ),
    ]
    return columns(found, described, left=(0,))


def _repeats(repeats: Mapping[str, Any]) -> str:
    """Write a section about how well profiles agree."""
    lines = []
    for name, about in repeats["models"].items():
        times = [floor.partition_times(of_partition) for of_partition in about["partitions"]]
        lines.append(
            [
                name,
                ", ".join(map(str, about["balance"])),
                *(f"{1e3 * median(of_partition):.1f}" for of_partition in times),
                *(percent(floor.far_from_median(of_partition)) for of_partition in times),
                *(percent(floor.far_from_median(work)) for work in about["work"].values()),
            ]
        )
    first = next(iter(repeats["models"].values()))
    partitions = range(len(first["partitions"]))
    header = ["model", "balance", *(f"ms of {j}" for j in partitions)]
    header += [*(f"partition {j}" for j in partitions), *first["work"]]
    text = table(header, lines, left=(0, 1))
    turns = len(first["partitions"][0]["forward"])
    return section(
        f"{turns} profiles of each model, farthest from their median",
        f"{text}\n\n{other_load(repeats['provenance'].get('other_load'))}",
    )


def _environment(record: dict[str, Any]) -> str:
    about = record["provenance"]
    lines = [
        f"{about['device_name']}, {about['cores']} cores, {about['system']}, {about['date']}; "
        f"partitions on {', '.join(about['devices'])}",
        *software(about),
        f"{about['rounds']} rounds; {about['minutes']:.0f} minutes in {about['runs']} run"
        f"{_of_runs(about)}",
        other_load(about["other_load"]),
    ]
    dates = merging.dates_of(record)
    if len(set(dates.values())) > 1:
        for date in sorted(set(dates.values())):
            lines.append(f"{date}: {', '.join(name for name in dates if dates[name] == date)}")
    if "memory" in record:
        of_memory = record["memory"]["provenance"]
        lines.append(
            f"memory: anew, {of_memory['date']}, gpipebal {of_memory['gpipebal']}; of models that "
            "were measured later, then"
        )
    return "\n".join(lines)


def _of_runs(about: dict[str, Any]) -> str:
    """Say which models are of which run, where there were several."""
    if about["runs"] == 1:
        return ""
    if about.get("steadiest"):
        return "s: of each model the one with the lowest floor"
    return "s, each of other models"


def _of(rows: Sequence[Row], **wanted: Any) -> list[Row]:
    return [row for row in rows if all(row[key] == value for key, value in wanted.items())]


def _of_settings(record: dict[str, Any]) -> list[list[Row]]:
    """Return the plans of each setting that has some."""
    found = [
        _of(record["rows"], way=one.way, chunks=one.chunks, checkpoint=one.checkpoint)
        for one in SETTINGS
    ]
    return [rows for rows in found if rows]


def _model(rows: list[Row]) -> str:
    return str(rows[0]["model"])


#: The columns that say of which setting plans are.
_SETTING: list[Column[list[Row]]] = [
    ("step", lambda rows: rows[0]["way"]),
    ("chunks", lambda rows: str(rows[0]["chunks"])),
    ("checkpoint", lambda rows: rows[0]["checkpoint"]),
]


def number(value: float | None) -> str:
    """Write a rank or a ratio; None is a dash."""
    return "-" if value is None else f"{value:.3f}"
