"""The table of known schedules, and all that follows from it: names, makers, who runs what.

One record says everything about a schedule that is not in its rows. To add one, add its record to
`KNOWN_SCHEDULES`: the planner, the simulator, the executor, the comparison of schedules and the
command line take its name from here, and whatever else they need from its rows. (Some schedules
also have shortcuts, in `gpipebal.schedule.orders` and elsewhere, which only save time.) This module
loads no numpy, because the help of the command line needs the names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from gpipebal.errors import BalanceError, UnsupportedPlanError
from gpipebal.schedule.actions import Schedule
from gpipebal.schedule.checkpoint import Checkpoint
from gpipebal.schedule.executed import gpipe_schedule, one_f_one_b_schedule
from gpipebal.schedule.studied import (
    gpipe_in_order_schedule,
    interleaved_schedule,
    looped_bfs_schedule,
    zero_bubble_schedule,
)
from gpipebal.text import either
from gpipebal.units import count

__all__ = [
    "ALL_SCHEDULES",
    "KNOWN_SCHEDULES",
    "SCHEDULES",
    "KnownSchedule",
    "check_known_schedule",
    "check_schedule",
    "make_schedule",
    "partitions_on_each",
    "shares_devices",
]

#: Makes the rows of devices, micro-batches and checkpoint; also of ``partitions_per_device=`` where
#: a device may have several.
Maker = Callable[..., Schedule]


@dataclass(frozen=True)
class KnownSchedule:
    """What is known about a schedule, besides its rows.

    Attributes:
        name: Its name in arguments and files.
        make: Makes its rows: of the number of devices, of micro-batches, and a checkpoint; and, if
            `takes_several`, of the keyword ``partitions_per_device``.
        is_ours: Whether `GPipe` runs it.
        torch: The class of torch.distributed.pipelining that runs it; None: torch does not have it.
        also: Other names of it, or of a family of which it is the only one here; without capitals,
            dashes, underscores and spaces.
        partitions_per_device: Partitions of every device, unless the caller asks for others.
        takes_several: Whether a device may have several partitions.
        is_in_parts: Whether it does backwards as gradients of inputs and gradients of weights.

    Raises:
        UnsupportedPlanError: `GPipe` is to run what it cannot, or `partitions_per_device` is above
            1 without `takes_several`.
    """

    name: str
    make: Maker
    is_ours: bool = False
    torch: str | None = None
    also: tuple[str, ...] = ()
    partitions_per_device: int = 1
    takes_several: bool = False
    is_in_parts: bool = False

    def __post_init__(self) -> None:
        if self.is_ours and (self.takes_several or self.is_in_parts):
            raise UnsupportedPlanError(
                f"GPipe cannot run {self.name!r}: takes_several={self.takes_several}, "
                f"is_in_parts={self.is_in_parts} (expected False: GPipe runs one partition on each "
                "device, and whole backwards).\nFix: is_ours=False."
            )
        if self.partitions_per_device > 1 and not self.takes_several:
            raise UnsupportedPlanError(
                f"{self.name!r} has {self.partitions_per_device} partitions on each device, and "
                "takes_several=False (expected True).\nFix: takes_several=True."
            )

    @property
    def run_by(self) -> str:
        """The software that runs it, in words."""
        if self.is_ours:
            return "GPipe"
        return "nothing" if self.torch is None else f"torch.distributed.pipelining {self.torch}"

    def schedule(
        self,
        n_devices: int,
        chunks: int,
        checkpoint: Checkpoint,
        partitions_per_device: int | None = None,
    ) -> Schedule:
        """Make its rows.

        Raises:
            BalanceError: counts or a mode that it cannot have.
        """
        each = (
            self.partitions_per_device if partitions_per_device is None else partitions_per_device
        )
        if self.takes_several:
            return self.make(n_devices, chunks, checkpoint, partitions_per_device=each)
        self.check_single(each)
        return self.make(n_devices, chunks, checkpoint)

    def check_single(self, partitions_per_device: int) -> None:
        """Refuse several partitions per device.

        Raises:
            BalanceError: there are several.
        """
        if partitions_per_device != 1:
            others = [
                known.name for known in KNOWN_SCHEDULES.values() if shares_devices(known.name)
            ]
            raise BalanceError(
                f"schedule has one partition per device: schedule={self.name!r}, "
                f"partitions_per_device={partitions_per_device!r} (expected 1).\n"
                f"Fix: schedule={either(map(repr, others))}, or one partition per device."
            )


#: Every known schedule by its name: first those that `GPipe` runs.
KNOWN_SCHEDULES: dict[str, KnownSchedule] = {
    known.name: known
    for known in (
        KnownSchedule("gpipe", gpipe_schedule, is_ours=True),
        KnownSchedule("1f1b", one_f_one_b_schedule, is_ours=True, torch="Schedule1F1B"),
        KnownSchedule("gpipe_in_order", gpipe_in_order_schedule, torch="ScheduleGPipe"),
        KnownSchedule(
            "interleaved_1f1b",
            interleaved_schedule,
            torch="ScheduleInterleaved1F1B",
            also=("interleaved",),
            partitions_per_device=2,
            takes_several=True,
        ),
        KnownSchedule(
            "looped_bfs",
            looped_bfs_schedule,
            torch="ScheduleLoopedBFS",
            also=("breadthfirst",),
            partitions_per_device=2,
            takes_several=True,
        ),
        KnownSchedule(
            "zb_h1",
            zero_bubble_schedule,
            torch="ScheduleInterleavedZeroBubble",
            also=("zerobubble",),
            takes_several=True,
            is_in_parts=True,
        ),
    )
}


class _Executed(Mapping[str, Maker]):
    """The makers of the schedules that `GPipe` runs, as the table has them."""

    def __getitem__(self, name: str) -> Maker:
        known = KNOWN_SCHEDULES[name]
        if not known.is_ours:
            raise KeyError(name)
        return known.make

    def __iter__(self) -> Iterator[str]:
        return (name for name, known in KNOWN_SCHEDULES.items() if known.is_ours)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __repr__(self) -> str:
        return f"<makers of {', '.join(self)}>"


#: The schedules that `GPipe` runs, by name.
SCHEDULES: Mapping[str, Maker] = _Executed()

#: Every schedule that can be simulated: those that `GPipe` runs, then the others.
ALL_SCHEDULES: tuple[str, ...] = tuple(
    sorted(KNOWN_SCHEDULES, key=lambda name: not KNOWN_SCHEDULES[name].is_ours)
)


def spelled(name: object) -> object:
    """Return the name of a schedule as it is spelled here; anything else unchanged.

    Example:
        >>> spelled("Interleaved1F1B"), spelled("zero-bubble"), spelled("dualpipe")
        ('interleaved_1f1b', 'zb_h1', 'dualpipe')
    """
    if not isinstance(name, str):
        return name
    letters = _letters(name)
    for known in KNOWN_SCHEDULES.values():
        if letters in (_letters(known.name), *known.also):
            return known.name
    return name


def _letters(name: str) -> str:
    """Leave out what does not distinguish names."""
    return name.lower().translate(str.maketrans("", "", "-_ "))


def check_known_schedule(name: object) -> str:
    """Return the name of a schedule that can be simulated, as `ALL_SCHEDULES` has it.

    Capitals, dashes and underscores do not matter; ``'interleaved'`` and ``'zero_bubble'`` mean the
    only known schedule of that family.

    Raises:
        UnsupportedPlanError: there is none of this name.

    Example:
        >>> check_known_schedule("1F1B"), check_known_schedule("zero_bubble")
        ('1f1b', 'zb_h1')
    """
    known = spelled(name)
    if not isinstance(known, str) or known not in KNOWN_SCHEDULES:
        raise UnsupportedPlanError(
            f"schedule does not exist: schedule={name!r:.60} (expected one of "
            f"{', '.join(map(repr, KNOWN_SCHEDULES))}).\nFix: schedule='gpipe'."
        )
    return known


def check_schedule(name: object) -> str:
    """Return the name of a schedule that `GPipe` runs, as `SCHEDULES` has it.

    Raises:
        UnsupportedPlanError: there is none of this name; if other software runs it, the text says
            which.
    """
    known = spelled(name)
    if not isinstance(known, str) or known not in SCHEDULES:
        fix = "schedule='gpipe'."
        if isinstance(known, str) and known in KNOWN_SCHEDULES:
            theirs = KNOWN_SCHEDULES[known].torch
            runs = f"torch.distributed.pipelining, as {theirs}" if theirs else "nothing known here"
            fix = (
                f"schedule={either(map(repr, SCHEDULES))}; {known!r} is run by {runs}, and "
                "simulated by gpipebal.simulate."
            )
        raise UnsupportedPlanError(
            f"schedule cannot be built: schedule={name!r:.60} (expected one of "
            f"{', '.join(map(repr, SCHEDULES))}).\nFix: {fix}"
        )
    return known


def make_schedule(
    name: str, n_partitions: int, chunks: int, checkpoint: Checkpoint = "except_last"
) -> Schedule:
    """Order a mini-batch by the schedule of this name.

    Raises:
        UnsupportedPlanError: there is none of this name.
        BalanceError: a count below 1, more actions than a memory holds, or an unknown checkpoint
            mode.

    Example:
        >>> print(make_schedule("1f1b", 1, 2, "always"))
        0F0 0B0 0F1 0B1
    """
    return KNOWN_SCHEDULES[check_schedule(name)].schedule(n_partitions, chunks, checkpoint)


def shares_devices(schedule: str) -> bool:
    """Tell whether a schedule is meant for several partitions on every device.

    Example:
        >>> shares_devices("interleaved_1f1b"), shares_devices("zb_h1")
        (True, False)
    """
    return KNOWN_SCHEDULES[schedule].partitions_per_device > 1


def partitions_on_each(schedule: str, n_partitions: int) -> int:
    """Tell how many of a plan's partitions every device has: 1, or more if devices are shared.

    Args:
        schedule: Name of the schedule; under one that is not known here, every device has one.
        n_partitions: Number of partitions.

    Raises:
        BalanceError: partitions that cannot be dealt out evenly.

    Example:
        >>> partitions_on_each("interleaved_1f1b", 8), partitions_on_each("1f1b", 8)
        (2, 1)
    """
    known = KNOWN_SCHEDULES.get(schedule)
    each = 1 if known is None else known.partitions_per_device
    if n_partitions % each:
        raise BalanceError(
            f"partitions cannot be dealt out evenly: {count(n_partitions, 'partition')}, {each} on "
            f"each device with schedule={schedule!r} (expected a multiple of {each}).\n"
            f"Fix: {-(-n_partitions // each) * each} partitions, or schedule='1f1b'."
        )
    return each
