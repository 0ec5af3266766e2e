"""A partition that is faster than its neighbour waits for it, and little is on its way."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import closing
from functools import partial
from math import inf
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from gpipebal import GPipe
from gpipebal.errors import PipelineTimeoutError
from gpipebal.pipeline import measure_memory
from gpipebal.pipeline.workers.inbox import Inbox, InboxClosedError, Stop
from gpipebal.schedule import (
    CHECKPOINT_MODES,
    MOST_WAITING,
    SCHEDULES,
    Action,
    Schedule,
    make_schedule,
)
from gpipebal.simulator import Durations, place
from gpipebal.skip import pop, skippable, stash

CHUNKS = 12
#: Two outputs wait, and one was taken a moment ago.
FEW = 3


class Log:
    """When cells begin, in the order of all threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.begun: list[tuple[str, int]] = []

    def add(self, kind: str, j: int) -> None:
        """Note that a cell of a partition begins."""
        with self._lock:
            self.begun.append((kind, j))

    def most_ahead(self, kind: str, j: int, other: int) -> int:
        """Return by how many cells partition `j` was ahead of another one, at most."""
        ahead = most = 0
        for each, partition in self.begun:
            if each == kind:
                ahead += (partition == j) - (partition == other)
                most = max(most, ahead)
        return most


