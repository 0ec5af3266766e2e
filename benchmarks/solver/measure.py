"""Run the planner's balances and those of other rules on two CPU partitions, timed.

    python benchmarks/solver/measure.py             measure, write measured.json and the README
    python benchmarks/solver/measure.py --readme    write the README's table from measured.json

The models are those whose stored profiles are of a CPU, profiled anew. Needs a quiet machine.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

# What all benchmarks have in common is next to their folders.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmark_tools.machine import OtherLoad, provenance
from benchmark_tools.text import write_readme
from solver_benchmark import two_devices

from gpipebal.files import read_record, write_record

HERE = Path(__file__).parent
RESULTS = HERE / "measured.json"
PROFILES = HERE.parent.parent / "profiles"

#: Turns of each balance, and seconds for the repeats of each profile.
ROUNDS, TIMEOUT = 4, 12.0


def main() -> None:
    """Measure, store, print, and write the README."""
    arguments = parse()
    if not arguments.readme:
        write_record(arguments.out, run(arguments.rounds))
    record = read_record(arguments.out, two_devices.FORMAT, two_devices.VERSION)
    print(two_devices.summary(record))
    # A trial is no result to publish.
    if arguments.out.resolve() == RESULTS.resolve():
        write_readme(HERE / "README.md", two_devices.blocks(record), source=RESULTS.name)


def parse(words: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=RESULTS, help="result file (%(default)s)")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="turns (%(default)s)")
    parser.add_argument("--readme", action="store_true", help="only write the README's table")
    return parser.parse_args(words)


def run(rounds: int) -> two_devices.Record:
    """Measure all models, and return the record to store."""
    started = time.monotonic()
    load = OtherLoad()
    models = []
    for model in two_devices.models(PROFILES, TIMEOUT):
        models.append(two_devices.measure(model, rounds=rounds))
        print(f"{time.monotonic() - started:5.0f} s  {model.name}", file=sys.stderr)
    other = load.end(print)
    return {
        "format": two_devices.FORMAT,
        "version": two_devices.VERSION,
        "provenance": {
            **provenance(),
            "rounds": rounds,
            "minutes": round((time.monotonic() - started) / 60, 2),
            "other_load": other,
        },
        "models": models,
    }


if __name__ == "__main__":
    main()
