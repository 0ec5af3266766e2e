"""The peak memory of one partition at a time, each walked through once.

A change of a plan leaves most partitions as they were, and what others do matters to a partition
only by what it makes for them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from functools import cache
from itertools import pairwise, product
from math import prod
from typing import NamedTuple

from gpipebal.memory.cell import Cell
from gpipebal.memory.loss import loss_of_micro_batch
from gpipebal.memory.partitions import memory_of_cell
from gpipebal.memory.waiting import Stream, streams_of
from gpipebal.planner.posing import Posed
from gpipebal.planner.times import order_for
from gpipebal.schedule import CheckpointMode, Order

__all__ = ["Modes", "RowPeaks"]

#: What is made for others is known after this part of the time of a walk; and a layer of a run that
#: has not been walked through before takes as long as this.
_STREAMS, _LAYER = 1 / 6, 1 / 40
#: Up to so many modes of a partition and of those that it depends on are tried together.
_MOST_TOGETHER = 27

#: The checkpoint modes that a partition may have.
Modes = tuple[CheckpointMode, ...]


class _Near(NamedTuple):
    """What is known of a partition among others, whatever their modes are.

    Attributes:
        streams: What it makes for them.
        makers: The earlier partitions whose modes decide what of it there is.
        peaks: Its peak in bytes, by its mode and theirs.
        fitting: Which modes are left of theirs, and of its own, by how many bytes it may need and
            which are open.
    """

    streams: tuple[Stream, ...]
    makers: Sequence[int]
    peaks: dict[tuple[CheckpointMode, ...], int]
    fitting: dict[tuple[int, tuple[Modes, ...]], tuple[Modes, ...]]


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
        #: By a partition and its neighbours; and peaks by what it makes for them, and modes.
        self._known: dict[object, _Near] = {}
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
        return self._peak(self._near(j, bounds), j, bounds, modes)

    def leave_fitting(
        self, j: int, bounds: Sequence[int], open_modes: list[Modes], most: int
    ) -> bool:
        """Leave out the modes in which a partition needs too much, whatever the others' are.

        Args:
            j: The partition.
            bounds: As for `peak`.
            open_modes: The modes that the first partitions may have. Those of this partition, and
                of earlier ones on which its memory depends, lose the modes that do not fit, unless
                these are together too many to try.
            most: Bytes that are not too much.

        Returns:
            Whether any are left.
        """
        near = self._near(j, bounds)
        asked = (*near.makers, j)
        sets = tuple([open_modes[k] for k in asked])
        if (most, sets) not in near.fitting:
            near.fitting[most, sets] = self._fitting(near, j, bounds, open_modes, most)
        left = near.fitting[most, sets]
        for k, some in zip(asked, left, strict=False):
            open_modes[k] = some
        return bool(left)

    def _fitting(
        self,
        near: _Near,
        j: int,
        bounds: Sequence[int],
        open_modes: Sequence[Modes],
        most: int,
    ) -> tuple[Modes, ...]:
        """Return which modes are left of its makers, and of the partition; none if none fit."""
        asked = (*near.makers, j)
        sets = tuple([open_modes[k] for k in asked])
        if prod(map(len, sets)) > _MOST_TOGETHER:
            return sets
        modes, fits = [some[0] for some in open_modes], set()
        for chosen in product(*sets):
            for k, mode in zip(asked, chosen, strict=True):
                modes[k] = mode
            if self._peak(near, j, bounds, modes) <= most:
                fits.add(chosen)
        left = [set(of_one) for of_one in zip(*fits, strict=True)]
        return tuple(
            [
                tuple([mode for mode in some if mode in fit])
                for some, fit in zip(sets, left, strict=False)
            ]
        )

    def _near(self, j: int, bounds: Sequence[int]) -> _Near:
        """Return what is known of a partition among such others."""
        cell, ends = self._cell(bounds[j], bounds[j + 1]), bounds[1:]
        takers = tuple([bisect_right(ends, skip.destination) for skip in cell.outgoing])
        others = {bisect_right(ends, skip.source) for skip in cell.incoming}
        is_shared = self._question.shared_memory
        if is_shared and j:
            # There it matters what the one before hands over.
            others.add(j - 1)
        about = tuple([(k, ends[k], bounds[k] if is_shared else 0) for k in sorted(others)])
        key = (j, cell.first, cell.end, takers, about)
        if key not in self._known:
            self.n_walks += _STREAMS
            streams = streams_of([self._cell(*run) for run in pairwise(bounds)], j)
            makers = sorted({s.taker for s in streams if s.only_if_recomputed is not None})
            self._known[key] = _Near(tuple(streams), makers, {}, {})
        return self._known[key]

    def _peak(
        self, near: _Near, j: int, bounds: Sequence[int], modes: Sequence[CheckpointMode]
    ) -> int:
        """Return the peak of a partition, of which it is known what it makes for others."""
        asked = (modes[j], *[modes[k] for k in near.makers])
        peak = near.peaks.get(asked)
        if peak is None:
            own = bounds[j], bounds[j + 1]
            # Others like it may make the same.
            key = (j, own, near.streams, asked)
            if key not in self._peaks:
                self.n_walks += 1 + (own not in self._walked) * _LAYER * (own[1] - own[0])
                self._walked.add(own)
                cells = [self._cell(*run) for run in pairwise(bounds)]
                order = self._order((*modes, *("never",) * (len(cells) - len(modes))))
                exist = self._question.gradients_exist
                self._peaks[key] = memory_of_cell(cells, order, j, gradients_exist=exist).total
            peak = near.peaks[asked] = self._peaks[key]
        return peak

    def _order_of(self, modes: tuple[CheckpointMode, ...]) -> Order:
        return order_for(self._question.schedule, len(modes), self.posed.chunks, modes)

    def _cell(self, start: int, end: int) -> Cell:
        """Describe the cells of a run of layers, once."""
        if (start, end) not in self._cells:
            profile = self.posed.profile
            loss = self._loss if end == profile.n_layers else None
            self._cells[start, end] = Cell(profile, start, end, loss, self._question.shared_memory)
        return self._cells[start, end]
