"""Floors: what the executor must reach on two cores, and whether the stored result does."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence

from benchmark_tools.bars import Bar

from executor_benchmark.result import Case, Result

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


def floors(result: Result) -> list[Bar]:
    """Evaluate every floor, over the workloads that are not small."""
    found = []
    cases = result.cases(*result.workloads)
    for way, name in _OURS.items():
        values = _known((result.efficiency(case, way), case) for case in cases)
        mean = statistics.fmean(value for value, _ in values) if values else None
        found.append(Bar(f"efficiency of {name}, mean", 0.93, mean, False, _over(values)))
        lowest, where = min(values, default=(None, None))
        found.append(Bar(f"efficiency of {name}, worst", 0.85, lowest, False, _name(where)))
        bound = _known((result.attainable(case, way), case) for case in cases)
        if bound:
            mean = statistics.fmean(value for value, _ in bound)
            label = f"  cells of {name} in bare threads"
            found.append(Bar(f"{label}, mean", None, mean, False, _over(bound)))
            lowest, where = min(bound)
            found.append(Bar(f"{label}, worst", None, lowest, False, _name(where)))

    several = result.cases(*result.workloads, least_chunks=4)
    for way, name in _OURS.items():
        values = _known((result.ratio(case, "torchgpipe", way), case) for case in several)
        where = f"{_over(values)}, chunks >= 4"
        found.append(Bar(f"torchgpipe / {name}, mean", 1.6, _mean_ratio(values), False, where))

    found += distributed_floors(cases, result.ratio)
    alone = [
        (row["gpipebal"]["median"] / row["plain_1"]["median"], row["workload"])
        for row in result.record["one_partition"]
    ]
    highest, workload = max(alone, default=(None, "not measured"))
    name = "one partition, chunks=1, never / plain, worst"
    found.append(Bar(name, 1.03, highest, True, workload))
    return found


def distributed_floors(
    cases: Sequence[Case], ratio: Callable[[Case, str, str], float | None]
) -> list[Bar]:
    """Evaluate the floors that torch.distributed sets, by any ratio of two ways in a case."""
    found = []
    for way, (peer, schedule) in SAME_SCHEDULE.items():
        values = _known((ratio(case, way, peer), case) for case in cases)
        highest, where = max(values, default=(None, None))
        name = f"{_OURS[way]} / torch.distributed {schedule}"
        found.append(Bar(f"{name}, worst", 1.03, highest, True, _name(where)))
        if values:
            found.append(Bar(f"  {name}, mean", None, _mean_ratio(values), False, _over(values)))
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
