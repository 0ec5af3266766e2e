"""`place_sharing`: durations on a schedule whose partitions slow each other down.

Partitions that work side by side on a CPU share its caches, its memory and one interpreter. So an
action proceeds faster while its neighbours wait, and has no single duration: each has two, one for
a partition that works alone and one for all of them doing the same. The two tell how hard an action
presses on the shared resources. With pressure p it takes 1 + p * sum(q) times as long as alone
while actions of pressures q run. Between two times at which an action starts or ends every action
proceeds at one speed::

    alone: 2 seconds; side by side: 3      partition 0  0000111111
                                           partition 1  ....0000001111
    seconds                                             0   2     5   7
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from gpipebal.schedule import Order, Schedule
from gpipebal.schedule.actions import F
from gpipebal.simulator.durations import Durations
from gpipebal.simulator.place import place
from gpipebal.simulator.work import Work, work_of
from gpipebal.timeline import EventTable, Timeline

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["place_sharing"]

#: An action with less than this share of its work left is done.
DONE = 1e-9


def place_sharing(
    schedule: Schedule | Order,
    durations: Durations,
    alone: Durations,
    side_by_side: int,
    *,
    pause: float | None = None,
) -> Timeline:
    """Start every action as early as its order and its needs allow, at speeds that change.

    Args:
        schedule: Order of the actions of each partition, each on a device of its own.
        durations: Seconds of each partition's actions while `side_by_side` partitions do the same.
        alone: The same while no other partition works.
        side_by_side: Two or more.
        pause: As for `place`.

    Returns:
        A Timeline as from `place`.

    Raises:
        BalanceError: as from `place`.
        ProfileError: as from `place`.

    Complexity:
        O(n k) for n actions on k partitions.

    Example:
        >>> from gpipebal.schedule import gpipe_schedule
        >>> together = Durations((3.0, 3.0), (0.0, 0.0), (0.0, 0.0))
        >>> alone = Durations((2.0, 2.0), (0.0, 0.0), (0.0, 0.0))
        >>> timeline = place_sharing(gpipe_schedule(2, 2, "never"), together, alone, 2)
        >>> timeline.makespan
        7.0
    """
    # A schedule that can never finish is refused there, and all times are checked.
    longest = place(schedule, durations, pause=pause)
    order = Order.of(schedule) if isinstance(schedule, Schedule) else schedule
    works = [
        work_of(order, times, late=False, overlap=True, check=False) for times in (durations, alone)
    ]
    assert works[0] is not None and works[1] is not None
    starts, ends = _run(works[0], works[1].duration, side_by_side, pause)
    table = EventTable(order.partitions, order.kinds, order.micro_batches, starts, ends)
    said = {**longest.provenance, "side_by_side": side_by_side}
    return Timeline(table, order.n_partitions, "simulated", said)


def _run(
    work: Work, alone: NDArray[np.float64], side_by_side: int, pause: float | None
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return when each action starts and ends."""
    order = work.order
    n = order.n_actions
    base = alone[:n].tolist()
    longer = np.maximum(0.0, work.duration[:n] - alone[:n])
    squares = np.divide(longer, alone[:n], out=np.zeros(n), where=alone[:n] > 0)
    pressures = np.sqrt(squares / (side_by_side - 1)).tolist()
    need, kinds = work.need.tolist(), order.kinds.tolist()
    forwards_left = kinds.count(F)
    position, last = order.offsets[:-1].tolist(), order.offsets[1:].tolist()
    starts, ends = np.zeros(n), np.zeros(n)
    done = [False] * n + [True, False]  # `nothing` has ended, `never` has not
    # Share of the action at work that is still to do, by partition.
    left: dict[int, float] = {}
    now, barrier = 0.0, 0.0
    while True:
        for j, k in enumerate(position):
            if j in left or k == last[j] or not done[need[k]]:
                continue
            if pause is not None and kinds[k] != F and (forwards_left or now < barrier):
                continue
            left[j] = 1.0
            starts[k] = now
        if not left:
            if now >= barrier:
                return starts, ends
            now = barrier
            continue
        whole = sum(pressures[position[j]] for j in left)
        seconds = {}
        for j in left:
            k = position[j]
            seconds[j] = base[k] * (1.0 + pressures[k] * (whole - pressures[k]))
        step = min(share * seconds[j] for j, share in left.items())
        now += step
        for j in list(left):
            left[j] -= step / seconds[j] if seconds[j] else 1.0
            if left[j] > DONE:
                continue
            k = position[j]
            ends[k] = now
            done[k] = True
            position[j] += 1
            del left[j]
            if kinds[k] == F:
                forwards_left -= 1
                if not forwards_left and pause is not None:
                    barrier = now + pause
