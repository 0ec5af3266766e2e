"""A device that runs one partition: how fast it is, and how much memory it has."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from gpipebal.argument_kinds import plain_number
from gpipebal.errors import BalanceError
from gpipebal.problem.checks import check_limit, check_times

__all__ = ["Device"]


@dataclass(frozen=True)
class Device:
    """A device that runs one partition.

    Devices with equal `slowness` and times are of one type. The more types there are, the longer
    solvers take.

    Attributes:
        slowness: How many times longer than in the problem every layer takes here: 2 on a device
            of half the speed. More than 0. Kept as it is given, so that costs stay exact: a float
            such as 1 / 3 is taken as that float.
        memory_limit: Bytes that the partition may need, from which the reserve has already been
            subtracted; None for no limit.
        forward: Forward time of each layer on this device, before `slowness`; None: the problem's.
        backward: The same for the backward.
        recompute: The same for the recompute.

    Raises:
        BalanceError: a slowness or a limit that is not one, or times of some kinds only.
        KindError: times that are not a list.

    Example:
        >>> Device(slowness=1.5, memory_limit=16 * 2**30).slowness
        1.5
    """

    slowness: float = 1
    memory_limit: int | None = None
    forward: Sequence[float] | None = None
    backward: Sequence[float] | None = None
    recompute: Sequence[float] | None = None

    def __post_init__(self) -> None:
        slowness = plain_number(self.slowness)
        if not 0 < slowness < math.inf:
            raise BalanceError(
                f"slowness of a device is not a factor: slowness={self.slowness!r:.60} (expected a "
                "finite number above 0).\nFix: slowness=1 for a device as fast as the profile's."
            )
        object.__setattr__(self, "slowness", slowness)
        if self.memory_limit is not None:
            object.__setattr__(self, "memory_limit", check_limit("memory_limit", self.memory_limit))
        columns = [name for name in _COLUMNS if getattr(self, name) is not None]
        if columns and len(columns) < len(_COLUMNS):
            missing = next(name for name in _COLUMNS if name not in columns)
            raise BalanceError(
                f"times of a device are incomplete: {missing}=None (expected forward, backward and "
                "recompute, or none of them).\nFix: give all three, or use slowness."
            )
        for name in columns:
            object.__setattr__(self, name, check_times(name, getattr(self, name)))

    @property
    def times(self) -> tuple[Sequence[float], Sequence[float], Sequence[float]] | None:
        """Forward, backward and recompute times of its own; None: the problem's."""
        if self.forward is None or self.backward is None or self.recompute is None:
            return None
        return self.forward, self.backward, self.recompute

    @property
    def is_alike(self) -> bool:
        """Whether every layer takes the same time here as in the problem."""
        return self.slowness == 1 and self.times is None


_COLUMNS = ("forward", "backward", "recompute")
