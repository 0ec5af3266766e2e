"""Actions, and schedules: rows of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from gpipebal.argument_kinds import check_list, check_whole, whole_number
from gpipebal.errors import BalanceError

__all__ = [
    "ACTION_NAMES",
    "IN",
    "KINDS",
    "Action",
    "B",
    "F",
    "Kind",
    "R",
    "Schedule",
    "W",
    "check_count",
]

Kind = Literal["F", "R", "B", "I", "W"]

#: What each kind is called.
ACTION_NAMES: dict[Kind, str] = {
    "F": "forward",
    "R": "recompute",
    "B": "backward",
    "I": "input gradient",
    "W": "weight gradient",
}

#: All kinds; in a table of actions a kind is its place in this text, and these are the places.
KINDS = "".join(ACTION_NAMES)
F, R, B, IN, W = range(len(KINDS))


#: Most cells, micro-batches of a partition, of a schedule whose actions are objects: each cell has
#: two or three, of a hundred bytes. And of one whose actions are columns of numbers.
MOST_CELLS, MOST_IN_COLUMNS = 2**24, 2**30


class Action(NamedTuple):
    """One forward, recompute, backward, or part of a backward, of a cell.

    `kind` is ``F`` forward, ``R`` recompute, ``B`` backward, or one of the two parts of a
    backward: ``I`` gradient of the input, ``W`` gradient of the weights.
    """

    partition: int
    kind: Kind
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.partition}{self.kind}{self.micro_batch}"


@dataclass(frozen=True)
class Schedule:
    """The order of actions of every device.

    Attributes:
        name: Name of the rule that made it, such as ``'gpipe'``.
        rows: One tuple of actions per device, in the order in which it runs them.
        devices: For each partition the device (row) that runs it; None: every device has one
            partition, in order.

    Raises:
        KindError: `rows` is not a list of lists of actions, or `devices` not one of whole numbers.

    Example:
        >>> rows = (Action(0, "F", 0), Action(0, "B", 0)), (Action(1, "F", 0), Action(1, "B", 0))
        >>> print(Schedule("one micro-batch", rows))
        0F0 0B0
        1F0 1B0
    """

    name: str
    rows: tuple[tuple[Action, ...], ...]
    devices: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        fix = "rows=((Action(0, 'F', 0), Action(0, 'B', 0)),), a row for each device"
        given = check_list("rows", self.rows, fix=fix)
        rows = tuple(check_list(f"rows[{d}]", row, fix=fix) for d, row in enumerate(given))
        for d, row in enumerate(rows):  # d: device
            if not set(map(type, row)) <= {Action}:
                check_list(f"rows[{d}]", row, Action, fix)
        # What was given may be an iterator, which is used up now.
        object.__setattr__(self, "rows", rows)
        if self.devices is not None:
            devices = check_list("devices", self.devices, fix="devices=(0, 1, 0, 1), say")
            object.__setattr__(self, "devices", tuple(check_whole("devices", d) for d in devices))

    @property
    def n_partitions(self) -> int:
        """Number of partitions."""
        return len(self.rows) if self.devices is None else len(self.devices)

    @property
    def n_devices(self) -> int:
        """Number of devices (rows)."""
        return len(self.rows)

    @property
    def placement(self) -> tuple[int, ...]:
        """Device of each partition."""
        return tuple(range(len(self.rows))) if self.devices is None else self.devices

    @property
    def chunks(self) -> int:
        """Number of micro-batches."""
        return 1 + max((action.micro_batch for row in self.rows for action in row), default=-1)

    def phase(self, kinds: str) -> tuple[tuple[Action, ...], ...]:
        """Keep, in order, the actions whose kind is one of `kinds`, such as ``'RB'``."""
        return tuple(tuple(a for a in row if a.kind in kinds) for row in self.rows)

    def __str__(self) -> str:
        return "\n".join(" ".join(map(str, row)) for row in self.rows)


def check_size(n_partitions: int, chunks: int, most: int = MOST_CELLS) -> None:
    """Refuse a schedule of so many actions that they would fill the memory.

    Raises:
        BalanceError: there are more than `most` cells, partitions times micro-batches.
    """
    if n_partitions * chunks > most:
        fewer = f"chunks={most // n_partitions}, or " if 1 < n_partitions <= most else ""
        fix = f"chunks={most}" if n_partitions == 1 else f"{fewer}fewer partitions"
        raise BalanceError(
            f"schedule is too large: chunks={chunks!r:.60} for partitions={n_partitions!r:.60} "
            f"(expected at most {most} of both multiplied).\n"
            f"Fix: {fix}."
        )


def check_count(name: str, value: object) -> int:
    """Return `value` as an int of 1 or more.

    A float that is a whole number is taken, as torchgpipe did for balances and chunks.

    Raises:
        BalanceError: `value` is not a whole number, or below 1.
    """
    whole = int(value) if isinstance(value, float) and value.is_integer() else value
    count = whole_number(whole)
    if count is None:
        raise BalanceError(
            f"{name} is not a whole number: {name}={value!r:.60} (expected an int of 1 or more).\n"
            f"Fix: {name}=1, or more."
        )
    if count < 1:
        raise BalanceError(
            f"{name} is too small: {name}={count} (expected 1 or more).\nFix: {name}=1, or more."
        )
    return count
