"""Tables of the README, made from a stored result and from nothing else."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from benchmark_tools.machine import describe
from benchmark_tools.text import Column, block, columns, gib, percent, section, signed, table

from memory_benchmark.balances import BALANCES
from memory_benchmark.experiments import EXPERIMENTS, Experiment

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
    parts = [
        block(goals(record)),
        section("AmoebaNet-D", _activations(record)),
        section("U-Net", _totals(record)),
        section("By partition", _by_partition(record)),
        section("What it consists of", _parts(record)),
        section("What a smaller need costs in time", _times(record)),
        section("Estimated against counted", f"{_agreement(record)}\n\n{_counted(record)}"),
        section("Measured on one device", _measured(record)),
    ]
    return {"result": "\n\n".join(parts), "environment": block("\n".join(_environment(record)))}


def total(found: dict[str, Any], name: str = "activations") -> int:
    """Add up the partitions."""
    return sum(found[name])


def errors(row: dict[str, Any]) -> list[float]:
    """Return estimated over counted peak, less one, of each partition."""
    pairs = zip(row["estimated"], row["counted"], strict=True)
    return [estimated / counted - 1 for estimated, counted in pairs]


def decided_by_clock(row: dict[str, Any]) -> list[bool]:
    """Tell of each partition whether its count lies between what the clock can make of it."""
    ranges = zip(row["least"], row["counted"], row["estimated"], strict=True)
    return [
        least <= counted * (1 + LEEWAY) and most >= counted * (1 - LEEWAY)
        for least, counted, most in ranges
    ]


def on_one_device(record: Record, key: str) -> list[int] | None:
    """Return the estimated need of each partition of torchgpipe's balance, all on one device.

    None: nothing was estimated.
    """
    row = record["full"].get(key)
    if row is None:
        return None
    model = row["balances"]["published"]["model"]
    return [a + b for a, b in zip(model, row["on_one_device"], strict=True)]


def _present(record: Record, model: str | None = None) -> list[Experiment]:
    return [e for e in EXPERIMENTS if e.key in record["full"] and model in (None, e.model)]


def _balances(record: Record) -> Iterator[tuple[Experiment, str, dict[str, Any]]]:
    """Yield every balance of every experiment, with its name."""
    for experiment in _present(record):
        for name, found in record["full"][experiment.key]["balances"].items():
            yield experiment, name, found


def goals(record: Record) -> str:
    """Write what was needed beside the goal, and whether that is reached."""
    lines = []
    for experiment in _present(record, "amoebanetd"):
        if experiment.key not in GOALS:
            continue
        goal, balances = GOALS[experiment.key], record["full"][experiment.key]["balances"]
        reserved = record["measured"].get(experiment.key, {}).get("reserved")
        model = total(balances["published"], "model")
        needs = [None if reserved is None else reserved - model]
        needs += [total(balances[name]) for name in BALANCES]
        row = [experiment.name, f"{goal:.2f}", f"{experiment.paper_activations:.2f}"]
        lines.append([*row, *(_against(need, goal) for need in needs)])
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
        reserved = _known(experiment.published_activations)
        lines.append(
            [
                *_about(experiment, row),
                _known(experiment.published_model),
                _known(experiment.paper_model),
                "no room" if experiment.is_plain else reserved,
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
        lines.append(
            [
                *_about(experiment, row),
                _known(experiment.published_total),
                gib(total(published, "model") + total(published)),
                *(_live(row, name) for name in BALANCES),
            ]
        )
    return table([*header, *BALANCES], lines, left=[0])


def _about(experiment: Experiment, row: dict[str, Any]) -> list[str]:
    model = gib(total(row["balances"]["published"], "model"))
    return [experiment.name, str(experiment.size), f"{row['parameters']:,}", model]


def _by_partition(record: Record) -> str:
    lines = [
        [
            *(experiment.key, name, ", ".join(map(str, found["balance"]))),
            *(_list(found["model"]), _list(found["activations"])),
        ]
        for experiment, name, found in _balances(record)
        if len(found["balance"]) > 1
    ]
    header = ["", "balance", "layers", "model GiB", "peak activations, live GiB"]
    return table(header, lines, left=[0, 1, 2, 3, 4])


def _parts(record: Record) -> str:
    lines = [
        [
            *(experiment.key, name, gib(total(found))),
            *(gib(sum(found["parts"][part])) for part in _PARTS),
        ]
        for experiment, name, found in _balances(record)
        if name in ("published", "least total")
    ]
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
    off_by, at_most = _off_by(found)
    return (
        f"{len(found)} partitions counted at reduced sizes: {off_by} (mean absolute), {at_most};\n"
        f"{n_inside} of them between nothing and all that may wait for a neighbour "
        f"(within {LEEWAY:.0%})"
    )


def _off_by(found: Sequence[float]) -> tuple[str, str]:
    """Say how far estimates are off, on average and at most."""
    return (
        f"estimates off by {percent(sum(map(abs, found)) / len(found))}",
        f"at most {signed(max(found))} over and {signed(min(found))} under",
    )


def _counted(record: Record) -> str:
    described: list[Column[tuple[str, dict[str, Any]]]] = [
        ("", lambda item: item[0]),
        ("size", lambda item: str(tuple(item[1]["size"]))),
        ("images", lambda item: f"{item[1]['rows']} x {item[1]['image_size']} px"),
        ("chunks", lambda item: str(item[1]["chunks"])),
        (
            "counted live MiB",
            lambda item: " ".join(f"{n / 2**20:.1f}" for n in item[1]["counted"]),
        ),
        ("estimate is off by", lambda item: " ".join(map(signed, errors(item[1])))),
    ]
    reduced = record["reduced"]
    keys = [experiment.key for experiment in _present(record) if experiment.key in reduced]
    return columns([(key, reduced[key]) for key in keys], described, left=[0, 4, 5])


def _measured(record: Record) -> str:
    measured = [e for e in EXPERIMENTS if e.key in record["measured"]]
    if not measured:
        return "nothing measured"
    parts = [_measured_in_all(record, measured)]
    several = [e for e in measured if len(e.balance) > 1]
    if several:  # of one partition, the line above says it all
        parts.append(_measured_by_partition(record, several))
    found = [error for e in measured for error in _errors_of_measured(record, e)]
    if found:
        off_by, at_most = _off_by(found)
        devices = dict.fromkeys(row["provenance"]["device"] for row in record["measured"].values())
        parts.insert(
            0,
            f"{len(found)} partitions counted at full size on {' and '.join(devices)}: {off_by}\n"
            f"(mean absolute), {at_most}",
        )
    return "\n\n".join(parts)


def _errors_of_measured(record: Record, experiment: Experiment) -> list[float]:
    estimated = on_one_device(record, experiment.key)
    counted = record["measured"][experiment.key]["counted"]
    return errors({"estimated": estimated, "counted": counted}) if estimated else []


def _measured_in_all(record: Record, measured: Sequence[Experiment]) -> str:
    header = ["", "estimated", "counted", "estimate is", "at one time"]
    second = ["", "live GiB", "live GiB", "off by", "live GiB"]
    lines = [[*second, "allocated GiB", "reserved GiB", "reserved GiB"]]
    for experiment in measured:
        row = record["measured"][experiment.key]
        estimated = on_one_device(record, experiment.key)
        need, counted = sum(estimated) if estimated else None, sum(row["counted"])
        lines.append(
            [
                *(experiment.key, gib(need), gib(counted)),
                signed(None if need is None else need / counted - 1),
                *(gib(row[name]) for name in ("counted_total", "allocated", "reserved")),
                _published_total(record, experiment),
            ]
        )
    return table([*header, "allocator", "allocator", "torchgpipe"], lines, left=[0])


def _measured_by_partition(record: Record, measured: Sequence[Experiment]) -> str:
    described: list[Column[Experiment]] = [
        ("", lambda e: e.key),
        ("estimated live GiB", lambda e: _list(on_one_device(record, e.key) or ()) or "-"),
        ("counted live GiB", lambda e: _list(record["measured"][e.key]["counted"])),
        (
            "estimate is off by",
            lambda e: " ".join(map(signed, _errors_of_measured(record, e))) or "-",
        ),
    ]
    return columns(measured, described, left=[0, 1, 2, 3])


def _published_total(record: Record, experiment: Experiment) -> str:
    """Write what torchgpipe's devices reserved in all, model included."""
    if experiment.published_total is not None:
        return f"{experiment.published_total:.1f}"
    row = record["full"].get(experiment.key)
    if row is None or experiment.published_activations is None:
        return "-"
    model = total(row["balances"]["published"], "model") / 2**30
    return f"{experiment.published_activations + model:.2f}"


