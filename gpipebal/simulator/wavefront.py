"""Waves: all cells that can run at the same time are placed at once.

With GPipe the forward of micro-batch i in partition j needs (i - 1, j) and (i, j - 1): cells on one
diagonal of the grid need only the diagonal before. Backwards are the same from the other corner::

    # diagonal of each forward, 3 partitions, 4 micro-batches
    # partition 0  0 1 2 3
    # partition 1  1 2 3 4
    # partition 2  2 3 4 5

So m + n - 1 steps of numpy, each on at most n numbers, place m n forwards. They add and compare the
same numbers as the other engines, so times are equal to the last bit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from gpipebal.schedule import Order
from gpipebal.simulator.durations import Durations, too_large

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

__all__ = ["can_sweep", "sweep"]

#: Orders of all forwards, then all backwards, and which backward is that of the last micro-batch.
_SPARED = {"gpipe": "first", "gpipe_in_order": "last"}

#: With fewer partitions other engines are as fast; with a thousand they take three times as long.
FEWEST_FOR_WAVES = 64


def can_sweep(order: Order, durations: Durations) -> bool:
    """Whether the order is GPipe's, and nothing but the devices takes time.

    In addition, no action's time may depend on the one before it, and waves have to be long enough.

    Args:
        order: The actions.
        durations: Seconds of each partition.
    """
    more = durations.has_transfers or durations.has_launches or durations.optimizer is not None
    more = more or durations.has_turns
    known = order.modes is not None and order.name in _SPARED
    return known and not more and order.n_partitions >= FEWEST_FOR_WAVES


def sweep(order: Order, durations: Durations, pause: float | None) -> tuple[Floats, Floats]:
    """Place all actions of GPipe's order.

    Args:
        order: An order of `order_of`, for which `can_sweep`.
        durations: Seconds of each partition.
        pause: Seconds between the last forward and the first recompute or backward; None: none.

    Returns:
        Start and end of every action, in the order of the rows.

    Raises:
        ProfileError: times that are too large to be added.

    Complexity:
        O(m n) for m micro-batches and n partitions, in 2 (m + n) steps of numpy.
    """
    with np.errstate(over="ignore"):
        starts, ends, clock = _sweep(order, durations, pause)
    if not np.isfinite(clock).all():
        raise too_large()
    return starts, ends


def _sweep(
    order: Order, durations: Durations, pause: float | None
) -> tuple[Floats, Floats, Floats]:
    """Return start and end of every action, and when each partition is done."""
    assert order.modes is not None
    n, m = order.n_partitions, int(order.micro_batches.max()) + 1
    starts, ends = np.empty(order.n_actions), np.empty(order.n_actions)
    j = np.arange(n)  # j: partition
    first = order.offsets[:-1]
    recomputes = np.array([mode != "never" for mode in order.modes])
    spares = np.array([mode == "except_last" for mode in order.modes])
    times = durations.forward, durations.recompute, durations.backward
    forward, recompute, backward = (np.array(each, dtype=np.float64) for each in times)
    again = np.where(recomputes, durations.times_of("no_grad_forward"), forward)

    # clock[j]: when partition j is done with what it has been given so far.
    clock = np.zeros(n)
    for diagonal in range(m + n - 1):
        low, high = max(0, diagonal - m + 1), min(n, diagonal + 1)
        begin = clock[low:high].copy()
        left = max(low, 1)
        np.maximum(begin[left - low :], clock[left - 1 : high - 1], out=begin[left - low :])
        end = begin + again[low:high]
        if low == diagonal - m + 1 and spares[low]:
            # The last micro-batch is the one that except_last spares.
            end[0] = begin[0] + forward[low]
        where = first[low:high] + (diagonal - j[low:high])
        starts[where], ends[where] = begin, end
        clock[low:high] = end
    if pause is not None:
        clock[:] = clock.max() + pause

    # k counts the backwards of a partition; the spared one is the first or the last of them.
    spared = 0 if _SPARED[order.name] == "first" else m - 1
    done = np.zeros(n)
    for diagonal in range(m + n - 1):
        # Partition n - 1 is at k = diagonal, the one before it at one less, and so on.
        low, high = max(0, n - 1 - diagonal), min(n, n - 1 - diagonal + m)
        here = j[low:high]
        k = diagonal - (n - 1 - here)
        redone = recomputes[low:high] & ~(spares[low:high] & (k == spared))
        begin = clock[low:high]
        ready = np.where(redone, begin + recompute[low:high], begin)
        before = k * (1 + recomputes[low:high]) - (spares[low:high] & (k > spared))
        where = first[low:high] + m + before + redone
        if redone.any():
            starts[where[redone] - 1], ends[where[redone] - 1] = begin[redone], ready[redone]
        right = min(high, n - 1)
        np.maximum(ready[: right - low], done[low + 1 : right + 1], out=ready[: right - low])
        end = ready + backward[low:high]
        starts[where], ends[where] = ready, end
        clock[low:high] = done[low:high] = end
    return starts, ends, clock
