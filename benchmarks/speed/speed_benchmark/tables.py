"""Tables of the README, made from a stored result and from nothing else."""

from __future__ import annotations

from typing import Any

from benchmark_tools.devices import P40
from benchmark_tools.machine import describe
from benchmark_tools.text import block, percent, percent_or_unknown, table

from speed_benchmark.devices import (
    FAST,
    FAST_LINK,
    FAST_LINK_NAME,
    LINK,
    LINK_NAME,
    MEMORY_LIMIT,
)
from speed_benchmark.published import MODELS, SpeedModel

__all__ = ["FORMAT", "VERSION", "against_published", "blocks", "speed_of", "summary"]

FORMAT = "gpipebal-benchmark-speed"
VERSION = 1

Record = dict[str, Any]


def blocks(record: Record) -> dict[str, str]:
    """Return what stands between the marks of the README."""
    sections = [block(_agreement(record))] if record["simulated"] else []
    for model in _present(record, "simulated"):
        about = record["simulated"][model.name]["about"]
        sections += [
            f"### {about}",
            "Published settings, simulated:",
            block(_published(record, model)),
            "Equal batch, and the largest that fits:",
            block(_batches(record, model)),
            f"On {FAST.name}, 32 micro-batches:",
            block(_fast(record, model)),
        ]
    if record["measured"]:
        sections += ["### Measured with two CPU partitions", block(_measured(record))]
    if record.get("shares"):
        sections += ["### Measured on shares of one device", block(_shares(record))]
    return {
        "result": "\n\n".join(sections),
        "environment": block(_environment(record)),
    }


def summary(record: Record) -> str:
    """Write all tables, for a terminal."""
    parts = [_agreement(record)]
    for model in _present(record, "simulated"):
        parts += [model.name, _published(record, model), _batches(record, model)]
        parts.append(_fast(record, model))
    if record["measured"]:
        parts.append(_measured(record))
    if record.get("shares"):
        parts.append(_shares(record))
    return "\n\n".join(parts)


def speed_of(found: dict[str, Any], of: str = "devices") -> float:
    """Return images a second of a simulated run, 0 if it does not fit at all."""
    return found["batch"] / found["seconds"][of] if found["chunks"] else 0.0


def _present(record: Record, part: str) -> list[SpeedModel]:
    return [model for model in MODELS if model.name in record.get(part, {})]


def against_published(record: Record) -> dict[str, tuple[list[float], list[float]]]:
    """Compare the published runs of each model with their simulation.

    Returns:
        By model: how far simulated speeds are from torchgpipe's, one for each run behind the
        first, which the others are compared with; and by how much the planner's balance is faster
        than torchgpipe's, one for each run on several devices. As fractions.
    """
    compared = {}
    for model in _present(record, "simulated"):
        found = record["simulated"][model.name]["published"]
        first = found[0]["theirs"]
        errors = [
            speed_of(row["theirs"]) / speed_of(first) / (run.throughput / model.runs[0].throughput)
            - 1
            for run, row in zip(model.runs, found, strict=True)
        ][1:]
        gains = [
            speed_of(row["planner"]) / speed_of(row["theirs"]) - 1
            for run, row in zip(model.runs, found, strict=True)
            if run.n_partitions > 1
        ]
        compared[model.name] = errors, gains
    return compared


def _agreement(record: Record) -> str:
    """Say how far simulated speeds are from torchgpipe's, and what the planner's balances add."""
    lines = []
    for name, (errors, gains) in against_published(record).items():
        lines.append(
            [
                name,
                str(len(errors)),
                percent(sum(map(abs, errors)) / len(errors)),
                percent(max(errors, key=abs), sign=True),
                percent(sum(gains) / len(gains), sign=True),
                percent(min(gains), sign=True),
                percent(max(gains), sign=True),
            ]
        )
    header = ["simulated speed against torchgpipe's", "runs", "off by, mean", "worst"]
    header += ["planner's balance instead, mean", "least", "most"]
    return table(header, lines, left=[0])


