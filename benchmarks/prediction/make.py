"""Predict steps and peak memory of many plans, and measure what they then are.

    python benchmarks/prediction/make.py            measure, write results.json and the README
    python benchmarks/prediction/make.py --quick --out /tmp/quick.json    try it, with tiny layers
    python benchmarks/prediction/make.py --readme   write the README's tables from the stored files
    python benchmarks/prediction/make.py --add --model mlp    measure one model of a result anew
    python benchmarks/prediction/make.py --merge F    of each model the run with the lower floor
    python benchmarks/prediction/make.py --repeats          only how well profiles agree, anew
    python benchmarks/prediction/make.py --memory           only what partitions hold, anew
    python benchmarks/prediction/make.py --out benchmarks/prediction/results-cuda.json    with CUDA
    python benchmarks/prediction/make.py --allocator --out F    add what CUDA's allocator says

Without CUDA the partitions are on the CPU, with one thread each. On a machine with several CUDA
devices each partition has one; of a single device each has a share of the multiprocessors, which
needs the package cuda-bindings, and the models have more rows. A result is of one kind of machine:
results.json of a CPU, results-cuda.json of a CUDA device. The README shows both.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from gpipebal.files import read_record, write_record

# What all benchmarks have in common is next to their folders.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmark_tools.machine import OtherLoad, provenance
from benchmark_tools.text import write_readme
from prediction_benchmark import cuda_tables, figures, merging, tables
from prediction_benchmark.allocator import measure_allocator
from prediction_benchmark.measure import (
    MIDDLE,
    Subject,
    about,
    measure_memory_of,
    measure_model,
    take_profiles,
)
from prediction_benchmark.models import MODELS, Model, larger, tiny
from prediction_benchmark.repeats import WORK_SECONDS, measure_repeats
from prediction_benchmark.settings import QUICK_SETTINGS, SETTINGS
from prediction_benchmark.steps import about_devices, devices, on_first_device

HERE = Path(__file__).parent
RESULTS = HERE / "results.json"
RESULTS_ON_CUDA = HERE / "results-cuda.json"
#: What the README says of each stored file.
BLOCKS = {RESULTS: tables.blocks, RESULTS_ON_CUDA: cuda_tables.blocks}

#: Turns of each plan, and timed steps in each.
ROUNDS = 4
STEPS = 2
#: Profiles of each model one after the other, to see how well they agree.
REPEATS = 5


def main() -> None:
    """Measure, store, print, and write the README."""
    arguments = parse()
    if not arguments.readme and not arguments.merge:
        check_device(arguments)
    if arguments.repeats:
        record = {**_read(arguments.out), "repeats": repeats(arguments, _told())}
        write_record(arguments.out, record)
    elif arguments.memory:
        write_record(arguments.out, memory(arguments, _read(arguments.out), _told()))
    elif arguments.allocator:
        record = _read(arguments.out)
        found = allocator(arguments, _told())
        if arguments.add and "allocator" in record:
            names = [model.name for model in MODELS]
            found = merging.merge_allocator(record["allocator"], found, names)
        write_record(arguments.out, {**record, "allocator": found})
    elif arguments.merge:
        record = _read(arguments.out)
        for path in arguments.merge:
            record = merging.merge_steadier(record, _read(path), [model.name for model in MODELS])
        write_record(arguments.out, record)
    elif not arguments.readme:
        record = measure(arguments)
        if not arguments.quick and not arguments.add and arguments.out.exists():
            # They are measured by themselves.
            old = _read(arguments.out)
            record |= {key: old[key] for key in ("repeats", "allocator") if key in old}
        if arguments.add and arguments.out.exists():
            record = merging.merge(_read(arguments.out), record, [model.name for model in MODELS])
        write_record(arguments.out, record)
    record = _read(arguments.out)
    print(tables.summary(record))
    if "allocator" in record:
        print(f"\n{cuda_tables.by_allocator(record['allocator']['rows'])}")
    for path, blocks in BLOCKS.items():
        # A trial, or a part of the models, is no result to publish.
        if arguments.readme or arguments.out.resolve() == path.resolve():
            write_readme(HERE / "README.md", blocks(_read(path)), path.name)


def parse(words: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    names = [model.name for model in MODELS]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=RESULTS, help="result file (%(default)s)")
    parser.add_argument("--model", action="append", choices=names, help="only this; repeatable")
    parser.add_argument("--rounds", type=int, help=f"turns of each plan ({ROUNDS}; quick: 2)")
    parser.add_argument(
        "--quick", action="store_true", help="few plans of few tiny layers; the times mean nothing"
    )
    parser.add_argument(
        "--add", action="store_true", help="keep what the result file says of the other models"
    )
    only = parser.add_mutually_exclusive_group()
    only.add_argument("--repeats", action="store_true", help="only measure how well profiles agree")
    only.add_argument(
        "--memory", action="store_true", help="only predict and count memory anew, of all plans"
    )
    only.add_argument(
        "--allocator", action="store_true", help="only ask CUDA's allocator for peaks, and add them"
    )
    only.add_argument(
        "--merge",
        action="append",
        type=Path,
        metavar="FILE",
        help="measure nothing; of each model keep the run with the lower floor; repeatable",
    )
    only.add_argument("--readme", action="store_true", help="only write the README's tables")
    arguments = parser.parse_args(words)
    partial = arguments.quick or (arguments.model and not arguments.add)
    if partial and not (arguments.readme or arguments.merge) and _is_stored(arguments.out):
        parser.error(
            "--quick and --model make no complete result: give another file as --out, or --add"
        )
    if arguments.rounds is not None and arguments.rounds < 1:
        parser.error("--rounds must be 1 or more")
    return arguments


def check_device(arguments: argparse.Namespace) -> None:
    """Refuse to measure what this machine has no device for.

    Raises:
        SystemExit: the result file is that of another kind of machine, or there is no CUDA device
            whose allocator could be asked.
    """
    on_cuda = torch.cuda.is_available()
    if arguments.allocator and not on_cuda:
        raise SystemExit(
            "--allocator needs a CUDA device, and there is none.\n"
            "Fix: run it on a machine that has one."
        )
    stored = RESULTS_ON_CUDA if on_cuda else RESULTS
    if _is_stored(arguments.out) and arguments.out.resolve() != stored.resolve():
        here = "with" if on_cuda else "without"
        raise SystemExit(
            f"{arguments.out} is not of a machine {here} CUDA, and this is one.\n"
            f"Fix: give --out {stored} or another file."
        )


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure all models, and return the record to store."""
    torch.set_num_threads(1)
    # What is there by now stays: a collection in the middle of a step looks at little.
    gc.collect()
    gc.freeze()
    started = time.monotonic()
    told = _told()
    load = OtherLoad()
    quick = arguments.quick
    rounds = arguments.rounds or (2 if quick else ROUNDS)
    timeout = 0.0 if quick else None
    settings = QUICK_SETTINGS if quick else SETTINGS
    chunks = sorted({MIDDLE, *(setting.chunks for setting in settings)})
    chosen = [model for model in MODELS if not arguments.model or model.name in arguments.model]

    subjects = []
    for model in chosen:
        subject = _subject(model, quick)
        subject.start = take_profiles(subject, chunks, timeout, other_rows=True)
        told(f"{model.name}: profiles")
        subjects.append(subject)
    rows: list[dict[str, Any]] = []
    for subject in subjects:
        rows += measure_model(
            subject,
            rounds=rounds,
            steps=1 if quick else STEPS,
            timeout=timeout,
            settings=settings,
            told=told,
        )
        gc.collect()
    for subject in subjects:
        subject.end = take_profiles(subject, (MIDDLE,), timeout)
    other = load.end(told)
    return {
        "format": figures.FORMAT,
        "version": figures.VERSION,
        "provenance": {
            **provenance(),
            **about_devices(),
            "rounds": rounds,
            "runs": 1,
            "quick": quick,
            "minutes": round((time.monotonic() - started) / 60, 2),
            "other_load": other,
        },
        "models": {subject.model.name: about(subject) for subject in subjects},
        "rows": rows,
    }


