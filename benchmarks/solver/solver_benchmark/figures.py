"""Figures that are made of a stored result: bars, growth."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from benchmark_tools.bars import Bar

from solver_benchmark.chains import RANDOM

FORMAT = "gpipebal solver benchmark"
VERSION = 1
_OBJECTIVES = ("bottleneck", "makespan")
#: What is timed, and what its figures are called.
_TIMED = {
    "value": "bottleneck without tie-break",
    "bottleneck": "bottleneck",
    "makespan": "makespan",
}
#: What is compared with torchgpipe's rule, and what it is called.
_COMPARED = {
    "value": "bottleneck without tie-break",
    "bottleneck": "bottleneck",
    "reading": "reading the costs once",
}
#: Sizes that have a bar: seconds, layers and partitions, and what they are called.
_SIZES = (
    (0.2e-3, ((100, 8), (200, 8)), "N <= 200, K = 8"),
    (0.2e-3, ((100, 64), (200, 64)), "N <= 200, K = 64"),
    (10e-3, ((10_000, 512),), "10,000 / 512"),
    (25e-3, ((100_000, 512),), "100,000 / 512"),
)

Row = dict[str, Any]


def bars(record: dict[str, Any]) -> list[Bar]:
    """Return the bars: over the chains that are drawn layer by layer, then over the others."""
    drawn = [row for row in record["times"] if row["kind"] in RANDOM]
    others = [row for row in record["times"] if row["kind"] not in RANDOM]
    gaps = [row[objective]["gap"] for row in record["times"] for objective in _OBJECTIVES]
    return [
        *_bars_of_kind("drawn", drawn),
        *_bars_of_kind("others", others),
        Bar("gap of every split", 0.0, max(gaps), True, "all chains"),
        *(
            Bar(row["name"], row["limit"], row["seconds"], True, f"gap {row['gap']:.1%}")
            for row in record["joint"]
        ),
    ]


def _bars_of_kind(kind: str, of_kind: Sequence[Row]) -> Iterator[Bar]:
    """Yield the longest times, and how many times as long torchgpipe's rule takes at the least."""
    for timed, called in _TIMED.items():
        for limit, sizes, size in _SIZES:
            rows = [row for row in of_kind if (row["n_layers"], row["n_partitions"]) in sizes]
            longest = _farthest(max, rows, lambda row, timed=timed: row[timed]["seconds"])
            yield Bar(f"{called}, {size}, {kind}", limit, longest[0], True, longest[1])
    for timed, called in _COMPARED.items():
        rows = [
            row
            for row in of_kind
            if row["n_layers"] >= 1_000 and row["peers"].get("torchgpipe", {}).get("seconds")
        ]
        least = _farthest(
            min,
            rows,
            lambda row, timed=timed: row["peers"]["torchgpipe"]["seconds"] / row[timed]["seconds"],
        )
        yield Bar(f"torchgpipe / {called}, N >= 1,000, {kind}", 17.0, least[0], False, least[1])


def _farthest(
    choose: Callable[..., Row], rows: Sequence[Row], figure: Callable[[Row], float]
) -> tuple[float | None, str]:
    """Return the largest or the smallest figure of some rows, and where it is; None: no rows."""
    if not rows:
        return None, ""
    row = choose(rows, key=figure)
    return figure(row), f"{row['kind']}, {row['n_layers']:,} / {row['n_partitions']}"


def growth(record: dict[str, Any], name: str, kind: str, n_partitions: int) -> float | None:
    """Fit ``time = c * N ** p`` over N of 1,000 and more; return p."""
    points = [
        (row["n_layers"], row[name]["seconds"])
        for row in pick(record["times"], kind=kind, n_partitions=n_partitions)
        if row["n_layers"] >= 1_000
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