def _published(record: Record, model: SpeedModel) -> str:
    found = record["simulated"][model.name]["published"]
    first = found[0]["theirs"]
    lines = []
    for run, row in zip(model.runs, found, strict=True):
        theirs, planner = row["theirs"], row["planner"]
        lines.append(
            [
                row["name"],
                str(run.n_partitions),
                f"{run.batch:,}",
                str(run.chunks),
                f"{run.throughput:.1f}",
                f"{run.throughput / model.runs[0].throughput:.3f}",
                "-" if run.paper is None else f"{run.paper:.2f}",
                f"{speed_of(theirs):.1f}",
                f"{speed_of(theirs) / speed_of(first):.3f}",
                f"{speed_of(theirs, 'host') / speed_of(first, 'host'):.3f}",
                f"{speed_of(planner) / speed_of(first):.3f}",
                f"{speed_of(planner, 'host') / speed_of(first, 'host'):.3f}",
                percent(speed_of(planner) / speed_of(theirs) - 1, sign=True),
                _fit(theirs, planner),
            ]
        )
    header = [
        *("run", "devices", "batch", "chunks", "torchgpipe/s", "speed", "paper"),
        *("simulated/s", "speed", "one host", "planner's", "one host", "gain", "fits"),
    ]
    return table(header, lines, left=[0])


def _fit(theirs: dict[str, Any], planner: dict[str, Any]) -> str:
    names = {(True, True): "both", (True, False): "torchgpipe's", (False, True): "planner's"}
    return names.get((theirs["fits"], planner["fits"]), "neither")


def _batches(record: Record, model: SpeedModel) -> str:
    found = record["simulated"][model.name]
    lines = []
    rows = [("plain", found["plain"]["equal"], found["plain"]["largest"])]
    rows += [
        (str(equal["n"]), equal, largest)
        for equal, largest in zip(found["equal"], found["largest"], strict=True)
    ]
    for name, equal, largest in rows:
        lines.append(
            [
                name,
                *_batch(equal, found["plain"]["equal"]),
                "" if equal["fits"] else "does not fit",
                *_batch(largest, found["plain"]["largest"]),
            ]
        )
    header = ["devices"]
    header += ["equal batch", "chunks", "images/s", "speed", "one host", "host busy", ""]
    header += ["largest batch", "chunks", "images/s", "speed", "one host", "host busy"]
    return table(header, lines, left=[0])


def _batch(found: dict[str, Any], plain: dict[str, Any]) -> list[str]:
    if not found["chunks"]:
        return ["none fits", "", "", "", "", ""]
    return [
        f"{found['batch']:,}",
        str(found["chunks"]),
        f"{speed_of(found):.1f}",
        f"{speed_of(found) / speed_of(plain):.3f}",
        f"{speed_of(found, 'host') / speed_of(plain, 'host'):.3f}",
        _busy(found),
    ]


def _busy(found: dict[str, Any]) -> str:
    return percent(found["seconds"]["launching"] / found["seconds"]["host"])


def _fast(record: Record, model: SpeedModel) -> str:
    lines = [
        [
            str(row["n"]),
            f"{row['batch']:,}",
            str(row["rows"]),
            f"{speed_of(row):.1f}",
            f"{speed_of(row, 'host'):.1f}",
            percent(speed_of(row, "host") / speed_of(row) - 1, sign=True),
            _busy(row),
        ]
        for row in record["simulated"][model.name]["fast"]
    ]
    header = ["devices", "batch", "rows", "images/s", "with one host", "", "host busy"]
    return table(header, lines)


def _measured(record: Record) -> str:
    lines = []
    for model in _present(record, "measured"):
        row = record["measured"][model.name]
        plain, predicted = row["measured"]["plain"][1], row["predicted"]
        for name in predicted:
            seconds = row["measured"].get(name)
            lines.append(
                [
                    row["about"] if name == "plain" else "",
                    name,
                    str(row["batch"]),
                    "1" if name == "plain" else str(row["chunks"]),
                    f"{1e3 * predicted[name]:.0f}",
                    "-" if seconds is None else f"{1e3 * seconds[1]:.0f}",
                    "-" if seconds is None else f"{1e3 * seconds[0]:.0f}-{1e3 * seconds[2]:.0f}",
                    f"{predicted['plain'] / predicted[name]:.3f}",
                    "-" if seconds is None else f"{plain / seconds[1]:.3f}",
                ]
            )
    header = [
        *("one thread a partition", "partitions", "batch", "chunks", "predicted ms"),
        *("measured ms", "quartiles", "speed predicted", "measured"),
    ]
    return table(header, lines, left=[0])


