"""Search: which layer is the first to give another result in the pipeline.

A wrong gradient shows in parameters, but a layer before or after theirs may have made it. So once a
difference is found both models run again, and every layer's results are compared: in the forward,
and in the recompute with those of the forward.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor, nn

from gpipebal.pipeline.gpipe import GPipe
from gpipebal.pipeline.layers.recomputed import Recomputed
from gpipebal.pipeline.process.phase import is_recomputing
from gpipebal.pipeline.values.microbatch import flatten
from gpipebal.schedule import make_schedule
from gpipebal.verification.executions import plain_copy, run_pipe, run_plain
from gpipebal.verification.task import Task
from gpipebal.verification.tolerance import Tolerance, alike, distance, largest

__all__ = ["find_layer"]


def find_layer(
    module: nn.Module,
    pipe: GPipe,
    task: Task,
    schedule: str | None,
    tolerance: Tolerance,
    *,
    trains: bool,
) -> str:
    """Run both models once more, and say which layer is the first to give another result.

    Needs the memory of all layers' results in addition to that of the layers.

    Args:
        module: The plain model.
        pipe: The pipeline.
        task: What they run on.
        schedule: Schedule of the run that differed, as for `run_pipe`.
        tolerance: How large a difference may be.
        trains: As for `run_pipe`.

    Returns:
        A sentence; empty if the search failed.
    """
    names = list(pipe._modules)
    results: list[list[Any]] = [[] for _ in names]

    def keep(layer: int, value: Any) -> None:
        results[layer].append(_kept(value))

    comparer = _Comparer(results, tolerance)
    try:
        run_plain(plain_copy(module, pipe), pipe, task, keep)
        chunks = len(results[0]) if results else 1
        comparer.recomputed = _recomputed(pipe, chunks, schedule or "gpipe")
        run_pipe(pipe, task, schedule, trains=trains, watch=comparer.compare)
        same = "All layers give the same results as in the plain model"
        has_runs = any(isinstance(layer, Recomputed) for layer in pipe._modules.values())
        same += ", but for recomputes of runs, which were not looked at." if has_runs else "."
    except Exception:
        # What was found before remains valid, whatever has happened here.
        same = ""
    if not comparer.differing:
        return same if comparer.has_seen_all else ""
    recomputing, layer, micro_batch = min(comparer.differing)
    return (
        f"The first layer with another result is {names[layer]!r}, in the "
        f"{'recompute' if recomputing else 'forward'} of micro-batch {micro_batch}."
    )


class _Comparer:
    """Compares the results of layers as they arrive, those of each layer in one thread.

    Attributes:
        recomputed: For each layer, the micro-batches in the order of their recomputes.
        differing: Each difference: whether it was in the recompute, the layer, the micro-batch.
    """

    def __init__(self, results: list[list[Any]], tolerance: Tolerance) -> None:
        self.recomputed: list[list[int]] = []
        self.differing: list[tuple[bool, int, int]] = []
        self._results = results
        self._tolerance = tolerance
        self._counts = [[0, 0] for _ in results]
        self._adding = threading.Lock()

    @property
    def has_seen_all(self) -> bool:
        """Whether every layer has given a result."""
        return all(forwards for forwards, _ in self._counts)

    def compare(self, layer: int, value: Any) -> None:
        """Compare one result of a layer."""
        recomputing = is_recomputing()
        count = self._counts[layer][recomputing]
        self._counts[layer][recomputing] += 1
        micro_batch = self.recomputed[layer][count] if recomputing else count
        if not _same(self._results[layer][micro_batch], _kept(value), self._tolerance):
            with self._adding:
                self.differing.append((recomputing, layer, micro_batch))


def _recomputed(pipe: GPipe, chunks: int, schedule: str) -> list[list[int]]:
    checkpoint = pipe.checkpoint if pipe.training else "never"
    rows = make_schedule(schedule, len(pipe.balance), chunks, checkpoint).rows
    orders = [[action.micro_batch for action in row if action.kind == "R"] for row in rows]
    return [order for order, size in zip(orders, pipe.balance, strict=True) for _ in range(size)]


def _kept(value: Any) -> tuple[list[Any], Any]:
    """Copy a layer's result: the next layer may write to it."""
    leaves, structure = flatten(value)
    with torch.no_grad():
        return [x.detach().clone() if isinstance(x, Tensor) else x for x in leaves], structure


def _same(plain: Any, found: Any, tolerance: Tolerance) -> bool:
    if plain[1] != found[1]:
        return False
    around = max((largest(leaf) for leaf in plain[0] if isinstance(leaf, Tensor)), default=0.0)
    return all(
        _same_leaf(mine, theirs, tolerance, around)
        for mine, theirs in zip(plain[0], found[0], strict=True)
    )


def _same_leaf(plain: Any, found: Any, tolerance: Tolerance, around: float) -> bool:
    if not (isinstance(plain, Tensor) and isinstance(found, Tensor)):
        return alike(plain, found)
    if plain.shape != found.shape or plain.dtype != found.dtype:
        return False
    return distance(plain, found).absolute <= tolerance.allowed(plain, around)
