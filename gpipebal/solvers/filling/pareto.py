"""A Pareto program: makespans in which any partition may decide.

The path that turns around in partition k costs what lies up to its end, its recompute, and
(chunks - 1) times the largest forward and the largest backward (with recompute) among partitions
0 to k. What the first cuts mean for the rest is therefore not one number but three: both maxima
so far, and the quantity to be minimised so far. A dynamic program from the left keeps, for every
place of every cut, the labels of which no other is better in all three.

That would be many labels, so the program is bounded from two sides: a label is dropped when even
the best imaginable rest exceeds the largest makespan allowed, and cuts are only placed where
partitions within that makespan can put them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

from gpipebal.problem import Problem
from gpipebal.solvers.chain import (
    Windows,
    everywhere,
    meet,
    narrowed,
    reach_limit,
    reach_within,
)

__all__ = ["ParetoProgram", "TooManyLabels"]

#: Largest forward and largest backward so far, and what is to be minimised.
_Label = tuple[int, int, Any]


class TooManyLabels(Exception):  # noqa: N818  # never leaves the solvers
    """More labels than `ParetoProgram.least` was allowed."""


class ParetoProgram:
    """The splits whose makespan is at most a limit, ready to be minimised over.

    Args:
        problem: A problem with 2 or more chunks and partitions, and checkpoint ``'always'``.
        limit: Largest makespan allowed, as a scaled integer.

    Attributes:
        reach: How far each partition may extend in a split that keeps the limit, or further; see
            `gpipebal.solvers.chain`.

    Example:
        >>> problem = Problem([9, 1, 1], [1, 1, 1], [9, 1, 1], 2, chunks=2, checkpoint="always")
        >>> program = ParetoProgram(problem, limit=50)
        >>> program.least(program.reach, 0, lambda most, path, start, end: max(most, path))
        38
    """

    def __init__(self, problem: Problem, limit: int) -> None:
        self.limit, self.repeats = limit, problem.chunks - 1
        self.n_layers, self.n_partitions = problem.n_layers, problem.n_partitions
        self.forward, self.recompute = problem.forward_sums, problem.recompute_sums
        self.loads, self.backward_phase = problem.load_sums, problem.backward_phase_sums
        #: The last path is limited, and with it what it repeats: the sum of the two maxima.
        self.room = (limit - (self.loads[-1] - self.recompute[-2])) // self.repeats
        self.reach = self._limits()

    def _limits(self) -> list[int]:
        repeats, room = self.repeats, self.room
        forward = _unavoidable(self.forward, self.n_partitions)
        backward_phase = _unavoidable(self.backward_phase, self.n_partitions)
        both = _unavoidable(self.loads, self.n_partitions)
        # A path passes once what lies before its end, less the recomputes before its start. It
        # repeats at least the partition in which it turns around ...
        starts = [r + repeats * load for r, load in zip(self.recompute, self.loads, strict=True)]
        ends = [load + repeats * load for load in self.loads]
        # ... and at least what the partitions up to its end cannot avoid. That gets less at the
        # last place, where one partition more can be; what is allowed there is allowed before.
        columns = zip(self.loads, forward, backward_phase, both, strict=True)
        paths = [load + repeats * max(one + two, sum_) for load, one, two, sum_ in columns]
        paths = list(accumulate(reversed(paths), min))[::-1]
        return meet(
            reach_within(ends, starts, self.limit),
            reach_within(paths, self.recompute, self.limit),
            reach_within(self.forward, self.forward, room - backward_phase[-1]),
            reach_within(self.backward_phase, self.backward_phase, room - forward[-1]),
            reach_within(self.loads, self.loads, room),
        )

    def within(self, bottleneck: int) -> list[int]:
        """Limit the bottleneck as well."""
        return meet(self.reach, reach_within(self.loads, self.loads, bottleneck))

    def least(
        self,
        reach: Sequence[int],
        first: Any,
        extend: Callable[[Any, int, int, int], Any],
        most_labels: int | None = None,
    ) -> Any:
        """Minimise a quantity over the splits, from the left.

        Args:
            reach: The limits, these or tighter ones.
            first: The quantity before any partition.
            extend: The quantity with one more partition, from what it was, the path that turns
                around in the partition, its start and its end; or None to drop it. Never
                decreasing in its first argument.
            most_labels: Give up when more labels than this are compared; None: never.

        Returns:
            The least quantity, or None if there is no split.

        Raises:
            TooManyLabels: there are more than `most_labels`.

        Complexity:
            O(L w) for windows of w places and L labels in all of them. L is small when the limit
            is close to the least makespan, and can grow with every pair of distinct maxima when
            it is not.
        """
        if any(start >= end for start, end in enumerate(reach)):
            return None
        windows = narrowed([reach_limit(reach)], everywhere(self.n_layers, self.n_partitions))
        if windows is None:
            return None
        # What the rest of the chain cannot avoid: forwards, backwards, and both together.
        columns = (self.forward, self.backward_phase, self.loads)
        rests = zip(*(_best_rests(sums, windows) for sums in columns), strict=True)
        before: dict[int, list[_Label]] = {0: [(0, 0, first)]}
        n_labels = 0
        for first_end, reachable in list(zip(windows.first, rests, strict=True))[1:]:
            here = {}
            for end, rest in enumerate(zip(*reachable, strict=True), first_end):
                labels: list[_Label] = []
                if rest[2] <= self.room:
                    for start in before:
                        if start < end <= reach[start]:
                            labels += self._extended(before[start], start, end, rest, extend)
                if labels:
                    kept = _undominated(labels)
                    here[end] = kept
                    # Each label is compared with those that are kept.
                    n_labels += len(labels) * len(kept)
                    if most_labels is not None and n_labels > most_labels:
                        raise TooManyLabels
            before = here
        return min((label[2] for label in before.get(self.n_layers, ())), default=None)

    def _extended(
        self,
        labels: list[_Label],
        start: int,
        end: int,
        rest: tuple[int, int, int],
        extend: Callable[[Any, int, int, int], Any],
    ) -> list[_Label]:
        """Extend the labels at `start` by the partition from `start` to `end`."""
        rest_forward, rest_backward_phase, _ = rest
        forward = self.forward[end] - self.forward[start]
        backward_phase = self.backward_phase[end] - self.backward_phase[start]
        if max(forward, rest_forward) + max(backward_phase, rest_backward_phase) > self.room:
            return []
        once, repeats = self.loads[end] - self.recompute[start], self.repeats
        room_here = (self.limit - once) // repeats
        extended = []
        for one, two, before in labels:
            if one < forward:
                one = forward
            if two < backward_phase:
                two = backward_phase
            both = one + two
            if (
                both > room_here
                or max(one, rest_forward) + max(two, rest_backward_phase) > self.room
            ):
                continue
            quantity = extend(before, once + repeats * both, start, end)
            if quantity is not None:
                extended.append((one, two, quantity))
        return extended


def _unavoidable(sums: Sequence[int], n_partitions: int) -> list[int]:
    """Bound, for every place, the largest partition before it.

    The largest layer, and the even share of the partitions that can be there: one less than all,
    unless the place is the end of the chain.

    Example:
        >>> _unavoidable([0, 3, 5, 10], 3)
        [0, 3, 3, 5]
    """
    bounds, largest = [0], 0
    for layer in range(len(sums) - 1):
        largest = max(largest, sums[layer + 1] - sums[layer])
        parts = n_partitions - 1 if layer + 2 < len(sums) else n_partitions
        bounds.append(max(largest, -(-sums[layer + 1] // parts)))
    return bounds


def _best_rests(sums: Sequence[int], windows: Windows) -> list[list[int]]:
    """Find the smallest bottleneck of every rest of the chain.

    Args:
        sums: Prefix sums of the layers' costs.
        windows: Where each bound may be.

    Returns:
        One row per bound, with one entry per place where it may stand: the bottleneck of what
        follows, minimised over the later cuts within their own windows.

    Complexity:
        O(w) for w places in all windows.

    Example:
        >>> _best_rests([0, 1, 3, 6], Windows([0, 1, 3], [0, 2, 3]))
        [[3], [5, 3], [0]]
    """
    first, last = windows
    rows = [[0]]
    for k in range(len(first) - 2, -1, -1):  # k: bound
        after, offset = rows[-1], first[k + 1]
        row = []
        end = offset
        for start in range(first[k], last[k] + 1):
            # The first partition grows with `end` and the rest shrinks: the best end is where
            # they cross, or just before, and crossings move right with the start.
            end = max(end, start + 1)
            while end < last[k + 1] and sums[end] - sums[start] < after[end - offset]:
                end += 1
            value = max(sums[end] - sums[start], after[end - offset])
            if end > max(start + 1, offset):
                value = min(value, max(sums[end - 1] - sums[start], after[end - 1 - offset]))
            row.append(value)
        rows.append(row)
    return rows[::-1]


def _undominated(labels: list[_Label]) -> list[_Label]:
    """Keep the labels of which no other is at least as good in all three places."""
    kept: list[_Label] = []
    for label in sorted(labels):
        _, two, quantity = label
        if not any(other[1] <= two and other[2] <= quantity for other in kept):
            kept.append(label)
    return kept