def _shares(record: Record) -> str:
    """Say how fast the published runs are on shares of one device, by that of the first."""
    lines = []
    for model in _present(record, "shares"):
        found = record["shares"][model.name]
        first = found["runs"][0]
        for row in found["runs"]:
            predicted, measured = row["predicted"], row["seconds"]
            lines.append(
                [
                    found["about"] if row is first else "",
                    row["name"],
                    "" if row["whose"] == "torchgpipe's" else "planner's",
                    str(len(row["balance"])),
                    str(row["batch"]),
                    str(row["chunks"]),
                    f"{1e3 * predicted['devices']:,.0f}",
                    f"{1e3 * predicted['host']:,.0f}" if "host" in predicted else "-",
                    f"{1e3 * measured[1]:,.0f}",
                    f"{1e3 * measured[0]:,.0f}-{1e3 * measured[2]:,.0f}",
                    percent(predicted["devices"] / measured[1] - 1, sign=True),
                    *(
                        f"{row['batch'] / seconds / (first['batch'] / of_first):.3f}"
                        for seconds, of_first in (
                            (predicted["devices"], first["predicted"]["devices"]),
                            (measured[1], first["seconds"][1]),
                        )
                    ),
                    _published_speed(model, row["name"]),
                ]
            )
    header = [
        *("", "run", "balance", "shares", "batch", "chunks", "predicted ms", "one host"),
        *("measured ms", "quartiles", "off", "speed predicted", "measured", "torchgpipe"),
    ]
    return table(header, lines, left=[0, 1, 2])


def _published_speed(model: SpeedModel, name: str) -> str:
    run = next(run for run in model.runs if run.name == name)
    return f"{run.throughput / model.runs[0].throughput:.3f}"


def _about_shares(record: Record) -> list[str]:
    about = record["provenance"]["shares"]
    product = about["product"]
    turns = {m.name: record["shares"][m.name]["turns"] for m in _present(record, "shares")}
    alike = len(set(turns.values())) == 1
    made = [str(n) if alike else f"{n} of {name}" for name, n in turns.items()]
    return [
        f"{about['device_name']}, {about['device_bytes'] / 1e9:.0f} GB, {about['multiprocessors']} "
        f"multiprocessors, CUDA {about['cuda']}; each share has "
        f"{about['multiprocessors_of_a_share']} of them",
        f"a product of two matrices of 4096 x 4096 takes {1e3 * product['whole device']:.1f} ms on "
        f"the whole device, {1e3 * product['one share']:.1f} ms on a share, "
        f"{1e3 * product['all shares']:.1f} ms on a share while the others do the same",
        f"turns of one timed step, after one that does not count: {', '.join(dict.fromkeys(made))}",
    ]


def _environment(record: Record) -> str:
    about = record["provenance"]
    lines = [
        f"simulated: {P40.name}, {P40.flops_of('float32') / 1e12:g} float32 TFLOP/s, "
        f"{P40.bandwidth / 1e9:g} GB/s ({P40.source}); "
        f"{MEMORY_LIMIT / 1e9:g} GB of its {(P40.memory_bytes or 0) / 1e9:g} for a partition",
        f"link: {LINK_NAME}, {LINK.bandwidth / 1e9:g} GB/s each way and {1e6 * LINK.latency:g} us, "
        "during the computation",
        f"faster: {FAST.name}, {FAST.flops_of('float32') / 1e12:g} float32 TFLOP/s, "
        f"{FAST.bandwidth / 1e9:g} GB/s ({FAST.source}); {FAST_LINK_NAME}, "
        f"{FAST_LINK.bandwidth / 1e9:g} GB/s",
        f"host: {1e6 * (P40.host_time or 0):g} us to launch an operation",
    ]
    for part in ("simulated", "measured", "shares"):
        found = about.get(part)
        if found is None:
            continue
        name = {"shares": "measured on shares of a device"}.get(part, part)
        lines += ["", f"{name} on:", *describe(found)]
        if part == "shares":
            lines += _about_shares(record)
        if part == "measured":
            lines.append(
                f"{found['rounds']} turns of two timed steps, after one that does not count;"
                " other programs' share of the cores meanwhile: "
                + percent_or_unknown(found["other_load"])
            )
    return "\n".join(lines)