def repeats(arguments: argparse.Namespace, told: Callable[[str], None]) -> dict[str, Any]:
    """Profile every model several times in turns, beside work that is always the same."""
    torch.set_num_threads(1)
    quick = arguments.quick
    models = [model for model in MODELS if not arguments.model or model.name in arguments.model]
    load = OtherLoad()
    turns = 2 if quick else REPEATS
    found = measure_repeats(
        [_subject(model, quick) for model in models],
        turns,
        0.0 if quick else None,
        work_seconds=0.01 if quick else WORK_SECONDS,
        told=told,
    )
    return {"provenance": {**provenance(), "other_load": load.share()}, "models": found}


def memory(
    arguments: argparse.Namespace, record: dict[str, Any], told: Callable[[str], None]
) -> dict[str, Any]:
    """Predict and count the memory of all stored plans, and return the record with that."""
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    for model in MODELS:
        stored = [row for row in record["rows"] if row["model"] == model.name]
        if stored:
            subject = _subject(model, arguments.quick)
            rows += measure_memory_of(subject, stored, 0.0 if arguments.quick else None)
            told(f"{model.name}: memory")
    return {**record, "rows": rows, "memory": {"provenance": provenance()}}


def allocator(arguments: argparse.Namespace, told: Callable[[str], None]) -> dict[str, Any]:
    """Ask the allocator of the first CUDA device for the peak of every model as one partition."""
    rows = []
    for model in MODELS:
        if not arguments.model or model.name in arguments.model:
            rows += measure_allocator(tiny(model) if arguments.quick else larger(model))
            told(f"{model.name}: peaks of the allocator")
    about = {"device_name": torch.cuda.get_device_name(0), "cuda": torch.version.cuda}
    return {"provenance": {**provenance(), **about, "runs": 1}, "rows": rows}


def _subject(model: Model, quick: bool) -> Subject:
    """Make a model of the size that the device is for, on that device."""
    first = devices()[0]
    if quick:
        model = tiny(model)
    elif first.type == "cuda":
        model = larger(model)
    with on_first_device():
        return Subject(model, model.make().to(first))


def _told() -> Callable[[str], None]:
    started = time.monotonic()

    def told(line: str) -> None:
        print(f"{time.monotonic() - started:5.0f} s  {line}", file=sys.stderr)

    return told


def _is_stored(path: Path) -> bool:
    """Whether a file is one that the README shows."""
    return path.resolve() in {stored.resolve() for stored in BLOCKS}


def _read(path: Path) -> dict[str, Any]:
    return read_record(path, figures.FORMAT, figures.VERSION)


if __name__ == "__main__":
    main()
