"""Memory over time: what the cells of a timeline hold, kind by kind, on every device.

A forward leaves its graph behind, or its input if it is recomputed later; a recompute turns an
input into a graph; a backward lets go of it, or, done in two parts, of that only which the
gradients of the weights do not need. What has been handed in and is not used yet waits. Inside an
action there is a passing need besides::

    # 1F1B, 2 partitions, 3 micro-batches; graphs held by partition 0 (F and B take one clock)
    # partition 0  01.A2B.C
    #              12222211
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from gpipebal.errors import ProfileError
from gpipebal.timeline import EventTable, Timeline
from gpipebal.units import format_bytes

if TYPE_CHECKING:
    import pandas as pd
    from numpy.typing import NDArray

    Ints = NDArray[np.int64]
    Floats = NDArray[np.float64]

__all__ = ["HELD_KINDS", "HeldBytes", "MemoryTrack", "memory_over_time"]

#: What can be held: parameters and the like; inputs of micro-batches that will be recomputed;
#: graphs; what weight gradients still need; what was handed in and is not used yet; passing needs.
HELD_KINDS = ("fixed", "inputs", "graphs", "weights", "waiting", "transient")

_FIXED, _INPUTS, _GRAPHS, _WEIGHTS, _WAITING, _TRANSIENT = range(len(HELD_KINDS))


@dataclass(frozen=True)
class HeldBytes:
    """Bytes that one partition holds for one micro-batch, and always.

    Attributes:
        fixed: Parameters, gradients, buffers and optimizer state.
        input: What the partition is given, and keeps of a micro-batch to be recomputed.
        saved: What a graph keeps, with the input if it keeps that.
        gradient: The gradient of its output, which it is given.
        weights: What is left of `saved` when the input's gradient is done; None: all of it.
        forward_transient: Largest need of a forward or recompute beyond `saved`.
        backward_transient: Largest need of a backward beyond `saved` and `gradient`.

    Raises:
        ProfileError: a size that is negative or no whole number.
    """

    fixed: int = 0
    input: int = 0
    saved: int = 0
    gradient: int = 0
    weights: int | None = None
    forward_transient: int = 0
    backward_transient: int = 0

    def __post_init__(self) -> None:
        for name, size in vars(self).items():
            if size is None and name == "weights":
                continue
            if type(size) is not int or not 0 <= size < 2**62:
                raise ProfileError(
                    f"size is impossible: {name}={size!r} (expected a whole number of bytes, 0 or "
                    "more).\nFix: correct the value, or profile the model again."
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
        """Most bytes at any time."""
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
        """Return the bytes of each kind at a time, after all that happens in that moment."""
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

    An action takes at its start and gives back at its end; of two actions in a row the second
    starts when the first has given back. What a neighbour made waits at the partition that will
    use it, from the moment at which it was made: a copy on its way counts there.

    Args:
        timeline: When every action starts and ends.
        sizes: Bytes of each partition.

    Returns:
        One track per device.

    Raises:
        ProfileError: not one size per partition.

    Complexity:
        O(n log n) for n events, in numpy.

    Example:
        >>> from gpipebal.schedule import one_f_one_b_schedule
        >>> from gpipebal.simulator import Durations, place
        >>> times = Durations((1.0, 1.0), (1.0, 1.0), (1.0, 1.0))
        >>> timeline = place(one_f_one_b_schedule(2, 3), times)
        >>> tracks = memory_over_time(timeline, [HeldBytes(saved=10), HeldBytes(saved=7)])
        >>> [track.peak for track in tracks]
        [20, 7]
    """
    n_partitions = timeline.n_partitions
    if len(sizes) != n_partitions:
        raise ProfileError(
            f"sizes and partitions differ: len(sizes)={len(sizes)} (expected {n_partitions}, one "
            "per partition).\nFix: give one HeldBytes per partition."
        )
    table = timeline.table
    shown = table.of_kind("FRBIW")
    table = table if shown.all() else table.pick(shown)
    chunks = timeline.chunks
    cells = table.partitions.astype(np.int64) * chunks + table.micro_batches
    made = {kinds: _last_ends(table, cells, kinds, n_partitions * chunks) for kinds in ("F", "BI")}
    again = np.zeros(n_partitions * chunks, dtype=bool)
    again[cells[table.of_kind("R")]] = True
    bytes_of = {
        name: np.array([getattr(size, name) or 0 for size in sizes], dtype=np.int64)
        for name in vars(HeldBytes())
    }
    bytes_of["weights"] = np.array(
        [size.saved if size.weights is None else size.weights for size in sizes], dtype=np.int64
    )
    placement = np.array(timeline.placement)
    tracks = []
    for d, which in enumerate(_rows_of(table, placement[table.partitions], timeline.n_devices)):
        own = table.pick(which)
        here = cells[which]
        # The first partition is given its inputs by the caller, the last its gradients by the loss.
        takes_input = own.of_kind("F") & (own.partitions > 0)
        takes_gradient = own.of_kind("BI") & (own.partitions < n_partitions - 1)
        moments = _Moments(own, bytes_of)
        moments.follow_actions(again[here], takes_gradient)
        moments.wait(takes_input, made["F"][here[takes_input] - chunks], "input")
        moments.wait(takes_gradient, made["BI"][here[takes_gradient] + chunks], "gradient")
        partitions = np.flatnonzero(placement == d)
        fixed = int(bytes_of["fixed"][partitions].sum())
        tracks.append(moments.track(d, tuple(partitions.tolist()), fixed))
    return tuple(tracks)


