"""Measure how close the executor comes to the ideal, and compare it with its peers.

    python benchmarks/executor/make.py --small    measure all, write results.json and the README
    python benchmarks/executor/make.py --distributed    only gpipebal and torch.distributed, longer
    python benchmarks/executor/make.py --quick --out /tmp/quick.json    try it, with tiny layers
    python benchmarks/executor/make.py --readme   write the README's tables from results.json anew

The peers that are not installed have a row that says so.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import torch

from gpipebal.files import write_record

# What all benchmarks have in common is next to their folders.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmark_tools.machine import OtherLoad, place, settings, versions
from benchmark_tools.text import write_readme
from executor_benchmark import tables, workloads
from executor_benchmark.floors import SAME_SCHEDULE
from executor_benchmark.measure import measure_group, measure_one_partition
from executor_benchmark.processes import Processes
from executor_benchmark.result import FORMAT, VERSION, Result

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results.json"
#: Of other machines and days, of which the README has the floors side by side.
OTHERS = [HERE / name for name in tables.OTHERS]
DISTRIBUTED = HERE / tables.DISTRIBUTED

#: Packages whose versions are stored.
PACKAGES = ("torch", "gpipebal", "torchgpipe", "fairscale", "numpy")

#: Seconds of rounds at least: for each number of micro-batches, and for one partition.
LEAST_SECONDS, LEAST_SECONDS_ALONE = 60.0, 30.0
#: The same where few ways take turns.
LEAST_SECONDS_DISTRIBUTED = 140.0


def main() -> None:
    """Measure, store, print, and write the README."""
    arguments = parse()
    if not arguments.readme:
        record = measure(arguments)
        write_record(arguments.out, record)
    result = Result.load(arguments.out)
    if arguments.distributed:
        print(tables.distributed_table(result))
        if arguments.out.resolve() == DISTRIBUTED:
            readme = HERE / "README.md"
            write_readme(readme, tables.distributed_blocks(result), tables.DISTRIBUTED)
        return
    print(tables.floors_table(result))
    # A trial, or a part of the workloads, is no result to publish.
    if arguments.out.resolve() in OTHERS:
        others = [Result.load(path) for path in OTHERS]
        write_readme(HERE / "README.md", tables.other_blocks(others), tables.OTHERS_SOURCE)
    if arguments.out.resolve() == RESULTS:
        write_readme(HERE / "README.md", tables.blocks(result))


def parse() -> argparse.Namespace:
    """Read the command line."""
    names = [workload.name for workload in workloads.WORKLOADS]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help=f"result file ({RESULTS})")
    parser.add_argument("--workload", action="append", choices=names, help="only this; repeatable")
    parser.add_argument("--small", action="store_true", help="also measure small cells")
    parser.add_argument(
        "--distributed",
        action="store_true",
        help=f"only gpipebal and torch.distributed ({DISTRIBUTED.name})",
    )
    parser.add_argument(
        "--rounds", type=int, help="rounds that count (at least 7, and a minute; quick: 2)"
    )
    parser.add_argument("--quick", action="store_true", help="tiny layers; the times mean nothing")
    parser.add_argument("--readme", action="store_true", help="only write the README's tables")
    arguments = parser.parse_args()
    if arguments.out is None:
        arguments.out = DISTRIBUTED if arguments.distributed else RESULTS
    partial = arguments.quick or arguments.workload
    is_stored = arguments.out.resolve() in (RESULTS, DISTRIBUTED, *OTHERS)
    if partial and not arguments.readme and is_stored:
        parser.error("--quick and --workload make no complete result: give another file as --out")
    if arguments.distributed != (arguments.out.resolve() == DISTRIBUTED) and is_stored:
        parser.error(f"--distributed belongs to {DISTRIBUTED.name}: give another file as --out")
    if arguments.rounds is not None and arguments.rounds < 1:
        parser.error("--rounds must be 1 or more")
    return arguments


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure all workloads, and return the record to store."""
    torch.set_num_threads(1)
    started = time.monotonic()
    load = OtherLoad()
    rounds = arguments.rounds or (2 if arguments.quick else 7)
    # Whoever asks for rounds gets these.
    few = arguments.quick or arguments.rounds is not None
    only = None
    if arguments.distributed:
        only = [way for pair in SAME_SCHEDULE.items() for way in (pair[0], pair[1][0])]
    seconds = LEAST_SECONDS if only is None else LEAST_SECONDS_DISTRIBUTED
    seconds, alone = (0.0, 0.0) if few else (seconds, LEAST_SECONDS_ALONE)
    chosen = [
        (workload, False)
        for workload in workloads.WORKLOADS
        if not arguments.workload or workload.name in arguments.workload
    ]
    chosen += [(workload, True) for workload in workloads.SMALL if arguments.small]
    if arguments.quick:
        chosen = [(workloads.tiny(workload), small) for workload, small in chosen]
    about: dict[str, Any] = {}
    results: list[dict[str, Any]] = []
    one_partition: list[dict[str, Any]] = []
    with Processes(workloads.N_PARTITIONS) as processes:
        for workload, small in chosen:
            balance, times = workloads.find_balance(workload)
            about[workload.name] = describe(workload, small, balance, times)
            for chunks in workload.chunks:
                print(f"{time.monotonic() - started:5.0f} s  {workload.name}, chunks={chunks}")
                results += measure_group(
                    workload,
                    balance,
                    chunks,
                    rounds=rounds,
                    least_seconds=seconds,
                    processes=processes,
                    quick=arguments.quick,
                    only=only,
                )
            if not small and only is None:
                print(f"{time.monotonic() - started:5.0f} s  {workload.name}, one partition")
                one_partition.append(
                    measure_one_partition(workload, rounds=3 * rounds, least_seconds=alone)
                )
    # Behind the block, where the processes have ended and their time is known.
    other = load.end(print)
    minutes = (time.monotonic() - started) / 60
    return {
        "format": FORMAT,
        "version": VERSION,
        "provenance": {
            **place(),
            "threads_per_partition": 1,
            "versions": versions(PACKAGES),
            "settings": settings(),
            "rounds": rounds,
            "rounds_one_partition": 3 * rounds,
            "least_seconds": seconds,
            "least_seconds_one_partition": alone,
            "quick": arguments.quick,
            "minutes": round(minutes, 2),
            "other_load": other,
        },
        "workloads": about,
        "results": results,
        "one_partition": one_partition,
    }


def describe(
    workload: workloads.Workload, small: bool, balance: list[int], seconds: list[float]
) -> dict[str, Any]:
    """Tell what a workload is, and what its balance comes from."""
    model = workload.make_model()
    return {
        "about": workload.about,
        "small": small,
        "rows": workload.rows,
        "shape": list(workload.shape),
        "n_layers": len(model),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "balance": balance,
        "layer_seconds": [round(value, 7) for value in seconds],
    }


if __name__ == "__main__":
    main()
