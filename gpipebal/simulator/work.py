"""Work: an order with durations, as columns of numbers that the engines run through."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from gpipebal.schedule import Order
from gpipebal.schedule.actions import IN, KINDS, B, F, R, W
from gpipebal.simulator.durations import Durations, too_large

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Ints = NDArray[np.integer]
    Floats = NDArray[np.float64]
    Flags = NDArray[np.bool_]

__all__ = ["Work", "work_of"]

#: Rows of the table of durations, by their names in `Durations`: first the kinds of actions.
_ROWS = (
    *("forward", "recompute", "backward", "input_gradients", "weight_gradients"),
    *("no_grad_forward", "forward_after_backward", "no_grad_forward_after_backward"),
    *("recompute_after_forward", "backward_after_forward"),
    *("first_forward", "first_no_grad_forward", "first_backward"),
)
#: The row of a forward of a micro-batch that is recomputed.
F_AGAIN = _ROWS.index("no_grad_forward")
#: The rows of actions after one of the other kind (a recompute: of its own kind), and of the first
#: ones of a step, by the rows that they would have otherwise.
TURNED = {
    F: _ROWS.index("forward_after_backward"),
    F_AGAIN: _ROWS.index("no_grad_forward_after_backward"),
    R: _ROWS.index("recompute_after_forward"),
    B: _ROWS.index("backward_after_forward"),
}
FIRST = {
    F: _ROWS.index("first_forward"),
    F_AGAIN: _ROWS.index("first_no_grad_forward"),
    B: _ROWS.index("first_backward"),
}


@dataclass
class Work:
    """What the engines need to know about every action.

    Actions are numbered as in the order. Two further numbers are no actions: `nothing`, which has
    ended at 0, and `never`, which never ends.

    Attributes:
        order: The actions.
        need: The action of another partition that must have ended before.
        duration: Seconds on the device.
        lead: Seconds for which the device itself first copies what it received; None: none.
        tail: Seconds for which it then copies what it made; None: none.
        send: Seconds that the result takes to the device that needs it, over a link that takes
            one transfer at a time; None: none.
        link: Number of that link.
        launch: Seconds of the host; None: no host.
    """

    order: Order
    need: Ints
    duration: Floats
    lead: Floats | None = None
    tail: Floats | None = None
    send: Floats | None = None
    link: Ints | None = None
    launch: Floats | None = None

    @property
    def nothing(self) -> int:
        """Number that stands for an action that has ended at 0."""
        return self.order.n_actions

    @property
    def never(self) -> int:
        """Number that stands for an action that never ends."""
        return self.order.n_actions + 1


def work_of(
    order: Order, durations: Durations, *, late: bool, overlap: bool, check: bool
) -> Work | None:
    """Look up what each action needs, and how long it takes.

    Args:
        order: The actions.
        durations: Seconds of each partition.
        late: Whether a recompute waits for the gradient too.
        overlap: Whether transfers overlap with the devices' work.
        check: Whether to check that each action comes after what it needs in its own partition.

    Returns:
        The work; None if an action needs one that does not exist or that comes after it.

    Raises:
        ProfileError: times that are too large to be added.

    Complexity:
        O(n) for n actions; O(n log n) if most numbers of micro-batches are missing.
    """
    kinds, partitions = order.kinds, order.partitions
    n_partitions, n = order.n_partitions, order.n_actions
    nothing, micro_batches = n, order.micro_batches
    chunks = 1 + int(micro_batches.max(initial=-1))
    if chunks > n:  # numbered with gaps, for which tables have no room
        known, micro_batches = np.unique(micro_batches, return_inverse=True)
        chunks = len(known)
    cells = partitions.astype(np.int64) * chunks + micro_batches

    def table(which: Flags) -> Ints:
        """Return the number of the action in each cell, of some of the actions; -1: none."""
        found: Ints = np.full(n_partitions * chunks, -1, dtype=np.int64)
        found[cells[which]] = np.flatnonzero(which)
        return found

    is_forward = kinds == F
    passes_back = (kinds == B) | (kinds == IN)
    forwards, backwards = table(is_forward), table(passes_back)
    recomputes = table(kinds == R) if (kinds == R).any() else None
    need = np.full(n + 2, nothing, dtype=np.int64)
    need[n + 1] = n + 1
    which = np.flatnonzero(is_forward & (partitions > 0))
    need[which] = forwards[cells[which] - chunks]
    waits_back = passes_back | (kinds == R) if late else passes_back
    which = np.flatnonzero(waits_back & (partitions < n_partitions - 1))
    need[which] = backwards[cells[which] + chunks]
    if (need < 0).any():
        return None
    if check and not _follows_own(cells, kinds, forwards, backwards, recomputes):
        return None
    rows = kinds
    if durations.no_grad_forward is not None and recomputes is not None:
        again = is_forward & (recomputes[cells] >= 0)
        rows = np.where(again, np.uint8(F_AGAIN), kinds)
    if durations.has_turns:
        rows = _with_turns(order, rows, first_backwards=durations.first_backward is not None)
    times = np.array([durations.times_of(name) for name in _ROWS], dtype=np.float64)
    work = Work(order, need, _look_up(times, rows, partitions))
    if durations.has_transfers:
        into = _transfer_times(order, durations)
        # A transfer into a partition leaves its neighbour: a forward goes one partition on.
        out = np.zeros_like(into)
        out[F, :-1] = into[F, 1:]
        out[B, 1:] = out[IN, 1:] = into[B, :-1]
        leaving = _look_up(out, kinds, partitions)
        if overlap:
            work.send = leaving
            work.link = np.where(is_forward, partitions, n_partitions + partitions)
        else:
            work.lead, work.tail = _look_up(into, kinds, partitions), leaving
    if durations.has_launches:
        work.launch = _look_up(_launch_times(durations), kinds, partitions)
    parts = [work.duration, work.lead, work.tail, work.send, work.launch]
    with np.errstate(over="ignore"):
        total = sum(float(times.sum()) for times in parts if times is not None)
    if not np.isfinite(total):
        raise too_large()
    return work


def _with_turns(order: Order, rows: Ints, *, first_backwards: bool) -> Ints:
    """Give actions after one of the other kind the numbers of `TURNED`, first ones of `FIRST`.

    `gpipebal.profiler.trial.traces.positions` tells them apart in the same way.
    """
    is_forward = (order.kinds == F) | (order.kinds == R)
    behind_forward = np.zeros(order.n_actions, dtype=bool)
    behind_forward[1:] = is_forward[:-1]
    # The first of a step, a forward, comes after the backwards of the step before.
    first = np.zeros(order.n_actions, dtype=bool)
    first[order.offsets[:-1][np.diff(order.offsets) > 0]] = True
    if first_backwards:
        backwards = np.flatnonzero(order.kinds == B)
        devices = np.searchsorted(order.offsets, backwards, side="right")
        first[backwards[np.diff(devices, prepend=0) > 0]] = True
        # What it needs has just been made again.
        first[1:] &= (order.kinds[1:] != B) | (order.kinds[:-1] != R)
    # Recomputes come after backwards as a rule.
    turned = np.where(order.kinds == F, ~behind_forward, behind_forward) & ~first
    found = rows.copy()
    for where, numbers in ((turned, TURNED), (first, FIRST)):
        for kind, number in numbers.items():
            found[where & (rows == kind)] = number
    return found


def _follows_own(
    cells: NDArray[np.int64],
    kinds: Ints,
    forwards: Ints,
    backwards: Ints,
    recomputes: Ints | None,
) -> bool:
    """Whether every action comes after what it needs in its own partition."""
    numbers = np.arange(len(cells))

    def behind(which: Flags, table: Ints, *, required: bool = True) -> bool:
        before = table[cells[which]]
        return bool(np.all((before < numbers[which]) & ((before >= 0) | (not required))))

    backward = (kinds == B) | (kinds == IN)
    good = behind(backward | (kinds == R), forwards) and behind(kinds == W, backwards)
    return good and (recomputes is None or behind(backward, recomputes, required=False))


def _look_up(table: Floats, rows: Ints, columns: Ints) -> Floats:
    """Return ``table[rows, columns]``, and 0 for the two numbers that are no actions."""
    found = np.zeros(len(rows) + 2)
    np.take(table.ravel(), rows * np.int64(table.shape[1]) + columns, out=found[: len(rows)])
    return found


def _transfer_times(order: Order, durations: Durations) -> Floats:
    """Return the seconds to bring the input of each kind of action into each partition."""
    table = np.zeros((len(KINDS), order.n_partitions))
    elsewhere = order.devices[1:] != order.devices[:-1]
    if durations.forward_transfer is not None:
        table[F, 1:] = np.where(elsewhere, durations.forward_transfer[1:], 0.0)
    if durations.backward_transfer is not None:
        table[B, :-1] = np.where(elsewhere, durations.backward_transfer[:-1], 0.0)
        table[IN] = table[B]
    return table


def _launch_times(durations: Durations) -> Floats:
    none = (0.0,) * durations.n_partitions
    forward = durations.forward_launch or none
    again = forward if durations.recompute_launch is None else durations.recompute_launch
    backward = durations.backward_launch or none
    halves = tuple(time / 2 for time in backward)
    return np.array([forward, again, backward, halves, halves], dtype=np.float64)
