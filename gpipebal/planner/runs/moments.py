"""The moments of a partition's row of the schedule that can be the highest."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from gpipebal.schedule import Action

__all__ = ["RowMoment", "moments_of", "moments_of_long"]

#: Micro-batches beyond those ahead with which a row has all its kinds of moments.
_ALL_KINDS = 8


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
        n_returned: Micro-batches whose gradients wait for the partition before.
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
    n_returned: int
    n_passed: int


def moments_of(
    row: Sequence[Action],
    *,
    loss_inside: bool,
    waiting: bool = False,
    ahead: int | None = None,
    gradients_exist: bool = False,
) -> list[RowMoment]:
    """Walk through the row of a partition, and keep the moments that can be the highest.

    Args:
        row: Its actions.
        loss_inside: Whether the last partition computes the loss.
        waiting: Whether to count micro-batches that may wait for a neighbour.
        ahead: How many forwards the partition before runs before it alternates between one forward
            and one backward; None: it runs all of them first.
        gradients_exist: Whether the parameters have gradients before the step.

    Complexity:
        O(a) for a row of a actions, of which those of one kind change the counts in few ways.

    Example:
        >>> from gpipebal.schedule import gpipe_schedule
        >>> row = gpipe_schedule(1, 4, "except_last").rows[0]
        >>> [(m.kind, m.n_graphs, m.n_inputs) for m in moments_of(row, loss_inside=True)]
        [('F', 0, 2), ('F', 0, 3), ('B', 0, 3), ('R', 0, 2), ('B', 0, 2), ('O', 0, 0)]
    """
    chunks = sum(action.kind == "F" for action in row)
    recomputed = {action.micro_batch for action in row if action.kind == "R"}
    found: dict[tuple[str, bool, bool, bool], list[RowMoment]] = {}
    #: Of each kind of moments, by how much the counts changed from the last but one to the last.
    steps: dict[tuple[str, bool, bool, bool], tuple[int, ...]] = {}
    graphs = inputs = forwards = backwards = 0

    def waits(kind: str) -> tuple[int, int]:
        """Bound how many outputs and gradients wait to be taken."""
        if not waiting or kind in "LO":
            return 0, 0
        if ahead is not None:
            # The output of a micro-batch was taken before its backward; and before a forward comes,
            # the partition that it comes from has taken the gradients of much earlier ones.
            taken = max(0, forwards - 1 - ahead)
            return forwards - backwards, max(0, backwards - taken)
        # Without a loss between the phases, outputs may wait until the first backward.
        early = kind == "R" and not backwards and loss_inside
        return forwards if kind == "F" or early else 0, backwards

    def meet(kind: str, is_recomputed: bool, n_graphs: int, n_inputs: int) -> None:
        key = (kind, is_recomputed, gradients_exist or backwards > 0, forwards == chunks)
        moments = found.setdefault(key, [])
        n_passed = n_graphs + (kind == "B") if waiting and kind != "O" else 0
        new = RowMoment(*key, n_graphs, n_inputs, *waits(kind), n_passed)
        counts = new[4:]
        if any(all(a <= b for a, b in zip(counts, old[4:], strict=True)) for old in moments):
            return
        kept = [old for old in moments if any(a > b for a, b in zip(old[4:], counts, strict=True))]
        before = kept[-1][4:] if kept else counts
        step = tuple(a - b for a, b in zip(counts, before, strict=True))
        if len(kept) == len(moments) > 1 and step == steps.get(key):
            kept.pop()  # on a line with those beside it, of which one is as high
        found[key], steps[key] = [*kept, new], step

    for action in row:
        is_recomputed = action.micro_batch in recomputed
        if action.kind == "F":
            meet("F", is_recomputed, graphs, inputs)
            graphs, inputs = graphs + (not is_recomputed), inputs + is_recomputed
            forwards += 1
            if forwards == chunks and not loss_inside:
                meet("L", False, graphs, inputs)
        else:
            others = graphs - (not is_recomputed), inputs - is_recomputed
            meet(action.kind, is_recomputed, *others)
            if action.kind == "B":
                graphs, inputs = others
                backwards += 1
    meet("O", False, 0, 0)
    return [moment for moments in found.values() for moment in moments]


def moments_of_long(
    walk: Callable[[int], list[RowMoment]], chunks: int, n_ahead: int
) -> list[RowMoment]:
    """Return the moments of a row with many micro-batches, from those of short rows.

    In the rows of GPipe and 1F1B each micro-batch more changes each count by as much as the one
    before. Should it not, the row itself is walked through.

    Args:
        walk: Returns the moments of the row with a number of micro-batches.
        chunks: Micro-batches of the long row.
        n_ahead: Forwards before the first backward, beyond the first, that do not grow with them.

    Complexity:
        That of three walks through rows of about `n_ahead` micro-batches.

    Example:
        >>> from gpipebal.schedule import gpipe_schedule
        >>> def walk(chunks):
        ...     row = gpipe_schedule(1, chunks, "except_last").rows[0]
        ...     return moments_of(row, loss_inside=True)
        >>> moments_of_long(walk, 50, 0) == walk(50)
        True
    """
    short = n_ahead + _ALL_KINDS
    if chunks <= short + 2:
        return walk(chunks)
    rows = [walk(short + more) for more in range(3)]
    if len(set(map(len, rows))) > 1:
        return walk(chunks)
    found = []
    for first, second, third in zip(*rows, strict=True):
        steps = [b - a for a, b in zip(first[4:], second[4:], strict=True)]
        if third != _moved(second, steps, 1) or second[:4] != first[:4]:
            return walk(chunks)
        found.append(_moved(first, steps, chunks - short))
    return found


def _moved(moment: RowMoment, steps: Sequence[int], times: int) -> RowMoment:
    """Return a moment whose counts have changed some times by as much."""
    counts = [count + times * step for count, step in zip(moment[4:], steps, strict=True)]
    return RowMoment(*moment[:4], *counts)
