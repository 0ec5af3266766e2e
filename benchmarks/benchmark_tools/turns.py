"""Turns: ways of doing the same, timed in turns, so that a slow minute meets all of them alike."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Mapping
from typing import TypeVar

__all__ = ["seconds_in_turns"]

Way = TypeVar("Way")


def seconds_in_turns(
    ways: Mapping[Way, Callable[[], float]], rounds: int
) -> dict[Way, list[float]]:
    """Return the seconds of two steps of each way in each round, in an order that changes.

    The first step of a turn finds cold caches, and does not count.

    Args:
        ways: By name, what does a step and returns its seconds.
        rounds: How often each has a turn.
    """
    found: dict[Way, list[float]] = {way: [] for way in ways}
    shuffler = random.Random(0)
    for _ in range(rounds):
        turns = list(ways)
        shuffler.shuffle(turns)
        for way in turns:
            ways[way]()
            gc.collect()
            found[way] += [ways[way](), ways[way]()]
    return found
