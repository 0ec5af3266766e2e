"""The memory of all runs of layers, with what plans have shown that some of them need.

Solvers know the least that may wait in a partition, whatever the others are. The plan of a split
that they found tells how much may wait in each of its partitions. When it exceeds a limit by that,
they are asked again, and count these runs of layers with what was shown. So the next split is
another one, and every other run counts as before.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from gpipebal.plan import Plan
from gpipebal.problem import Memory
from gpipebal.schedule import CheckpointMode
from gpipebal.solvers import Split

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["LearnedMemory"]


class LearnedMemory:
    """What solvers know about the memory of runs, and what plans have shown.

    Args:
        known: The least memory that runs need, whatever the other partitions are.
        n_partitions: Number of partitions.
    """

    def __init__(self, known: Memory, n_partitions: int) -> None:
        self._known, self._labels = known, known.labels(n_partitions)
        #: For each label, first layer and mode: bytes by the number of layers after the first.
        self._shown: dict[tuple[int, int, CheckpointMode], dict[int, int]] = {}

    @property
    def memory(self) -> Memory:
        """The same in the form that solvers use."""
        return Memory(self._rows, self._labels)

    def learn(self, split: Split, plan: Plan) -> None:
        """Count the partitions of a split with what they need in its plan, or more.

        Args:
            split: What a solver found, with the modes that it knows.
            plan: The plan of this split.
        """
        for j, (start, end) in enumerate(pairwise(split.bounds)):
            shown = self._shown.setdefault((self._labels[j], start, split.modes[j]), {})
            more = end - start - 1
            shown[more] = max(shown.get(more, 0), plan.partitions[j].memory.total)

    def _rows(self, first: int, partition: int, mode: CheckpointMode) -> Any:
        row = self._known.rows(first, partition, mode)
        shown = self._shown.get((self._labels[partition], first, mode))
        if shown is None:
            return row
        counted: NDArray[Any] = np.array(row)
        for more, n_bytes in shown.items():
            counted[more] = max(counted[more], n_bytes)
        return counted
