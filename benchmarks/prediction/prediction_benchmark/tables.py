"""Tables of the README, made from a stored result and from nothing else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import fmean, median
from typing import Any

from benchmark_tools.text import percent, percent_or_unknown, table

from prediction_benchmark import figures, floor, merging
from prediction_benchmark.figures import Row
from prediction_benchmark.parts import PARTS
from prediction_benchmark.settings import SETTINGS

__all__ = ["blocks", "summary"]

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
    return {"result": _results(record), "environment": _environment(record)}


def summary(record: dict[str, Any]) -> str:
    """Write the figures that have a bar, and a line per model and per setting."""
    parts = [_bars(record), _times_by_model(record), _memory_by_model(record)]
    return "\n\n".join([*parts, _times_by_setting(record), _parts(record), _cells(record)])


def _results(record: dict[str, Any]) -> str:
    rows = record["rows"]
    models = [f"* **{name}**: {about['about']}." for name, about in record["models"].items()]
    sections = [
        ("", _bars(record)),
        ("### The models", "\n".join(models)),
        ("### Step time by model", _times_by_model(record)),
        ("### Step time by setting", _times_by_setting(record)),
        ("### Where the step time is off", _parts(record)),
        ("### Cells", _cells(record)),
        ("### Peak memory by model", _memory_by_model(record)),
        ("### Farthest off", _farthest(rows)),
        *_repeats(record.get("repeats")),
    ]
    found = []
    for title, text in sections:
        found += [title] if title else []
        found.append(text if text.startswith("*") else f"```\n{text}\n```")
    return "\n\n".join(found)


def _bars(record: dict[str, Any]) -> str:
    words = {True: "reached", False: "NOT REACHED", None: ""}
    lines = []
    for bar in figures.bars(record):
        show: Callable[[float], str] = _number if "rank" in bar.name else percent
        limit = "" if bar.limit is None else f"{'<=' if bar.at_most else '>='} {show(bar.limit)}"
        value = "not measured" if bar.value is None else show(bar.value)
        lines.append([bar.name, limit, value, words[bar.reached], bar.where])
    return table(["figure", "bar", "value", "", "where"], lines, left=(0, 3, 4))


def _times_by_model(record: dict[str, Any]) -> str:
    header = [
        *(
            "model",
            "plans",
            "ms",
            "spread",
            "off by",
            "mean abs",
            "floor",
            "worst",
            "rank",
            "at best",
        ),
        *("within", "regret", "before", "one prof", "drift", "repeat"),
    ]
    lines = []
    for name, about in record["models"].items():
        rows = _of(record["rows"], model=name)
        found = figures.errors(rows)
        within = figures.ranks_within(rows)
        times = [1e3 * row["seconds"]["median"] for row in rows]
        lines.append(
            [
                name,
                str(len(rows)),
                f"{min(times):.0f}-{max(times):.0f}",
                percent(figures.spread(rows)),
                percent(fmean(found), sign=True),
                percent(figures.mean_absolute(found)),
                percent(floor.mean_unavoidable(rows)),
                percent(max(found, key=abs), sign=True),
                _number(figures.rank(rows)),
                _number(floor.best_rank(rows)),
                _number(fmean(within) if within else None),
                percent(figures.regret(rows)),
                percent(figures.mean_absolute(figures.errors(rows, "start"))),
                percent(figures.mean_absolute(figures.errors(rows, "one profile"))),
                percent(figures.drift(about), sign=True),
                percent(figures.disagreement(about)),
            ]
        )
    return table(header, lines, left=(0,))


def _times_by_setting(record: dict[str, Any]) -> str:
    names = list(record["models"])
    lines = []
    for setting in SETTINGS:
        rows = _of(
            record["rows"], way=setting.way, chunks=setting.chunks, checkpoint=setting.checkpoint
        )
        if not rows:
            continue
        found = figures.errors(rows)
        by_model = [figures.errors(_of(rows, model=name)) for name in names]
        lines.append(
            [
                *(setting.way, str(setting.chunks), setting.checkpoint),
                percent(fmean(found), sign=True),
                percent(figures.mean_absolute(found)),
                percent(max(found, key=abs), sign=True),
                *(percent(fmean(errors), sign=True) if errors else "-" for errors in by_model),
            ]
        )
    header = ["step", "chunks", "checkpoint", "off by", "mean abs", "worst", *names]
    return table(header, lines, left=(0, 2))


def _parts(record: dict[str, Any]) -> str:
    lines = []
    for name in record["models"]:
        for several in (False, True):
            rows = [
                row for row in _of(record["rows"], model=name) if (row["chunks"] > 1) == several
            ]
            if rows:
                parts, seconds = figures.mean_parts(rows), figures.median_parts(rows)
                values = [percent(parts[part], sign=True) for part in PARTS]
                total = percent(sum(parts.values()), sign=True)
                times = [f"{1e3 * seconds[part]:+.2f}" for part in PARTS]
                lines.append([name, "4, 8" if several else "1", *values, total, *times])
    header = ["model", "chunks", *PARTS, "sum", *(f"{part}, ms" for part in PARTS)]
    return table(header, lines, left=(0,))


def _cells(record: dict[str, Any]) -> str:
    rows = record["rows"]
    by_model = [[name, *_ratios(_of(rows, model=name))] for name in record["models"]]
    by_setting = []
    for setting in SETTINGS:
        about = {"way": setting.way, "chunks": setting.chunks, "checkpoint": setting.checkpoint}
        if found := _of(rows, **about):
            by_setting.append([*map(str, about.values()), *_ratios(found)])
    return "\n\n".join(
        (
            table(["model", *_KINDS.values()], by_model, left=(0,)),
            table(["step", "chunks", "checkpoint", *_KINDS.values()], by_setting, left=(0, 2)),
        )
    )


def _ratios(rows: Sequence[Row]) -> list[str]:
    found = figures.cell_ratios(rows)
    return [f"{found[kind]:.3f}" if kind in found else "-" for kind in _KINDS]


def _memory_by_model(record: dict[str, Any]) -> str:
    lines = []
    for name in record["models"]:
        rows = _of(record["rows"], model=name)
        found = figures.memory_errors(rows)
        counted = [n_bytes / 2**20 for row in rows for n_bytes in row["memory"]["counted"]]
        lines.append(
            [
                name,
                str(len(found)),
                f"{min(counted):.1f}-{max(counted):.1f}",
                percent(figures.mean_absolute(found)),
                percent(max(found), sign=True),
                percent(min(found), sign=True),
                percent(sum(abs(error) <= 0.02 for error in found) / len(found)),
                percent(figures.share_under(found)),
            ]
        )
    header = ["model", "partitions", "MiB", "mean abs", "most over", "most under"]
    return table([*header, "within 2%", "under by > 1%"], lines, left=(0,))


def _farthest(rows: Sequence[Row]) -> str:
    found = sorted(rows, key=lambda row: -abs(figures.errors([row])[0]))[:FARTHEST]
    lines = []
    for row in found:
        seconds = row["seconds"]
        lines.append(
            [
                figures.describe(row),
                percent(figures.errors([row])[0], sign=True),
                percent(figures.errors([row], "start")[0], sign=True),
                f"{1e3 * row['predicted']['same minutes']:.1f}",
                f"{1e3 * seconds['median']:.1f}",
                f"{1e3 * seconds['q1']:.1f}-{1e3 * seconds['q3']:.1f}",
            ]
        )
    header = ["plan", "off by", "before", "predicted", "measured ms", "quartiles"]
    return table(header, lines, left=(0,))


def _repeats(repeats: dict[str, Any] | None) -> list[tuple[str, str]]:
    """Return a section of how well profiles agree, if that was measured."""
    if not repeats:
        return []
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
    n = len(first["partitions"])
    header = ["model", "balance", *(f"ms of {j}" for j in range(n))]
    header += [*(f"partition {j}" for j in range(n)), *first["work"]]
    turns = len(first["partitions"][0]["forward"])
    text = table(header, lines, left=(0, 1))
    share = percent_or_unknown(repeats["provenance"].get("other_load"))
    text += f"\n\nother programs' share of the cores meanwhile: {share}"
    return [(f"### {turns} profiles of each model, farthest from their median", text)]


def _environment(record: dict[str, Any]) -> str:
    about = record["provenance"]
    settings = ", ".join(f"{name}={value}" for name, value in about["settings"].items())
    lines = [
        f"{about['device_name']}, {about['cores']} cores, {about['system']}, {about['date']}; "
        f"partitions on {', '.join(about['devices'])}",
        f"Python {about['python']}, torch {about['torch']}, gpipebal {about['gpipebal']}",
        settings or "no settings of the allocator",
        f"{about['rounds']} rounds; {about['minutes']:.0f} minutes in {about['runs']} run"
        f"{_of_runs(about)}",
        "other programs' share of the cores meanwhile: " + percent_or_unknown(about["other_load"]),
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
    return "```\n" + "\n".join(lines) + "\n```"


def _of_runs(about: dict[str, Any]) -> str:
    """Say which models are of which run, where there were several."""
    if about["runs"] == 1:
        return ""
    if about.get("steadiest"):
        return "s: of each model the one with the lowest floor"
    return "s, each of other models"


def _of(rows: Sequence[Row], **wanted: Any) -> list[Row]:
    return [row for row in rows if all(row[key] == value for key, value in wanted.items())]


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
