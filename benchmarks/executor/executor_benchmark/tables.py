"""Tables of the README, made from a stored result and from nothing else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

from benchmark_tools.bars import Bar, bars_table
from benchmark_tools.text import (
    Column,
    block,
    columns,
    other_load,
    percent_or_unknown,
    section,
    table,
)

from executor_benchmark.floors import SAME_SCHEDULE, distributed_floors, floors
from executor_benchmark.result import Case, PairedRatio, Result

#: Result files of other machines and days, and how the README's mark names them together.
OTHERS = ("results-xeon.json", "results-noisy.json")
OTHERS_SOURCE = ", ".join(OTHERS)
#: Result file of gpipebal and torch.distributed by themselves.
DISTRIBUTED = "results-distributed.json"

_COLUMNS = {
    "plain_1": "plain 1 thr",
    "plain_2": "plain 2 thr",
    "gpipebal": "loss(pipe(x))",
    "gpipebal_gpipe": "step gpipe",
    "gpipebal_1f1b": "step 1f1b",
    "torchgpipe": "torchgpipe",
    "fairscale": "fairscale",
    "distributed_gpipe": "dist GPipe",
    "distributed_1f1b": "dist 1F1B",
}
_OURS = ("gpipebal", "gpipebal_gpipe", "gpipebal_1f1b")

#: What each peer is compared with: the same schedule, called in the same way where there is one.
_RATIOS = (
    ("plain_1", "gpipebal"),
    ("plain_2", "gpipebal"),
    ("torchgpipe", "gpipebal"),
    ("fairscale", "gpipebal"),
    ("distributed_gpipe", "gpipebal_gpipe"),
    ("distributed_1f1b", "gpipebal_1f1b"),
)


def blocks(result: Result) -> dict[str, str]:
    """Return everything that the result says as blocks of a README, by their marks."""
    parts = [
        section("Floors", floors_table(result)),
        section("Where another way is faster", _losses_table(result)),
    ]
    for name in result.workloads:
        balance = result.record["workloads"][name]["balance"]
        about = f"balance={balance} for every way, from the measured time of each layer."
        parts += [_heading(result, name), about, *_tables_of(result, name)]
    if result.record["one_partition"]:
        parts.append(section("One partition, chunks=1, `never`", _one_partition_table(result)))
    for name in result.small:
        parts += [_heading(result, name), *_tables_of(result, name)]
    return {"result": "\n\n".join(parts), "environment": _environment(result)}


def other_blocks(others: Sequence[Result]) -> dict[str, str]:
    """Return what is said of runs on other machines, in the order of `OTHERS`."""
    parts = [block(_others_table(others)), *map(_environment, others)]
    return {"others": "\n\n".join(parts)}


def distributed_blocks(result: Result) -> dict[str, str]:
    """Return what is said of gpipebal and torch.distributed by themselves."""
    parts = [block(distributed_table(result)), block(_rounds_table(result)), _environment(result)]
    return {"distributed": "\n\n".join(parts)}


def floors_table(result: Result) -> str:
    """Write one line per floor: limit, value, whether it is reached."""
    return _table_of(floors(result))


def distributed_table(result: Result) -> str:
    """Write the floors that torch.distributed sets, by the ratios of each round."""

    def ratio(case: Case, way: str, over: str) -> float | None:
        found = result.paired_ratio(case, way, over)
        return None if found is None else found.median

    return _table_of(distributed_floors(result.cases(*result.workloads), ratio))


def _table_of(found: Sequence[Bar]) -> str:
    return bars_table(found, _show, show_limit=_show_limit, header=("floor", "limit", "where"))


def _show(_: Bar, value: float) -> str:
    return f"{value:.3f}"


def _show_limit(_: Bar, limit: float) -> str:
    return f"{limit:.2f}"


def _rounds_table(result: Result) -> str:
    """Write gpipebal's step times over those of the same schedules, case by case."""

    def over(way: str, peer: str) -> Column[Case]:
        heading = f"{_COLUMNS[way]} / {_COLUMNS[peer]}"
        return heading, lambda case: _interval(result.paired_ratio(case, way, peer))

    described: list[Column[Case]] = [
        ("workload", lambda case: case[0]),
        ("chunks", lambda case: str(case[1])),
        ("rounds", lambda case: str(len(result.row(case, "gpipebal")["seconds"]["all"]))),
        *(over(way, peer) for way, (peer, _) in SAME_SCHEDULE.items()),
    ]
    title = "gpipebal's step time over torch.distributed's, in the middle of all rounds [95 %]"
    return f"{title}\n{columns(result.cases(*result.workloads), described, left=(0,))}"


def _interval(ratio: PairedRatio | None) -> str:
    return "-" if ratio is None else f"{ratio.median:.3f} [{ratio.low:.3f}, {ratio.high:.3f}]"


def _others_table(others: Sequence[Result]) -> str:
    """Write one line per floor, and the values of each result beside each other."""
    rows = []
    for row in zip(*map(floors, others), strict=True):
        values = ["-" if floor.value is None else f"{floor.value:.3f}" for floor in row]
        marks = [floor.verdict if floor.reached is False else "" for floor in row]
        limit = row[0].limit_text(_show_limit)
        rows.append([row[0].name, limit, *chain(*zip(values, marks, strict=True))])
    header = ["floor", "limit"]
    for name in OTHERS:
        header += [name.removeprefix("results-").removesuffix(".json"), ""]
    return table(header, rows, left=(0, *range(3, len(header), 2)))


