"""Memory over time: what the cells of a timeline hold, kind by kind, on every device.

A forward leaves its graph behind, or its input if it is recomputed later; a recompute turns an
input into a graph; a backward frees the graph, or, done in two parts, first only the part that the
gradients of the weights do not need. What an action has made for a neighbour waits until the
neighbour takes it. Inside an action there is also a transient need::

    # 1F1B, 2 partitions, 3 micro-batches; graphs held by partition 0 (F and B take one clock)
    # partition 0  01.A2B.C
    #              12222211

Where the caller computes the loss, between the phases, the last partition has its outputs as well:
they add up until its last forward is over. Then they are gathered, the loss takes what it needs,
and while the backwards run the gathered output, its gradient and the loss stay; after them the
output and the loss stay.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from gpipebal.argument_kinds import check_kind, check_list
from gpipebal.errors import ProfileError
from gpipebal.memory.loss import AroundLoss
from gpipebal.memory.waiting import AT_ONCE, Stream
from gpipebal.schedule import SCHEDULES
from gpipebal.schedule.actions import KINDS
from gpipebal.simulator.held import HeldBytes
from gpipebal.timeline import EventTable, Timeline
from gpipebal.units import format_bytes

if TYPE_CHECKING:
    import pandas as pd
    from numpy.typing import NDArray

    Ints = NDArray[np.int64]
    Floats = NDArray[np.float64]
    Which = NDArray[np.bool_]

__all__ = ["HELD_KINDS", "MemoryTrack", "memory_over_time"]

#: What can be held: parameters and the like; their gradients; inputs of micro-batches that will be
#: recomputed; graphs; what weight gradients still need; outputs and loss that the caller holds;
#: what was made for others and is not yet taken; transient needs.
HELD_KINDS = (
    "fixed",
    "gradients",
    "inputs",
    "graphs",
    "weights",
    "outputs",
    "waiting",
    "transient",
)

_FIXED, _GRADIENTS, _INPUTS, _GRAPHS, _WEIGHTS, _OUTPUTS, _WAITING, _TRANSIENT = range(
    len(HELD_KINDS)
)


@dataclass(frozen=True, eq=False)
class MemoryTrack:
    """What one device holds over time.

    Attributes:
        device: Index of the device.
        partitions: Its partitions.
        times: Seconds at which something changes, in ascending order; the first is 0.
        held: For each of `HELD_KINDS` the bytes from each of these times on.
    """

    device: int
    partitions: tuple[int, ...]
    times: Floats
    held: Mapping[str, Ints]

    @property
    def total(self) -> Ints:
        """Bytes of all kinds together, from each time on."""
        return np.sum([self.held[kind] for kind in HELD_KINDS], axis=0, dtype=np.int64)

    @property
    def peak(self) -> int:
        """The most bytes at any time."""
        return int(self.total.max())

    @property
    def peak_time(self) -> float:
        """Seconds at which the peak is reached first."""
        return float(self.times[int(self.total.argmax())])

    @property
    def at_peak(self) -> dict[str, int]:
        """Bytes of each kind when the peak is reached first."""
        place = int(self.total.argmax())
        return {kind: int(self.held[kind][place]) for kind in HELD_KINDS}

    def at(self, time: float) -> dict[str, int]:
        """Return the bytes of each kind at a time, after all changes at that time."""
        place = max(0, int(np.searchsorted(self.times, time, side="right")) - 1)
        return {kind: int(self.held[kind][place]) for kind in HELD_KINDS}

    def to_frame(self) -> pd.DataFrame:
        """Return one row per change: device, time, bytes of each kind, and their total."""
        import pandas as pd

        columns = {"time": self.times, **self.held, "total": self.total}
        frame = pd.DataFrame(columns)
        frame.insert(0, "device", self.device)
        return frame

    def __str__(self) -> str:
        parts = [f"{format_bytes(size)} {kind}" for kind, size in self.at_peak.items() if size]
        return f"device {self.device}: peak {format_bytes(self.peak)} ({', '.join(parts)})"


def memory_over_time(timeline: Timeline, sizes: Sequence[HeldBytes]) -> tuple[MemoryTrack, ...]:
    """Follow what every device holds through a timeline, simulated or measured.

    An action takes memory at its start and gives it back at its end; of two actions in a row the
    second starts when the first has given back. What a partition has made for another one is its
    own until the other begins the action that takes it; if the partition's next action starts at
    the same instant, both count, so with layers that take no time the peak may be above the plan's.
    A schedule that `GPipe` runs is placed as if partitions ran ahead without end, but what they
    make counts as in `GPipe`, where they wait: at the latest until an action that begins only when
    it was taken.

    Args:
        timeline: When every action starts and ends.
        sizes: Bytes of each partition; `held_of` returns those of a plan.

    Returns:
        One track per device.

    Raises:
        KindError: `timeline` is not a Timeline, or `sizes` are not HeldBytes.
        ProfileError: not one size per partition, or a timeline that does not have every action.

    Complexity:
        O(n log n) for n events, in numpy.

    Example:
        >>> from gpipebal.schedule import one_f_one_b_schedule
        >>> from gpipebal.simulator import CellBytes, Durations, place
        >>> times = Durations((1.0, 1.0), (1.0, 1.0), (1.0, 1.0))
        >>> timeline = place(one_f_one_b_schedule(2, 3), times)
        >>> sizes = [HeldBytes(recorded=CellBytes(graph=size)) for size in (10, 7)]
        >>> [track.peak for track in memory_over_time(timeline, sizes)]
        [20, 7]
    """
    check_kind("timeline", timeline, Timeline)
    n = timeline.n_partitions
    sizes = check_list("sizes", sizes, HeldBytes, "sizes=held_of(profile, plan)")
    if len(sizes) != n:
        raise ProfileError(
            f"sizes and partitions differ: len(sizes)={len(sizes)} (expected {n}, one "
            "per partition).\nFix: give one HeldBytes per partition."
        )
    if not timeline.tells_micro_batches:
        raise ProfileError(
            "timeline does not tell when each micro-batch was at work: detail=False (expected "
            "every action as an event of its own).\nFix: simulate(plan, detail=True)."
        )
    table = timeline.table.pick(timeline.table.of_kind(KINDS))
    cells = _Cells(table, n, timeline.chunks)
    placement = np.array(timeline.placement)
    # `place` lets a fast partition run ahead, as other tools do; in `GPipe` it waits.
    few_wait = timeline.provenance.get("schedule") in SCHEDULES
    tracks = []
    for d, which in enumerate(_rows_of(table, placement[table.partitions], timeline.n_devices)):
        moments = _Moments(table.pick(which), cells, AT_ONCE * timeline.makespan, few_wait)
        partitions = np.flatnonzero(placement == d).tolist()
        for j in partitions:
            moments.follow(j, sizes[j])
        tracks.append(moments.track(d, tuple(partitions), sum(sizes[j].fixed for j in partitions)))
    return tuple(tracks)


class _Cells:
    """For every cell, by partition and micro-batch: its times, and whether it is recomputed."""

    def __init__(self, table: EventTable, n_partitions: int, chunks: int) -> None:
        self.recomputed = np.zeros((n_partitions, chunks), dtype=bool)
        which = table.of_kind("R")
        self.recomputed[table.partitions[which], table.micro_batches[which]] = True
        #: Seconds at which its forward, recompute and backward start, and end; infinity: it has
        #: none.
        self.starts, self.ends = (
            {kind: np.full(self.recomputed.shape, np.inf) for kind in "FRB"} for _ in range(2)
        )
        for kind, kinds in (("F", "F"), ("R", "R"), ("B", "BI")):
            which = table.of_kind(kinds)
            where = table.partitions[which], table.micro_batches[which]
            self.starts[kind][where] = table.starts[which]
            self.ends[kind][where] = table.ends[which]


class _Moments:
    """The times at which something changes on one device, and by how many bytes of each kind.

    Its actions give the order: start of the first, its end, start of the second, and so on. So an
    action without length still takes before it gives back. What others take is placed in between.
    """

    def __init__(self, own: EventTable, cells: _Cells, late: float, few_wait: bool) -> None:
        self._own, self._cells, self._late, self._few_wait = own, cells, late, few_wait
        self._recomputed = cells.recomputed[own.partitions, own.micro_batches]
        self._changes = np.zeros((len(HELD_KINDS), 2 * len(own)), dtype=np.int64)
        #: Times, places in the order, bytes.
        self._taken: list[tuple[Floats, Ints, Ints]] = []
        self._gradients_before = 0

    def follow(self, j: int, size: HeldBytes) -> None:
        """Enter the bytes that every action of a partition takes and gives back."""
        here = self._own.partitions == j
        forward, recompute, back, weights = (
            here & self._own.of_kind(kinds) for kinds in ("F", "R", "BI", "W")
        )
        input_only = here & self._own.of_kind("I")
        # Gradients of parameters come with a backward that is not only the input's.
        made = np.flatnonzero((back | weights) & ~input_only)
        exist = np.full(len(self._own), size.gradients_exist)
        if size.gradients_exist:
            self._gradients_before += size.gradients
        elif len(made):
            exist[made[0] + 1 :] = True
            self._change(made[:1], _GRADIENTS, size.gradients, end=True)
        self._change(forward & self._recomputed, _INPUTS, size.recomputed.kept)
        self._change(recompute, _INPUTS, -size.recomputed.kept)
        for cell, is_so, makes in (
            (size.recorded, ~self._recomputed, forward),
            (size.recomputed, self._recomputed, recompute),
        ):
            left = cell.graph if cell.weights is None else cell.weights
            self._change(makes & is_so, _GRAPHS, cell.graph)
            self._change(back & is_so, _GRAPHS, -cell.graph, end=True)
            self._change(input_only & is_so, _WEIGHTS, left, end=True)
            self._change(weights & is_so, _WEIGHTS, -left, end=True)
            for which, need in (
                (forward, cell.forward),
                (recompute, cell.recompute),
                ((back | weights) & ~exist, cell.first_backward),
                ((back | weights) & exist, cell.backward),
            ):
                self._change(which & is_so, _TRANSIENT, need)
                self._change(which & is_so, _TRANSIENT, -need, end=True)
            if size.around is not None:
                self._change(forward & is_so, _OUTPUTS, cell.output, end=True)
        if size.around is not None:
            backward = np.flatnonzero(back | weights)
            self._gather(np.flatnonzero(here), np.flatnonzero(forward), backward, size.around)
        actions = {"F": forward, "R": recompute, "B": back}
        for stream in size.streams:
            self._wait(stream, actions[stream.kind], actions[stream.goes_on])

    def _change(self, which: Which | Ints, kind: int, n_bytes: int, *, end: bool = False) -> None:
        """Change what is held at the start of some actions, or at their end."""
        if n_bytes:
            places = np.flatnonzero(which) if which.dtype == bool else which
            self._changes[kind, 2 * places + int(end)] += n_bytes

    def _gather(self, here: Ints, forwards: Ints, backwards: Ints, around: AroundLoss) -> None:
        """Enter the caller's loss between the last forward and what comes after it."""
        if not len(forwards):
            return
        outputs = self._changes[_OUTPUTS]
        last = int(forwards[-1])
        outputs[2 * last + 1] += around.most - outputs.sum()
        behind = here[here > last]
        if len(behind):
            outputs[2 * behind[0]] += around.stays - around.most
            if len(backwards) >= len(forwards):
                outputs[2 * int(backwards[-1]) + 1] += around.after - around.stays

    def _wait(self, stream: Stream, makes: Which, goes_on: Which) -> None:
        """Let what some actions make wait until others take it; some begin only then."""
        made = np.flatnonzero(makes)
        micro_batches = self._own.micro_batches[made]
        n_bytes = np.where(self._recomputed[made], stream.n_bytes_recomputed, stream.n_bytes)
        if stream.only_if_recomputed is not None:
            recomputed = self._cells.recomputed[stream.taker, micro_batches]
            n_bytes = np.where(recomputed == stream.only_if_recomputed, n_bytes, 0)
        times = self._cells.ends if stream.at_end else self._cells.starts
        at = times[stream.taken_by][stream.taker, micro_batches]
        # The action that begins only when it has been taken; one past the last: there is none.
        next_one = np.full(len(made), len(self._own))
        if self._few_wait and stream.most is not None:
            further = np.flatnonzero(goes_on)
            next_of = np.full(self._cells.recomputed.shape[1], len(self._own))
            next_of[self._own.micro_batches[further[: -stream.most]]] = further[stream.most :]
            next_one = next_of[micro_batches]
        at = np.minimum(at, np.append(self._own.starts, np.inf)[next_one])
        # What is taken as soon as it is made never waits.
        next_starts = np.append(self._own.starts, np.inf)[made + 1]
        later = at + self._late >= np.minimum(self._own.ends[made] + 2 * self._late, next_starts)
        made, at, n_bytes, next_one = made[later], at[later], n_bytes[later], next_one[later]
        self._changes[_WAITING, 2 * made + 1] += n_bytes
        taken = np.isfinite(at)
        made, at, n_bytes, next_one = made[taken], at[taken], n_bytes[taken], next_one[taken]
        # After all that started before it, or at the same time, and so found it waiting.
        before = np.searchsorted(self._own.starts, at + self._late, side="right") - 1
        over = at >= self._own.ends[before]
        places = np.minimum(4 * before + np.where(over, 3, 1), 4 * next_one - 1)
        places = np.maximum(places, 4 * made + 3)
        self._taken.append((at, places, n_bytes))

    def track(self, device: int, partitions: tuple[int, ...], fixed: int) -> MemoryTrack:
        """Put the moments in order, and add the changes up."""
        own, changes = self._own, self._changes
        times = np.stack((own.starts, own.ends), axis=1).ravel()
        if self._taken:
            at, places, n_bytes = (np.concatenate(each) for each in zip(*self._taken, strict=True))
            places = np.concatenate((2 * np.arange(len(times)), places))
            times = np.concatenate((times, at))
            order = np.lexsort((times, places))
            taken = np.zeros((len(HELD_KINDS), len(at)), dtype=np.int64)
            taken[_WAITING] = -n_bytes
            changes = np.concatenate((changes, taken), axis=1)[:, order]
            # Rounding, or a measurement, may let it be taken before it is made.
            times = np.maximum.accumulate(times[order])
        # Before the first change only what is fixed, and gradients of earlier steps.
        held = np.zeros((len(HELD_KINDS), len(times) + 1), dtype=np.int64)
        np.cumsum(changes, axis=1, out=held[:, 1:])
        held[_FIXED] += fixed
        held[_GRADIENTS] += self._gradients_before
        return MemoryTrack(
            device,
            partitions,
            np.concatenate(([0.0], times)),
            dict(zip(HELD_KINDS, held, strict=True)),
        )


def _rows_of(
    table: EventTable, devices: NDArray[np.integer], n_devices: int
) -> list[NDArray[np.integer]]:
    """Return the events of each device in the order in which they start."""
    order = np.lexsort((table.starts, devices))
    bounds = np.searchsorted(devices[order], np.arange(n_devices + 1))
    return [order[first:last] for first, last in pairwise(bounds)]
