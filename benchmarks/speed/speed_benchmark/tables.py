"""Tables of the README, made from a stored result and from nothing else."""

from __future__ import annotations

from typing import Any

from benchmark_tools.devices import P40
from benchmark_tools.machine import describe
from benchmark_tools.text import Column, block, columns, other_load, percent, section, signed, table

from speed_benchmark.devices import (
    FAST,
    FAST_LINK,
    FAST_LINK_NAME,
    LINK,
    LINK_NAME,
    MEMORY_LIMIT,
)
from speed_benchmark.published import MODELS, Run, SpeedModel

FORMAT = "gpipebal-benchmark-speed"
VERSION = 1

Record = dict[str, Any]


def blocks(record: Record) -> dict[str, str]:
    """Return what stands between the marks of the README."""
    parts = [block(_agreement(record))] if record["simulated"] else []
    for model in _present(record, "simulated"):
        found = record["simulated"][model.name]
        parts += [
            f"### {found['about']}",
            "Published settings, simulated:",
            block(_published(model, found["published"])),
            "Equal batch, and the largest that fits:",
            block(_batches(found)),
            f"On {FAST.name}, 32 micro-batches:",
            block(_fast(found["fast"])),
        ]
    if record["measured"]:
        parts.append(section("Measured with two CPU partitions", _measured(record)))
    if record.get("shares"):
        parts.append(section("Measured on shares of one device", _shares(record)))
    return {"result": "\n\n".join(parts), "environment": block(_environment(record))}


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
                *(name, str(len(errors)), percent(sum(map(abs, errors)) / len(errors))),
                signed(max(errors, key=abs)),
                *(signed(gain) for gain in (sum(gains) / len(gains), min(gains), max(gains))),
            ]
        )
    header = ["simulated speed against torchgpipe's", "runs", "off by, mean", "worst"]
    header += ["planner's balance instead, mean", "least", "most"]
    return table(header, lines, left=[0])


def _published(model: SpeedModel, found: list[dict[str, Any]]) -> str:
    first = found[0]["theirs"]

    def speed(heading: str, whose: str, of: str) -> Column[tuple[Run, dict[str, Any]]]:
        return heading, lambda row: f"{speed_of(row[1][whose], of) / speed_of(first, of):.3f}"

    described: list[Column[tuple[Run, dict[str, Any]]]] = [
        ("run", lambda row: row[1]["name"]),
        ("devices", lambda row: str(row[0].n_partitions)),
        ("batch", lambda row: f"{row[0].batch:,}"),
        ("chunks", lambda row: str(row[0].chunks)),
        ("torchgpipe/s", lambda row: f"{row[0].throughput:.1f}"),
        ("speed", lambda row: _published_speed(model, row[0])),
        ("paper", lambda row: "-" if row[0].paper is None else f"{row[0].paper:.2f}"),
        ("simulated/s", lambda row: f"{speed_of(row[1]['theirs']):.1f}"),
        speed("speed", "theirs", "devices"),
        speed("one host", "theirs", "host"),
        speed("planner's", "planner", "devices"),
        speed("one host", "planner", "host"),
        (
            "gain",
            lambda row: signed(speed_of(row[1]["planner"]) / speed_of(row[1]["theirs"]) - 1),
        ),
        ("fits", lambda row: _fit(row[1]["theirs"], row[1]["planner"])),
    ]
    return columns(zip(model.runs, found, strict=True), described, left=[0])


def _published_speed(model: SpeedModel, run: Run) -> str:
    return f"{run.throughput / model.runs[0].throughput:.3f}"


def _fit(theirs: dict[str, Any], planner: dict[str, Any]) -> str:
    names = {(True, True): "both", (True, False): "torchgpipe's", (False, True): "planner's"}
    return names.get((theirs["fits"], planner["fits"]), "neither")


def _batches(found: dict[str, Any]) -> str:
    plain = found["plain"]
    rows = [("plain", plain["equal"], plain["largest"])]
    rows += [
        (str(equal["n"]), equal, largest)
        for equal, largest in zip(found["equal"], found["largest"], strict=True)
    ]
    lines = [
        [
            name,
            *_batch(equal, plain["equal"]),
            "" if equal["fits"] else "does not fit",
            *_batch(largest, plain["largest"]),
        ]
        for name, equal, largest in rows
    ]
    of_batch = ["chunks", "images/s", "speed", "one host", "host busy"]
    header = ["devices", "equal batch", *of_batch, "", "largest batch", *of_batch]
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


def _fast(found: list[dict[str, Any]]) -> str:
    described: list[Column[dict[str, Any]]] = [
        ("devices", lambda row: str(row["n"])),
        ("batch", lambda row: f"{row['batch']:,}"),
        ("rows", lambda row: str(row["rows"])),
        ("images/s", lambda row: f"{speed_of(row):.1f}"),
        ("with one host", lambda row: f"{speed_of(row, 'host'):.1f}"),
        ("", lambda row: signed(speed_of(row, "host") / speed_of(row) - 1)),
        ("host busy", _busy),
    ]
    return columns(found, described)


