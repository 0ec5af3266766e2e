"""Engines: three ways to the same times.

All start an action as soon as its device is free and what it needs has arrived. `run_rounds` looks
at the next action of all devices at once, round after round: as many rounds as actions follow one
another on the longest path, each a few operations of numpy. With few devices such a round would be
mostly overhead: `run_rows` goes through one row until it has to wait. `run_host` also has the host
launch every action, one at a time, the device that asked first being served first.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from typing import TYPE_CHECKING

import numpy as np

from gpipebal.simulator.work import Work

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Ints = NDArray[np.integer]
    Floats = NDArray[np.float64]

__all__ = ["Times", "run"]

#: With this many devices or more a round costs less than its actions one by one.
FEWEST_FOR_ROUNDS = 24


class Times:
    """When every action starts and ends, as far as known; infinity: not known.

    Attributes:
        starts: Start of each action.
        ends: End of each action.
        arrivals: When its result is where it is needed: its end, or the end of its transfer, or
            when the device has copied it.
        launch_starts: When the host begins to launch it; None: no host.
        launch_ends: When the host has launched it.
    """

    def __init__(self, work: Work) -> None:
        size = work.never + 1
        self.starts = np.full(size, math.inf)
        self.ends = np.full(size, math.inf)
        self.ends[work.nothing] = 0.0
        alike = work.send is None and work.tail is None
        self.arrivals = self.ends if alike else self.ends.copy()
        hosted = work.launch is not None
        self.launch_starts = np.full(size, math.inf) if hosted else None
        self.launch_ends = self.ends.copy() if hosted else None
        self.link_clocks = np.zeros(2 * work.order.n_partitions)


def run(work: Work, times: Times, first: Ints, last: Ints, start: float) -> bool:
    """Place one stretch of every row; actions outside that it needs must have been placed.

    Args:
        work: The actions.
        times: Where their times are written.
        first: First action of each device.
        last: One past the last action of each device.
        start: Seconds before which nothing starts.

    Returns:
        Whether all could be placed.
    """
    if work.launch is not None:
        return _run_host(work, times, first, last, start)
    if work.order.n_devices >= FEWEST_FOR_ROUNDS:
        return _run_rounds(work, times, first, last, start)
    return _run_rows(work, times, first, last, start)


def _run_rounds(work: Work, times: Times, first: Ints, last: Ints, start: float) -> bool:
    """Place the next action of every device that can go on, until none can."""
    position = first.astype(np.int64)
    clock = np.full(len(position), start)
    need, duration, lead, tail, send = work.need, work.duration, work.lead, work.tail, work.send
    starts, ends, arrivals = times.starts, times.ends, times.arrivals
    never = work.never
    while True:
        # A device at its end waits for `never`; so nothing below asks which devices are done.
        now = np.where(position < last, position, never)
        begin = np.maximum(clock, arrivals[need[now]])
        if lead is not None:
            begin += lead[now]
        end = begin + duration[now]
        placed = end < math.inf
        if not placed.any():
            return bool((position == last).all())
        # Actions that are not placed are written too: as infinity, which is right.
        starts[now] = begin
        ends[now] = end
        if tail is not None:
            arrivals[now] = end = end + tail[now]
        if send is not None and work.link is not None:
            sent = placed & (send[now] > 0)
            arrivals[now] = end
            who = now[sent]
            link = work.link[who]
            times.link_clocks[link] = arrivals[who] = (
                np.maximum(times.link_clocks[link], end[sent]) + send[who]
            )
        clock = np.where(placed, end, clock)
        position += placed


def _run_rows(work: Work, times: Times, first: Ints, last: Ints, start: float) -> bool:
    """Place row by row, each until it needs an action that has no times yet, which wakes it."""
    need, duration = work.need.tolist(), work.duration.tolist()
    lead = None if work.lead is None else work.lead.tolist()
    tail = None if work.tail is None else work.tail.tolist()
    send = None if work.send is None else work.send.tolist()
    link = None if work.link is None else work.link.tolist()
    starts, ends = times.starts.tolist(), times.ends.tolist()
    arrivals = ends if times.arrivals is times.ends else times.arrivals.tolist()
    link_clocks = times.link_clocks.tolist()
    position, stop = first.tolist(), last.tolist()
    clocks = [start] * len(position)
    waiting: dict[int, list[int]] = {}
    ready = deque(range(len(position)))
    while ready:
        d = ready.popleft()  # d: device
        now, clock = position[d], clocks[d]
        while now < stop[d]:
            arrival = arrivals[need[now]]
            if arrival == math.inf:
                waiting.setdefault(need[now], []).append(d)
                break
            begin = max(clock, arrival)
            if lead is not None:
                begin += lead[now]
            starts[now] = begin
            ends[now] = clock = begin + duration[now]
            if tail is not None:
                arrivals[now] = clock = clock + tail[now]
            if send is not None and link is not None:
                arrivals[now] = clock
                if send[now] > 0:
                    on = link[now]
                    link_clocks[on] = arrivals[now] = max(link_clocks[on], clock) + send[now]
            if now in waiting:
                ready.extend(waiting.pop(now))
            now += 1
        position[d], clocks[d] = now, clock
    times.starts[:], times.ends[:], times.arrivals[:] = starts, ends, arrivals
    times.link_clocks[:] = link_clocks
    return position == stop


def _run_host(work: Work, times: Times, first: Ints, last: Ints, start: float) -> bool:
    """Place in the order in which the host launches: always the action that was ready first.

    A worker may ask the host for its next action when its last one is launched, and when what
    that needs is launched: a device waits for data by itself. The device may begin when the host
    begins, and cannot end before the host has.
    """
    assert work.launch is not None
    assert times.launch_starts is not None and times.launch_ends is not None
    need, duration, launch = work.need.tolist(), work.duration.tolist(), work.launch.tolist()
    launch_starts, launch_ends = times.launch_starts.tolist(), times.launch_ends.tolist()
    starts, ends, arrivals = times.starts.tolist(), times.ends.tolist(), times.arrivals.tolist()
    position, stop = first.tolist(), last.tolist()
    asked = [start] * len(position)
    clocks = [start] * len(position)
    host = start
    waiting: dict[int, list[int]] = {}
    queue: list[tuple[float, int]] = []

    def ask(d: int) -> None:
        """Queue the next action of a device, or let it wait for what the action needs."""
        now = position[d]
        if now == stop[d]:
            return
        known = launch_ends[need[now]]
        if known == math.inf:
            waiting.setdefault(need[now], []).append(d)
        else:
            heapq.heappush(queue, (max(asked[d], known), d))

    for d in range(len(position)):
        ask(d)
    while queue:
        wish, d = heapq.heappop(queue)
        now = position[d]
        launch_starts[now] = begin = max(host, wish)
        launch_ends[now] = asked[d] = host = begin + launch[now]
        begin = max(begin, clocks[d], arrivals[need[now]])
        if work.lead is not None:
            begin += float(work.lead[now])
        starts[now] = begin
        ends[now] = clocks[d] = max(begin + duration[now], host)
        if work.tail is not None:
            clocks[d] += float(work.tail[now])
        arrivals[now] = clocks[d]
        if work.send is not None and work.link is not None and work.send[now] > 0:
            on = int(work.link[now])
            moved = max(float(times.link_clocks[on]), clocks[d]) + float(work.send[now])
            times.link_clocks[on] = arrivals[now] = moved
        position[d] = now + 1
        ask(d)
        for other in waiting.pop(now, ()):
            ask(other)
    times.starts[:], times.ends[:], times.arrivals[:] = starts, ends, arrivals
    times.launch_starts[:], times.launch_ends[:] = launch_starts, launch_ends
    return position == stop
