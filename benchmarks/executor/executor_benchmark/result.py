"""A stored result: its records, found by workload, micro-batches, checkpoint mode and way."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from scipy.stats import quantile_test

FORMAT = "gpipebal-benchmark-executor"
VERSION = 1

#: Workload, micro-batches, checkpoint mode.
Case = tuple[str, int, str]


class PairedRatio(NamedTuple):
    """The median of a ratio over the rounds, and between what it lies with 95 % confidence."""

    median: float
    low: float
    high: float


class Result:
    """What the benchmark measured.

    Args:
        record: The content of a result file.

    Attributes:
        record: As given.
        workloads: Names of the workloads that the floors are about.
        small: Names of those with small cells.
    """

    def __init__(self, record: Mapping[str, Any]) -> None:
        if record.get("format") != FORMAT or record.get("version") != VERSION:
            raise ValueError(f"not a result of this benchmark: format={record.get('format')!r}")
        self.record = record
        self.workloads = [name for name, about in record["workloads"].items() if not about["small"]]
        self.small = [name for name, about in record["workloads"].items() if about["small"]]
        self._rows = {
            (row["workload"], row["chunks"], row["checkpoint"], row["way"]): row
            for row in record["results"]
            if "way" in row
        }

    @classmethod
    def load(cls, path: Path) -> Result:
        """Read a result file."""
        return cls(json.loads(path.read_text(encoding="utf-8")))

    def cases(self, *workloads: str, least_chunks: int = 1) -> list[Case]:
        """List what was measured of some workloads, in the order of the file."""
        found = {
            (name, chunks, checkpoint): None
            for name, chunks, checkpoint, _ in self._rows
            if name in workloads and checkpoint is not None and chunks >= least_chunks
        }
        return list(found)

    def row(self, case: Case, way: str) -> Mapping[str, Any]:
        """Return the record of one way; the plain model has no checkpoint mode."""
        workload, chunks, checkpoint = case
        key = (workload, chunks, None if way.startswith("plain") else checkpoint, way)
        return self._rows.get(key, {"status": "no checkpointing"})

    def median(self, case: Case, way: str) -> float | None:
        """Return the median seconds of a step; None where it was not run."""
        row = self.row(case, way)
        return row["seconds"]["median"] if row["status"] == "ok" else None

    def spread(self) -> float | None:
        """Return half the distance of the quartiles over the median, that of the middle row."""
        found = [
            (row["seconds"]["q3"] - row["seconds"]["q1"]) / 2 / row["seconds"]["median"]
            for row in self._rows.values()
            if row["status"] == "ok"
        ]
        return statistics.median(found) if found else None

    def efficiency(self, case: Case, way: str) -> float | None:
        """Return the ideal makespan over the measured one, each the median over the rounds."""
        row = self.row(case, way)
        if row["status"] != "ok" or "ideal" not in row:
            return None
        return row["ideal"]["median"] / row["seconds"]["median"]

    def attainable(self, case: Case, way: str) -> float | None:
        """Return the efficiency that bare threads reach with the same cells; see `cells`."""
        row = self.row(case, way)
        if row["status"] != "ok" or "side_by_side" not in row:
            return None
        return row["ideal"]["median"] / row["side_by_side"]["median"]

    def ratio(self, case: Case, way: str, over: str) -> float | None:
        """Return one way's median step time over another's: above 1, the other is faster."""
        top, bottom = self.median(case, way), self.median(case, over)
        return None if top is None or bottom is None else top / bottom

    def paired_ratio(self, case: Case, way: str, over: str) -> PairedRatio | None:
        """Compare two ways in each round by itself: what slows a whole round down cancels out.

        The interval assumes nothing of how the ratios are spread, only that rounds do not depend on
        each other. With fewer than six of them its ends are NaN.
        """
        rows = self.row(case, way), self.row(case, over)
        if any(row["status"] != "ok" for row in rows):
            return None
        seconds = [row["seconds"]["all"] for row in rows]
        ratios = [ours / theirs for ours, theirs in zip(*seconds, strict=True)]
        low, high = quantile_test(ratios, q=1).confidence_interval(0.95)
        return PairedRatio(statistics.median(ratios), float(low), float(high))
