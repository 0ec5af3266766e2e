"""Time the solver and other rules, and see what its plans gain.

    python benchmarks/solver/make.py            measure, write results.json and the README
    python benchmarks/solver/make.py --quick --out /tmp/quick.json    try it, on short chains
    python benchmarks/solver/make.py --add --part gaps     measure one part of a result anew
    python benchmarks/solver/make.py --readme   write the README's tables from results.json

torchgpipe's rule and DeepSpeed's run if their packages are installed.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import time
from pathlib import Path
from typing import Any

# One thread, whatever the libraries would take: to be said before they are imported.
for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[_name] = "1"

# What all benchmarks have in common is next to their folders.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmark_tools.machine import OtherLoad, place, versions  # noqa: E402
from benchmark_tools.text import write_readme  # noqa: E402
from solver_benchmark import figures, measure, tables  # noqa: E402
from solver_benchmark.chains import KINDS, SIZES  # noqa: E402
from solver_benchmark.peers import peers  # noqa: E402
from solver_benchmark.plans import joint, plans, searches  # noqa: E402

from gpipebal.files import read_record, write_record  # noqa: E402

HERE = Path(__file__).parent
RESULTS = HERE / "results.json"
PROFILES = HERE.parent.parent / "profiles"

#: Packages whose versions are stored.
PACKAGES = ("gpipebal", "numpy", "scipy", "torchgpipe", "deepspeed", "torch")
#: What can be measured alone: each kind of chain, and what follows them.
PARTS = (*KINDS, "gaps", "joint", "plans", "searches")
#: Turns of every solver at every chain.
ROUNDS = 5
#: Seconds after which another rule is given up.
LIMIT = 2.0
#: How many small chains are drawn for each rule.
DRAWS = {"torchgpipe": 60, "deepspeed": 8}


def main() -> None:
    """Measure, store, print, and write the README."""
    arguments = parse()
    if not arguments.readme:
        record = run(arguments)
        if arguments.add and arguments.out.exists():
            record = figures.merge(_read(arguments.out), record, list(KINDS))
        write_record(arguments.out, record)
    record = _read(arguments.out)
    print(tables.summary(record))
    # A trial is no result to publish.
    if arguments.out.resolve() == RESULTS.resolve():
        write_readme(HERE / "README.md", tables.blocks(record))


def parse(words: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=RESULTS, help="result file (%(default)s)")
    parser.add_argument("--quick", action="store_true", help="short chains, few draws")
    parser.add_argument("--part", action="append", choices=PARTS, help="only this; repeatable")
    parser.add_argument("--add", action="store_true", help="keep the other parts of the file")
    parser.add_argument("--readme", action="store_true", help="only write the README's tables")
    arguments = parser.parse_args(words)
    partial = arguments.quick or (arguments.part and not arguments.add)
    if partial and not arguments.readme and arguments.out.resolve() == RESULTS.resolve():
        parser.error(
            "--quick and --part make no complete result: give another file as --out, or --add"
        )
    return arguments


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure what is asked for, and return the record to store."""
    quick = arguments.quick
    parts = arguments.part or PARTS
    found = peers()
    gc.collect()
    gc.freeze()
    started = time.monotonic()
    load = OtherLoad()

    def told(line: str) -> None:
        print(f"{time.monotonic() - started:5.0f} s  {line}", file=sys.stderr)

    rounds, limit = (1, 0.5) if quick else (ROUNDS, LIMIT)
    sizes = [size for size in SIZES if size[0] <= (200 if quick else max(SIZES)[0])]
    kinds = [kind for kind in KINDS if kind in parts]
    result: dict[str, Any] = {
        "times": measure.time_all(sizes, kinds, found, rounds=rounds, limit=limit, told=told)
    }
    if "gaps" in parts:
        draws = {name: 2 if quick else number for name, number in DRAWS.items()}
        result["gaps"] = measure.gaps(found, draws, measure.GAP_SIZES[: 1 if quick else None])
        told("gaps")
    if "joint" in parts:
        result["joint"] = joint(1 if quick else rounds)
        told("joint")
    if "plans" in parts:
        result["plans"] = plans(PROFILES)
        told("plans")
    if "searches" in parts:
        result["searches"] = searches(PROFILES)
    other = load.end(told)
    return {
        "format": figures.FORMAT,
        "version": figures.VERSION,
        "provenance": {
            **place(),
            "versions": versions(PACKAGES),
            "rounds": rounds,
            "limit": limit,
            "quick": quick,
            "runs": 1,
            "minutes": round((time.monotonic() - started) / 60, 2),
            "other_load": other,
        },
        "peers": list(found),
        **result,
    }


def _read(path: Path) -> dict[str, Any]:
    return read_record(path, figures.FORMAT, figures.VERSION)


if __name__ == "__main__":
    main()
