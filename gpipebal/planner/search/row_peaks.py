"""The peak memory of one partition at a time, each walked through once.

A change of a plan leaves most partitions as they were, and what others do matters to a partition
only by what it makes for them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from functools import cache
from itertools import pairwise

from gpipebal.memory.cell import Cell
from gpipebal.memory.loss import loss_of_micro_batch
from gpipebal.memory.partitions import memory_of_cell
from gpipebal.memory.waiting import streams_of
from gpipebal.planner.posing import Posed
from gpipebal.planner.times import order_for
from gpipebal.schedule import CheckpointMode, Order

__all__ = ["RowPeaks"]

#: What is made for others is known after this part of the time of a walk; and a layer of a run that
#: has not been walked through before takes as long as this.
_STREAMS, _LAYER = 1 / 6, 1 / 40


class RowPeaks:
    """Peaks of partitions, by what they depend on.

    Attributes:
        posed: The question.
        n_walks: How long all of it took, in walks through a partition's row of the schedule.

    Args:
        posed: The question.
    """

    def __init__(self, posed: Posed) -> None:
        self.posed, self.n_walks = posed, 0.0
        self._question = posed.question
        self._loss = loss_of_micro_batch(posed.profile) if posed.question.loss_inside else None
        self._cells: dict[tuple[int, int], Cell] = {}
        self._walked: set[tuple[int, int]] = set()
        #: By a partition and its neighbours; and by what it makes for them.
        self._near: dict[object, int] = {}
        self._peaks: dict[object, int] = {}
        self._order = cache(self._order_of)

    def peak(self, j: int, bounds: Sequence[int], modes: Sequence[CheckpointMode]) -> int:
        """Return the peak of a partition in bytes.

        Args:
            j: The partition.
            bounds: All bounds. Of later partitions it matters only in which of them a layer is.
            modes: The modes of the first partitions; up to this one at the least.

        Complexity:
            That of a walk through a row of the schedule, if nothing like it is known.
        """
        cell, ends = self._cell(bounds[j], bounds[j + 1]), bounds[1:]
        takers = tuple(bisect_right(ends, skip.destination) for skip in cell.outgoing)
        others = {bisect_right(ends, skip.source) for skip in cell.incoming}
        is_shared = self._question.shared_memory
        if is_shared:
            # There it matters how an earlier partition keeps what it hands over.
            others.update(range(max(0, j - 1), j))
        makers = sorted(others)
        about = tuple((k, ends[k]) for k in makers)
        kept = tuple((bounds[k], modes[k]) for k in makers) if is_shared else ()
        near = (j, cell.first, cell.end, modes[j], takers, about, kept)
        if near not in self._near:
            self._near[near] = self._peak(j, bounds, modes)
        return self._near[near]

    def _peak(self, j: int, bounds: Sequence[int], modes: Sequence[CheckpointMode]) -> int:
        cells = [self._cell(*run) for run in pairwise(bounds)]
        streams, own = streams_of(cells, j), (cells[j].first, cells[j].end)
        self.n_walks += _STREAMS
        makers = tuple(modes[s.taker] for s in streams if s.only_if_recomputed is not None)
        key = (j, own, modes[j], tuple(streams), makers)
        if key not in self._peaks:
            self.n_walks += 1 + (own not in self._walked) * _LAYER * (own[1] - own[0])
            self._walked.add(own)
            n = len(cells)
            order = self._order((*modes, *("never",) * (n - len(modes))))
            exist = self._question.gradients_exist
            peak = memory_of_cell(cells, order, j, gradients_exist=exist)
            self._peaks[key] = peak.total
        return self._peaks[key]

    def _order_of(self, modes: tuple[CheckpointMode, ...]) -> Order:
        return order_for(self._question.schedule, len(modes), self.posed.chunks, modes)

    def _cell(self, start: int, end: int) -> Cell:
        """Describe the cells of a run of layers, once."""
        if (start, end) not in self._cells:
            profile = self.posed.profile
            loss = self._loss if end == profile.n_layers else None
            self._cells[start, end] = Cell(profile, start, end, loss, self._question.shared_memory)
        return self._cells[start, end]
