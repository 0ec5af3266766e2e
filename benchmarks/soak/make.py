"""Run many small steps with faults, and see that nothing grows, hangs or differs.

    python benchmarks/soak/make.py                  10,000 steps; writes results.json and the README
    python benchmarks/soak/make.py --steps 500      a shorter one, which is not stored
    python benchmarks/soak/make.py --readme         write the README's tables from results.json

The exit status is 1 if a step failed or something grew.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

from gpipebal.files import read_record, write_record

# What all benchmarks have in common is next to their folders.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmark_tools.script import is_same_file
from benchmark_tools.text import write_readme
from soak_benchmark import tables
from soak_benchmark.soak import FORMAT, VERSION, soak
from soak_benchmark.steps import SoakError

HERE = Path(__file__).parent
RESULTS = HERE / "results.json"

#: Seconds after which a step counts as hanging.
HANG = 60.0


def main() -> int:
    """Run, store, print, and write the README; return the exit status."""
    arguments = parse()
    if arguments.readme:
        fill_readme()
        return 0
    torch.set_num_threads(1)
    try:
        record = soak(
            arguments.steps,
            seed=arguments.seed,
            first=arguments.first,
            every=max(1, min(100, arguments.steps // 20)),
            hang_after=HANG,
            progress=lambda done: print(f"\r{done} steps", end="", file=sys.stderr, flush=True),
        )
    except SoakError as error:
        print(f"\n{error}\nbecause of: {error.__cause__!r}")
        return 1
    print(f"\n{tables.result(record)}")
    if arguments.out is not None:
        write_record(arguments.out, record)
        if is_same_file(arguments.out, RESULTS):
            fill_readme()
    return 0 if tables.is_passed(record) else 1


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=10_000, help="how many (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="decides every step (%(default)s)")
    parser.add_argument("--first", type=int, default=0, help="number of the first (%(default)s)")
    parser.add_argument("--out", type=Path, help="result file (results.json for a whole soak)")
    parser.add_argument("--readme", action="store_true", help="only write the README's tables")
    arguments = parser.parse_args()
    if arguments.steps < 1:
        parser.error("--steps must be 1 or more")
    is_whole = arguments.steps >= 10_000 and arguments.first == 0
    if arguments.out is None and is_whole:
        arguments.out = RESULTS
    if not is_whole and arguments.out and is_same_file(arguments.out, RESULTS):
        parser.error("fewer than 10,000 steps make no complete result: give another file as --out")
    return arguments


def fill_readme() -> None:
    """Put the tables into the README."""
    write_readme(HERE / "README.md", tables.blocks(read_record(RESULTS, FORMAT, VERSION)))


if __name__ == "__main__":
    sys.exit(main())