def _measured(record: Record) -> str:
    lines = []
    for model in _present(record, "measured"):
        row = record["measured"][model.name]
        predicted, measured = row["predicted"], row["measured"]
        for name in predicted:
            is_plain = name == "plain"
            line = [row["about"] if is_plain else "", name, str(row["batch"])]
            line += ["1" if is_plain else str(row["chunks"]), f"{1e3 * predicted[name]:.0f}"]
            speed = f"{predicted['plain'] / predicted[name]:.3f}"
            if name in measured:
                low, middle, high = (1e3 * seconds for seconds in measured[name])
                line += [f"{middle:.0f}", f"{low:.0f}-{high:.0f}", speed]
                line += [f"{measured['plain'][1] / measured[name][1]:.3f}"]
            else:
                line += ["-", "-", speed, "-"]
            lines.append(line)
    header = [
        *("one thread a partition", "partitions", "batch", "chunks", "predicted ms"),
        *("measured ms", "quartiles", "speed predicted", "measured"),
    ]
    return table(header, lines, left=[0])


def _shares(record: Record) -> str:
    """Say how fast the published runs are on shares of one device, by that of the first."""
    rows = []
    for model in _present(record, "shares"):
        found = record["shares"][model.name]
        first = found["runs"][0]
        speeds = {run.name: _published_speed(model, run) for run in model.runs}
        for row in found["runs"]:
            about = found["about"] if row is first else ""
            rows.append({**row, "about": about, "first": first, "published": speeds[row["name"]]})

    def speed(seconds: float, row: dict[str, Any], of_first: float) -> str:
        return f"{row['batch'] / seconds / (row['first']['batch'] / of_first):.3f}"

    described: list[Column[dict[str, Any]]] = [
        ("", lambda row: row["about"]),
        ("run", lambda row: row["name"]),
        ("balance", lambda row: "" if row["whose"] == "torchgpipe's" else "planner's"),
        ("shares", lambda row: str(len(row["balance"]))),
        ("batch", lambda row: str(row["batch"])),
        ("chunks", lambda row: str(row["chunks"])),
        ("predicted ms", lambda row: f"{1e3 * row['predicted']['devices']:,.0f}"),
        (
            "one host",
            lambda row: (
                f"{1e3 * row['predicted']['host']:,.0f}" if "host" in row["predicted"] else "-"
            ),
        ),
        ("measured ms", lambda row: f"{1e3 * row['seconds'][1]:,.0f}"),
        (
            "quartiles",
            lambda row: f"{1e3 * row['seconds'][0]:,.0f}-{1e3 * row['seconds'][2]:,.0f}",
        ),
        ("off", lambda row: signed(row["predicted"]["devices"] / row["seconds"][1] - 1)),
        (
            "speed predicted",
            lambda row: speed(
                row["predicted"]["devices"], row, row["first"]["predicted"]["devices"]
            ),
        ),
        ("measured", lambda row: speed(row["seconds"][1], row, row["first"]["seconds"][1])),
        ("torchgpipe", lambda row: row["published"]),
    ]
    return columns(rows, described, left=[0, 1, 2])


def _about_shares(record: Record) -> list[str]:
    about = record["provenance"]["shares"]
    whole, alone, beside = (
        f"{1e3 * about['product'][name]:.1f} ms on"
        for name in ("whole device", "one share", "all shares")
    )
    turns = {m.name: record["shares"][m.name]["turns"] for m in _present(record, "shares")}
    alike = len(set(turns.values())) == 1
    made = [str(n) if alike else f"{n} of {name}" for name, n in turns.items()]
    return [
        f"{about['device_name']}, {about['device_bytes'] / 1e9:.0f} GB, {about['multiprocessors']} "
        f"multiprocessors, CUDA {about['cuda']}; each share has "
        f"{about['multiprocessors_of_a_share']} of them",
        f"a product of two matrices of 4096 x 4096 takes {whole} the whole device, {alone} a "
        f"share, {beside} a share while the others do the same",
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
    if "simulated" in about:
        lines += ["", "simulated on:", *describe(about["simulated"])]
    if measured := about.get("measured"):
        turns = f"{measured['rounds']} turns of two timed steps, after one that does not count"
        lines += ["", "measured on:", *describe(measured)]
        lines.append(f"{turns}; {other_load(measured['other_load'])}")
    if shares := about.get("shares"):
        lines += ["", "measured on shares of a device on:", *describe(shares)]
        lines += _about_shares(record)
    return "\n".join(lines)
