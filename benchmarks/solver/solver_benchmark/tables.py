"""Tables of the README, made from a stored result and from nothing else."""

from __future__ import annotations

from statistics import fmean
from typing import Any

from benchmark_tools.bars import Bar, bars_table
from benchmark_tools.text import Column, block, columns, percent, percent_or_unknown, section, table

from solver_benchmark import figures
from solver_benchmark.figures import Row

#: What is timed of ours.
_TIMED = ("reading", "problem", "value", "bottleneck", "makespan")
_RULES = ("equal layers", "equal parameters", "torchgpipe", "least bottleneck")


def blocks(record: dict[str, Any]) -> dict[str, str]:
    """Return everything that the record says as blocks of a README, by their marks."""
    bars = bars_table(
        figures.bars(record),
        _show,
        show_limit=_show_limit,
        header=("figure", "bar", "worst at"),
    )
    parts = [
        block(bars),
        section("Times", _times(record)),
        section("Growth with the number of layers", _growth(record)),
        section("How far other rules are off", _gaps(record)),
        section("Memory, modes and micro-batches together", _joint(record)),
        section("Stored profiles: predicted makespan above the plan's", _plans(record)),
        section("Other schedules", _searches(record)),
    ]
    return {"result": "\n\n".join(parts), "environment": block(_environment(record))}


def _show(bar: Bar, value: float) -> str:
    if "gap" in bar.name:
        return percent(value)
    return _ms(value) if bar.at_most else _times_faster(value)


def _show_limit(bar: Bar, limit: float) -> str:
    if "gap" in bar.name:
        return f"{100 * limit:g} %"
    return f"{1e3 * limit:g} ms" if bar.at_most else f"{limit:g}x"


def _times(record: dict[str, Any]) -> str:
    def of_ours(name: str) -> Column[Row]:
        return name, lambda row: _ms(row[name]["seconds"])

    def of_peer(name: str) -> list[Column[Row]]:
        def seconds(row: Row) -> str:
            peer = row["peers"][name]
            if peer["seconds"] is not None:
                return _ms(peer["seconds"])
            return f"> {record['provenance']['limit']:g} s" if peer["tried"] else "not tried"

        def above(row: Row) -> str:
            peer = row["peers"][name]
            if peer["seconds"] is None:
                return "-"
            return "no answer" if peer["excess"] is None else percent(peer["excess"])

        def slower(row: Row) -> str:
            theirs = row["peers"][name]["seconds"]
            return "-" if theirs is None else _times_faster(theirs / row["bottleneck"]["seconds"])

        return [(name, seconds), ("above", above), ("slower", slower)]

    described: list[Column[Row]] = [
        ("chain", lambda row: row["kind"]),
        ("N", lambda row: f"{row['n_layers']:,}"),
        ("K", lambda row: str(row["n_partitions"])),
        *map(of_ours, _TIMED),
        *(column for name in record["peers"] for column in of_peer(name)),
    ]
    return columns(record["times"], described, left=(0,))


def _growth(record: dict[str, Any]) -> str:
    kinds = list(dict.fromkeys(row["kind"] for row in record["times"]))
    lines = []
    for kind in kinds:
        for n_partitions in sorted({row["n_partitions"] for row in record["times"]}):
            found = [figures.growth(record, name, kind, n_partitions) for name in _TIMED]
            if None not in found:
                lines.append([kind, str(n_partitions), *(f"{power:.2f}" for power in found)])
    return table(["p of c * N ** p", "K", *_TIMED], lines, left=(0,))


def _gaps(record: dict[str, Any]) -> str:
    def of_peer(name: str) -> list[Column[Row]]:
        return [
            (f"{name}: mean", lambda row: percent(row[name]["mean"])),
            ("worst", lambda row: percent(row[name]["worst"])),
            ("optimal", lambda row: f"{row[name]['optimal']} of {row[name]['draws']}"),
            ("no answer", lambda row: str(row[name]["no_answer"] or "-")),
        ]

    described: list[Column[Row]] = [
        ("chain", lambda row: row["kind"]),
        ("N / K", lambda row: f"{row['n_layers']} / {row['n_partitions']}"),
        *(column for name in record["peers"] for column in of_peer(name)),
    ]
    return columns(record["gaps"], described, left=(0,))


def _joint(record: dict[str, Any]) -> str:
    described: list[Column[Row]] = [
        ("question to solve()", lambda row: row["name"]),
        ("time", lambda row: _ms(row["seconds"])),
        ("result", lambda row: f"{row['status']}, gap {row['gap']:.1%}"),
        ("method", lambda row: row["method"]),
    ]
    return columns(record["joint"], described, left=(0, 2, 3))


def _plans(record: dict[str, Any]) -> str:
    lines = [
        [
            *(row["profile"], str(row["n_layers"]), str(row["n_partitions"]), str(row["chunks"])),
            *(percent(row["above"].get(rule)) for rule in _RULES),
        ]
        for row in record["plans"]
    ]
    for name, pick in (("mean", fmean), ("worst", max)):
        line = [name, "", "", ""]
        for rule in _RULES:
            found = [row["above"].get(rule) for row in record["plans"]]
            line.append(percent(pick([above for above in found if above is not None])))
        lines.append(line)
    return table(["profile", "N", "K", "chunks", *_RULES], lines, left=(0,))


def _searches(record: dict[str, Any]) -> str:
    rows = record["searches"]
    found = {(row["profile"], row["n_partitions"], row["schedule"]): row for row in rows}

    def of_schedule(name: str) -> list[Column[tuple[str, int]]]:
        def gap(key: tuple[str, int]) -> str:
            row = found[*key, name]
            return "optimal" if row["status"] == "optimal" else percent(row["gap"])

        return [
            (f"{name}: gap", gap),
            ("gain", lambda key: percent(found[*key, name]["gain"])),
            ("search", lambda key: f"{1e3 * found[*key, name]['seconds']:.0f} ms"),
        ]

    described: list[Column[tuple[str, int]]] = [
        ("profile", lambda key: key[0]),
        ("K", lambda key: str(key[1])),
    ]
    for name in dict.fromkeys(row["schedule"] for row in rows):
        described += of_schedule(name)
    keys = dict.fromkeys((row["profile"], row["n_partitions"]) for row in rows)
    return columns(keys, described, left=(0,))


def _environment(record: dict[str, Any]) -> str:
    about = record["provenance"]
    versions = ", ".join(f"{name} {text or '-'}" for name, text in about["versions"].items())
    return "\n".join(
        [
            f"{about['cpu']}, {about['cores']} cores, {about['system']}, {about['date']}; "
            "one thread",
            versions,
            f"{about['rounds']} rounds; other rules may take {about['limit']:g} s; "
            f"{about['minutes']:.1f} minutes",
            "other programs' share of the cores meanwhile: "
            + percent_or_unknown(about["other_load"]),
        ]
    )


def _ms(seconds: float) -> str:
    value = 1e3 * seconds
    return f"{value:.3f} ms" if value < 1 else f"{value:,.1f} ms"


def _times_faster(ratio: float) -> str:
    return f"{ratio:,.1f}x" if ratio < 100 else f"{ratio:,.0f}x"
