"""Floors: what the executor must reach on two cores, and whether the stored result does."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from executor_benchmark.result import Case, Result

__all__ = ["SAME_SCHEDULE", "Floor", "distributed_floors", "floors"]

#: The ways of gpipebal, as its users write them.
_OURS = {
    "gpipebal": "loss(pipe(x))",
    "gpipebal_gpipe": "step('gpipe')",
    "gpipebal_1f1b": "step('1f1b')",
}

#: The same schedule in torch.distributed.pipelining. Its GPipe takes the loss per micro-batch, as
#: step('gpipe') does; loss(pipe(x)) waits for the whole mini-batch, and is compared all the same.
SAME_SCHEDULE = {
    "gpipebal_gpipe": ("distributed_gpipe", "GPipe"),
    "gpipebal": ("distributed_gpipe", "GPipe"),
    "gpipebal_1f1b": ("distributed_1f1b", "1F1B"),
}


@dataclass(frozen=True)
class Floor:
    """One floor and what was measured.

    Attributes:
        name: What is compared.
        limit: The value to reach; None: it is no floor, and stands there to compare with.
        value: The value measured; None if it was not.
        where: The case that the value is of, or over how many it was taken.
        at_most: Whether the value must not be above the limit, instead of not below.
    """

    name: str
    limit: float | None
    value: float | None
    where: str
    at_most: bool = False

    @property
    def reached(self) -> bool | None:
        """Whether the value reaches the limit; None if it was not measured or is no floor."""
        if self.value is None or self.limit is None:
            return None
        return self.value <= self.limit if self.at_most else self.value >= self.limit


def floors(result: Result) -> list[Floor]:
    """Evaluate every floor, over the workloads that are not small."""
    found = []
    cases = result.cases(*result.workloads)
    for way, name in _OURS.items():
        values = _known((result.efficiency(case, way), case) for case in cases)
        mean = statistics.fmean(value for value, _ in values) if values else None
        found.append(Floor(f"efficiency of {name}, mean", 0.93, mean, _over(values)))
        lowest, where = min(values, default=(None, None))
        found.append(Floor(f"efficiency of {name}, worst", 0.85, lowest, _name(where)))
        bound = _known((result.attainable(case, way), case) for case in cases)
        if bound:
            mean = statistics.fmean(value for value, _ in bound)
            label = f"  cells of {name} in bare threads"
            found.append(Floor(f"{label}, mean", None, mean, _over(bound)))
            lowest, where = min(bound)
            found.append(Floor(f"{label}, worst", None, lowest, _name(where)))

    several = result.cases(*result.workloads, least_chunks=4)
    for way, name in _OURS.items():
        values = _known((result.ratio(case, "torchgpipe", way), case) for case in several)
        where = f"{_over(values)}, chunks >= 4"
        found.append(Floor(f"torchgpipe / {name}, mean", 1.6, _mean_ratio(values), where))

    found += distributed_floors(cases, result.ratio)
    alone = [
        (row["gpipebal"]["median"] / row["plain_1"]["median"], row["workload"])
        for row in result.record["one_partition"]
    ]
    highest, workload = max(alone, default=(None, "not measured"))
    name = "one partition, chunks=1, never / plain, worst"
    found.append(Floor(name, 1.03, highest, workload, at_most=True))
    return found


def distributed_floors(
    cases: Sequence[Case], ratio: Callable[[Case, str, str], float | None]
) -> list[Floor]:
    """Evaluate the floors that torch.distributed sets, by any ratio of two ways in a case."""
    found = []
    for way, (peer, schedule) in SAME_SCHEDULE.items():
        values = _known((ratio(case, way, peer), case) for case in cases)
        highest, where = max(values, default=(None, None))
        name = f"{_OURS[way]} / torch.distributed {schedule}"
        found.append(Floor(f"{name}, worst", 1.03, highest, _name(where), at_most=True))
        if values:
            found.append(Floor(f"  {name}, mean", None, _mean_ratio(values), _over(values)))
    return found


def _known(values: Iterable[tuple[float | None, Case]]) -> list[tuple[float, Case]]:
    return [(value, case) for value, case in values if value is not None]


def _mean_ratio(values: list[tuple[float, Case]]) -> float | None:
    """Return the geometric mean of ratios: the same whichever way round they are taken."""
    if not values:
        return None
    return math.exp(statistics.fmean(math.log(value) for value, _ in values))


def _over(values: list[tuple[float, Case]]) -> str:
    return f"over {len(values)} cases"


def _name(case: Case | None) -> str:
    if case is None:
        return "not measured"
    workload, chunks, checkpoint = case
    return f"{workload}, chunks={chunks}, {checkpoint}"
