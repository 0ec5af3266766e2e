"""Predict steps and peak memory of many plans, and measure what they then are.

    python benchmarks/prediction/make.py            measure, write results.json and the README
    python benchmarks/prediction/make.py --quick --out /tmp/quick.json    try it, with tiny layers
    python benchmarks/prediction/make.py --readme   write the README's tables from the stored files
    python benchmarks/prediction/make.py --model mlp --out F    only this model
    python benchmarks/prediction/make.py --merge F    of each model the run with the lower floor
    python benchmarks/prediction/make.py --repeats          only how well profiles agree, anew
    python benchmarks/prediction/make.py --memory           only what partitions hold, anew
    python benchmarks/prediction/make.py --allocator     with CUDA: what its allocator says

Without CUDA the partitions are on the CPU, with one thread each. On a machine with several CUDA
devices each partition has one; of a single device each has a share of the multiprocessors, which
needs the package cuda-bindings, and the models have more rows. The result file is results.json of a
CPU, results-cuda.json of a CUDA device. The README shows both.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from gpipebal.files import read_record, write_record

# What all benchmarks have in common is next to their folders.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmark_tools.machine import OtherLoad, Progress, provenance
from benchmark_tools.script import is_same_file, parser_of, publish
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
#: The order of the models.
NAMES = [model.name for model in MODELS]

#: Turns of each plan, and timed steps in each.
ROUNDS = 4
STEPS = 2
#: Profiles of each model one after the other, to see how well they agree.
REPEATS = 5


def main() -> None:
    """Measure, store, print, and write the README."""
    arguments = parse()
    if not arguments.readme:
        write_record(arguments.out, make(arguments))
    for path, blocks in BLOCKS.items():
        if arguments.readme or is_same_file(arguments.out, path):
            publish(path, path, blocks(_read(path)))
    if not _is_stored(arguments.out):
        # A trial, or a part of the models, is no result to publish.
        print(tables.blocks(_read(arguments.out))["result"])


def make(arguments: argparse.Namespace) -> dict[str, Any]:
    """Do what is asked for, and return the record to store."""
    adds = arguments.merge or arguments.repeats or arguments.memory or arguments.allocator
    is_there = arguments.out.exists() and not arguments.quick
    old = _read(arguments.out) if adds or is_there else {}
    if arguments.merge:
        for path in arguments.merge:
            old = merging.merge(old, _read(path), NAMES)
        return old
    torch.set_num_threads(1)
    if arguments.repeats:
        return {**old, "repeats": repeats(arguments)}
    if arguments.memory:
        return memory(arguments, old)
    if arguments.allocator:
        return {**old, "allocator": allocator(arguments)}
    # They are measured by themselves.
    kept = {key: old[key] for key in ("repeats", "allocator") if key in old}
    return measure(arguments) | kept


def parse(words: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    on_cuda = torch.cuda.is_available()
    parser = parser_of(__doc__, RESULTS_ON_CUDA if on_cuda else RESULTS)
    parser.add_argument("--model", action="append", choices=NAMES, help="only this; repeatable")
    parser.add_argument("--rounds", type=int, help=f"turns of each plan ({ROUNDS}; quick: 2)")
    parser.add_argument(
        "--quick", action="store_true", help="few plans of few tiny layers; the times mean nothing"
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
    arguments = parser.parse_args(words)
    partial = arguments.quick or arguments.model
    if partial and not (arguments.readme or arguments.merge) and _is_stored(arguments.out):
        parser.error("--quick and --model make no complete result: give another file as --out")
    if arguments.rounds is not None and arguments.rounds < 1:
        parser.error("--rounds must be 1 or more")
    if arguments.allocator and not on_cuda:
        parser.error("--allocator needs a CUDA device, and there is none")
    return arguments


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure all models, and return the record to store."""
    # What is there by now stays: a collection in the middle of a step looks at little.
    gc.collect()
    gc.freeze()
    progress = Progress()
    quick = arguments.quick
    rounds = arguments.rounds or (2 if quick else ROUNDS)
    timeout = 0.0 if quick else None
    settings = QUICK_SETTINGS if quick else SETTINGS
    chunks = sorted({MIDDLE, *(setting.chunks for setting in settings)})
    subjects = []
    for subject in _subjects(_chosen(arguments), quick):
        subject.start = take_profiles(subject, chunks, timeout, other_rows=True)
        progress.told(f"{subject.model.name}: profiles")
        subjects.append(subject)
    rows: list[dict[str, Any]] = []
    for subject in subjects:
        rows += measure_model(
            subject,
            rounds=rounds,
            steps=1 if quick else STEPS,
            timeout=timeout,
            settings=settings,
            told=progress.told,
        )
        gc.collect()
    for subject in subjects:
        subject.end = take_profiles(subject, (MIDDLE,), timeout)
    return {
        "format": figures.FORMAT,
        "version": figures.VERSION,
        "provenance": {
            **provenance(),
            **about_devices(),
            "rounds": rounds,
            "runs": 1,
            "quick": quick,
            **progress.end(),
        },
        "models": {subject.model.name: about(subject) for subject in subjects},
        "rows": rows,
    }


def repeats(arguments: argparse.Namespace) -> dict[str, Any]:
    """Profile every model several times in turns, beside work that is always the same."""
    quick = arguments.quick
    load = OtherLoad()
    found = measure_repeats(
        list(_subjects(_chosen(arguments), quick)),
        2 if quick else REPEATS,
        0.0 if quick else None,
        work_seconds=0.01 if quick else WORK_SECONDS,
        told=Progress().told,
    )
    return {"provenance": {**provenance(), "other_load": load.share()}, "models": found}


def memory(arguments: argparse.Namespace, record: dict[str, Any]) -> dict[str, Any]:
    """Predict and count the memory of all stored plans, and return the record with that."""
    progress = Progress()
    rows: list[dict[str, Any]] = []
    for subject in _subjects(MODELS, arguments.quick):
        stored = [row for row in record["rows"] if row["model"] == subject.model.name]
        if stored:
            rows += measure_memory_of(subject, stored, 0.0 if arguments.quick else None)
            progress.told(f"{subject.model.name}: memory")
    return {**record, "rows": rows, "memory": {"provenance": provenance()}}


def allocator(arguments: argparse.Namespace) -> dict[str, Any]:
    """Ask the allocator of the first CUDA device for the peak of every model as one partition."""
    progress = Progress()
    rows = []
    for model in _chosen(arguments):
        rows += measure_allocator(tiny(model) if arguments.quick else larger(model))
        progress.told(f"{model.name}: peaks of the allocator")
    about = {"device_name": torch.cuda.get_device_name(0), "cuda": torch.version.cuda}
    return {"provenance": {**provenance(), **about, "runs": 1}, "rows": rows}


def _chosen(arguments: argparse.Namespace) -> list[Model]:
    return [model for model in MODELS if not arguments.model or model.name in arguments.model]


def _subjects(models: Iterable[Model], quick: bool) -> Iterator[Subject]:
    """Make models of the size that the device is for, on that device."""
    first = devices()[0]
    for model in models:
        if quick:
            model = tiny(model)
        elif first.type == "cuda":
            model = larger(model)
        with on_first_device():
            subject = Subject(model, model.make().to(first))
        yield subject


def _is_stored(path: Path) -> bool:
    """Whether a file is one that the README shows."""
    return any(is_same_file(path, stored) for stored in BLOCKS)


def _read(path: Path) -> dict[str, Any]:
    return read_record(path, figures.FORMAT, figures.VERSION)


if __name__ == "__main__":
    main()
