"""Tables of the README, made from a stored record and from nothing else."""

from __future__ import annotations

from typing import Any

from benchmark_tools.machine import software
from benchmark_tools.text import Column, block, columns, table

from soak_benchmark.growth import Growth

_PHASES = ("forward", "recompute", "backward")

#: With fewer steps, the first quarter still imports and makes what is there once.
FEWEST_TO_JUDGE = 300


def is_passed(record: dict[str, Any]) -> bool:
    """Tell whether nothing grew, if there were enough steps to tell.

    A step that failed leaves no record.
    """
    is_short = record["steps"] < FEWEST_TO_JUDGE
    return is_short or all(growth.is_within for growth in _growths(record))


def blocks(record: dict[str, Any]) -> dict[str, str]:
    """Return everything that the record says as blocks of a README, by their marks."""
    about = record["provenance"]
    where = f"{about['system']}, {about['cores']} cores, {software(about)[0]}"
    return {
        "result": result(record),
        "environment": f"{where}, {about['date']}, seed {about['seed']}.",
    }


def result(record: dict[str, Any]) -> str:
    """Write what was done and what was found, as Markdown."""
    faults = sum(fault["times"] for fault in record["faults"])
    checks = sum(record["checks"].values())
    if record["steps"] < FEWEST_TO_JUDGE:
        verdict = f"whether something grew is told from {FEWEST_TO_JUDGE} steps on"
    else:
        verdict = "nothing grew beyond its bound" if is_passed(record) else "SOMETHING GREW"
    parts = [
        f"{record['steps']:,} steps in {record['minutes']:.1f} minutes, {faults:,} faults, "
        f"{checks:,} checks: no wrong number, no hang (the slowest step took "
        f"{record['slowest_step_seconds']:.2f} s), {verdict}.",
        _growth_table(record),
        _fault_table(record),
        _two_columns("steps", "", record["ways"]),
        _two_columns("check", "times", record["checks"]),
    ]
    return "\n\n".join(parts)


def _growths(record: dict[str, Any]) -> list[Growth]:
    return [Growth(**growth) for growth in record["growth"]]


def _growth_table(record: dict[str, Any]) -> str:
    described: list[Column[Growth]] = [
        ("", lambda growth: growth.name),
        ("first quarter", lambda growth: f"{growth.first:,.0f}"),
        ("last quarter", lambda growth: f"{growth.last:,.0f}"),
        ("growth", lambda growth: f"{growth.last - growth.first:+,.0f}"),
        ("bound", lambda growth: f"{growth.bound:,.0f}"),
        ("", lambda growth: "kept" if growth.is_within else "NOT KEPT"),
    ]
    return block(columns(_growths(record), described, left=(0, 5)))


def _fault_table(record: dict[str, Any]) -> str:
    times = {(fault["kind"], fault["phase"]): fault["times"] for fault in record["faults"]}
    kinds = sorted({kind for kind, _ in times}, key=str.lower)
    rows = [[kind, *(f"{times.get((kind, phase), 0):,}" for phase in _PHASES)] for kind in kinds]
    return block(table(["fault", *_PHASES], rows, left=[0]))


def _two_columns(left: str, right: str, counts: dict[str, int]) -> str:
    rows = [[name, f"{times:,}"] for name, times in counts.items()]
    return block(table([left, right], rows, left=[0]))