class Timed(torch.autograd.Function):
    """The identity, which takes its time."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: Stage) -> Tensor:
        """Take the time of a forward."""
        ctx.layer = layer
        layer.work("F")
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        """Take the time of a backward."""
        ctx.layer.work("B")
        return gradient.clone(), None


class Stage(nn.Module):
    """A layer that is a partition: it notes when it begins, and takes some seconds."""

    def __init__(self, log: Log, j: int, seconds: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.log, self.j, self.seconds = log, j, seconds

    def work(self, kind: str) -> None:
        """Begin a forward or a backward."""
        self.log.add(kind, self.j)
        time.sleep(self.seconds)

    def forward(self, x: Tensor) -> Tensor:
        """Scale the input."""
        scaled: Tensor = Timed.apply(x * self.weight, self)
        return scaled


def chain(*seconds: float) -> tuple[nn.Sequential, Log]:
    """Make a chain of one layer for each partition, with their seconds."""
    log = Log()
    return nn.Sequential(*(Stage(log, j, each) for j, each in enumerate(seconds))), log


@pytest.mark.parametrize("schedule", [None, *SCHEDULES])
@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_a_faster_partition_is_little_ahead(schedule: Any, checkpoint: Any) -> None:
    """The first one in the forward, the last one in the backward: the middle one is slow."""
    model, log = chain(0.0, 0.004, 0.0)
    x = torch.ones(CHUNKS, 1, requires_grad=True)
    with closing(GPipe(model, [1, 1, 1], chunks=CHUNKS, checkpoint=checkpoint)) as pipe:
        if schedule is None:
            pipe(x).sum().backward()
        else:
            target, loss_fn = torch.zeros(CHUNKS, 1), nn.functional.mse_loss
            pipe.step(x, target=target, loss_fn=loss_fn, schedule=schedule)
    forwards = [cell for cell in log.begun if cell == ("F", 1)]
    assert len(forwards) == CHUNKS * (1 if checkpoint == "never" else 2)
    if checkpoint == "never":  # recomputes look like forwards
        assert log.most_ahead("F", 0, 1) <= FEW
    assert log.most_ahead("B", 2, 1) <= FEW


def test_without_gradients_no_more_waits_either() -> None:
    """However many micro-batches go through a pipeline that only evaluates."""
    model, log = chain(0.0, 0.002)
    with closing(GPipe(model.eval(), [1, 1], chunks=40)) as pipe, torch.no_grad():
        pipe(torch.ones(40, 1))
    assert 1 <= log.most_ahead("F", 0, 1) <= FEW


def test_what_waits_needs_little_memory() -> None:
    """Of a hundred outputs a few exist at once in the partition that makes them."""

    class Widen(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.expand(-1, 1024).clone()

    class Narrow(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            time.sleep(0.001)
            return x.sum(1, keepdim=True)

    pipe = GPipe(nn.Sequential(Widen(), Narrow()), [1, 1], chunks=100)
    with torch.no_grad(), measure_memory(pipe) as meter:
        pipe(torch.ones(100, 1))
    pipe.close()
    one = 1024 * 4
    # The input, outputs that wait, and one that is being made, with what makes it.
    assert meter.peak_bytes[0] <= 100 * 4 + (FEW + 1) * one


@skippable(stash=["far"])
class Stash(nn.Module):
    """Stashes its input."""

    def forward(self, x: Tensor) -> Any:
        """Hand the input on, too."""
        yield stash("far", x * 2)
        return x + 1


@skippable(pop=["far"])
class Pop(nn.Module):
    """Adds what was stashed."""

    def forward(self, x: Tensor) -> Any:
        """Take its time: skips wait meanwhile."""
        far = yield pop("far")
        time.sleep(0.002)
        return x + far


def test_skips_that_wait_keep_nobody_from_going_on() -> None:
    """They go past partitions in between, and so more of them wait than of outputs."""
    log = Log()
    model = nn.Sequential(Stash(), *(Stage(log, j, 0.0) for j in range(1, 5)), Pop())
    x = torch.rand(CHUNKS, 2, requires_grad=True)
    expected = torch.autograd.grad((3 * x + 1).sum(), x)
    with closing(GPipe(model, [1] * 6, chunks=CHUNKS, timeout=60.0)) as pipe:
        y = pipe(x)
        torch.testing.assert_close(y, 3 * x + 1)
        torch.testing.assert_close(torch.autograd.grad(y.sum(), x), expected)


class Fails(nn.Module):
    """Raises in its second micro-batch, when those before it wait for it."""

    def __init__(self, fail: Callable[[], object]) -> None:
        super().__init__()
        self.fail, self.n_calls = fail, 0

    def forward(self, x: Tensor) -> Tensor:
        """Raise, after some time."""
        self.n_calls += 1
        if self.n_calls == 2:
            time.sleep(0.1)
            self.fail()
        return x * 2


def test_a_partition_that_waits_for_room_is_told_of_a_failure() -> None:
    """It stops, and the pipeline can be used again."""

    def fail() -> None:
        raise ValueError("second one")

    log = Log()
    model = nn.Sequential(Stage(log, 0, 0.0), Fails(fail))
    with closing(GPipe(model, [1, 1], chunks=CHUNKS, timeout=60.0)) as pipe:
        with pytest.raises(ValueError, match="second one"):
            pipe(torch.ones(CHUNKS, 1))
        assert log.begun.count(("F", 0)) <= 2 + FEW
        assert pipe(torch.ones(CHUNKS, 1)).eq(2).all()


def test_a_partition_that_waits_for_room_does_not_outwait_a_timeout() -> None:
    """Who waits for a layer that hangs is named, with the layer."""
    released = threading.Event()
    log = Log()
    model = nn.Sequential(Stage(log, 0, 0.0), Fails(partial(released.wait, 60.0)))
    pipe = GPipe(model, [1, 1], chunks=CHUNKS, timeout=0.5)
    try:
        with pytest.raises(PipelineTimeoutError) as caught:
            pipe(torch.ones(CHUNKS, 1))
    finally:
        released.set()
    assert "partition 0 waits to start the forward of micro-batch 4" in str(caught.value)
    assert "partition 1 runs the forward of micro-batch 1 in layer '1'" in str(caught.value)


def test_an_inbox_has_room_when_enough_was_taken() -> None:
    """And who waits for room wakes up at a stop."""
    stop = Stop()
    inbox = Inbox(stop)
    for key in range(2):
        inbox.wait_for_room(2)
        inbox.put(key, key)
    went_on = threading.Event()

    def go_on() -> None:
        inbox.wait_for_room(2)
        went_on.set()

    thread = threading.Thread(target=go_on, daemon=True)
    thread.start()
    assert not went_on.wait(0.05)
    assert inbox.take(0) == 0
    assert went_on.wait(10.0)
    inbox.put(2, 2)

    def stop_it() -> None:
        time.sleep(0.05)
        stop.is_set = True
        inbox.wake()

    threading.Thread(target=stop_it, daemon=True).start()
    with pytest.raises(InboxClosedError):
        inbox.wait_for_room(2)


def times_with_room(schedule: Schedule, times: Durations) -> dict[Action, tuple[float, float]]:
    """Start every action as early as its needs allow, and the room for what it makes."""
    seconds = {"F": times.forward, "R": times.recompute, "B": times.backward}
    rows = [list(row) for row in schedule.rows]
    made = {kind: [[a for a in row if a.kind == kind] for row in rows] for kind in "FB"}
    spans: dict[Action, tuple[float, float]] = {}
    clocks = [0.0] * len(rows)
    ready = True
    while ready:
        ready = False
        for j, row in enumerate(rows):
            while row:
                action = row[0]
                kind, step = action.kind, -1 if action.kind == "B" else 1
                starts = [clocks[j]]
                if kind != "R" and 0 <= j - step < len(rows):
                    needs = action._replace(partition=j - step)
                    starts.append(spans.get(needs, (inf, inf))[1])
                if kind != "R" and 0 <= j + step < len(rows):
                    before = made[kind][j].index(action) - MOST_WAITING
                    if before >= 0:
                        taken = made[kind][j + step][before]
                        assert taken.micro_batch == made[kind][j][before].micro_batch
                        starts.append(spans.get(taken, (inf, inf))[0])
                if max(starts) == inf:
                    break
                clocks[j] = max(starts) + seconds[kind][j]
                spans[row.pop(0)] = max(starts), clocks[j]
                ready = True
    assert not any(rows), "they wait in a circle"
    return spans


@settings(deadline=None)
@given(
    st.lists(st.tuples(*[st.integers(1, 20)] * 2), min_size=1, max_size=6),
    st.integers(1, 16),
    st.sampled_from(sorted(SCHEDULES)),
    st.sampled_from(CHECKPOINT_MODES),
)
def test_steady_times_lose_nothing_by_waiting_for_room(
    seconds: list[tuple[int, int]], chunks: int, schedule: str, mode: Any
) -> None:
    """However uneven partitions are, a mini-batch ends when it does without a bound.

    So the simulator, which has none, is right about the makespan. And nobody waits in a circle.
    """
    forward, backward = (tuple(map(float, column)) for column in zip(*seconds, strict=True))
    times = Durations(forward, forward, backward)
    rows = make_schedule(schedule, len(seconds), chunks, mode)
    spans = times_with_room(rows, times)
    assert max(end for _, end in spans.values()) == place(rows, times).makespan
