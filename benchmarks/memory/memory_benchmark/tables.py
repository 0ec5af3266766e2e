"""Tables of the README, made from a stored result and from nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmark_tools.machine import describe
from benchmark_tools.text import block, gib, percent, table

from memory_benchmark.balances import BALANCES
from memory_benchmark.experiments import EXPERIMENTS, Experiment

__all__ = [
    "FORMAT",
    "GOALS",
    "VERSION",
    "blocks",
    "decided_by_clock",
    "errors",
    "goals",
    "on_one_device",
    "summary",
    "total",
    "upgraded",
]

FORMAT = "gpipebal-benchmark-memory"
VERSION = 2

#: Peak activation memory to stay at or under, in GiB: torchgpipe's.
GOALS = {
    "amoebanetd pipeline-2": 3.39,
    "amoebanetd pipeline-4": 6.91,
    "amoebanetd pipeline-8": 10.83,
}

#: How far a count may be from what the clock can make of it, as a fraction of the count.
LEEWAY = 0.02

Record = dict[str, Any]

_PARTS = {
    "in flight": "in flight",
    "transient": "one cell",
    "outputs": "outputs",
    "waiting": "waiting",
    "buffers": "buffers",
    "copies": "copies of them",
}


def blocks(record: Record) -> dict[str, str]:
    """Return what stands between the marks of the README."""
    return {"result": _results(record), "environment": block(_environment(record))}


def summary(record: Record) -> str:
    """Say whether the goals are reached, how far estimates are from counts, what was measured.

    Of a record that has only measurements, it is these.
    """
    estimates = [goals(record), _agreement(record)] if record["full"] else []
    return "\n\n".join([*estimates, _measured(record)])


def total(found: dict[str, Any], name: str = "activations") -> int:
    """Add up the partitions."""
    return sum(found[name])


def errors(row: dict[str, Any]) -> list[float]:
    """Return estimated over counted peak, less one, of each partition."""
    pairs = zip(row["estimated"], row["counted"], strict=True)
    return [estimated / counted - 1 for estimated, counted in pairs]


def decided_by_clock(row: dict[str, Any]) -> list[bool]:
    """Tell of each partition whether its count lies between what the clock can make of it."""
    ranges = zip(row["least"], row["counted"], row["most"], strict=True)
    return [
        least <= counted * (1 + LEEWAY) and most >= counted * (1 - LEEWAY)
        for least, counted, most in ranges
    ]


def upgraded(record: Record) -> Record:
    """Return a record of any version as one of today's.

    Before version 2 nothing was measured, and nothing was estimated for one device.
    """
    return {"measured": {}, **record, "version": VERSION}


def on_one_device(record: Record, key: str) -> list[int] | None:
    """Return the estimated need of each partition of torchgpipe's balance, all on one device.

    None: nothing was estimated.
    """
    row = record["full"].get(key)
    if row is None or "on_one_device" not in row:
        return None
    model = row["balances"]["published"]["model"]
    return [a + b for a, b in zip(model, row["on_one_device"], strict=True)]


def _results(record: Record) -> str:
    sections = [
        ("", goals(record)),
        ("### AmoebaNet-D", _activations(record)),
        ("### U-Net", _totals(record)),
        ("### By partition", _by_partition(record)),
        ("### What it consists of", _parts(record)),
        ("### What a smaller need costs in time", _times(record)),
        ("### Estimated against counted", f"{_agreement(record)}\n\n{_counted(record)}"),
        ("### Measured on one device", _measured(record)),
    ]
    found = []
    for title, text in sections:
        found += [title] if title else []
        found.append(block(text))
    return "\n\n".join(found)


def _present(record: Record, model: str | None = None) -> list[Experiment]:
    return [e for e in EXPERIMENTS if e.key in record["full"] and model in (None, e.model)]


def goals(record: Record) -> str:
    """Write what was needed beside the goal, and whether that is reached."""
    lines = []
    for experiment in _present(record, "amoebanetd"):
        if experiment.key not in GOALS:
            continue
        goal, balances = GOALS[experiment.key], record["full"][experiment.key]["balances"]
        row = [experiment.name, f"{goal:.2f}", f"{experiment.paper_activations:.2f}"]
        reserved = record["measured"].get(experiment.key, {}).get("reserved")
        model = total(balances["published"], "model")
        needs = [None if reserved is None else reserved - model]
        needs += [total(balances[name]) for name in BALANCES]
        row += [_against(need, goal) for need in needs]
        lines.append(row)
    names = ["published, one allocator: reserved GiB", *(f"{name}: live GiB" for name in BALANCES)]
    return table(["AmoebaNet-D", "goal GiB", "paper GB", *names], lines, left=[0])


def _against(need: int | None, goal: float) -> str:
    if need is None:
        return "-"
    return f"{gib(need)} {'yes' if need <= goal * 2**30 else 'NO'}"


def _activations(record: Record) -> str:
    header = ["", "(L, D)", "parameters", "model", "torchgpipe", "paper", "torchgpipe", "paper"]
    second = ["", "", "", "GiB", "model GiB", "model GB", "reserved GiB", "GB"]
    lines = [second + ["live GiB"] * len(BALANCES) + ["and foreach"]]
    for experiment in _present(record, "amoebanetd"):
        row = record["full"][experiment.key]
        published = row["balances"]["published"]
        lines.append(
            [
                experiment.name,
                str(experiment.size),
                f"{row['parameters']:,}",
                gib(total(published, "model")),
                _known(experiment.published_model),
                _known(experiment.paper_model),
                _known(experiment.published_activations) if not experiment.is_plain else "no room",
                _known(experiment.paper_activations),
                *(_live(row, name) for name in BALANCES),
                gib(sum(row["today"])),
            ]
        )
    return table([*header, *BALANCES, "published"], lines, left=[0])


def _totals(record: Record) -> str:
    header = ["", "(B, C)", "parameters", "model", "torchgpipe: all", "published: all"]
    second = ["", "", "", "GiB", "reserved GiB", "live GiB"]
    lines = [second + ["activations GiB"] * len(BALANCES)]
    for experiment in _present(record, "unet"):
        row = record["full"][experiment.key]
        published = row["balances"]["published"]
        model = total(published, "model")
        lines.append(
            [
                experiment.name,
                str(experiment.size),
                f"{row['parameters']:,}",
                gib(model),
                _known(experiment.published_total),
                gib(model + total(published)),
                *(_live(row, name) for name in BALANCES),
            ]
        )
    return table([*header, *BALANCES], lines, left=[0])


def _by_partition(record: Record) -> str:
    lines = []
    for experiment in _present(record):
        balances = record["full"][experiment.key]["balances"]
        for name, found in balances.items():
            if len(found["balance"]) == 1:
                continue
            lines.append(
                [
                    experiment.key,
                    name,
                    ", ".join(map(str, found["balance"])),
                    _list(found["model"]),
                    _list(found["activations"]),
                ]
            )
    header = ["", "balance", "layers", "model GiB", "peak activations, live GiB"]
    return table(header, lines, left=[0, 1, 2, 3, 4])


def _parts(record: Record) -> str:
    lines = []
    for experiment in _present(record):
        for name, found in record["full"][experiment.key]["balances"].items():
            if name in ("published", "least total"):
                needs = [sum(found["parts"][part]) for part in _PARTS]
                lines.append([experiment.key, name, gib(total(found)), *map(gib, needs)])
    header = ["sum over partitions, live GiB", "balance", "activations", *_PARTS.values()]
    return table(header, lines, left=[0, 1])


def _times(record: Record) -> str:
    lines = []
    for experiment in _present(record):
        balances = record["full"][experiment.key]["balances"]
        if "fastest" in balances:
            least = balances["fastest"]["makespan"]
            ratios = [f"{balances[name]['makespan'] / least:.3f}" for name in BALANCES]
            lines.append([experiment.key, *ratios])
    return table(["makespan over the fastest", *BALANCES], lines, left=[0])


def _agreement(record: Record) -> str:
    found = [error for row in record["reduced"].values() for error in errors(row)]
    if not found:
        return "nothing counted"
    n_inside = sum(sum(decided_by_clock(row)) for row in record["reduced"].values())
    mean = sum(map(abs, found)) / len(found)
    return (
        f"{len(found)} partitions counted at reduced sizes: estimates off by {percent(mean)} "
        f"(mean absolute), at most {percent(max(found), sign=True)} over and "
        f"{percent(min(found), sign=True)} under;\n"
        f"{n_inside} of them between nothing and all that may wait for a neighbour "
        f"(within {LEEWAY:.0%})"
    )


def _counted(record: Record) -> str:
    lines = []
    for experiment in _present(record):
        row = record["reduced"].get(experiment.key)
        if row is None:
            continue
        lines.append(
            [
                experiment.key,
                str(tuple(row["size"])),
                f"{row['rows']} x {row['image_size']} px",
                str(row["chunks"]),
                " ".join(f"{n / 2**20:.1f}" for n in row["counted"]),
                " ".join(percent(error, sign=True) for error in errors(row)),
            ]
        )
    header = ["", "size", "images", "chunks", "counted live MiB", "estimate is off by"]
    return table(header, lines, left=[0, 4, 5])


def _measured(record: Record) -> str:
    header = ["", "estimated", "counted", "estimate is", "at one time"]
    second = ["", "live GiB", "live GiB", "off by", "live GiB"]
    lines = [[*second, "allocated GiB", "reserved GiB", "reserved GiB"]]
    by_partition, found = [], []
    for experiment in EXPERIMENTS:
        row = record["measured"].get(experiment.key)
        if row is None:
            continue
        estimated = on_one_device(record, experiment.key)
        need = None if estimated is None else sum(estimated)
        if row.get("did_not_fit"):
            lines.append([experiment.key, gib(need), "did not fit", *"-----"])
            continue
        counted = row["counted"]
        ratios = errors({"estimated": estimated, "counted": counted}) if estimated else []
        found += ratios
        lines.append(
            [
                experiment.key,
                gib(need),
                gib(sum(counted)),
                percent(None if need is None else need / sum(counted) - 1, sign=True),
                gib(row["counted_total"]),
                gib(row["allocated"]),
                gib(row["reserved"]),
                _published_total(record, experiment),
            ]
        )
        if len(counted) == 1:
            continue  # the line above says it all
        by_partition.append(
            [
                experiment.key,
                _list(estimated or ()) or "-",
                _list(counted),
                " ".join(percent(ratio, sign=True) for ratio in ratios) or "-",
            ]
        )
    if len(lines) == 1:
        return "nothing measured"
    sections = [table([*header, "allocator", "allocator", "torchgpipe"], lines, left=[0])]
    if by_partition:
        header = ["", "estimated live GiB", "counted live GiB", "estimate is off by"]
        sections.append(table(header, by_partition, left=[0, 1, 2, 3]))
    if found:
        sections.insert(
            0,
            f"{len(found)} partitions counted at full size on {_devices(record)}: "
            f"estimates off by {percent(sum(map(abs, found)) / len(found))}\n"
            f"(mean absolute), at most {percent(max(found), sign=True)} over and "
            f"{percent(min(found), sign=True)} under",
        )
    return "\n\n".join(sections)


def _published_total(record: Record, experiment: Experiment) -> str:
    """Write what torchgpipe's devices reserved in all, model included."""
    if experiment.published_total is not None:
        return f"{experiment.published_total:.1f}"
    row = record["full"].get(experiment.key)
    if row is None or experiment.published_activations is None:
        return "-"
    model = total(row["balances"]["published"], "model") / 2**30
    return f"{experiment.published_activations + model:.2f}"


