"""The failures of one mini-batch, and which of them the caller gets to see."""

from __future__ import annotations

import threading
from contextlib import suppress

from gpipebal.pipeline.workers.activity import where
from gpipebal.schedule import Action, Schedule
from gpipebal.simulator import Durations, place

__all__ = ["Failures"]


class Failures:
    """What went wrong in the workers of one mini-batch."""

    def __init__(self) -> None:
        self._failures: list[tuple[Action, BaseException]] = []
        self._adding = threading.Lock()

    def __bool__(self) -> bool:
        return bool(self._failures)

    def add(self, action: Action, error: BaseException) -> None:
        """Keep what an action raised."""
        _note(error, where(action))
        with self._adding:
            self._failures.append((action, error))

    def take_first(self, schedule: Schedule) -> BaseException:
        """Return the failure that comes first in schedule order, with notes of the others."""
        places = _places_in(schedule)
        failures = sorted(self._failures, key=lambda failure: places[failure[0]])
        error = failures[0][1]
        for action, other in failures[1:]:
            _note(error, f"also failed: {where(action)}: {_described(other)}")
        self._failures = []
        return error


def _note(error: BaseException, text: str) -> None:
    # The exception's own class may refuse a note: then it arrives without one.
    with suppress(Exception):
        error.add_note(text)


def _described(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:
        return f"{type(error).__name__}, whose text cannot be read"


def _places_in(schedule: Schedule) -> dict[tuple[int, str, int], tuple[float, int]]:
    """Give every action its place in the schedule: when it would run if each took one cycle.

    Among actions of one cycle the forwards of earlier partitions come first, the backwards of
    later ones.
    """
    ones = (1.0,) * schedule.n_partitions
    return {
        (j, kind, i): (start, j if kind == "F" else schedule.n_partitions - 1 - j)
        for j, kind, i, start, _ in place(schedule, Durations(ones, ones, ones)).events
    }