def _environment(record: Record) -> list[str]:
    lines = []
    if about := record["provenance"]:
        rates = about["rates"]
        lines = [
            *describe(about),
            f"times for a {rates['name']}: {rates['flops'] / 1e12:g} float32 TFLOP/s, "
            f"{rates['bandwidth'] / 1e9:g} GB/s ({rates['source']}); "
            f"{rates['memory_limit'] / 1e9:g} GB for a partition of the fastest balance",
        ]
    # The machines that anything was measured on, each once.
    machines: dict[str, list[str]] = {}
    for key, row in record["measured"].items():
        about = row["provenance"]
        device = about["device"]
        if "cuda" in about:
            device += (
                f", {gib(about['device_bytes'])} GiB, CUDA {about['cuda']}, cuDNN {about['cudnn']}"
            )
        machine, packages, _ = describe(about)
        machines.setdefault(f"{device}\n  {machine}\n  {packages}", []).append(key)
    return [
        *lines,
        *(f"measured on {text}\n  {', '.join(keys)}" for text, keys in machines.items()),
    ]


def _live(row: dict[str, Any], name: str) -> str:
    found = row["balances"].get(name)
    return "-" if found is None else gib(total(found))


def _known(value: float | None) -> str:
    return "-" if value is None else f"{value:g}"


def _list(sizes: Sequence[int]) -> str:
    return " ".join(map(gib, sizes))
