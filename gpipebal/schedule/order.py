"""Orders: a schedule as columns of numbers, for millions of actions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from gpipebal.schedule.actions import KINDS, Action, Kind, Schedule
from gpipebal.schedule.checkpoint import CheckpointMode

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Ints = NDArray[np.integer]

__all__ = ["Order"]


@dataclass(frozen=True, eq=False)
class Order:
    """A schedule as columns: all rows one after the other, one number per action and column.

    Attributes:
        name: Name of the schedule.
        offsets: Where the row of each device begins, then the number of actions.
        partitions: Partition of each action.
        kinds: Kind of each action, as its place in `KINDS`.
        micro_batches: Micro-batch of each action.
        devices: Device of each partition.
        modes: Checkpoint mode of each partition, if `order_of` made the columns without rows, as it
            can for GPipe (in either order of backwards) and 1F1B; else None.
    """

    name: str
    offsets: Ints
    partitions: Ints
    kinds: Ints
    micro_batches: Ints
    devices: Ints
    modes: tuple[CheckpointMode, ...] | None = None

    @property
    def n_actions(self) -> int:
        """Number of actions."""
        return len(self.kinds)

    @property
    def n_devices(self) -> int:
        """Number of devices (rows)."""
        return len(self.offsets) - 1

    @property
    def n_partitions(self) -> int:
        """Number of partitions."""
        return len(self.devices)

    @property
    def shared_devices(self) -> tuple[int, ...] | None:
        """Device of each partition; None: every device has one, in order."""
        devices = tuple(self.devices.tolist())
        return None if devices == tuple(range(self.n_devices)) else devices

    @classmethod
    def of(cls, schedule: Schedule) -> Order:
        """Write a schedule as columns; kinds and partitions must be known.

        Example:
            >>> row = (Action(0, "F", 0), Action(0, "B", 0))
            >>> Order.of(Schedule("mine", (row,))).kinds.tolist()
            [0, 2]
        """
        lengths = [len(row) for row in schedule.rows]
        actions = [action for row in schedule.rows for action in row]
        return cls(
            name=schedule.name,
            offsets=np.concatenate(([0], np.cumsum(lengths, dtype=np.int64))),
            partitions=np.array([action.partition for action in actions], dtype=np.int32),
            kinds=np.array([KINDS.index(action.kind) for action in actions], dtype=np.uint8),
            micro_batches=np.array([action.micro_batch for action in actions], dtype=np.int32),
            devices=np.array(schedule.placement, dtype=np.int32),
        )

    def schedule(self) -> Schedule:
        """Write the columns as a schedule."""
        rows = tuple(self.row(d) for d in range(self.n_devices))
        return Schedule(self.name, rows, self.shared_devices)

    def row(self, device: int) -> tuple[Action, ...]:
        """Return the actions of one device."""
        first, last = self.offsets[device : device + 2].tolist()
        columns: list[Sequence[int]] = [
            column[first:last].tolist()
            for column in (self.partitions, self.kinds, self.micro_batches)
        ]
        kinds: dict[int, Kind] = {k: kind for k, kind in enumerate(KINDS)}  # type: ignore[misc]  # the letters are kinds
        return tuple(Action(j, kinds[k], i) for j, k, i in zip(*columns, strict=True))
