"""The moments of a partition's row of the schedule that can be the highest."""

from __future__ import annotations

from operator import le
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from gpipebal.schedule import MOST_WAITING, Order
from gpipebal.schedule.actions import KINDS, B, F, R

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["RowMoment", "moments_of"]


class RowMoment(NamedTuple):
    """A kind of moment in the row of a partition.

    Attributes:
        kind: ``'F'``, ``'R'``, ``'B'``; ``'L'`` for the caller's loss between the phases; ``'O'``
            for the optimizer after them.
        recomputed: Whether the micro-batch at work is recomputed.
        gradients_exist: Whether the parameters have gradients by then.
        forwards_done: Whether all forwards are over.
        n_graphs: Other micro-batches that hold a graph.
        n_inputs: Other micro-batches that hold their input.
        n_given: Micro-batches whose outputs wait for the next partition.
        n_stashed: Micro-batches whose skip connections wait for later partitions.
        n_returned: Micro-batches whose gradients wait for the partition before.
        n_popped: Micro-batches whose gradients of skip connections wait for earlier partitions.
        n_passed: Micro-batches that an earlier partition may still have to recompute, for which it
            keeps what it passes through without a gradient.
    """

    kind: str
    recomputed: bool
    gradients_exist: bool
    forwards_done: bool
    n_graphs: int
    n_inputs: int
    n_given: int
    n_stashed: int
    n_returned: int
    n_popped: int
    n_passed: int


def moments_of(
    order: Order,
    partition: int,
    *,
    loss_inside: bool,
    most: bool = True,
    in_phases: bool = False,
    ahead: int | None = None,
    hops: int = 1,
    held: bool = False,
    gradients_exist: bool = False,
) -> list[RowMoment]:
    """Go through the row of a partition, and keep the moments that can be the highest.

    Args:
        order: The actions, one partition on each device.
        partition: The partition.
        loss_inside: Whether the last partition computes the loss.
        most: Whether to count the most that may wait for others. If not, only that counts which may
            wait whatever the other partitions are like.
        in_phases: Whether all partitions run all of their forwards first, as under GPipe.
        ahead: How many forwards the partition before runs before it alternates between one forward
            and one backward, as under 1F1B; None: it is not known.
        hops: How many partitions further on, or back, a skip connection goes at most.
        held: Whether what is returned may be held until the end of the backward that takes it.
        gradients_exist: Whether the parameters have gradients before the step.

    Complexity:
        O(a) in numpy for a row of a actions, of which those of one kind change the counts in few
        ways.

    Example:
        >>> from gpipebal.schedule import order_of
        >>> order = order_of("gpipe", 1, 4, "except_last")
        >>> moments = moments_of(order, 0, loss_inside=True, in_phases=True)
        >>> [(m.kind, m.n_graphs, m.n_inputs) for m in moments]
        [('F', 0, 3), ('F', 0, 2), ('R', 0, 1), ('R', 0, 2), ('B', 0, 3), ('B', 0, 2), ('O', 0, 0)]
    """
    row = slice(*order.offsets[partition : partition + 2].tolist())
    kinds, micro_batches = order.kinds[row].astype(np.int64), order.micro_batches[row]
    forward, backward = kinds == F, kinds == B
    chunks = int(forward.sum())
    again = np.zeros(chunks, dtype=bool)
    again[micro_batches[kinds == R]] = True
    recomputed = again[micro_batches]
    # What has been done before each action, and what other micro-batches hold.
    forwards, backwards = _before(forward), _before(backward)
    n_graphs, n_inputs = (
        _before(forward & which) - _before(backward & which) - (~forward & which)
        for which in (~recomputed, recomputed)
    )
    # When a gradient comes, all later partitions have taken that micro-batch.
    n_back = backwards + backward
    n_made = n_far = np.maximum(0, forwards - n_back)
    n_popped = n_returned = backwards
    if in_phases:
        # Without a loss between the phases, outputs may wait until the first backward.
        early = (kinds == R) & (backwards == 0) & loss_inside
        n_made = n_far = np.where(forward | early, forwards, 0)
    elif ahead is not None:
        # Then the next partition has taken some more; and when a forward comes, the partition
        # before has taken the gradients of earlier ones.
        n_made = np.where(n_back > 0, np.maximum(0, n_far - max(0, ahead - 2)), n_far)
        n_returned = backwards - np.maximum(0, forwards + forward - 1 - ahead)
    elif not most:
        n_made = n_returned = np.zeros_like(forwards)
    # One fewer waits while another one is made; and each partition on the way has as many.
    n_given = np.minimum(n_made, MOST_WAITING - forward)
    n_late = int(held and most)
    n_returned = np.minimum(n_returned, MOST_WAITING + n_late - backward)
    if most:
        n_stashed = np.minimum(n_far, hops * MOST_WAITING - forward)
        n_popped = np.minimum(n_popped, hops * MOST_WAITING + n_late - backward)
    else:
        n_stashed, n_popped = n_given, n_returned
    n_passed = most * (n_graphs + backward)
    counts = np.stack(
        [n_graphs, n_inputs, n_given, n_stashed, n_returned, n_popped, n_passed], axis=1
    )
    exist, done = (backwards > 0) | gradients_exist, forwards == chunks
    ways = 8 * kinds + 4 * recomputed + 2 * exist + done
    found = []
    for way in np.unique(ways).tolist():
        what = KINDS[way // 8], bool(way & 4), bool(way & 2), bool(way & 1)
        found += [RowMoment(*what, *corner) for corner in _corners(counts[ways == way])]
    if not loss_inside:
        # Between the phases of GPipe: no backward has been by then.
        in_flight = chunks - int(again.sum()), int(again.sum())
        passed = most * in_flight[0]
        found.append(RowMoment("L", False, gradients_exist, True, *in_flight, 0, 0, 0, 0, passed))
    found.append(RowMoment("O", False, True, True, 0, 0, 0, 0, 0, 0, 0))
    return found


def _before(which: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Count the actions of some kind before each action."""
    return np.cumsum(which) - which


def _corners(points: NDArray[np.int64]) -> list[tuple[int, ...]]:
    """Return those of a series of points that may have the largest sum, whatever a count adds.

    No point is it that lies on a line between two others, or below another in every count.

    Example:
        >>> _corners(np.array([[0, 3], [1, 2], [2, 1], [0, 1]]))
        [(0, 3), (2, 1)]
    """
    steps = np.diff(points, axis=0)
    bends = np.ones(len(points), dtype=bool)
    bends[1:-1] = (steps[1:] != steps[:-1]).any(axis=1)
    corners = sorted(set(map(tuple, points[bends].tolist())))
    return [
        one
        for one in corners
        if not any(one != other and all(map(le, one, other)) for other in corners)
    ]