def _environment(result: Result) -> str:
    """Write what it was measured on and with."""
    facts = result.record["provenance"]
    versions = ", ".join(
        f"{name} {version or 'not installed'}" for name, version in facts["versions"].items()
    )
    alone = ""
    if result.record["one_partition"]:
        alone = f" ({_length(facts, '_one_partition')} for one partition)"
    lines = [
        f"{facts['cpu']}, {facts['cores']} cores, {facts['system']}, {facts['date']}",
        versions,
        f"{_length(facts, '')} after a warm-up{alone}; the run took {facts['minutes']:.0f} minutes",
        other_load(facts["other_load"]),
        "half the distance of the quartiles of a step time, in the middle of all rows: "
        + percent_or_unknown(result.spread()),
    ]
    return block("\n".join(lines))


def _length(facts: Mapping[str, Any], of: str) -> str:
    """Say how many rounds there were."""
    return f"at least {facts['rounds' + of]} rounds and {facts['least_seconds' + of]:.0f} s"


def _losses_table(result: Result) -> str:
    """Count the cases in which another way is faster than the one it is compared with."""
    cases = result.cases(*result.workloads)
    rows = []
    for way, ours in _RATIOS:
        known = [(result.ratio(case, ours, way), case) for case in cases]
        ratios = [(ratio, case) for ratio, case in known if ratio is not None]
        if not ratios:
            absent = _short(result.row(cases[0], way)["status"]) if cases else "-"
            rows.append([_COLUMNS[way], _COLUMNS[ours], absent, "", ""])
            continue
        n_ahead = sum(ratio > 1 for ratio, _ in ratios)
        most, (workload, chunks, checkpoint) = max(ratios)
        at_most = [f"{most:.2f}x", f"{workload}, chunks={chunks}, {checkpoint}"]
        faster_in = f"{n_ahead} of {len(ratios)}"
        rows.append([_COLUMNS[way], _COLUMNS[ours], faster_in, *(at_most if n_ahead else ("", ""))])
    return table(["way", "than", "faster in", "at most by", "where"], rows, left=(0, 1, 4))


def _heading(result: Result, workload: str) -> str:
    return f"### {workload}: {result.record['workloads'][workload]['about']}"


def _tables_of(result: Result, workload: str) -> tuple[str, str]:
    """Write milliseconds of a step, then gpipebal's efficiencies and the peers' times over its."""

    def milliseconds(way: str) -> Column[Case]:
        return _COLUMNS[way], lambda case: _time(result.row(case, way))

    def efficiency(way: str) -> Column[Case]:
        return _COLUMNS[way], lambda case: _number(result.efficiency(case, way))

    def bare(way: str) -> Column[Case]:
        heading = f"bare {way.removeprefix('gpipebal_')}"
        return heading, lambda case: _number(result.attainable(case, way))

    def ratio(way: str, over: str) -> Column[Case]:
        return _COLUMNS[way], lambda case: _number(result.ratio(case, way, over), "x")

    about: list[Column[Case]] = [("chunks", lambda case: str(case[1])), ("checkpoint", _mode)]
    cases = result.cases(workload)
    times = columns(cases, [*about, *map(milliseconds, _COLUMNS)], left=(1,))
    ratios = [ratio(*pair) for pair in _RATIOS]
    described = [*about, *map(efficiency, _OURS), *map(bare, _OURS[1:]), *ratios]
    title = (
        "efficiency of gpipebal's three ways and of bare threads, then step time of each other way "
        "over gpipebal's (above 1, gpipebal is faster)"
    )
    return (
        block(f"ms per step\n{times}"),
        block(f"{title}\n{columns(cases, described, left=(1,))}"),
    )


def _one_partition_table(result: Result) -> str:
    described: list[Column[Mapping[str, Any]]] = [
        ("workload", lambda row: row["workload"]),
        ("plain, ms", lambda row: _spread(row["plain_1"])),
        ("gpipebal, ms", lambda row: _spread(row["gpipebal"])),
        (
            "gpipebal / plain",
            lambda row: f"{row['gpipebal']['median'] / row['plain_1']['median']:.3f}",
        ),
    ]
    return columns(result.record["one_partition"], described, left=(0,))


def _mode(case: Case) -> str:
    # With one micro-batch nothing is recomputed in either mode.
    return "either" if case[1] == 1 else case[2]


def _time(row: Mapping[str, Any]) -> str:
    return _spread(row["seconds"]) if row["status"] == "ok" else _short(row["status"])


def _spread(seconds: Mapping[str, float]) -> str:
    """Write the median, and half the distance of the quartiles."""
    return f"{1e3 * seconds['median']:.1f} ±{500 * (seconds['q3'] - seconds['q1']):.1f}"


def _number(value: float | None, unit: str = "") -> str:
    return "-" if value is None else f"{value:.2f}{unit}"


def _short(status: str) -> str:
    if status.startswith("failed"):
        return "failed"
    # Said in the README's text, for all rows at once.
    return "-" if status in ("no checkpointing", "needs 2 micro-batches") else status