def _devices(record: Record) -> str:
    names = [row["provenance"]["device"] for row in record["measured"].values()]
    return " and ".join(dict.fromkeys(names))


def _environment(record: Record) -> str:
    about = record["provenance"]
    rates = about["rates"]
    lines = [
        *describe(about),
        f"times for a {rates['name']}: {rates['flops'] / 1e12:g} float32 TFLOP/s, "
        f"{rates['bandwidth'] / 1e9:g} GB/s ({rates['source']}); "
        f"{rates['memory_limit'] / 1e9:g} GB for a partition of the fastest balance",
    ]
    return "\n".join([*lines, *_measured_with(record)])


def _measured_with(record: Record) -> list[str]:
    """Write the machines that anything was measured on, each once."""
    found: dict[str, list[str]] = {}
    for key, row in record["measured"].items():
        about = row["provenance"]
        device = about["device"]
        if "cuda" in about:
            device += (
                f", {gib(about['device_bytes'])} GiB, CUDA {about['cuda']}, cuDNN {about['cudnn']}"
            )
        machine, packages, _ = describe(about)
        found.setdefault(f"{device}\n  {machine}\n  {packages}", []).append(key)
    return [f"measured on {text}\n  {', '.join(keys)}" for text, keys in found.items()]


def _live(row: dict[str, Any], name: str) -> str:
    found = row["balances"].get(name)
    return "-" if found is None else gib(total(found))


def _known(value: float | None) -> str:
    return "-" if value is None else f"{value:g}"


def _list(sizes: Sequence[int]) -> str:
    return " ".join(map(gib, sizes))
