"""What is on its way between partitions, and charged to its maker until it is taken.

Little is on its way at once: a partition that is ahead waits, as `gpipebal.schedule.MOST_WAITING`
says.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from gpipebal.memory.cell import Cell, Storages
from gpipebal.schedule import MOST_WAITING, Kind, Order
from gpipebal.schedule.actions import KINDS, B, F, R
from gpipebal.timeline import Timeline

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["AT_ONCE", "Stream", "Waiting", "number_type", "streams_of"]

#: What is taken less than this share of the makespan before an action may as well be taken late.
AT_ONCE = 1e-9


def number_type(largest: int) -> type:
    """Return a number type for arrays in which no sum exceeds a number of bytes."""
    return np.int64 if largest < 2**60 else object


@dataclass(frozen=True)
class Stream:
    """One tensor per micro-batch that a partition makes and another takes.

    Attributes:
        kind: Kind of the actions that make it, or after whose end it waits.
        taker: The partition that takes it.
        n_bytes: Its bytes if the maker's cell is not recomputed.
        n_bytes_recomputed: Its bytes if the maker's cell is recomputed.
        only_if_recomputed: Whether there is one only for micro-batches that the taker recomputes,
            or only for those that it does not; None: for all.
        until: Kind of the taker's actions that it waits for. None: `kind`.
        is_held: Whether it waits until the end of the action in which the taker frees it. If not,
            it waits until the start of a forward or a backward; but always until the end of a
            recompute.
        most: With how many micro-batches more the maker goes on, where `GPipe` runs it, while one
            waits; None: with as many as the order of the actions lets.
    """

    kind: Kind
    taker: int
    n_bytes: int
    n_bytes_recomputed: int
    only_if_recomputed: bool | None = None
    until: Kind | None = None
    is_held: bool = False
    most: int | None = None

    @property
    def taken_by(self) -> Kind:
        """Kind of the taker's actions that end it."""
        return self.until or self.kind

    @property
    def goes_on(self) -> Kind:
        """Kind of the actions with which the maker does not go on without end while one waits."""
        return "F" if self.taken_by == "F" else "B"

    @property
    def at_end(self) -> bool:
        """Whether it waits for the end of such an action, and not only for the start."""
        return self.is_held or self.taken_by == "R"


class _Clock(NamedTuple):
    """What a timeline says.

    Attributes:
        starts: When actions start, by kind, partition and micro-batch, in seconds.
        ends: When they end.
        at_once: What is taken within so many seconds may as well be taken late.
        shortest: Seconds of the shortest action.
    """

    starts: NDArray[np.float64]
    ends: NDArray[np.float64]
    at_once: float
    shortest: float

    def taken(self, stream: Stream) -> NDArray[np.float64]:
        """Return until when the micro-batches of a stream wait."""
        times = self.ends if stream.at_end else self.starts
        found: NDArray[np.float64] = times[KINDS.index(stream.taken_by), stream.taker]
        return found + self.at_once


