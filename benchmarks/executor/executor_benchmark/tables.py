"""Tables of the README, made from a stored result and from nothing else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

from benchmark_tools.bars import Bar
from benchmark_tools.text import block, percent_or_unknown, table

from executor_benchmark.floors import SAME_SCHEDULE, distributed_floors, floors
from executor_benchmark.result import Case, PairedRatio, Result

__all__ = [
    "DISTRIBUTED",
    "OTHERS",
    "OTHERS_SOURCE",
    "blocks",
    "distributed_blocks",
    "distributed_table",
    "environment",
    "floors_table",
    "other_blocks",
    "results",
]

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
    return {"result": results(result), "environment": environment(result)}


def other_blocks(others: Sequence[Result]) -> dict[str, str]:
    """Return what is said of runs on other machines, in the order of `OTHERS`."""
    parts = [block(_others_table(others)), *map(environment, others)]
    return {"others": "\n\n".join(parts)}


def distributed_blocks(result: Result) -> dict[str, str]:
    """Return what is said of gpipebal and torch.distributed by themselves."""
    parts = [block(distributed_table(result)), block(_rounds_table(result)), environment(result)]
    return {"distributed": "\n\n".join(parts)}


def results(result: Result) -> str:
    """Write all tables, as Markdown."""
    parts = ["### Floors", block(floors_table(result))]
    parts += ["### Where another way is faster", block(_losses_table(result))]
    for name in result.workloads:
        parts += [f"### {name}: {result.record['workloads'][name]['about']}"]
        parts += [_about_balance(result, name)]
        parts += [block(_times_table(result, name)), block(_ratios_table(result, name))]
    if result.record["one_partition"]:
        parts += ["### One partition, chunks=1, `never`"]
        parts += [block(_one_partition_table(result))]
    for name in result.small:
        parts += [f"### {name}: {result.record['workloads'][name]['about']}"]
        parts += [block(_times_table(result, name)), block(_ratios_table(result, name))]
    return "\n\n".join(parts)


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
    words = {True: "reached", False: "NOT REACHED", None: "not measured"}
    rows = [
        [
            floor.name,
            _limit(floor),
            "" if floor.value is None else f"{floor.value:.3f}",
            "" if floor.limit is None else words[floor.reached],
            floor.where,
        ]
        for floor in found
    ]
    return table(["floor", "limit", "value", "", "where"], rows, left=(0, 3, 4))


def _rounds_table(result: Result) -> str:
    """Write gpipebal's step times over those of the same schedules, case by case."""
    rows = []
    for case in result.cases(*result.workloads):
        n_rounds = len(result.row(case, "gpipebal")["seconds"]["all"])
        ratios = [result.paired_ratio(case, way, peer) for way, (peer, _) in SAME_SCHEDULE.items()]
        rows.append([case[0], str(case[1]), str(n_rounds), *map(_interval, ratios)])
    over = [f"{_COLUMNS[way]} / {_COLUMNS[peer]}" for way, (peer, _) in SAME_SCHEDULE.items()]
    title = "gpipebal's step time over torch.distributed's, in the middle of all rounds [95 %]"
    return f"{title}\n{table(['workload', 'chunks', 'rounds', *over], rows, left=(0,))}"


def _interval(ratio: PairedRatio | None) -> str:
    return "-" if ratio is None else f"{ratio.median:.3f} [{ratio.low:.3f}, {ratio.high:.3f}]"


def _others_table(others: Sequence[Result]) -> str:
    """Write one line per floor, and the values of each result beside each other."""
    rows = []
    for row in zip(*map(floors, others), strict=True):
        values = ["-" if floor.value is None else f"{floor.value:.3f}" for floor in row]
        marks = ["NOT REACHED" if floor.reached is False else "" for floor in row]
        rows.append([row[0].name, _limit(row[0]), *chain(*zip(values, marks, strict=True))])
    header = ["floor", "limit"]
    for name in OTHERS:
        header += [name.removeprefix("results-").removesuffix(".json"), ""]
    return table(header, rows, left=(0, *range(3, len(header), 2)))


def _limit(floor: Bar) -> str:
    """Write what a value must reach; nothing for what is no floor."""
    return "" if floor.limit is None else f"{'<=' if floor.at_most else '>='} {floor.limit:.2f}"


def environment(result: Result) -> str:
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
        "other programs' share of the cores meanwhile: " + percent_or_unknown(facts["other_load"]),
        "half the distance of the quartiles of a step time, in the middle of all rows: "
        + percent_or_unknown(result.spread()),
    ]
    return block("\n".join(lines))


