"""Tables of the README, made from a stored result and from nothing else."""

from __future__ import annotations

from statistics import fmean
from typing import Any

from benchmark_tools.text import percent, percent_or_unknown, table

from solver_benchmark import figures
from solver_benchmark.figures import Row

__all__ = ["blocks", "summary"]

#: What is timed of ours.
_TIMED = ("reading", "problem", "value", "bottleneck", "makespan")
_RULES = ("equal layers", "equal parameters", "torchgpipe", "least bottleneck")


def blocks(record: dict[str, Any]) -> dict[str, str]:
    """Return everything that the record says as blocks of a README, by their marks."""
    return {"result": _results(record), "environment": _environment(record)}


def summary(record: dict[str, Any]) -> str:
    """Write the figures that have a bar, and the largest tables."""
    parts = {"times": (_bars, _times), "joint": (_joint,), "plans": (_plans,)}
    return "\n\n".join(
        table_of(record)
        for part, of_part in parts.items()
        if part in record
        for table_of in of_part
    )


def _results(record: dict[str, Any]) -> str:
    sections = (
        ("", "times", _bars),
        ("### Times", "times", _times),
        ("### Growth with the number of layers", "times", _growth),
        ("### How far other rules are off", "gaps", _gaps),
        ("### Memory, modes and micro-batches together", "joint", _joint),
        ("### Stored profiles: predicted makespan above the plan's", "plans", _plans),
        ("### Other schedules", "searches", _searches),
    )
    found = []
    for title, part, table_of in sections:
        if part in record:
            found += [title] if title else []
            found.append(f"```\n{table_of(record)}\n```")
    return "\n\n".join(found)


def _bars(record: dict[str, Any]) -> str:
    words = {True: "reached", False: "NOT REACHED", None: ""}
    lines = []
    for bar in figures.bars(record):
        sign = "<=" if bar.at_most else ">="
        if "gap" in bar.name:
            limit, value = "<= 0 %", percent(bar.value)
        elif bar.at_most:
            limit, value = f"{sign} {1e3 * bar.limit:g} ms", _ms(bar.value)
        else:
            limit, value = f"{sign} {bar.limit:g}x", _times_faster(bar.value)
        lines.append([bar.name, limit, value, words[bar.reached], bar.where])
    return table(["figure", "bar", "value", "", "worst at"], lines, left=(0, 3, 4))


def _times(record: dict[str, Any]) -> str:
    names = record["peers"]
    lines = []
    for row in record["times"]:
        line = [row["kind"], f"{row['n_layers']:,}", str(row["n_partitions"])]
        line += [_ms(row[name]["seconds"]) for name in _TIMED]
        for name in names:
            peer = row["peers"][name]
            line += [_peer_time(peer, record["provenance"]["limit"]), _above(peer)]
            ratio = None
            if peer["seconds"] is not None:
                ratio = peer["seconds"] / row["bottleneck"]["seconds"]
            line.append(_times_faster(ratio))
        lines.append(line)
    header = ["chain", "N", "K", *_TIMED]
    for name in names:
        header += [name, "above", "slower"]
    return table(header, lines, left=(0,))


def _peer_time(peer: Row, limit: float) -> str:
    if peer["seconds"] is not None:
        return _ms(peer["seconds"])
    return f"> {limit:g} s" if peer["tried"] else "not tried"


def _above(peer: Row) -> str:
    if peer["seconds"] is None:
        return "-"
    return "no answer" if peer["excess"] is None else percent(peer["excess"])


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
    lines = []
    for row in record["gaps"]:
        line = [row["kind"], f"{row['n_layers']} / {row['n_partitions']}"]
        for name in record["peers"]:
            found = row[name]
            line += [percent(found["mean"]), percent(found["worst"])]
            line.append(f"{found['optimal']} of {found['draws']}")
            line.append(str(found["no_answer"]) if found["no_answer"] else "-")
        lines.append(line)
    header = ["chain", "N / K"]
    for name in record["peers"]:
        header += [f"{name}: mean", "worst", "optimal", "no answer"]
    return table(header, lines, left=(0,))


def _joint(record: dict[str, Any]) -> str:
    lines = [
        [row["name"], _ms(row["seconds"]), f"{row['status']}, gap {row['gap']:.1%}", row["method"]]
        for row in record["joint"]
    ]
    return table(["question to solve()", "time", "result", "method"], lines, left=(0, 2, 3))


def _plans(record: dict[str, Any]) -> str:
    lines = []
    for row in record["plans"]:
        line = [row["profile"], str(row["n_layers"]), str(row["n_partitions"]), str(row["chunks"])]
        lines.append([*line, *(percent(row["above"].get(rule)) for rule in _RULES)])
    for name, pick in (("mean", fmean), ("worst", max)):
        line = [name, "", "", ""]
        for rule in _RULES:
            found = [row["above"].get(rule) for row in record["plans"]]
            line.append(percent(pick([above for above in found if above is not None])))
        lines.append(line)
    return table(["profile", "N", "K", "chunks", *_RULES], lines, left=(0,))


def _searches(record: dict[str, Any]) -> str:
    schedules = list(dict.fromkeys(row["schedule"] for row in record["searches"]))
    lines = []
    keys = dict.fromkeys((row["profile"], row["n_partitions"]) for row in record["searches"])
    for profile, n_partitions in keys:
        line = [profile, str(n_partitions)]
        for schedule in schedules:
            (row,) = figures.pick(
                record["searches"], profile=profile, n_partitions=n_partitions, schedule=schedule
            )
            proof = "optimal" if row["status"] == "optimal" else percent(row["gap"])
            line += [proof, percent(row["gain"]), f"{1e3 * row['seconds']:.0f} ms"]
        lines.append(line)
    header = ["profile", "K"]
    for schedule in schedules:
        header += [f"{schedule}: gap", "gain", "search"]
    return table(header, lines, left=(0,))


def _environment(record: dict[str, Any]) -> str:
    about = record["provenance"]
    versions = ", ".join(f"{name} {text or '-'}" for name, text in about["versions"].items())
    lines = [
        f"{about['cpu']}, {about['cores']} cores, {about['system']}, {about['date']}; one thread",
        versions,
        f"{about['rounds']} rounds; other rules may take {about['limit']:g} s; "
        f"{about['minutes']:.1f} minutes"
        + (f" in {about['runs']} runs, each of other parts" if about["runs"] > 1 else ""),
        "other programs' share of the cores meanwhile, in the worst run: "
        + percent_or_unknown(about["other_load"]),
    ]
    return "```\n" + "\n".join(lines) + "\n```"


def _ms(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    value = 1e3 * seconds
    return f"{value:.3f} ms" if value < 1 else f"{value:,.1f} ms"


def _times_faster(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:,.1f}x" if ratio < 100 else f"{ratio:,.0f}x"