class _Moments:
    """The moments of one device at which something changes, and by how many bytes of each kind.

    Its actions give the order: start of the first, its end, start of the second, and so on. So an
    action without length still takes before it gives. What arrives gets its place between them.
    """

    def __init__(self, own: EventTable, bytes_of: Mapping[str, Ints]) -> None:
        self._own = own
        self._bytes_of = bytes_of
        self._changes = np.zeros((len(HELD_KINDS), 2 * len(own)), dtype=np.int64)
        self._arrivals: list[tuple[Floats, Ints]] = []

    def follow_actions(self, again: NDArray[np.bool_], takes_gradient: NDArray[np.bool_]) -> None:
        """Enter what every action takes and gives back."""
        is_of = {kind: self._own.of_kind(kind) for kind in "FRBIW"}
        back = is_of["B"] | is_of["I"]
        self._take(is_of["F"] & again, _INPUTS, "input")
        self._take(is_of["F"] & ~again, _GRAPHS, "saved")
        self._take(is_of["R"], _INPUTS, "input", -1)
        self._take(is_of["R"], _GRAPHS, "saved")
        self._take(back, _GRAPHS, "saved", -1, end=True)
        self._take(is_of["I"], _WEIGHTS, "weights", end=True)
        self._take(is_of["W"], _WEIGHTS, "weights", -1, end=True)
        for which, name in (
            (is_of["F"] | is_of["R"], "forward_transient"),
            (back | is_of["W"], "backward_transient"),
            (takes_gradient, "gradient"),
        ):
            self._take(which, _TRANSIENT, name)
            self._take(which, _TRANSIENT, name, -1, end=True)

    def wait(self, which: NDArray[np.bool_], made: Floats, name: str) -> None:
        """Let what some actions use wait from when it was made until they start."""
        if not self._bytes_of[name].any():
            return
        self._take(which, _WAITING, name, -1)
        # Rounding, or a measurement, may let it arrive after it is used.
        at = np.minimum(made, self._own.starts[which])
        self._arrivals.append((at, self._bytes_of[name][self._own.partitions[which]]))

    def _take(
        self, which: NDArray[np.bool_], kind: int, name: str, sign: int = 1, *, end: bool = False
    ) -> None:
        if self._bytes_of[name].any():
            places = 2 * np.flatnonzero(which) + int(end)
            self._changes[kind, places] += sign * self._bytes_of[name][self._own.partitions[which]]

    def track(self, device: int, partitions: tuple[int, ...], fixed: int) -> MemoryTrack:
        """Put the moments in order, and add the changes up."""
        own, changes = self._own, self._changes
        times = np.stack((own.starts, own.ends), axis=1).ravel()
        if self._arrivals:
            at = np.concatenate([arrival[0] for arrival in self._arrivals])
            size = np.concatenate([arrival[1] for arrival in self._arrivals])
            by_time = np.argsort(at, kind="stable")
            at, size = at[by_time], size[by_time]
            # Before the first action that starts then or later: that is the one that can use it.
            # What runs at that moment has given nothing back; what ends in it has.
            before = np.searchsorted(own.starts, at)
            running = (before > 0) & (at < own.ends[before - 1])
            places = np.concatenate((2 * np.arange(len(times)), 4 * before - 1 - 2 * running))
            order = np.argsort(places, kind="stable")
            arriving = np.zeros((len(HELD_KINDS), len(at)), dtype=np.int64)
            arriving[_WAITING] = size
            changes = np.concatenate((changes, arriving), axis=1)[:, order]
            times = np.concatenate((times, at))[order]
        # Nothing but what is fixed before the first moment.
        held = np.zeros((len(HELD_KINDS), len(times) + 1), dtype=np.int64)
        np.cumsum(changes, axis=1, out=held[:, 1:])
        held[_FIXED] += fixed
        return MemoryTrack(
            device,
            partitions,
            np.concatenate(([0.0], times)),
            dict(zip(HELD_KINDS, held, strict=True)),
        )


def _rows_of(
    table: EventTable, devices: NDArray[np.integer], n_devices: int
) -> list[slice | NDArray[np.integer]]:
    """Return the events of each device in the order in which they start."""
    new = np.diff(devices)
    if np.all((new > 0) | ((new == 0) & (np.diff(table.starts) >= 0))):
        # As the simulator leaves them.
        bounds = np.searchsorted(devices, np.arange(n_devices + 1)).tolist()
        return [slice(first, last) for first, last in pairwise(bounds)]
    order = np.lexsort((table.starts, devices))
    bounds = np.searchsorted(devices[order], np.arange(n_devices + 1))
    return [order[first:last] for first, last in pairwise(bounds)]


def _last_ends(table: EventTable, cells: NDArray[np.int64], kinds: str, n_cells: int) -> Floats:
    """Return when each cell's action of some kinds ended; infinity: it has none."""
    ends = np.full(n_cells, np.inf)
    which = table.of_kind(kinds)
    ends[cells[which]] = table.ends[which]
    return ends
