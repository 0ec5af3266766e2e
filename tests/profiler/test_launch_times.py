"""What the host needs to launch a layer: clocked beside an idle device, bounded by the whole chain.

No device is needed: a stand-in notes in which order a clock waits, records and reads the time.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
import torch

from gpipebal.profiler.chain.clock import Clock, host_seconds_of
from gpipebal.profiler.times.settle import settle_launches


@pytest.fixture
def order(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return what a clock of a CUDA device does, in order; the host's time goes on by itself."""
    done: list[str] = []

    class Event:
        def __init__(self, **_: Any) -> None:
            done.append("event")

        def record(self) -> None:
            done.append("record")

    def now() -> float:
        done.append("time")
        return float(len(done))

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: done.append("wait"))
    monkeypatch.setattr(time, "perf_counter", now)
    return done


@pytest.mark.parametrize("from_idle", [False, True])
def test_events_are_no_part_of_what_the_host_needs(order: list[str], from_idle: bool) -> None:
    """The time is read behind the event that begins and before the one that ends."""
    clock = Clock(torch.device("cuda", 0))
    clock.from_idle = from_idle
    span = clock.begin(), clock.end()
    waits = ["wait"] if from_idle else []
    assert order == [*waits, "event", "record", "time", "time", "event", "record"]
    assert host_seconds_of([span, None]) == [1.0, 0.0]


def test_a_cpu_has_one_time_only(order: list[str]) -> None:
    """Where the host does the work, nothing is waited for and no event is recorded."""
    clock = Clock(torch.device("cpu"))
    clock.from_idle = True
    assert (clock.begin(), clock.end()) == (1.0, 2.0)
    assert order == ["time", "time"]


def test_launches_add_up_to_no_more_than_in_one_piece() -> None:
    """A whole chain that took longer had to wait for the device, and tells nothing."""
    layers = [[3e-4, 1e-4], [5e-4, 1e-4], [9e-4, 1e-4]]
    assert settle_launches([], [1.0]) is None
    for whole in ([], [6e-4], [2.0]):
        found = settle_launches(layers, whole)
        assert found is not None
        np.testing.assert_allclose(found, [5e-4, 1e-4])
    less = settle_launches(layers, [4e-4, 3e-4, 8e-4])
    assert less is not None
    np.testing.assert_allclose(less.sum(), 4e-4)
    assert 0 < less[1] < less[0]
