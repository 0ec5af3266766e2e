"""Tables of the README, made from a stored result and from nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmark_tools.machine import describe_counts
from benchmark_tools.text import block, signed

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


def blocks(record: dict[str, Any]) -> dict[str, str]:
    """Return everything that the record says as blocks of a README, by their marks."""
    parts = [block(_summary(record["rows"]))]
    for name, about in record["models"].items():
        rows = [row for row in record["rows"] if row["model"] == name]
        parts += [f"### {name}", f"{about}.", block("\n".join([_HEADER, *map(_cells, rows)]))]
    about = record["provenance"]
    where = f"{describe_counts(about)}; {about['minutes']:.1f} minutes."
    return {"result": "\n\n".join(parts), "environment": where}


def _summary(rows: Sequence[dict[str, Any]]) -> str:
    """Say how many predictions hold, which is the worst, and list those that do not."""
    errors = [error for row in rows for error in errors_of(row)]
    planned = [error for row in rows for error in errors_of_plan(row)]
    in_range = [inside for row in rows for inside in within_clock(row)]
    missed = [inside for error, inside in zip(errors, in_range, strict=True) if abs(error) > GOAL]
    lines = [
        _held("partitions", errors),
        f"of the other {len(missed)}, {sum(missed)} are within it without what neighbours took "
        "while the action of the peak ran",
        _too_low(errors),
        _held("sums over the partitions of a pipeline", list(map(_error_of_sum, rows))),
        "",
        "Plans, which do not know the timing of the step and count the most that may wait:",
        _held("partitions", planned),
        _too_low(planned),
    ]
    beyond = [row for row in rows if any(abs(error) > GOAL for error in errors_of(row))]
    if beyond:
        lines += ["", f"Beyond {GOAL:.0%}:", f"{'model':<13} {_HEADER}"]
        lines += [f"{row['model']:<13} {_cells(row)}".rstrip() for row in beyond]
    return "\n".join(lines)


def _held(what: str, errors: Sequence[float]) -> str:
    n_held = sum(abs(error) <= GOAL for error in errors)
    worst = signed(max(errors, key=abs))
    return f"{n_held} of {len(errors)} {what} within {GOAL:.0%}; the one farthest off by {worst}"


def _too_low(errors: Sequence[float]) -> str:
    n_under = sum(error < -0.01 for error in errors)
    return f"{n_under} of {len(errors)} partitions predicted more than 1% too low"


_HEADER = (
    f"{'step':<13} {'checkpoint':<11} {'chunks':>6}  {'counted by partition [MiB]':<31} "
    f"{'predicted is off by':<31} {'sum':>7} {'off by':>7} {'at once':>8}"
)


def _cells(row: dict[str, Any]) -> str:
    counted = " ".join(f"{n_bytes / _MIB:7.2f}" for n_bytes in row["counted"])
    errors = " ".join(f"{signed(error):>7}" for error in errors_of(row))
    return (
        f"{row['way']:<13} {row['mode']:<11} {row['chunks']:>6}  {counted:<31} {errors:<31} "
        f"{sum(row['counted']) / _MIB:7.2f} {signed(_error_of_sum(row)):>7} "
        f"{row['counted_at_once'] / _MIB:8.2f}"
    )


def _error_of_sum(row: dict[str, Any]) -> float:
    return float(sum(peak["total"] for peak in row["predicted"]) / sum(row["counted"]) - 1)
