"""Estimate the memory of the published experiments, and count it at a reduced size.

    python benchmarks/memory/make.py            all; writes results.json and the README's tables
    python benchmarks/memory/make.py --only "unet pipeline-8"    one experiment anew
    python benchmarks/memory/make.py --measure  the full sizes on a CUDA device, where they fit
    python benchmarks/memory/make.py --readme   write the README's tables from results.json

Without `--measure` it needs no device, and no clock: every figure is a count of bytes, the same on
every machine.
"""

from __future__ import annotations

import argparse
import sys
import traceback
from pathlib import Path
from typing import Any

import torch

from gpipebal.files import read_record, write_record

# What all benchmarks have in common is next to their folders.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmark_tools.devices import P40
from benchmark_tools.machine import Progress, provenance
from benchmark_tools.script import parser_of, publish
from memory_benchmark import tables
from memory_benchmark.estimate import MEMORY_LIMIT, estimate
from memory_benchmark.experiments import EXPERIMENTS, reduced
from memory_benchmark.measure import ORDER, count, free_bytes, measure

HERE = Path(__file__).parent
RESULTS = HERE / "results.json"


def main() -> None:
    """Estimate, count or measure, store, print, and write the README."""
    arguments = parse()
    failed = []
    if arguments.measure:
        failed = make_measured(arguments.out, arguments.only, torch.device("cuda:0"))
    elif not arguments.readme:
        make(arguments.out, arguments.only)
    record = read_record(arguments.out, tables.FORMAT, tables.VERSION)
    publish(arguments.out, RESULTS, tables.blocks(record))
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


def parse(words: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    keys = [experiment.key for experiment in EXPERIMENTS]
    parser = parser_of(__doc__, RESULTS)
    parser.add_argument(
        "--only", action="append", choices=keys, help="one experiment anew; repeatable"
    )
    parser.add_argument("--measure", action="store_true", help="run the full sizes that fit")
    return parser.parse_args(words)


def make(path: Path, only: list[str] | None = None) -> None:
    """Estimate and count all experiments, or some, and put them into a result file."""
    progress = Progress()
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
        _write(path, record)
        progress.told(experiment.key)


def make_measured(path: Path, only: list[str] | None, device: torch.device) -> list[str]:
    """Measure all experiments that fit a device, or some of them, and put them into a result file.

    Each is stored as soon as it is measured, so that a run that is ended has not measured in vain.
    One that fails is told and leaves the others their turn.

    Args:
        path: The file; where it is none yet, it will have only what was measured.
        only: Keys of experiments; None or empty: all.
        device: Where all partitions are.

    Returns:
        The keys of those that failed.
    """
    progress = Progress()
    estimates = _old(RESULTS)
    record = _old(path)
    # So that a file that cannot be written is told now.
    _write(path, record)
    failed = []
    for key in ORDER:
        if only and key not in only:
            continue
        estimated = tables.on_one_device(estimates, key)
        free = free_bytes(device)
        if estimated is not None and free is not None and sum(estimated) > free:
            need = f"{sum(estimated) / 2**30:.1f} of {free / 2**30:.1f} GiB"
            progress.told(f"does not fit, {need} needed: {key}")
            continue
        experiment = next(e for e in EXPERIMENTS if e.key == key)
        try:
            record["measured"][key] = measure(experiment, device)
        except Exception:
            traceback.print_exc()
            failed.append(key)
            continue
        _write(path, record)
        progress.told(key)
    return failed


def _write(path: Path, record: dict[str, Any]) -> None:
    """Store a record, its experiments in the order of the tables."""
    for part in ("full", "reduced", "measured"):
        known = record[part]
        record[part] = {e.key: known[e.key] for e in EXPERIMENTS if e.key in known}
    write_record(path, record)


def _old(path: Path) -> dict[str, Any]:
    """Return the record to add to."""
    if path.exists():
        return read_record(path, tables.FORMAT, tables.VERSION)
    parts = {name: {} for name in ("provenance", "full", "reduced", "measured")}
    return {"format": tables.FORMAT, "version": tables.VERSION, **parts}


if __name__ == "__main__":
    main()
