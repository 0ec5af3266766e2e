"""Tables of the README, made from a stored result and from nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmark_tools.text import percent

__all__ = [
    "FORMAT",
    "GOAL",
    "VERSION",
    "blocks",
    "errors_of",
    "errors_of_plan",
    "summary",
    "within_clock",
]

FORMAT = "gpipebal-benchmark-peak-memory"
VERSION = 3
#: How far a prediction may be from the count, as a fraction of the count.
GOAL = 0.03

_MIB = 2**20


def errors_of(row: dict[str, Any]) -> list[float]:
    """Return predicted over counted, less one, of each partition."""
    pairs = zip(row["predicted"], row["counted"], strict=True)
    return [predicted["total"] / counted - 1 for predicted, counted in pairs]


def errors_of_plan(row: dict[str, Any]) -> list[float]:
    """Return the same of a plan."""
    pairs = zip(row["planned"], row["counted"], strict=True)
    return [planned / counted - 1 for planned, counted in pairs]


def within_clock(row: dict[str, Any]) -> list[bool]:
    """Tell of each partition whether the count lies between what the clock of its step allows.

    That is, from nothing that a neighbour takes while an action runs to all of it, with the goal's
    leeway at both ends.
    """
    ranges = zip(row["taken"], row["counted"], row["predicted"], strict=True)
    return [
        taken / counted <= 1 + GOAL and predicted["total"] / counted >= 1 - GOAL
        for taken, counted, predicted in ranges
    ]


def summary(record: dict[str, Any]) -> str:
    """Say how many predictions hold, which is the worst, and list those that do not."""
    rows = record["rows"]
    errors = [error for row in rows for error in errors_of(row)]
    sums = [_error_of_sum(row) for row in rows]
    in_range = [inside for row in rows for inside in within_clock(row)]
    n_missed = sum(abs(error) > GOAL for error in errors)
    n_clock = sum(
        abs(error) > GOAL and inside for error, inside in zip(errors, in_range, strict=True)
    )
    planned = [error for row in rows for error in errors_of_plan(row)]
    n_under, n_under_plan = (sum(error < -0.01 for error in found) for found in (errors, planned))
    lines = [
        _held("partitions", errors),
        f"of the other {n_missed}, {n_clock} are within it without what neighbours took while the "
        "action of the peak ran",
        f"{n_under} of {len(errors)} partitions predicted more than 1% too low",
        _held("sums over the partitions of a pipeline", sums),
        "",
        "Plans, which do not know the timing of the step and have a margin:",
        _held("partitions", planned),
        f"{n_under_plan} of {len(planned)} partitions predicted more than 1% too low",
    ]
    beyond = [row for row in rows if any(abs(error) > GOAL for error in errors_of(row))]
    if beyond:
        lines += ["", f"Beyond {GOAL:.0%}:", f"{'model':<13} {_HEADER}"]
        lines += [f"{row['model']:<13} {_cells(row)}".rstrip() for row in beyond]
    return "\n".join(lines)


def blocks(record: dict[str, Any]) -> dict[str, str]:
    """Return everything that the record says as blocks of a README, by their marks."""
    return {"result": _results(record), "environment": _environment(record)}


def _results(record: dict[str, Any]) -> str:
    parts = [f"```\n{summary(record)}\n```"]
    for name, about in record["models"].items():
        rows = [row for row in record["rows"] if row["model"] == name]
        lines = [_HEADER, *map(_cells, rows)]
        parts += [f"### {name}", f"{about}.", "```\n" + "\n".join(lines) + "\n```"]
    return "\n\n".join(parts)


_HEADER = (
    f"{'step':<13} {'checkpoint':<11} {'chunks':>6}  {'counted by partition [MiB]':<31} "
    f"{'predicted is off by':<31} {'sum':>7} {'off by':>7} {'at once':>8}"
)


def _cells(row: dict[str, Any]) -> str:
    counted = " ".join(f"{n_bytes / _MIB:7.2f}" for n_bytes in row["counted"])
    errors = " ".join(f"{percent(error, sign=True):>7}" for error in errors_of(row))
    return (
        f"{row['way']:<13} {row['mode']:<11} {row['chunks']:>6}  {counted:<31} {errors:<31} "
        f"{sum(row['counted']) / _MIB:7.2f} {percent(_error_of_sum(row), sign=True):>7} "
        f"{row['counted_at_once'] / _MIB:8.2f}"
    )


def _error_of_sum(row: dict[str, Any]) -> float:
    return float(sum(peak["total"] for peak in row["predicted"]) / sum(row["counted"]) - 1)


def _held(what: str, errors: Sequence[float]) -> str:
    n_held = sum(abs(error) <= GOAL for error in errors)
    worst = max(errors, key=abs)
    return (
        f"{n_held} of {len(errors)} {what} within {GOAL:.0%}; "
        f"the one farthest off by {percent(worst, sign=True)}"
    )


def _environment(record: dict[str, Any]) -> str:
    about = record["provenance"]
    return (
        f"{about['date']}, {about['cores']} cores ({about['system']}), Python {about['python']}, "
        f"torch {about['torch']}, gpipebal {about['gpipebal']}; {about['minutes']:.1f} minutes."
    )