class Waiting:
    """Bytes that wait at the actions of each partition.

    Args:
        cells: One per partition.
        order: The actions, one partition on each device.
        timeline: When they start; None: everything waits as long as the order of the actions and
            `GPipe` let it, with any timing.
        pause: Whether the caller's loss comes between forwards and backwards; all partitions wait
            for it.
    """

    def __init__(
        self,
        cells: Sequence[Cell],
        order: Order,
        timeline: Timeline | None,
        pause: bool = False,
    ) -> None:
        self._cells, self._order = cells, order
        shape = (order.n_partitions, 1 + int(order.micro_batches.max(initial=-1)))
        self._chunks = shape[1]
        recomputed = order.kinds == R
        self._recomputed = np.zeros(shape, dtype=bool)
        self._recomputed[order.partitions[recomputed], order.micro_batches[recomputed]] = True
        # For each kind, partition and micro-batch, the action's place in its row.
        self._places = np.zeros((len(KINDS), *shape), dtype=np.int64)
        lengths = np.diff(order.offsets)
        places = np.arange(order.n_actions) - np.repeat(order.offsets[:-1], lengths)
        self._places[order.kinds, order.partitions, order.micro_batches] = places
        self._pause = pause
        # Whether all forwards come first, so that no forward has to wait for a backward.
        n_forwards = np.bincount(order.partitions[order.kinds == F], minlength=shape[0])
        self._forwards_first = bool((self._places[F].max(axis=1) == n_forwards - 1).all())
        self._clock = None if timeline is None else self._read(timeline)
        # For actions that take no time, a timeline tells less than their order.
        self._goes_by_order = self._clock is None or self._clock.shortest <= self._clock.at_once

    def _read(self, timeline: Timeline) -> _Clock:
        table, shortest = timeline.table, np.inf
        starts, ends = np.zeros(self._places.shape), np.zeros(self._places.shape)
        for kind in (F, R, B):
            own = table.of_kind(KINDS[kind])
            where = table.partitions[own], table.micro_batches[own]
            starts[kind][where] = table.starts[own]
            ends[kind][where] = table.ends[own]
            shortest = (table.ends[own] - table.starts[own]).min(initial=shortest)
        return _Clock(starts, ends, AT_ONCE * timeline.makespan, float(shortest))

    def of_row(self, j: int) -> list[int]:
        """Return the bytes that wait in partition j while each action of its row runs."""
        first, last = self._order.offsets[j : j + 2].tolist()
        kinds = self._order.kinds[first:last]
        micro_batches = self._order.micro_batches[first:last]
        streams = streams_of(self._cells, j)
        # How many actions of other partitions must have ended before those of this row.
        ended: dict[int, NDArray[np.int64]] = {}
        if self._goes_by_order:
            ended = {taker: self._ended_before(j, taker) for taker in {s.taker for s in streams}}
        most = sum(max(stream.n_bytes, stream.n_bytes_recomputed) for stream in streams)
        waits: NDArray[Any] = np.zeros(last - first, dtype=number_type(most * self._chunks))
        for stream in streams:
            kind = KINDS.index(stream.kind)
            made = np.flatnonzero(kinds == kind)
            i = micro_batches[made]
            # It waits from the next action on, until the taker has it.
            since = made + 1
            until = np.maximum(since, self._until(j, stream, ended.get(stream.taker))[i])
            recomputed = self._recomputed[j, i]
            exists = np.ones(len(i), dtype=bool)
            if stream.only_if_recomputed is not None:
                exists = self._recomputed[stream.taker, i] == stream.only_if_recomputed
            for n_bytes, which in (
                (stream.n_bytes, exists & ~recomputed),
                (stream.n_bytes_recomputed, exists & recomputed),
            ):
                if n_bytes and which.any():
                    changes = np.bincount(since[which], minlength=len(kinds) + 1)
                    changes -= np.bincount(until[which], minlength=len(kinds) + 1)
                    waits += n_bytes * np.cumsum(changes)[:-1].astype(waits.dtype)
        found: list[int] = waits.tolist()
        return found

    def _until(self, j: int, stream: Stream, ended: NDArray[np.int64] | None) -> NDArray[np.int64]:
        """Return at which action of row j a stream that its partition makes has ended.

        Args:
            j: The row.
            stream: The stream.
            ended: What `_ended_before` says of its taker; None: its actions take time, by a clock.
        """
        taker, kind, made = stream.taker, KINDS.index(stream.taken_by), KINDS.index(stream.kind)
        first, last = self._order.offsets[j : j + 2].tolist()
        until: NDArray[np.int64] = np.full(self._chunks, last - first)
        places = self._places[kind, taker]
        kinds, micro_batches = self._order.kinds[first:last], self._order.micro_batches[first:last]
        if ended is not None:
            until = np.searchsorted(ended, places, side="right")
        if self._forwards_first and made == kind == F:
            # No backward starts before the last forward of later partitions, nor does anything
            # else that comes after a pause: not even at the same time, by the clock.
            is_behind = kinds != F if self._pause else kinds == B
            until = np.minimum(until, np.append(is_behind, True).argmax())
        if stream.most is not None:
            # When an action begins, all but the last few of those before were taken.
            own = np.flatnonzero(kinds == KINDS.index(stream.goes_on))
            early = micro_batches[own[: -stream.most]]
            until[early] = np.minimum(until[early], own[stream.most :])
        if self._clock is None:
            return until
        starts = self._clock.starts[kinds, j, micro_batches]
        by_clock = np.searchsorted(starts, self._clock.taken(stream), side="right")
        return np.minimum(until, by_clock)

    def _ended_before(self, j: int, other: int) -> NDArray[np.int64]:
        """Tell how many actions of another partition must have ended before each of row j starts.

        An action needs those before it in its row, and that of its micro-batch in a neighbour: a
        forward in the partition before, or a backward in the next one. So what is needed of earlier
        partitions comes with forwards, from one partition to the next, and of later ones with
        backwards. What comes on a detour was known before, as it never gets less along a row.
        """
        step, kind = (1, F) if other < j else (-1, B)
        ended: NDArray[np.int64] | None = None
        for row in range(other + step, j + step, step):
            own = slice(*self._order.offsets[row : row + 2].tolist())
            places = self._places[kind, row - step, self._order.micro_batches[own]]
            needed = places + 1 if ended is None else ended[places]
            needed = np.where(self._order.kinds[own] == kind, needed, 0)
            ended = np.maximum.accumulate(needed)
        assert ended is not None
        return ended


