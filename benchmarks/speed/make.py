"""Speed on 1, 2, 4 and 8 devices: simulated, with the published, and measured on two CPU cores.

    python benchmarks/speed/make.py              simulate; writes results.json and the README
    python benchmarks/speed/make.py --measure    measure on the CPU too; needs a quiet machine
    python benchmarks/speed/make.py --measure --model unet    measure one model anew
    python benchmarks/speed/make.py --shares --out F    measure on shares of one CUDA device
    python benchmarks/speed/make.py --merge F    add that to results.json
    python benchmarks/speed/make.py --readme     write the README's tables from results.json

What is simulated needs no device and no clock. What is there of the other parts is kept. Shares
need the package cuda-bindings.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

from gpipebal.files import read_record, write_record

# What all benchmarks have in common is next to their folders.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmark_tools.machine import OtherLoad, provenance
from benchmark_tools.text import write_readme
from speed_benchmark import tables
from speed_benchmark.devices import FAST
from speed_benchmark.measure import measure
from speed_benchmark.published import MODELS, SpeedModel
from speed_benchmark.shares import N_SHARES, about_shares, measure_shares
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
        chosen = [m for m in MODELS if not arguments.model or m.name in arguments.model]
        if arguments.merge:
            add_other(record, _read(arguments.merge))
        elif arguments.measure:
            add_measured(record, chosen, arguments.rounds, arguments.timeout)
        elif arguments.shares:
            for model in chosen:
                add_shares(record, model, arguments)
        else:
            add_simulated(record, chosen)
        write_record(arguments.out, record)
    record = _read(arguments.out)
    print(tables.summary(record))
    if arguments.out.resolve() == RESULTS.resolve():
        write_readme(HERE / "README.md", tables.blocks(record))


def parse(words: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    names = [model.name for model in MODELS]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=RESULTS, help="result file (%(default)s)")
    parser.add_argument("--model", action="append", choices=names, help="only this; repeatable")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--measure", action="store_true", help="measure on the CPU")
    what.add_argument(
        "--shares", action="store_true", help="measure at full size on shares of a CUDA device"
    )
    parser.add_argument(
        "--predict",
        action="store_true",
        help="with --shares: only profile and predict anew, and keep what was measured",
    )
    what.add_argument(
        "--merge", type=Path, help="add what another file says of shares of a CUDA device"
    )
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="turns (%(default)s)")
    parser.add_argument("--timeout", type=float, help="seconds for a profile's repeats")
    what.add_argument("--readme", action="store_true", help="only write the README's tables")
    arguments = parser.parse_args(words)
    if arguments.predict and not arguments.shares:
        parser.error("--predict needs --shares")
    if arguments.rounds < 1:
        parser.error(f"--rounds {arguments.rounds} is too small (expected 1 or more)")
    return arguments


def add_simulated(record: dict[str, Any], models: list[SpeedModel]) -> None:
    """Simulate models, and put them into the record."""
    started = time.monotonic()
    for model in models:
        record["simulated"][model.name] = simulate(model, estimate(model), estimate(model, FAST))
        print(f"{time.monotonic() - started:5.0f} s  {model.name}", file=sys.stderr)
    record["provenance"]["simulated"] = provenance()


def add_measured(
    record: dict[str, Any], models: list[SpeedModel], rounds: int, timeout: float | None
) -> None:
    """Measure models, and put them into the record."""
    load = OtherLoad()
    for model in models:
        record["measured"][model.name] = measure(model, rounds=rounds, timeout=timeout)
    before = record["provenance"].get("measured", {}).get("other_load")
    share = load.share()
    known = [value for value in (before, share) if value is not None]
    record["provenance"]["measured"] = {
        **provenance(),
        "rounds": rounds,
        # Of several runs the least quiet.
        "other_load": round(max(known), 4) if known else None,
    }


def add_shares(record: dict[str, Any], model: SpeedModel, arguments: argparse.Namespace) -> None:
    """Measure a model on shares of a CUDA device, put it into the record, and store that.

    What is there of all turns stays until all turns of this run are made.
    """
    started = time.monotonic()
    parted = record.setdefault("shares", {})
    before = _known(parted, model.name) if arguments.predict else None
    if not arguments.predict:
        about = {**provenance(), **about_shares(N_SHARES)}

    def told(line: str) -> None:
        seconds = time.monotonic() - started
        print(f"{seconds:5.0f} s  {model.name}, on shares: {line}", file=sys.stderr, flush=True)

    def keep(found: dict[str, Any]) -> None:
        if not _replaces(found, parted.get(model.name)):
            return
        parted[model.name] = found
        if not arguments.predict:
            record["provenance"]["shares"] = about
        write_record(arguments.out, record)
        told("stored")

    keep(
        measure_shares(
            model,
            rounds=arguments.rounds,
            timeout=arguments.timeout,
            measured=before,
            keep=keep,
            told=told,
        )
    )


def _replaces(found: dict[str, Any], before: dict[str, Any] | None) -> bool:
    """Tell whether a result of a model is to replace the one before: not if only that is whole."""
    is_whole = found["turns"] == found["rounds"]
    return is_whole or before is None or before["turns"] < before["rounds"]


def _known(parted: dict[str, Any], name: str) -> dict[str, Any]:
    if name not in parted:
        sys.exit(
            f"{name} was not measured on shares: there is nothing to predict anew.\n"
            f"Fix: --shares --model {name} without --predict."
        )
    found: dict[str, Any] = parted[name]
    return found


def add_other(record: dict[str, Any], other: dict[str, Any]) -> None:
    """Take over what another file says of shares."""
    if not other.get("shares"):
        sys.exit("the file says nothing of shares.\nFix: one that --shares --out wrote.")
    parted = record.setdefault("shares", {})
    taken = {
        name: found for name, found in other["shares"].items() if _replaces(found, parted.get(name))
    }
    if not taken:
        sys.exit(
            "the file has fewer turns than were asked for, and all turns are there already.\n"
            "Fix: --shares --out once more."
        )
    parted.update(taken)
    record["provenance"]["shares"] = other["provenance"]["shares"]


def _read(path: Path) -> dict[str, Any]:
    record = read_record(path, tables.FORMAT, tables.VERSION)
    rounds = record["provenance"].get("shares", {}).pop("rounds", None)
    if rounds is not None:  # files of before say it once for all models
        for found in record["shares"].values():
            found.update({"turns": rounds, "rounds": rounds, **found})
    return record


def _old(path: Path) -> dict[str, Any]:
    """Return the record to add to."""
    if path.exists():
        return _read(path)
    return {
        "format": tables.FORMAT,
        "version": tables.VERSION,
        "provenance": {},
        "simulated": {},
        "measured": {},
    }


if __name__ == "__main__":
    main()
