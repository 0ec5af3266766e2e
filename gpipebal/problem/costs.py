"""What partitions cost when devices or modes differ, or when handing over takes time.

The formulas are those of `Problem.makespan` with more machines: every link that overlaps the
computation is one. All numbers are scaled integers, so that sums and comparisons are exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from operator import sub
from typing import TYPE_CHECKING, NamedTuple

from gpipebal.errors import BalanceError
from gpipebal.problem.checks import largest_denominator, scaled
from gpipebal.problem.device import Device
from gpipebal.schedule import CheckpointMode, modes_of

if TYPE_CHECKING:
    from gpipebal.problem.problem import Problem

__all__ = ["Costs", "ExactTimes", "LayerSums", "denominators", "least_sums"]


class LayerSums(NamedTuple):
    """Prefix sums of the layers' scaled times on one type of device."""

    forward: tuple[int, ...]
    backward: tuple[int, ...]
    recompute: tuple[int, ...]


class ExactTimes(NamedTuple):
    """Scaled times of one partition, with the copies that keep its device busy.

    `recompute` is that of all micro-batches but the last, `last_recompute` that of the last one.
    """

    forward: int
    backward: int
    recompute: int
    last_recompute: int

    @property
    def load(self) -> int:
        """How long its device is busy with one micro-batch."""
        return self.forward + self.backward + max(self.recompute, self.last_recompute)


class Costs:
    """The exact costs of a problem's partitions.

    Attributes:
        types: Prefix sums for each type of device.
        type_of: The type of each device.
        send: Scaled time to pass values on at each place from 0 to the number of layers; 0 at both
            ends.
        give_back: The same for passing the gradients back.
        overlaps: Whether copies run at the same time as the computation.
    """

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        kinds: dict[object, int] = {}
        self.types: list[LayerSums] = []
        self.type_of: list[int] = []
        for device in problem.devices or (Device(),) * problem.n_partitions:
            key = (device.slowness, device.times)
            if key not in kinds:
                kinds[key] = len(kinds)
                if device.is_alike:
                    self.types.append(LayerSums(*problem.layer_sums))
                else:
                    times = device.times or (problem.forward, problem.backward, problem.recompute)
                    self.types.append(LayerSums(*(self._sums(t, device.slowness) for t in times)))
            self.type_of.append(kinds[key])
        links = problem.links
        self.overlaps = links is not None and links.overlaps
        self.send = self.give_back = (0,) * (problem.n_layers + 1)
        if links is not None:
            self.send, self.give_back = self._scaled(links.forward), self._scaled(links.backward)

    def _sums(self, times: Sequence[float], slowness: float) -> tuple[int, ...]:
        factor, below = slowness.as_integer_ratio()
        scale = self._problem.scale
        ratios = (time.as_integer_ratio() for time in times)
        return tuple(
            accumulate((top * factor * (scale // (low * below)) for top, low in ratios), initial=0)
        )

    def _scaled(self, times: Sequence[float]) -> tuple[int, ...]:
        return (0, *scaled(times, self._problem.scale), 0)

    def modes(self, modes: Sequence[CheckpointMode] | None) -> tuple[CheckpointMode, ...]:
        """Return the mode of each partition: those given, or the problem's.

        Raises:
            BalanceError: the problem leaves the modes open, and none are given.
        """
        problem = self._problem
        if modes is not None:
            return modes_of(tuple(modes), problem.n_partitions)
        if problem.modes is None:
            raise BalanceError(
                "checkpoint modes of the partitions are not known: modes=None (expected one mode "
                "per partition where checkpoint='auto').\n"
                "Fix: modes=split(problem).modes, or checkpoint='except_last'."
            )
        return problem.modes

    def least_recompute(self, device_type: int) -> list[int]:
        """Return prefix sums of recompute that a partition with these layers has at the least.

        Nothing for frozen layers at the beginning: a partition that ends among them has none.
        """
        sums = self.types[device_type].recompute
        before = sums[self._problem.n_frozen]
        return [max(total - before, 0) for total in sums]

    def parts(
        self,
        bounds: Sequence[int],
        modes: Sequence[CheckpointMode] | None = None,
        order: Sequence[int] | None = None,
    ) -> list[ExactTimes]:
        """Add up the times of every partition.

        Args:
            bounds: A split.
            modes: Mode of each partition; None: the problem's.
            order: Device of each partition, as an index into the problem's; None: in order.
        """
        of_modes = self.modes(modes)
        return [
            self.part(start, end, j if order is None else order[j], of_modes[j])
            for j, (start, end) in enumerate(pairwise(bounds))
        ]

    def part(self, start: int, end: int, device: int, mode: CheckpointMode) -> ExactTimes:
        """Add up the times of a run of layers on a device, under a mode."""
        sums = self.types[self.type_of[device]]
        forward, backward, recompute = (column[end] - column[start] for column in sums)
        recompute = recompute if end > self._problem.n_frozen else 0
        if not self.overlaps:
            forward += self.send[start] + self.send[end]
            backward += self.give_back[start] + self.give_back[end]
        repeated = recompute if mode != "never" and self._problem.chunks > 1 else 0
        last = recompute if mode == "always" else 0
        return ExactTimes(forward, backward, repeated, last)

    def makespan(
        self,
        bounds: Sequence[int],
        modes: Sequence[CheckpointMode] | None = None,
        order: Sequence[int] | None = None,
    ) -> int:
        """Return the makespan as a scaled integer; see `Problem.makespan`."""
        repeats = self._problem.chunks - 1
        once = slowest_forward = slowest_backward = longest = 0
        for start, part in zip(bounds, self.parts(bounds, modes, order), strict=False):
            if self.overlaps:
                # The link to a partition is one more machine, on the way there and back.
                once += self.send[start] + self.give_back[start]
                slowest_forward = max(slowest_forward, self.send[start])
                slowest_backward = max(slowest_backward, self.give_back[start])
            once += part.forward + part.backward
            slowest_forward = max(slowest_forward, part.forward)
            slowest_backward = max(slowest_backward, part.backward + part.recompute)
            repeated = repeats * (slowest_forward + slowest_backward)
            longest = max(longest, once + part.last_recompute + repeated)
        return longest

    def bottleneck(
        self,
        bounds: Sequence[int],
        modes: Sequence[CheckpointMode] | None = None,
        order: Sequence[int] | None = None,
    ) -> int:
        """Return the bottleneck as a scaled integer; see `Problem.bottleneck`."""
        loads = [part.load for part in self.parts(bounds, modes, order)]
        if self.overlaps:
            loads += [self.send[cut] + self.give_back[cut] for cut in bounds[1:-1]]
        return max(loads)


def least_sums(columns: Sequence[Sequence[int]]) -> list[int]:
    """Return prefix sums of the least that each layer takes in any of several prefix sums.

    Example:
        >>> least_sums([[0, 2, 5], [0, 3, 4]])
        [0, 2, 3]
    """
    layers = (map(sub, column[1:], column) for column in columns)
    return list(accumulate(map(min, zip(*layers, strict=True)), initial=0))


def denominators(problem: Problem) -> int:
    """Find the power of two that makes all times of a problem integers, on every device."""
    columns = [problem.forward, problem.backward, problem.recompute]
    scale = _denominator(columns)
    for device in problem.devices or ():
        own = scale if device.times is None else _denominator(device.times)
        scale = max(scale, own * device.slowness.as_integer_ratio()[1])
    if problem.links is not None:
        scale = max(scale, _denominator((problem.links.forward, problem.links.backward)))
    return scale


def _denominator(columns: Sequence[Sequence[float]]) -> int:
    return max(map(largest_denominator, columns))
