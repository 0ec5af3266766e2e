"""How a measurement is carried out: where, with what beside it, and for how long."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass

import torch

from gpipebal.profiler.trial.trial import LEAST_TRIAL_SECONDS

__all__ = ["Conduct"]

#: Training steps that a profile costs by default, with all that comes before the repeats.
DEFAULT_STEPS = 10
#: How many of them are for the trial as a pipeline; and which part of a timeout it has in addition.
TRIAL_STEPS, TRIAL_PART = 4, 0.5
#: Without a timeout: least and most seconds for the repeats, where steps are short or long.
LEAST_SECONDS = 2.0
MOST_SECONDS = 60.0
#: Where steps are short, the trial has this many, up to these seconds, which all can wait for.
MANY_STEPS, FEW_SECONDS = 50, 10.0


@dataclass(frozen=True)
class Conduct:
    """How a measurement is carried out; see the arguments of `profile_model`."""

    where: torch.device
    _: KW_ONLY
    rows: int | Sequence[int] | None
    n_partitions: int
    side_by_side: int
    n_threads: int
    alone: bool
    share: bool
    as_pipeline: bool
    limit: float | None
    progress: bool | None

    @property
    def on_cpu(self) -> bool:
        """Whether partitions share the cores of one machine."""
        return self.where.type == "cpu"

    @property
    def tries(self) -> bool:
        """Whether the layers run as a pipeline in the end."""
        return self.on_cpu and self.as_pipeline and not self.alone

    def seconds_left(self, started: float, step_seconds: float, parts: int) -> float:
        """Return the seconds left for the rounds: at least half of all, or too few are measured.

        Args:
            started: When the work began, in seconds of `time.perf_counter`.
            step_seconds: Seconds of a training step, or of the part of it whose rounds come now.
            parts: How many such parts there are.
        """
        if self.limit is None:
            n_steps = DEFAULT_STEPS - (TRIAL_STEPS if self.tries else 0)
            seconds = _within(n_steps * step_seconds, LEAST_SECONDS / parts, MOST_SECONDS / parts)
        else:
            seconds = self.limit / parts
        spent = 0.0 if self.alone else time.perf_counter() - started
        return max(seconds / 2, seconds - spent)

    def seconds_to_try(self, step_seconds: float) -> float:
        """Return the seconds for the trial.

        Args:
            step_seconds: Seconds of a training step.
        """
        if self.limit is not None:
            return TRIAL_PART * self.limit
        least = _within(MANY_STEPS * step_seconds, LEAST_TRIAL_SECONDS, FEW_SECONDS)
        return _within(TRIAL_STEPS * step_seconds, least, TRIAL_PART * MOST_SECONDS)


def _within(seconds: float, least: float, most: float) -> float:
    return min(most, max(least, seconds))
