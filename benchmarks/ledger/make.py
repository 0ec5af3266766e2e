"""Compare the bytes that the ledger counts with those that torch's allocator reports.

    python benchmarks/ledger/make.py            count, write results.json and the README
    python benchmarks/ledger/make.py --readme   write the README's tables from results.json

Every differentiable operator of torch runs forward and backward on the samples of torch's own
tests, once under the ledger and once unwatched under `torch.profiler`.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from gpipebal.files import read_record, write_record
from gpipebal.pipeline.observers.ledger import Ledger

# What all benchmarks have in common is next to their folders.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmark_tools.allocator import mark, peaks_between_marks
from benchmark_tools.machine import Progress, provenance
from benchmark_tools.script import parser_of, publish
from ledger_tables import FORMAT, VERSION, blocks, difference

HERE = Path(__file__).parent
RESULTS = HERE / "results.json"

#: Samples of one operator that are looked at.
MOST_SAMPLES = 12

#: Inputs, keyword arguments among them, and what runs on them.
Inputs = tuple[Any, Any, Any]
Operation = Callable[[Inputs], Any]


def main() -> None:
    """Count, store, print, and write the README."""
    arguments = parser_of(__doc__, RESULTS).parse_args()
    if not arguments.readme:
        write_record(arguments.out, measure())
    publish(arguments.out, RESULTS, blocks(read_record(arguments.out, FORMAT, VERSION)))


def measure(names: Collection[str] = ()) -> dict[str, Any]:
    """Count all operators, or those named, and return the record to store."""
    # Only torch's tests have samples of all operators. They need the package expecttest. Importing
    # them forbids the process to set torch's flags from then on, but for this block.
    with torch.backends.__allow_nonbracketed_mutation():
        from torch.testing._internal.common_methods_invocations import op_db

    progress = Progress()
    operators: list[dict[str, Any]] = []
    n_failed = 0
    for operator in op_db:
        if names and operator.name not in names:
            continue
        if not operator.supports_autograd or torch.float32 not in operator.supported_dtypes("cpu"):
            continue
        peaks = []
        for sample in samples_of(operator):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                try:
                    peaks.append(compare(operator, sample))
                except Exception:  # a sample that is meant to fail, or that cannot run twice
                    n_failed += 1
        known = [one for one in peaks if one]
        if known:
            operators.append(
                {
                    "name": operator.formatted_name,
                    "samples": len(known),
                    "forward": [one[0] for one in known if difference(one[0])],
                    "backward": [one[1] for one in known if difference(one[1])],
                }
            )
    return {
        "format": FORMAT,
        "version": VERSION,
        "provenance": {**provenance(), "minutes": progress.minutes},
        "failed": n_failed,
        "operators": operators,
    }


def samples_of(operator: Any) -> Iterator[Any]:
    """Yield samples of an operator; there may be fewer than torch has, or none."""
    torch.manual_seed(0)
    found = iter(operator.sample_inputs("cpu", torch.float32, requires_grad=True))
    for _ in range(MOST_SAMPLES):
        try:
            yield next(found)
        except Exception:  # also the end of the samples
            return


def compare(operator: Any, sample: Any) -> list[list[int]] | None:
    """Return the peaks of a sample's forward and backward, each counted and allocated, in bytes.

    None: it has no backward.
    """

    def make() -> Inputs:
        def again(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            return value.detach().clone().requires_grad_(value.requires_grad)

        inputs: Inputs = pytree.tree_map(again, (sample.input, sample.args, sample.kwargs))
        return inputs

    def run(inputs: Inputs) -> Any:
        value, args, keywords = inputs
        return operator(value, *args, **keywords)

    allocated(make, run)  # what libraries take once
    counts, reports = counted(make, run), allocated(make, run)
    if counts is None or reports is None:
        return None
    return [[counts[0], reports[0]], [counts[1], reports[1]]]


def counted(make: Callable[[], Inputs], run: Operation) -> tuple[int, int] | None:
    """Return the peaks of a forward and a backward by the ledger."""
    inputs, ledger = make(), Ledger()
    ledger.hold(pytree.tree_leaves(inputs), 0)
    with ledger.watch(0):
        before = ledger.start_peak()
        outputs = trained(run(inputs))
        forward = ledger.total_peak - before
        if not outputs:
            return None
        gradients = [torch.ones_like(output) for output in outputs]
        before = ledger.start_peak()
        torch.autograd.backward(outputs, gradients)
        return forward, ledger.total_peak - before


def allocated(make: Callable[[], Inputs], run: Operation) -> tuple[int, int] | None:
    """Return the same by what torch's allocator reports.

    It reports no end of what began before, so all is made while it reports.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as report:
        inputs = make()
        mark()
        outputs = trained(run(inputs))
        mark()
        if outputs:
            gradients = [torch.ones_like(output) for output in outputs]
            mark()
            torch.autograd.backward(outputs, gradients)
            mark()
    peaks = peaks_between_marks(report)
    return (peaks[1], peaks[3]) if outputs else None


def trained(value: Any) -> list[Tensor]:
    """Return the tensors of an output that a backward can start from."""
    leaves = [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]
    return [leaf for leaf in leaves if leaf.requires_grad and leaf.is_floating_point()]


if __name__ == "__main__":
    main()
