"""Trials: many durations on one order, all at the same time.

Which action needs which does not depend on how long actions take. So an order is sorted once, into
levels: actions on a level need only actions on lower ones. Then all candidates go through it
together, level by level, one column of numbers for each. A search that tries a hundred splits pays
for the overhead of one.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from gpipebal.errors import BalanceError
from gpipebal.schedule import Order
from gpipebal.schedule.actions import IN, KINDS, B, F, R, W
from gpipebal.simulator.durations import Durations
from gpipebal.simulator.engines import Times, run
from gpipebal.simulator.work import work_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Ints = NDArray[np.int64]
    Floats = NDArray[np.float64]

__all__ = ["Candidates", "Trials"]

#: The recompute of the last micro-batch, as one more kind after those in `KINDS`.
LAST_R = len(KINDS)
#: Numbers that are held at a time, 8 bytes each.
MOST_NUMBERS = 2**22


@dataclass(frozen=True)
class Candidates:
    """Seconds of every partition for one micro-batch, one row per candidate.

    Attributes:
        forward: Seconds of each partition's forward.
        recompute: Seconds of each partition's recompute.
        backward: Seconds of each partition's backward.
        weight_gradient: The part of the backward that no partition waits for; None: half of it.
        forward_transfer: Seconds to bring a micro-batch into each partition from the one before;
            the first column is ignored. None: no time.
        backward_transfer: Seconds to bring a gradient into each partition from the one after; the
            last column is ignored. None: no time.
        last_recompute: Seconds of each partition's recompute of the last micro-batch; None: as of
            the others.
    """

    forward: Floats
    recompute: Floats
    backward: Floats
    weight_gradient: Floats | None = None
    forward_transfer: Floats | None = None
    backward_transfer: Floats | None = None
    last_recompute: Floats | None = None

    def pick(self, which: slice) -> Candidates:
        """Return some of the candidates."""
        return Candidates(
            *(None if column is None else column[which] for column in vars(self).values())  # type: ignore[arg-type]  # the first three are never None
        )


class Trials:
    """An order of actions on which many durations are tried.

    Args:
        order: An order from `gpipebal.schedule.order_of`.

    Raises:
        BalanceError: the order can never finish.

    Complexity:
        O(n) for n actions, in numpy if there are many devices.

    Example:
        >>> from gpipebal.schedule import order_of
        >>> trials = Trials(order_of("1f1b", 2, 3))
        >>> forward = np.array([[1.0, 1.0], [0.5, 1.5]])
        >>> trials.makespans(Candidates(forward, forward, 2 * forward)).tolist()
        [12.0, 15.0]
    """

    def __init__(self, order: Order) -> None:
        self.order = order
        n, n_partitions = order.n_actions, order.n_partitions
        work = work_of(order, _ones(n_partitions), late=False, overlap=True, check=False)
        times = None if work is None else Times(work)
        rows = order.offsets
        if work is None or times is None or not run(work, times, rows[:-1], rows[1:], 0.0):
            raise BalanceError(
                f"schedule can never finish: schedule={order.name!r} (expected every action after "
                "what it needs).\nFix: take an order of order_of."
            )
        # Every action takes one second: so it ends on its level.
        levels = times.ends[:n].astype(np.int64)
        sequence = np.argsort(levels, kind="stable")
        place = np.empty(n + 2, dtype=np.int64)
        place[sequence] = np.arange(n)
        place[n:] = n  # what stands for no action
        before = np.arange(-1, n - 1)
        before[rows[:-1][np.diff(rows) > 0]] = n
        self._before = place[before[sequence]]
        self._need = place[work.need[:n][sequence]]
        counts = np.bincount(levels)[1:]
        self._groups = list(pairwise(np.concatenate(([0], np.cumsum(counts))).tolist()))
        kinds = order.kinds.astype(np.int64)
        kinds[(kinds == R) & (order.micro_batches == order.micro_batches.max())] = LAST_R
        cell = kinds * n_partitions + order.partitions
        self._cells = cell[sequence]
        # The transfer before on the same link: same partition, same direction.
        self._sent_before = place[_last_alike(order)[sequence]]

    def makespans(self, candidates: Candidates, *, overlap: bool = True) -> Floats:
        """Place the durations of every candidate; return one makespan for each.

        Args:
            candidates: Seconds of the partitions.
            overlap: Whether transfers overlap with the devices' work; see
                `gpipebal.simulator.place`.

        Complexity:
            O(n c) for n actions and c candidates, in as many steps of numpy as there are levels.
        """
        n_candidates = len(candidates.forward)
        at_once = max(1, MOST_NUMBERS // (self.order.n_actions + 1))
        found = [
            self._makespans(candidates.pick(slice(first, first + at_once)), overlap)
            for first in range(0, n_candidates, at_once)
        ]
        return np.concatenate(found) if found else np.empty(0)

    def _makespans(self, candidates: Candidates, overlap: bool) -> Floats:
        table = _table(candidates)
        leaving, entering = _transfers(self.order, candidates)
        ends = np.zeros((self.order.n_actions + 1, table.shape[1]))
        if leaving is None or entering is None:
            for low, high in self._groups:
                begin = np.maximum(ends[self._before[low:high]], ends[self._need[low:high]])
                np.add(begin, table[self._cells[low:high]], out=ends[low:high])
            return np.asarray(ends.max(axis=0))
        arrivals = np.zeros_like(ends)
        # Where copies keep the device busy, it is free only when they are done.
        free = ends if overlap else arrivals
        for low, high in self._groups:
            cells = self._cells[low:high]
            begin = np.maximum(free[self._before[low:high]], arrivals[self._need[low:high]])
            if not overlap:
                begin += entering[cells]
            np.add(begin, table[cells], out=ends[low:high])
            sent = ends[low:high]
            if overlap:
                # An action that sends nothing waits for no link.
                queue = arrivals[self._sent_before[low:high]]
                sent = np.where(leaving[cells] > 0, np.maximum(sent, queue), sent)
            np.add(sent, leaving[cells], out=arrivals[low:high])
        return np.asarray((ends if overlap else arrivals).max(axis=0))


def _ones(n_partitions: int) -> Durations:
    ones = (1.0,) * n_partitions
    return Durations(ones, ones, ones, input_gradient=ones, weight_gradient=ones)


def _last_alike(order: Order) -> Ints:
    """Return for each action the last one before it that sends over the same link."""
    n = order.n_actions
    link = 2 * order.partitions.astype(np.int64) + (order.kinds == F)
    sends = (order.kinds == F) | (order.kinds == B) | (order.kinds == IN)
    which = np.flatnonzero(sends)
    by_link = which[np.argsort(link[which], kind="stable")]
    last = np.full(n, n, dtype=np.int64)
    same = link[by_link[1:]] == link[by_link[:-1]]
    last[by_link[1:][same]] = by_link[:-1][same]
    return last


def _table(candidates: Candidates) -> Floats:
    """Return the seconds of every kind and partition, one column per candidate."""
    backward = candidates.backward
    weights = backward / 2 if candidates.weight_gradient is None else candidates.weight_gradient
    recompute, last = candidates.recompute, candidates.last_recompute
    columns = {
        F: candidates.forward,
        R: recompute,
        LAST_R: recompute if last is None else last,
        B: backward,
        IN: np.maximum(0.0, backward - weights),
        W: weights,
    }
    return np.concatenate([columns[kind].T for kind in range(len(columns))])


def _transfers(order: Order, candidates: Candidates) -> tuple[Floats | None, Floats | None]:
    """Return the seconds that actions send and receive, in the form of `_table`."""
    forward, backward = candidates.forward_transfer, candidates.backward_transfer
    if forward is None and backward is None:
        return None, None
    into = np.zeros((len(KINDS) + 1, order.n_partitions, len(candidates.forward)))
    out = np.zeros_like(into)
    elsewhere = (order.devices[1:] != order.devices[:-1])[:, None]
    if forward is not None:
        into[F, 1:] = out[F, :-1] = np.where(elsewhere, forward[:, 1:].T, 0.0)
    if backward is not None:
        for kind in (B, IN):
            into[kind, :-1] = out[kind, 1:] = np.where(elsewhere, backward[:, :-1].T, 0.0)
    return out.reshape(-1, out.shape[-1]), into.reshape(-1, out.shape[-1])
