"""Profiles that repeat for a moment, for tests and for the processes that they start."""

from __future__ import annotations

from gpipebal.profiler import conduct
from gpipebal.profiler.trial import trial

__all__ = ["make_brief"]


def make_brief() -> None:
    """Let a profile without a timeout, and every trial, repeat for a moment and not for seconds.

    They do all that they do, but as often as nobody is waiting for: no test asserts a time.
    """
    conduct.LEAST_SECONDS = conduct.LEAST_TRIAL_SECONDS = 0.05
    conduct.MANY_STEPS = 1
    trial.OVERHEAD_ROUNDS = trial.TURN_STEPS = 1