def _length(facts: Mapping[str, Any], of: str) -> str:
    """Say how many rounds there were; older results had no time to fill."""
    rounds, seconds = facts["rounds" + of], facts.get("least_seconds" + of)
    return f"at least {rounds} rounds and {seconds:.0f} s" if seconds else f"{rounds} rounds"


def _losses_table(result: Result) -> str:
    """Count the cases in which another way is faster than the one it is compared with."""
    cases = result.cases(*result.workloads)
    rows = []
    for way, ours in _RATIOS:
        known = [(result.ratio(case, ours, way), case) for case in cases]
        ratios: list[tuple[float, Case]] = [(ratio, case) for ratio, case in known if ratio]
        if not ratios:
            rows.append([_COLUMNS[way], _COLUMNS[ours], _why_absent(result, way), "", ""])
            continue
        ahead = [(ratio, case) for ratio, case in ratios if ratio > 1]
        most, where = max(ratios)
        rows.append(
            [
                _COLUMNS[way],
                _COLUMNS[ours],
                f"{len(ahead)} of {len(ratios)}",
                f"{most:.2f}x" if ahead else "",
                f"{where[0]}, chunks={where[1]}, {where[2]}" if ahead else "",
            ]
        )
    return table(["way", "than", "faster in", "at most by", "where"], rows, left=(0, 1, 4))


def _times_table(result: Result, workload: str) -> str:
    """Write milliseconds of a step: median, and half the distance of the quartiles."""
    rows = [
        [str(case[1]), _mode(case), *(_time(result.row(case, way)) for way in _COLUMNS)]
        for case in result.cases(workload)
    ]
    text = table(["chunks", "checkpoint", *_COLUMNS.values()], rows, left=(1,))
    return f"ms per step\n{text}"


def _ratios_table(result: Result, workload: str) -> str:
    """Write gpipebal's efficiencies, and the peers' step times over gpipebal's."""
    rows = []
    for case in result.cases(workload):
        efficiencies = [_number(result.efficiency(case, way)) for way in _OURS]
        efficiencies += [_number(result.attainable(case, way)) for way in _OURS[1:]]
        ratios = [_number(result.ratio(case, *pair), "x") for pair in _RATIOS]
        rows.append([str(case[1]), _mode(case), *efficiencies, *ratios])
    header = [
        *("chunks", "checkpoint"),
        *(_COLUMNS[way] for way in _OURS),
        *("bare gpipe", "bare 1f1b"),
        *(_COLUMNS[way] for way, _ in _RATIOS),
    ]
    title = (
        "efficiency of gpipebal's three ways and of bare threads, then step time of each other way "
        "over gpipebal's (above 1, gpipebal is faster)"
    )
    return f"{title}\n{table(header, rows, left=(1,))}"


def _one_partition_table(result: Result) -> str:
    rows = [
        [
            row["workload"],
            _time({"status": "ok", "seconds": row["plain_1"]}),
            _time({"status": "ok", "seconds": row["gpipebal"]}),
            f"{row['gpipebal']['median'] / row['plain_1']['median']:.3f}",
        ]
        for row in result.record["one_partition"]
    ]
    return table(["workload", "plain, ms", "gpipebal, ms", "gpipebal / plain"], rows, left=(0,))


def _about_balance(result: Result, workload: str) -> str:
    balance = result.record["workloads"][workload]["balance"]
    return f"balance={balance} for every way, from the measured time of each layer."


def _mode(case: Case) -> str:
    # With one micro-batch nothing is recomputed in either mode.
    return "either" if case[1] == 1 else case[2]


def _time(row: Any) -> str:
    if row["status"] != "ok":
        return _short(row["status"])
    seconds = row["seconds"]
    return f"{1e3 * seconds['median']:.1f} ±{500 * (seconds['q3'] - seconds['q1']):.1f}"


def _number(value: float | None, unit: str = "") -> str:
    return "-" if value is None else f"{value:.2f}{unit}"


def _why_absent(result: Result, way: str) -> str:
    cases = result.cases(*result.workloads)
    return _short(result.row(cases[0], way)["status"]) if cases else "-"


def _short(status: str) -> str:
    if status.startswith("failed"):
        return "failed"
    # Said in the README's text, for all rows at once.
    return "-" if status in ("no checkpointing", "needs 2 micro-batches") else status
