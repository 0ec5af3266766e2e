"""Measure how close the executor comes to the ideal, and compare it with its peers.

    python benchmarks/executor/make.py            measure all, write results.json and the README
    python benchmarks/executor/make.py --distributed    only gpipebal and torch.distributed, longer
    python benchmarks/executor/make.py --quick --out /tmp/quick.json    try it, with tiny layers
    python benchmarks/executor/make.py --readme   write the README's tables from the stored files

The peers that are not installed have a row that says so.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch

from gpipebal.files import write_record

# What all benchmarks have in common is next to their folders.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmark_tools.machine import Progress, place, settings, versions
from benchmark_tools.script import is_same_file, parser_of
from benchmark_tools.text import write_readme
from executor_benchmark import tables
from executor_benchmark.floors import SAME_SCHEDULE
from executor_benchmark.measure import Length, measure_group, measure_one_partition
from executor_benchmark.processes import Processes
from executor_benchmark.result import FORMAT, VERSION, Result
from executor_benchmark.workloads import (
    N_PARTITIONS,
    SMALL,
    WORKLOADS,
    Workload,
    find_balance,
    tiny,
)

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results.json"
#: Of other machines and days, of which the README has the floors side by side.
OTHERS = [HERE / name for name in tables.OTHERS]
DISTRIBUTED = HERE / tables.DISTRIBUTED
STORED = (RESULTS, DISTRIBUTED, *OTHERS)

#: Packages whose versions are stored.
PACKAGES = ("torch", "gpipebal", "torchgpipe", "fairscale", "numpy")

#: Rounds of each number of micro-batches, at least; and where few ways take turns.
LENGTH, LENGTH_DISTRIBUTED = Length(7, 60.0), Length(7, 140.0)
#: Rounds of one partition, at least.
LENGTH_ALONE = Length(21, 30.0)
#: With tiny layers.
QUICK, QUICK_ALONE = Length(2), Length(6)


def main() -> None:
    """Measure, store, print, and write the README."""
    arguments = parse()
    if not arguments.readme:
        write_record(arguments.out, measure(arguments))
    result = Result.load(arguments.out)
    table_of = tables.distributed_table if arguments.distributed else tables.floors_table
    print(table_of(result))
    # A trial, or a part of the workloads, is no result to publish.
    if _is_stored(arguments.out):
        readme = HERE / "README.md"
        write_readme(readme, tables.blocks(Result.load(RESULTS)), RESULTS.name)
        distributed = tables.distributed_blocks(Result.load(DISTRIBUTED))
        write_readme(readme, distributed, DISTRIBUTED.name)
        others = tables.other_blocks([Result.load(path) for path in OTHERS])
        write_readme(readme, others, tables.OTHERS_SOURCE)


def parse() -> argparse.Namespace:
    """Read the command line."""
    names = [workload.name for workload in (*WORKLOADS, *SMALL)]
    parser = parser_of(__doc__, RESULTS)
    parser.add_argument("--workload", action="append", choices=names, help="only this; repeatable")
    parser.add_argument(
        "--distributed",
        action="store_true",
        help=f"only gpipebal and torch.distributed ({DISTRIBUTED.name})",
    )
    parser.add_argument("--quick", action="store_true", help="tiny layers; the times mean nothing")
    arguments = parser.parse_args()
    if arguments.distributed and arguments.out == RESULTS:
        arguments.out = DISTRIBUTED
    is_stored = _is_stored(arguments.out)
    if (arguments.quick or arguments.workload) and not arguments.readme and is_stored:
        parser.error("--quick and --workload make no complete result: give another file as --out")
    if arguments.distributed != is_same_file(arguments.out, DISTRIBUTED) and is_stored:
        parser.error(f"--distributed belongs to {DISTRIBUTED.name}: give another file as --out")
    return arguments


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure all workloads, and return the record to store."""
    torch.set_num_threads(1)
    progress = Progress()
    only = None
    length, alone = LENGTH, LENGTH_ALONE
    chosen = [*WORKLOADS, *SMALL]
    if arguments.distributed:
        only = [way for pair in SAME_SCHEDULE.items() for way in (pair[0], pair[1][0])]
        length, chosen = LENGTH_DISTRIBUTED, list(WORKLOADS)
    if arguments.workload:
        chosen = [workload for workload in chosen if workload.name in arguments.workload]
    if arguments.quick:
        length, alone = QUICK, QUICK_ALONE
        chosen = [tiny(workload) for workload in chosen]
    about: dict[str, Any] = {}
    results: list[dict[str, Any]] = []
    one_partition: list[dict[str, Any]] = []
    with Processes(N_PARTITIONS) as processes:
        for workload in chosen:
            balance, times = find_balance(workload)
            about[workload.name] = describe(workload, balance, times)
            for chunks in workload.chunks:
                progress.told(f"{workload.name}, chunks={chunks}")
                results += measure_group(workload, balance, chunks, length, processes, only)
            if not workload.small and only is None:
                progress.told(f"{workload.name}, one partition")
                one_partition.append(measure_one_partition(workload, alone))
    return {
        "format": FORMAT,
        "version": VERSION,
        "provenance": {
            **place(),
            "threads_per_partition": 1,
            "versions": versions(PACKAGES),
            "settings": settings(),
            "rounds": length.rounds,
            "rounds_one_partition": alone.rounds,
            "least_seconds": length.least_seconds,
            "least_seconds_one_partition": alone.least_seconds,
            "quick": arguments.quick,
            # Here the processes have ended, and their time is known.
            **progress.end(),
        },
        "workloads": about,
        "results": results,
        "one_partition": one_partition,
    }


def describe(workload: Workload, balance: list[int], seconds: list[float]) -> dict[str, Any]:
    """Tell what a workload is, and what its balance comes from."""
    model = workload.make_model()
    return {
        "about": workload.about,
        "small": workload.small,
        "rows": workload.rows,
        "shape": list(workload.shape),
        "n_layers": len(model),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "balance": balance,
        "layer_seconds": [round(value, 7) for value in seconds],
    }


def _is_stored(path: Path) -> bool:
    """Whether a file is one that the README shows."""
    return any(is_same_file(path, stored) for stored in STORED)


if __name__ == "__main__":
    main()
