"""Speed on 1, 2, 4 and 8 devices: simulated, with the published, and measured on two CPU cores.

    python benchmarks/speed/make.py              simulate; writes results.json and the README
    python benchmarks/speed/make.py --measure    measure on the CPU too; needs a quiet machine
    python benchmarks/speed/make.py --shares     measure on shares of one CUDA device
    python benchmarks/speed/make.py --shares --model unet    only one model; the others stay
    python benchmarks/speed/make.py --readme     write the README's tables from results.json

What is simulated needs no device and no clock. What is there of the other parts is kept. Shares
need the package cuda-bindings.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from gpipebal.files import read_record, write_record

# What all benchmarks have in common is next to their folders.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmark_tools.machine import Progress, provenance
from benchmark_tools.script import parser_of, publish
from benchmark_tools.shares import about_shares
from speed_benchmark import tables
from speed_benchmark.devices import FAST
from speed_benchmark.measure import measure
from speed_benchmark.published import MODELS, SpeedModel
from speed_benchmark.shares import N_SHARES, measure_shares
from speed_benchmark.simulate import estimate, simulate

HERE = Path(__file__).parent
RESULTS = HERE / "results.json"

#: Timed turns of each way.
ROUNDS = 5


def main() -> None:
    """Simulate or measure, store, print, and write the README."""
    arguments = parse()
    if not arguments.readme:
        record = _old(arguments.out)
        if arguments.measure:
            add_measured(record, arguments.rounds)
        elif arguments.shares:
            chosen = [one for one in MODELS if arguments.model in (None, one.name)]
            add_shares(record, chosen, arguments.rounds, arguments.out)
        else:
            add_simulated(record)
        write_record(arguments.out, record)
    publish(arguments.out, RESULTS, tables.blocks(_read(arguments.out)))


def parse(words: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = parser_of(__doc__, RESULTS)
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--measure", action="store_true", help="measure on the CPU")
    what.add_argument(
        "--shares", action="store_true", help="measure at full size on shares of a CUDA device"
    )
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="turns (%(default)s)")
    names = [model.name for model in MODELS]
    parser.add_argument("--model", choices=names, help="with --shares: only this one")
    arguments = parser.parse_args(words)
    if arguments.model and not arguments.shares:
        parser.error("--model needs --shares: the other parts are of all models")
    if arguments.rounds < 1:
        parser.error(f"--rounds {arguments.rounds} is too small (expected 1 or more)")
    return arguments


def add_simulated(record: dict[str, Any]) -> None:
    """Simulate all models, and put them into the record."""
    progress = Progress()
    for model in MODELS:
        record["simulated"][model.name] = simulate(model, estimate(model), estimate(model, FAST))
        progress.told(model.name)
    record["provenance"]["simulated"] = provenance()


def add_measured(record: dict[str, Any], rounds: int) -> None:
    """Measure all models, and put them into the record."""
    progress = Progress()
    for model in MODELS:
        record["measured"][model.name] = measure(model, rounds=rounds)
        progress.told(model.name)
    other_load = progress.end()["other_load"]
    about = {**provenance(), "rounds": rounds, "other_load": other_load}
    record["provenance"]["measured"] = about


def add_shares(record: dict[str, Any], models: list[SpeedModel], rounds: int, out: Path) -> None:
    """Measure models on shares of a CUDA device, and store each as soon as it is measured."""
    progress = Progress()
    about = {**provenance(), **about_shares(N_SHARES)}
    here, there = about["device_name"], record["provenance"].get("shares", {}).get("device_name")
    if there not in (None, here) and len(models) < len(MODELS):
        sys.exit(
            f"the other models were measured on shares of {there}, and this is {here}.\n"
            "Fix: give another file as --out, or measure all models."
        )
    for model in models:
        found = measure_shares(model, rounds=rounds, told=progress.told)
        record.setdefault("shares", {})[model.name] = found
        record["provenance"]["shares"] = about
        write_record(out, record)
        progress.told(f"{model.name}: stored")


def _read(path: Path) -> dict[str, Any]:
    return read_record(path, tables.FORMAT, tables.VERSION)


def _old(path: Path) -> dict[str, Any]:
    """Return the record to add to."""
    if path.exists():
        return _read(path)
    parts = {name: {} for name in ("provenance", "simulated", "measured")}
    return {"format": tables.FORMAT, "version": tables.VERSION, **parts}


if __name__ == "__main__":
    main()
