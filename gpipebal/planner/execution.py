"""How a chain is cut and run, and what else times and memory depend on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from gpipebal.plan import Plan
from gpipebal.problem import Device, Links, to_bounds
from gpipebal.schedule import SCHEDULES, Checkpoint, CheckpointMode
from gpipebal.solvers import Split

__all__ = ["Execution", "Way"]


class Way(NamedTuple):
    """How a chain is cut and run.

    Attributes:
        bounds: First layer of each partition, then the number of layers.
        modes: Checkpoint mode of each partition.
        order: Device of each partition, as an index into the question's devices.
    """

    bounds: Sequence[int]
    modes: Sequence[CheckpointMode]
    order: Sequence[int]

    @classmethod
    def of(cls, plan: Plan) -> Way:
        """Return the way of a plan."""
        return cls(to_bounds(plan.balance), plan.modes, plan.places)

    def split(self, value: float, lower_bound: float, method: str) -> Split:
        """Return it with its value, which a method has found."""
        bounds, modes, order = tuple(self.bounds), tuple(self.modes), tuple(self.order)
        return Split(bounds, value, lower_bound, method, modes, order)


@dataclass(frozen=True)
class Execution:
    """How a mini-batch runs, whatever the split.

    Attributes:
        chunks: Micro-batches.
        checkpoint: Which of them are recomputed: one mode, or one for each partition.
        schedule: Name of the schedule.
        loss_inside: Whether the last partition computes the loss.
        shared_memory: Whether all partitions live in one memory.
        gradients_exist: Whether the parameters have gradients before the step.
        devices: The device of each partition; None: all like the profile's.
        links: The time that handing over takes at each cut; None: none.
    """

    chunks: int
    checkpoint: Checkpoint
    schedule: str = "gpipe"
    loss_inside: bool = False
    shared_memory: bool = False
    gradients_exist: bool = False
    devices: Sequence[Device] | None = None
    links: Links | None = None

    @classmethod
    def of(cls, plan: Plan) -> Execution:
        """Return how a plan is run on devices like the profile's, with links that take no time."""
        return cls(
            plan.chunks,
            plan.checkpoint,
            plan.schedule,
            plan.loss_inside,
            plan.shared_memory,
            plan.gradients_exist,
        )

    @property
    def overlaps(self) -> bool:
        """Whether transfers run at the same time as the devices' work."""
        return self.links is None or self.links.overlaps

    @property
    def is_ours(self) -> bool:
        """Whether `GPipe` runs the schedule; others only torch runs."""
        return self.schedule in SCHEDULES
