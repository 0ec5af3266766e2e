"""What splits cost under a schedule: simulated makespans, and the terms of a bound on them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np

from gpipebal.planner.schedules.lower_bound import Columns, Relaxed, rows_of
from gpipebal.problem import Problem
from gpipebal.problem.costs import least_sums
from gpipebal.schedule import CheckpointMode, Order
from gpipebal.schedule.actions import W
from gpipebal.simulator.trials import Candidates, Trials

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

__all__ = ["ScheduleCosts"]

#: Parts of a backward are whole numbers of a finer unit, so that shares are precise enough.
_FINER = 2**32


class ScheduleCosts:
    """The costs of a problem's splits under one order of actions.

    Attributes:
        relaxed: The bound that no split can beat, for all modes and orders of devices that the
            problem leaves open.

    Args:
        problem: Times of the layers, devices and links.
        order: The actions, with the modes that partitions have.
        devices: Device of each partition, as an index into the problem's.
        weight_share: Share of each layer's backward that is the gradient of its weights, from 0 to
            1; None: half.
    """

    def __init__(
        self,
        problem: Problem,
        order: Order,
        devices: Sequence[int],
        weight_share: Sequence[float] | None = None,
    ) -> None:
        self._problem = problem
        costs = problem.costs
        in_parts = bool((order.kinds == W).any())
        finer = _FINER if in_parts else 1
        self._scale = problem.scale * finer
        halves = [0.5] * problem.n_layers
        shares = (halves if weight_share is None else weight_share) if in_parts else None
        types = [
            Columns(
                [finer * time for time in sums.forward],
                [finer * time for time in sums.recompute],
                *_parts([finer * time for time in sums.backward], shares),
            )
            for sums in costs.types
        ]
        type_of = [costs.type_of[device] for device in devices]
        bounded = [
            columns._replace(recompute=[finer * time for time in costs.least_recompute(kind)])
            for kind, columns in enumerate(types)
        ]
        path = Columns(*map(least_sums, zip(*bounded, strict=True)))
        self.relaxed = Relaxed(
            path=path,
            own=[path if problem.any_order else bounded[kind] for kind in type_of],
            rows=rows_of(order, recomputes=problem.checkpoint != "auto"),
            n_devices=order.n_devices,
        )
        self._order = order
        small = max(columns[k][-1] for columns in types for k in range(4)) < 2**62
        self._kind = np.int64 if small and self._scale < 2**62 else object
        self._tables = [
            np.array([columns[k] for columns in types], dtype=self._kind) for k in range(4)
        ]
        self._types = np.array(type_of)
        self._links: tuple[Floats, Floats] | None = None
        if any(costs.send) or any(costs.give_back):
            self._links = self._seconds(costs.send), self._seconds(costs.give_back)

    @cached_property
    def _trials(self) -> Trials:
        return Trials(self._order)

    def _seconds(self, units: Sequence[int]) -> Floats:
        return np.array([self._problem.to_time(time) for time in units], dtype=np.float64)

    @property
    def n_actions(self) -> int:
        """Number of actions of a mini-batch."""
        return self._order.n_actions

    def makespans(
        self,
        splits: Sequence[Sequence[int]],
        modes: Sequence[Sequence[CheckpointMode]] | None = None,
    ) -> list[float]:
        """Simulate splits; return the makespan of each, in the unit of the problem's times.

        Args:
            splits: The bounds of each.
            modes: For each, the modes of its partitions, if they differ from the order's: what they
                do not recompute takes no time there. None: those of the order.
        """
        bounds = np.array(splits, dtype=np.int64)
        starts, ends = bounds[:, :-1], bounds[:, 1:]
        forward, recompute, first, weight = (
            ((table[self._types, ends] - table[self._types, starts]) / self._scale).astype(
                np.float64
            )
            for table in self._tables
        )
        recompute = np.where(ends > self._problem.n_frozen, recompute, 0.0)
        others = {}
        if modes is not None:
            of_splits = np.array(modes)
            others["last_recompute"] = np.where(of_splits == "always", recompute, 0.0)
            recompute = np.where(of_splits == "never", 0.0, recompute)
        if self._links is not None:
            # Copies into a partition cross its first cut forwards, its last one backwards.
            send, give_back = self._links
            others["forward_transfer"] = send[starts]
            others["backward_transfer"] = give_back[ends]
        candidates = Candidates(
            forward, recompute, first + weight, weight_gradient=weight, **others
        )
        overlap = self._problem.costs.overlaps
        return [float(time) for time in self._trials.makespans(candidates, overlap=overlap)]

    def to_units(self, seconds: float) -> int:
        """Return a time as a whole number of the units of `relaxed`, rounded down."""
        top, below = seconds.as_integer_ratio()
        return top * self._scale // below

    def to_time(self, units: int) -> float:
        """Return units of `relaxed` in the unit of the problem's times."""
        return units / self._scale


def _parts(sums: Sequence[int], shares: Sequence[float] | None) -> tuple[list[int], list[int]]:
    """Divide the prefix sums of backwards into those of input and of weight gradients."""
    if shares is None:
        return list(sums), [0] * len(sums)
    weights = [0]
    for layer, share in enumerate(shares):
        top, below = share.as_integer_ratio()
        weights.append((sums[layer + 1] - sums[layer]) * top // below)
    of_weights = list(accumulate(weights))
    return [whole - weight for whole, weight in zip(sums, of_weights, strict=True)], of_weights
