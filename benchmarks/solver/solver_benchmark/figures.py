"""Figures that are made of a stored result: bars, growth."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from benchmark_tools.bars import Bar

from solver_benchmark.chains import RANDOM

__all__ = ["FORMAT", "VERSION", "bars", "exponent", "growth", "merge", "pick"]

FORMAT = "gpipebal solver benchmark"
VERSION = 1
_OBJECTIVES = ("bottleneck", "makespan")
#: What is timed, and what its figures are called.
_TIMED = {
    "value": "bottleneck without tie-break",
    "bottleneck": "bottleneck",
    "makespan": "makespan",
}

Row = dict[str, Any]


def bars(record: dict[str, Any]) -> list[Bar]:
    """Return the bars: over the chains that are drawn layer by layer, then over the others."""
    found = []
    drawn = [row for row in record["times"] if row["kind"] in RANDOM]
    built = [row for row in record["times"] if row["kind"] not in RANDOM]
    for kind, of_kind in (("drawn", drawn), ("others", built)):
        for timed, called in _TIMED.items():
            for limit, sizes, name in (
                (0.2e-3, ((100, 8), (200, 8)), "N <= 200, K = 8"),
                (0.2e-3, ((100, 64), (200, 64)), "N <= 200, K = 64"),
                (10e-3, ((10_000, 512),), "10,000 / 512"),
                (25e-3, ((100_000, 512),), "100,000 / 512"),
            ):
                rows = [row for row in of_kind if (row["n_layers"], row["n_partitions"]) in sizes]
                found.append(_worst(f"{called}, {name}, {kind}", limit, rows, _seconds_of(timed)))
        for timed, called in (*list(_TIMED.items())[:2], ("reading", "reading the costs once")):
            ratios = [
                (row["peers"]["torchgpipe"]["seconds"] / row[timed]["seconds"], row)
                for row in of_kind
                if row["n_layers"] >= 1_000 and row["peers"].get("torchgpipe", {}).get("seconds")
            ]
            ratio, row = min(ratios, key=lambda pair: pair[0], default=(None, None))
            where = "" if row is None else _where(row)
            title = f"torchgpipe / {called}, N >= 1,000, {kind}"
            found.append(Bar(title, 17.0, ratio, False, where))
    gaps = [row[objective]["gap"] for row in record["times"] for objective in _OBJECTIVES]
    most = max(gaps, default=None)
    found.append(Bar("gap of every split", 0.0, most, True, "all chains" if gaps else ""))
    for joint in record.get("joint", ()):
        found.append(
            Bar(joint["name"], joint["limit"], joint["seconds"], True, f"gap {joint['gap']:.1%}")
        )
    return found


def _seconds_of(timed: str) -> Callable[[Row], float]:
    return lambda row: float(row[timed]["seconds"])


def _worst(name: str, limit: float, rows: Sequence[Row], value: Callable[[Row], float]) -> Bar:
    if not rows:
        return Bar(name, limit, None, True, "")
    row = max(rows, key=value)
    return Bar(name, limit, value(row), True, _where(row))


def _where(row: Row) -> str:
    return f"{row['kind']}, {row['n_layers']:,} / {row['n_partitions']}"


def growth(record: dict[str, Any], name: str, kind: str, n_partitions: int) -> float | None:
    """Fit ``time = c * N ** p`` over N of 1,000 and more; return p."""
    points = [
        (row["n_layers"], row[name]["seconds"])
        for row in record["times"]
        if row["kind"] == kind and row["n_partitions"] == n_partitions and row["n_layers"] >= 1_000
    ]
    return exponent(points)


def exponent(points: Sequence[tuple[float, float]]) -> float | None:
    """Fit a power law by least squares of logarithms; None: fewer than two sizes.

    Example:
        >>> exponent([(1, 2.0), (10, 200.0)])
        2.0
    """
    if len({n for n, _ in points}) < 2:
        return None
    xs, ys = [math.log(n) for n, _ in points], [math.log(t) for _, t in points]
    x, y = sum(xs) / len(xs), sum(ys) / len(ys)
    return sum((a - x) * (b - y) for a, b in zip(xs, ys, strict=True)) / sum(
        (a - x) ** 2 for a in xs
    )


def pick(rows: Sequence[Row], **wanted: Any) -> list[Row]:
    """Return the rows with these values."""
    return [row for row in rows if all(row[key] == value for key, value in wanted.items())]


def merge(old: dict[str, Any], new: dict[str, Any], kinds: Sequence[str]) -> dict[str, Any]:
    """Put the parts that were measured anew into a result.

    Raises:
        ValueError: the two were measured with other packages or settings.
    """
    for name in ("cpu", "cores", "versions", "rounds", "limit", "quick"):
        if old["provenance"][name] != new["provenance"][name]:
            raise ValueError(
                f"results do not belong together: {name} is {new['provenance'][name]!r}, and was "
                f"{old['provenance'][name]!r}.\nFix: measure all parts anew."
            )
    again = {row["kind"] for row in new["times"]}
    times = [row for row in old["times"] if row["kind"] not in again] + new["times"]
    loads = [about["provenance"]["other_load"] for about in (old, new)]
    minutes = [about["provenance"]["minutes"] for about in (old, new)]
    provenance = {
        **new["provenance"],
        "runs": old["provenance"]["runs"] + 1,
        "minutes": round(sum(minutes), 2),
        "other_load": None if None in loads else max(loads),
    }
    ordered = sorted(times, key=lambda row: kinds.index(row["kind"]))
    return {**old, **new, "times": ordered, "provenance": provenance}
