"""What is on its way between partitions, and charged to who made it until it is taken."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from gpipebal.memory.cell import Cell
from gpipebal.schedule import Action, Kind, Schedule
from gpipebal.timeline import Timeline

__all__ = ["Waiting"]

#: Who takes something less than this share of the makespan before an action may as well be late.
AT_ONCE = 1e-9

#: An action as a plain tuple: equal to it, and faster to make.
_Action = tuple[int, str, int]


@dataclass(frozen=True)
class _Stream:
    """One tensor per micro-batch that a partition makes and another takes.

    Attributes:
        kind: Kind of the actions that make it and take it: ``'F'`` or ``'B'``.
        taker: The partition that takes it.
        n_bytes: Its bytes if the maker's cell is not recomputed.
        n_bytes_again: Its bytes if it is.
        unless_recomputed: Whether there is none for micro-batches that the taker recomputes.
    """

    kind: Kind
    taker: int
    n_bytes: int
    n_bytes_again: int
    unless_recomputed: bool = False


class Waiting:
    """Bytes that wait at the actions of each partition.

    Args:
        cells: One per partition.
        schedule: Order of the actions.
        timeline: When they start; None: everything waits as long as the order of the actions lets
            it, whatever the clock.
    """

    def __init__(
        self, cells: Sequence[Cell], schedule: Schedule, timeline: Timeline | None
    ) -> None:
        self._cells = cells
        self._schedule = schedule
        self._recomputed = {
            (j, action.micro_batch)
            for j, row in enumerate(schedule.rows)
            for action in row
            if action.kind == "R"
        }
        self._start: dict[_Action, float] = {}
        self._late = 0.0
        self._ended: dict[_Action, tuple[int, ...]] = {}
        if timeline is None:
            self._ended = _ended_before(schedule)
        else:
            self._start = {(e.partition, e.kind, e.micro_batch): e.start for e in timeline.events}
            self._late = AT_ONCE * timeline.makespan

    def of_row(self, j: int) -> list[int]:
        """Return the bytes that wait in partition j while each action of its row runs."""
        row = self._schedule.rows[j]
        # changes[k]: what is added before action k, in bytes.
        changes = [0] * (len(row) + 1)
        for stream in self._streams(j):
            until = self._until(row, stream)
            for k, action in enumerate(row):
                if action.kind == stream.kind:
                    n_bytes = self._bytes(stream, action)
                    changes[k + 1] += n_bytes
                    changes[max(k + 1, until(action))] -= n_bytes
        return list(accumulate(changes[:-1]))

    def _until(self, row: Sequence[Action], stream: _Stream) -> Callable[[Action], int]:
        """Return what tells at which action of a row the taker has what an action made."""
        if self._start:
            starts = [self._start[action] for action in row]
            return lambda action: bisect_right(
                starts, self._start[stream.taker, stream.kind, action.micro_batch] + self._late
            )
        takers = self._schedule.rows[stream.taker]
        place = {(action.kind, action.micro_batch): k for k, action in enumerate(takers)}
        # How far the taker must have come before each action of the row; it never goes back.
        ended = [self._ended[action][stream.taker] for action in row]
        return lambda action: bisect_right(ended, place[stream.kind, action.micro_batch])

    def _bytes(self, stream: _Stream, action: Action) -> int:
        i = action.micro_batch
        if stream.unless_recomputed and (stream.taker, i) in self._recomputed:
            return 0
        again = (action.partition, i) in self._recomputed
        return stream.n_bytes_again if again else stream.n_bytes

    def _streams(self, j: int) -> list[_Stream]:
        cells = self._cells
        cell = cells[j]
        found = []
        held = cell.graph - cell.handed
        ways = [] if cell.is_last else [(cell.outputs, j + 1)]
        ways += [(frozenset(s.storages), self._partition_of(s.destination)) for s in cell.outgoing]
        for storages, taker in ways:
            recorded, again = (
                cell.bytes_of(storages - held),
                cell.bytes_of(storages - cell.received),
            )
            found.append(_Stream("F", taker, recorded, again))
        back = [(cell.value, j - 1)] if j else []
        back += [(frozenset(s.storages), self._partition_of(s.source)) for s in cell.incoming]
        for storages, taker in back:
            if cell.wants_gradient(cells[taker].end):
                gradient = cell.gradient_of(storages)
                found.append(_Stream("B", taker, gradient, gradient))
            # The tensor itself, as long as the graph that it came from needs it.
            kept = cell.bytes_of(storages & cells[taker].graph & cells[taker].handed)
            if kept:
                found.append(_Stream("B", taker, kept, kept, unless_recomputed=True))
        return [stream for stream in found if stream.n_bytes or stream.n_bytes_again]

    def _partition_of(self, layer: int) -> int:
        return next(j for j, cell in enumerate(self._cells) if layer < cell.end)


def _ended_before(schedule: Schedule) -> dict[_Action, tuple[int, ...]]:
    """Tell how many actions of every partition must have ended before each action starts."""
    rows = schedule.rows
    found: dict[_Action, tuple[int, ...]] = {}
    position = [0] * len(rows)
    moved = True
    while moved:
        moved = False
        for j, row in enumerate(rows):
            while position[j] < len(row):
                k = position[j]
                action = row[k]
                needs = [(j, k - 1)] if k else []
                beside = j - 1 if action.kind == "F" else j + 1 if action.kind == "B" else j
                if beside != j and 0 <= beside < len(rows):
                    needed = (beside, action.kind, action.micro_batch)
                    if needed not in found:
                        break
                    needs.append((beside, rows[beside].index(Action(*needed))))
                clock = [0] * len(rows)
                for partition, place in needs:
                    before = found[rows[partition][place]]
                    clock = [max(pair) for pair in zip(clock, before, strict=True)]
                    clock[partition] = max(clock[partition], place + 1)
                found[action] = tuple(clock)
                position[j] += 1
                moved = True
    return found
