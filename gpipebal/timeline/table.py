"""Event tables: many events as columns of numbers, and the same as a sequence of `Event`s."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, overload

import numpy as np

from gpipebal.timeline.events import ALL_KINDS, COMPUTE_KINDS, Event, kind_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Ints = NDArray[np.integer]
    Floats = NDArray[np.float64]

__all__ = ["EventTable"]

_COMPUTES = np.array([kind in COMPUTE_KINDS for kind in ALL_KINDS])


class EventTable(Sequence[Event]):
    """Events as columns; an `Event` is made when it is read.

    A simulated mini-batch can have millions of events. As a sequence it equals a tuple of the
    same events.

    Attributes:
        partitions: Partition of each event.
        kinds: Kind of each event, as its place in `ALL_KINDS`.
        micro_batches: Micro-batch of each event.
        starts: Seconds.
        ends: Seconds.
    """

    __slots__ = ("ends", "kinds", "micro_batches", "partitions", "starts")

    def __init__(
        self, partitions: Ints, kinds: Ints, micro_batches: Ints, starts: Floats, ends: Floats
    ) -> None:
        self.partitions = partitions
        self.kinds = kinds
        self.micro_batches = micro_batches
        self.starts = starts
        self.ends = ends

    @classmethod
    def of(cls, events: Sequence[Event]) -> EventTable:
        """Write events, which must have been checked, as columns.

        Raises:
            ProfileError: an event of an unknown kind.
        """
        if isinstance(events, EventTable):
            return events
        kinds = [ALL_KINDS.index(kind_of(event[1]).letter) for event in events]
        return cls(
            np.array([event[0] for event in events], dtype=np.int32),
            np.array(kinds, dtype=np.uint8),
            np.array([event[2] for event in events], dtype=np.int32),
            np.array([event[3] for event in events], dtype=np.float64),
            np.array([event[4] for event in events], dtype=np.float64),
        )

    @property
    def span(self) -> tuple[float, float]:
        """Seconds of the first start and of the last end; zeros without events."""
        return (float(self.starts.min()), float(self.ends.max())) if len(self) else (0.0, 0.0)

    @property
    def computes(self) -> NDArray[np.bool_]:
        """Whether each event keeps its device busy."""
        return _COMPUTES[self.kinds]

    def of_kind(self, kinds: str) -> NDArray[np.bool_]:
        """Whether each event is of one of `kinds`, such as ``'FR'``."""
        return np.array([kind in kinds for kind in ALL_KINDS])[self.kinds]

    def pick(self, which: Ints | NDArray[np.bool_] | slice) -> EventTable:
        """Return some of the events, by their places, a mask or a slice."""
        return EventTable(
            self.partitions[which],
            self.kinds[which],
            self.micro_batches[which],
            self.starts[which],
            self.ends[which],
        )

    def __len__(self) -> int:
        return len(self.kinds)

    @overload
    def __getitem__(self, index: int) -> Event: ...

    @overload
    def __getitem__(self, index: slice) -> EventTable: ...

    def __getitem__(self, index: int | slice) -> Event | EventTable:
        if isinstance(index, slice):
            return self.pick(index)
        return Event(
            int(self.partitions[index]),
            ALL_KINDS[self.kinds[index]],
            int(self.micro_batches[index]),
            float(self.starts[index]),
            float(self.ends[index]),
        )

    def __iter__(self) -> Iterator[Event]:
        kinds = [ALL_KINDS[kind] for kind in self.kinds]
        columns = (self.micro_batches.tolist(), self.starts.tolist(), self.ends.tolist())
        return map(Event, self.partitions.tolist(), kinds, *columns)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, EventTable):
            return all(
                np.array_equal(getattr(self, name), getattr(other, name)) for name in self.__slots__
            )
        if isinstance(other, tuple):
            return len(self) == len(other) and all(a == b for a, b in zip(self, other, strict=True))
        return NotImplemented

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return f"EventTable({tuple(self)!r})" if len(self) <= 20 else f"<{len(self)} events>"