def streams_of(cells: Sequence[Cell], j: int) -> list[Stream]:
    """Return what partition j makes for others: outputs and skips, and gradients on the way back.

    Args:
        cells: One per partition.
        j: The partition.
    """
    cell = cells[j]
    ends = [each.end for each in cells]
    found = []
    held = cell.graph - cell.handed
    ways = [] if cell.is_last else [(cell.outputs, j + 1)]
    ways += [(frozenset(s.storages), bisect_right(ends, s.destination)) for s in cell.outgoing]
    for storages, taker in ways:
        recorded, recomputed = (
            cell.bytes_of(storages - held),
            cell.bytes_of(storages - (cell.kept_input - cell.handed_recomputed)),
        )
        found.append(Stream("F", taker, recorded, recomputed))
    back = [(cell.value, cell.input_gradient, j - 1)] if j else []
    for skip in cell.incoming:
        gradient = cell.profile.gradient_bytes_of(skip.storages)
        back.append((frozenset(skip.storages), gradient, bisect_right(ends, skip.source)))
    for storages, gradient, taker in back:
        if cell.wants_gradient(cells[taker].end):
            found.append(Stream("B", taker, gradient, gradient))
        # The tensor itself, as long as the graph that it came from needs it.
        handed = storages & cells[taker].handed
        for is_held, which in _let_go(cells[taker], handed & cells[taker].graph):
            kept = cell.bytes_of(which)
            found.append(Stream("B", taker, kept, kept, only_if_recomputed=False, is_held=is_held))
        found += _kept_for_recompute(cell, cells[taker], taker, handed)
    return [
        replace(stream, most=_most(stream, j))
        for stream in found
        if stream.n_bytes or stream.n_bytes_recomputed
    ]


def _most(stream: Stream, j: int) -> int:
    """Bound for how many micro-batches partition j may go on while a stream of it waits.

    From one partition to the next one, and so on to the taker, nobody is further ahead: when one
    begins a forward, or a backward, the neighbour has begun all but the last few of those before. A
    recompute has ended by then. What waits for the end of an action ends before the next one.
    """
    return MOST_WAITING * abs(stream.taker - j) + stream.is_held


def _let_go(cell: Cell, storages: Storages) -> Iterator[tuple[bool, Storages]]:
    """Divide what a cell's graph holds by when its backward frees it: at its end, or earlier.

    What only the last layer has saved is freed soon after the backward has begun; see `Cell`.
    """
    yield True, storages & cell.freed_last
    yield False, storages - cell.freed_last


def _kept_for_recompute(cell: Cell, other: Cell, taker: int, handed: Storages) -> Iterator[Stream]:
    """Yield what an earlier partition hands through and keeps for its recompute.

    Args:
        cell: The cell that is charged with it.
        other: The earlier partition.
        taker: Its number.
        handed: What it hands to `cell`.
    """
    both = handed & other.kept_input
    # What the loss returns lives as long as its cell, too.
    held = cell.graph if cell.loss is None else cell.graph | frozenset(cell.loss.outputs)
    ways: list[tuple[Kind, bool, Storages]] = [("R", False, both - other.graph)]
    ways += [("B", is_held, which) for is_held, which in _let_go(other, both & other.graph)]
    for until, is_held, storages in ways:
        # The partition's own cells hold it at first, and to the end what their graph needs.
        own, others = cell.bytes_of(storages & held), cell.bytes_of(storages - held)
        streams: tuple[tuple[Kind, int, int], ...] = (
            ("B", own, own),
            ("F", others, 0),
            ("R", 0, others),
        )
        for kind, recorded, recomputed in streams:
            yield Stream(
                kind,
                taker,
                recorded,
                recomputed,
                only_if_recomputed=True,
                until=until,
                is_held=is_held,
            )
