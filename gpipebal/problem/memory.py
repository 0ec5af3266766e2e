"""How much memory a partition needs, in the form that solvers use.

The true need of a run of layers is a union of storages walked through a backward: it is not a sum
over layers, and it may even shrink when the run gets longer (a partition is charged for the
gradient of its output, and the next layer's output may be smaller). With checkpoints it has a
term in its first layer, ``(chunks - 1) * input``, so that a shorter run may need more. Solvers
therefore assume nothing about it: they ask for all runs from a given first layer, and take the
ones that fit, whether or not these form an interval.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

import numpy as np

from gpipebal.argument_kinds import check_list
from gpipebal.errors import BalanceError
from gpipebal.problem.checks import check_bytes
from gpipebal.schedule import CheckpointMode, check_count

__all__ = ["Memory", "layer_memory"]

#: Peaks of the runs that begin at a layer, in a partition, under a mode: each run is one layer
#: longer than the one before it. The list may stop early: runs that it leaves out fit no device.
Rows = Callable[[int, int, CheckpointMode], Sequence[int]]


@dataclass(frozen=True)
class Memory:
    """Predicted peak memory of every run of layers.

    Attributes:
        rows: Called as ``rows(first, partition, mode)``; returns the peak bytes of the runs of 1,
            2, 3, ... layers that begin with layer `first`. Solvers call it once for each first
            layer, mode, and kind of partition, so n_layers times 2 or 6 in all. It is fastest if
            it adds one layer after the other.
        alike: Which partitions have the same rows: ``'all'``; ``'between'``, all but the first,
            which receives from the caller, and the last, which returns to it; or a label for each
            partition.

    Example:
        >>> memory = Memory(lambda first, partition, mode: range(10, 10 * (4 - first), 10))
        >>> list(memory.rows(1, 0, "never"))
        [10, 20]
    """

    rows: Rows
    alike: tuple[int, ...] | Literal["all", "between"] = "between"

    def fits(
        self, start: int, end: int, partition: int, mode: CheckpointMode, limit: float | None
    ) -> bool:
        """Tell whether the layers from `start` to ``end - 1`` need no more than a limit.

        Args:
            start: First layer.
            end: One past the last layer.
            partition: The partition that these layers form.
            mode: Its checkpoint mode.
            limit: Bytes; None: no limit.

        Example:
            >>> Memory(lambda first, partition, mode: [10, 20]).fits(0, 2, 0, "never", 15)
            False
        """
        if limit is None:
            return True
        peaks = self.rows(start, partition, mode)
        return end - start <= len(peaks) and int(peaks[end - start - 1]) <= limit

    def labels(self, n_partitions: int) -> tuple[int, ...]:
        """Return a label for each partition.

        Raises:
            BalanceError: `alike` has too many labels or too few.

        Example:
            >>> Memory(lambda first, partition, mode: [0]).labels(4)
            (0, 1, 1, 3)
        """
        if self.alike == "all":
            return (0,) * n_partitions
        if self.alike == "between":
            last = n_partitions - 1
            return tuple(j if j in (0, last) else 1 for j in range(n_partitions))
        if len(self.alike) != n_partitions:
            raise BalanceError(
                f"memory has labels for another number of partitions: len(alike)="
                f"{len(self.alike)} (expected n_partitions={n_partitions}).\n"
                "Fix: alike='between', or one label per partition."
            )
        return tuple(self.alike)


def layer_memory(
    fixed: Sequence[int],
    saved: Sequence[int],
    inputs: Sequence[int],
    *,
    chunks: int,
    transient: Sequence[int] | None = None,
) -> Memory:
    """Predict peak memory from sums over layers.

    A run needs the sum of `fixed`, the largest `transient`, and for its activations::

        never                 chunks * sum of saved
        except_last, always   (chunks - 1) * inputs[first] + sum of saved

    Args:
        fixed: Bytes of each layer's parameters, gradients, optimizer state and buffers.
        saved: Bytes that each layer keeps for its backward, for one micro-batch.
        inputs: Bytes of what each layer receives, for one micro-batch: the partition's input, if
            it is its first layer.
        chunks: Number of micro-batches.
        transient: Bytes that each layer needs temporarily; None: none.

    Raises:
        BalanceError: a value that is not a number of bytes, or lists of different lengths.

    Source:
        Huang et al., "GPipe", NeurIPS 2019, section 2.1, has the orders of magnitude. Differs:
        exact for layers that share no storages; `gpipebal.memory` counts shared storages once.

    Example:
        >>> memory = layer_memory([5, 5], [100, 10], [8, 50], chunks=4)
        >>> memory.rows(0, 0, "never"), memory.rows(0, 0, "except_last")
        (array([405, 450]), array([129, 144]))
    """
    given = {"fixed": fixed, "saved": saved, "inputs": inputs}
    columns = {name: check_list(name, column) for name, column in given.items()}
    n_layers, chunks = len(columns["fixed"]), check_count("chunks", chunks)
    columns["transient"] = check_list(
        "transient", [0] * n_layers if transient is None else transient
    )
    for name, column in columns.items():
        if len(column) != n_layers:
            raise BalanceError(
                f"{name} and fixed differ in length: len({name})={len(column)} (expected "
                f"{n_layers}, one per layer).\nFix: give 0 for a layer that has none."
            )
    table = [
        [check_bytes(f"{name}[{k}]", n) for k, n in enumerate(column)]
        for name, column in columns.items()
    ]
    sums = [np.array(list(accumulate(column, initial=0)), dtype=object) for column in table[:2]]
    largest = max(sums[0][-1] + chunks * (sums[1][-1] + max(table[2], default=0)), 1)
    kind = np.int64 if largest + max(table[3], default=0) < 2**62 else object
    fixed_sums, saved_sums = (column.astype(kind) for column in sums)
    moments = np.array(table[3], dtype=kind)

    def rows(first: int, partition: int, mode: CheckpointMode) -> Sequence[int]:
        graphs = saved_sums[first + 1 :] - saved_sums[first]
        held = chunks * graphs if mode == "never" else graphs + (chunks - 1) * table[2][first]
        need = fixed_sums[first + 1 :] - fixed_sums[first] + held
        return need + np.maximum.accumulate(moments[first:])

    return Memory(rows, alike="all")
