"""Time the solver and other rules, and see what its plans gain.

    python benchmarks/solver/make.py            measure, write results.json and the README
    python benchmarks/solver/make.py --quick --out /tmp/quick.json    try it, on short chains
    python benchmarks/solver/make.py --readme   write the README's tables from results.json

torchgpipe's rule and DeepSpeed's run if their packages are installed.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
from pathlib import Path
from typing import Any

# One thread, whatever the libraries would take: to be said before they are imported.
for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[_name] = "1"

# What all benchmarks have in common is next to their folders.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmark_tools.machine import Progress, place, versions  # noqa: E402
from benchmark_tools.script import is_same_file, parser_of, publish  # noqa: E402
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
        write_record(arguments.out, measure_all(quick=arguments.quick))
    record = read_record(arguments.out, figures.FORMAT, figures.VERSION)
    publish(arguments.out, RESULTS, tables.blocks(record))


def parse(words: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = parser_of(__doc__, RESULTS)
    parser.add_argument("--quick", action="store_true", help="short chains, few draws")
    arguments = parser.parse_args(words)
    if arguments.quick and not arguments.readme and is_same_file(arguments.out, RESULTS):
        parser.error("--quick makes no complete result: give another file as --out")
    return arguments


def measure_all(*, quick: bool) -> dict[str, Any]:
    """Measure all, and return the record to store."""
    found = peers()
    gc.collect()
    gc.freeze()
    progress = Progress()
    rounds, limit = (1, 0.5) if quick else (ROUNDS, LIMIT)
    sizes = [size for size in SIZES if size[0] <= 200] if quick else SIZES
    gap_sizes = measure.GAP_SIZES[:1] if quick else measure.GAP_SIZES
    draws = dict.fromkeys(DRAWS, 2) if quick else DRAWS
    times = measure.time_all(
        sizes, list(KINDS), found, rounds=rounds, limit=limit, told=progress.told
    )
    result: dict[str, Any] = {"times": times}
    for name, part in (
        ("gaps", lambda: measure.gaps(found, draws, gap_sizes)),
        ("joint", lambda: joint(rounds)),
        ("plans", lambda: plans(PROFILES)),
        ("searches", lambda: searches(PROFILES)),
    ):
        result[name] = part()
        progress.told(name)
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
            **progress.end(),
        },
        "peers": list(found),
        **result,
    }


if __name__ == "__main__":
    main()
