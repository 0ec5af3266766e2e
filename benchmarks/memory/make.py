"""Estimate the memory of the published experiments, and count it at a reduced size.

    python benchmarks/memory/make.py            all; writes results.json and the README's tables
    python benchmarks/memory/make.py --only "unet pipeline-8"    one experiment anew
    python benchmarks/memory/make.py --readme   write the README's tables from results.json

It needs no device, and no clock: every figure is a count of bytes, the same on every machine.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import torch

from gpipebal.files import read_record, write_record

# What all benchmarks have in common lies beside their folders.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmark_tools.machine import provenance
from benchmark_tools.text import write_readme
from memory_benchmark import tables
from memory_benchmark.count import count
from memory_benchmark.estimate import MEMORY_LIMIT, P40, estimate
from memory_benchmark.experiments import EXPERIMENTS, reduced

HERE = Path(__file__).parent
RESULTS = HERE / "results.json"


def main() -> None:
    """Estimate, count, store, print, and write the README."""
    arguments = parse()
    if not arguments.readme:
        make(arguments.out, arguments.only)
    record = read_record(arguments.out, tables.FORMAT, tables.VERSION)
    print(tables.summary(record))
    if arguments.out.resolve() == RESULTS.resolve():
        write_readme(HERE / "README.md", tables.blocks(record))


def parse(words: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    keys = [experiment.key for experiment in EXPERIMENTS]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=RESULTS, help="result file (%(default)s)")
    parser.add_argument(
        "--only", action="append", choices=keys, help="one experiment anew; repeatable"
    )
    parser.add_argument("--readme", action="store_true", help="only write the README's tables")
    return parser.parse_args(words)


def make(path: Path, only: list[str] | None = None) -> None:
    """Estimate and count all experiments, or some, and put them into a result file."""
    started = time.monotonic()
    torch.set_num_threads(1)
    record = _old(path)
    for experiment in EXPERIMENTS:
        if only and experiment.key not in only:
            continue
        record["full"][experiment.key] = estimate(experiment)
        record["reduced"][experiment.key] = count(reduced(experiment))
        record["provenance"] = {
            **provenance(),
            "rates": {
                "name": P40.name,
                "flops": P40.flops_of("float32"),
                "bandwidth": P40.bandwidth,
                "source": P40.source,
                "memory_limit": MEMORY_LIMIT,
            },
        }
        for part in ("full", "reduced"):
            known = record[part]
            record[part] = {e.key: known[e.key] for e in EXPERIMENTS if e.key in known}
        write_record(path, record)
        print(f"{time.monotonic() - started:5.0f} s  {experiment.key}", file=sys.stderr)


def _old(path: Path) -> dict[str, Any]:
    """Return the record to add to."""
    if path.exists():
        return read_record(path, tables.FORMAT, tables.VERSION)
    return {
        "format": tables.FORMAT,
        "version": tables.VERSION,
        "provenance": {},
        "full": {},
        "reduced": {},
    }


if __name__ == "__main__":
    main()
