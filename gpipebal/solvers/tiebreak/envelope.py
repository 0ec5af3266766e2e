"""The cheapest end for every start, without trying all pairs.

A tie-break by the sum of squares needs, for every place where a partition may start, the end
that minimises (sum of its layers) squared + cost of what follows. Two candidate ends are easy to
compare for all starts at once: with ``a < b``, the shorter partition to ``a`` is no worse than
the one to ``b`` exactly for the starts up to some turning point, because a square grows faster
the longer the partition already is; and where a limit forbids the longer one, the shorter one
wins anyway. So, as starts go from right to left, candidates are the best one after the other, in a
known order, and a candidate whose turn would be over before it begins is dropped for good.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

__all__ = ["cheapest_ends"]


def cheapest_ends(
    sums: Sequence[int],
    entry: Sequence[int],
    after: Sequence[int],
    cost: list[int],
    starts: tuple[int, int],
    ends: tuple[int, int],
    price: int = 0,
) -> list[int]:
    """Find the cheapest end of the partition that begins at each start.

    Minimises ``(sums[end] - sums[start]) ** 2 + after[end] + price`` over the ends in the range
    `ends` that lie after `start` and satisfy ``entry[end] <= start``; the leftmost one where
    several are equally cheap. There must be one for every start.

    Args:
        sums: Prefix sums of the layers' weights.
        entry: First start that may have each end. Never decreasing.
        after: Cost of what follows each end. May be `cost` itself: an entry is read only after
            it was written.
        cost: Receives the cost from each start on.
        starts: First and last start.
        ends: First and last end.
        price: Added for each partition.

    Returns:
        The ends, for the starts from the first to the last.

    Complexity:
        O(w log N) for w starts and ends.

    Source:
        Galil and Giancarlo, "Speeding up dynamic programming with applications to molecular
        biology", Theoretical Computer Science 64(1), 1989, the list of candidates for concave
        and convex costs. Differs: limits on the length of a partition; ties go left.

    Example:
        >>> cost = [0] * 4
        >>> cheapest_ends([0, 1, 2, 4], [0, 0, 0, 0], [9, 9, 4, 0], cost, (0, 2), (2, 3))
        [2, 2, 3]
        >>> cost
        [8, 5, 4, 0]
    """
    first_start, last_start = starts
    first_end, end = ends
    # Candidates in the order of their turns, the current one at `head`. A candidate beats the
    # one before it for all starts up to its turn. Lifted: its cost without the terms in `start`.
    queue: list[int] = []
    turns: list[int] = []
    lifted: list[int] = []
    head = 0
    choices = []
    for start in range(last_start, first_start - 1, -1):
        while end >= first_end and end > start:
            value = after[end] + sums[end] * sums[end]
            behind = end if end <= last_start else last_start + 1
            turn = end
            while len(queue) > head:
                rival = queue[-1]
                gap = sums[rival] - sums[end]
                lead = lifted[-1] - value
                if gap:
                    turn = bisect_right(sums, lead // (2 * gap), first_start, behind) - 1
                else:
                    turn = end if lead >= 0 else -1
                if turn < entry[rival] - 1:
                    turn = entry[rival] - 1
                if turn < turns[-1]:
                    break
                queue.pop()
                turns.pop()
                lifted.pop()
                turn = end
            if turn >= first_start:
                queue.append(end)
                turns.append(turn)
                lifted.append(value)
            end -= 1
        while head + 1 < len(queue) and turns[head + 1] >= start:
            head += 1
        chosen = queue[head]
        weight = sums[chosen] - sums[start]
        cost[start] = weight * weight + after[chosen] + price
        choices.append(chosen)
    choices.reverse()
    return choices
