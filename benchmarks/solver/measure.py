"""Run the planner's balances and those of other rules on two CPU partitions, timed.

    python benchmarks/solver/measure.py             measure, write measured.json and the README
    python benchmarks/solver/measure.py --readme    write the README's table from measured.json

The models are those whose stored profiles are of a CPU, profiled anew. Needs a quiet machine.
"""

from __future__ import annotations

import sys
from pathlib import Path

# What all benchmarks have in common is next to their folders.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmark_tools.machine import Progress, provenance
from benchmark_tools.script import parser_of, publish
from solver_benchmark import two_devices

from gpipebal.files import read_record, write_record

HERE = Path(__file__).parent
RESULTS = HERE / "measured.json"
PROFILES = HERE.parent.parent / "profiles"

#: Turns of each balance, and seconds for the repeats of each profile.
ROUNDS, TIMEOUT = 4, 12.0


def main() -> None:
    """Measure, store, print, and write the README."""
    parser = parser_of(__doc__, RESULTS)
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="turns (%(default)s)")
    arguments = parser.parse_args()
    if not arguments.readme:
        write_record(arguments.out, measure(arguments.rounds))
    record = read_record(arguments.out, two_devices.FORMAT, two_devices.VERSION)
    publish(arguments.out, RESULTS, two_devices.blocks(record))


def measure(rounds: int) -> two_devices.Record:
    """Measure all models, and return the record to store."""
    progress = Progress()
    models = []
    for model in two_devices.models(PROFILES, TIMEOUT):
        models.append(two_devices.measure(model, rounds=rounds))
        progress.told(model.name)
    return {
        "format": two_devices.FORMAT,
        "version": two_devices.VERSION,
        "provenance": {**provenance(), "rounds": rounds, **progress.end()},
        "models": models,
    }


if __name__ == "__main__":
    main()
